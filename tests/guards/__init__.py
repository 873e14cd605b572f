"""Guards of a rebuild: numbers, files and speed that must not change when code moves.

They reach the project through configurations, commands, exported folders and the public Python API,
so that the same guard runs on old and new code. `python -m tests.guards --help` has the options.
"""
