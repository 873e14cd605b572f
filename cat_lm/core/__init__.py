"""What every other package uses: errors, command lines, numbers, registries, plugins and files.

It imports no other package of the project.
"""

__version__ = "0.1.0"
