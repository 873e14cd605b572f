"""The ground floor: errors, command lines, numbers, registries, plugins, files; it imports nothing
from above it.
"""

__version__ = "0.1.0"
