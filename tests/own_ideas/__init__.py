"""Ideas of a newcomer, each in one file from outside of the package: examples for people, too.

`tests/e2e/test_own_ideas.py` installs them as packages and takes them through every command.
"""
