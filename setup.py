"""What setup.cfg cannot say."""

from setuptools import Distribution, setup

# Without this name editable wheels leave data_files out; distutils has the other one alone.
Distribution.has_data = Distribution.has_data_files
setup()
