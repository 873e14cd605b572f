"""Trying again what a network or a server made fail, after waits that double.

Where the server says how long to wait (429, 503), that is how long the wait is.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds
LONGEST_ASKED_WAIT = 3600.0  # more than a server's rate limit window

T = TypeVar("T")


def retrying(
    action: Callable[[], T],
    failure: Callable[[Exception, int], Exception | None],
    note: Callable[[Exception, int, float], object],
) -> T:
    """Return the result of `action`, tried again as long as its failures may pass.

    Args:
        failure: of an error and the number of attempts so far: what to raise, None to try again.
        note: gets an error that may pass, the number of attempts, and the seconds to wait.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return action()
        except Exception as error:  # every library has its own
            final = failure(error, attempt)
            if final is error:
                raise
            if final is not None:
                raise final from error
            wait = wait_before_retry(attempt, error)
            note(error, attempt, wait)
        time.sleep(wait)


def wait_before_retry(attempt: int, error: Exception) -> float:
    """Return the seconds to wait: what the server asks for, or else 1, 2, 4, … up to a minute.

    A little more by chance, so that many workers do not come back at the same moment.
    """
    headers = getattr(getattr(error, "response", error), "headers", None) or {}
    values = {str(key).lower(): str(value) for key, value in headers.items()}
    asked = re.match(r"(\d+)$", values.get("retry-after", ""))
    asked = asked or re.search(r";\s*t\s*=\s*(\d+)", values.get("ratelimit", ""))
    wait = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)
    wait = min(float(asked[1]), LONGEST_ASKED_WAIT) if asked else wait
    return wait * random.uniform(1.0, 1.25)


def status_of(error: Exception) -> int | None:
    """Return the HTTP status that an error of one of the HTTP libraries carries."""
    response = getattr(error, "response", None)
    for owner, name in ((response, "status_code"), (error, "status"), (error, "code")):
        if isinstance(value := getattr(owner, name, None), int):
            return value
    return None


def reason_of(error: Exception) -> str:
    """Return the first line of an error, or its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
