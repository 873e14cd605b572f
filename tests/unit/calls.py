"""The former place of `tests.calls`."""

from tests.calls import call_main

__all__ = ["call_main"]
