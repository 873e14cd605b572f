"""Fuzz test: damaged files and odd command lines, each of which must end well (see verdict.py)."""
