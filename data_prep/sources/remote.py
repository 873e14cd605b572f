"""Read files over an unreliable network, with retries that continue where a read has failed.

A preparation runs for days, for which the few retries of the libraries do not suffice. A failure is
retried up to `RETRIES` times in a row; any progress resets the count.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import TypeVar

from fsspec.spec import AbstractBufferedFile

from cat_lm.core.errors import UserError, reason_of, retrying, status_of

RETRIES = 8  # with the waits of cat_lm.core.errors, about four minutes without progress
READ_AHEAD = 1 << 24  # bytes per request, about a file of SlimPajama
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
HTTP_LIBRARIES = {"aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

T = TypeVar("T")


def call_with_retries(action: Callable[[], T], what: str, retries: int = RETRIES) -> T:
    """Return the result of `action`, with retries after transient errors.

    Raises:
        UserError: the error is permanent (no such file, no permission, an invalid name), or came
            `retries` + 1 times in a row; the message begins with `what`.
        Exception: errors that are not of the network or the server are raised unchanged.
    """

    def failure(error: Exception, attempt: int) -> Exception | None:
        transient = is_transient(error)
        if not transient and not isinstance(error, (OSError, ValueError)):
            return error
        if transient and attempt <= retries:
            return None
        tries = f", {attempt} times" if transient else ""
        return UserError(f"{what} ({reason_of(error)}{tries})")

    def note(error: Exception, attempt: int, wait: float) -> None:
        text = f"note: {what} ({reason_of(error)}); trying again in {wait:.0f} s"
        print(f"{text} [{attempt}/{retries}]", file=sys.stderr, flush=True)

    return retrying(action, failure, note)


def is_transient(error: Exception) -> bool:
    """Return True for transient errors, such as a broken connection or a busy server."""
    status = status_of(error)
    if status is not None:
        return status in TRANSIENT_STATUS
    # With HF_HUB_OFFLINE, the Hub's client raises a ConnectionError that is not transient.
    if isinstance(error, PERMANENT) or type(error).__name__ == "OfflineModeIsEnabled":
        return False
    module = type(error).__module__.partition(".")[0]
    return isinstance(error, (OSError, EOFError)) or module in HTTP_LIBRARIES


class RemoteFile(AbstractBufferedFile):
    """A remote file of known size, with read-ahead and retries of failed requests."""

    def __init__(
        self, fetch: Callable[[int, int], bytes], what: str, size: int, digest: str | None = None
    ) -> None:
        """Open the file.

        Args:
            fetch: returns the bytes [start, stop) by one request.
            what: the beginning of error messages.
            digest: the expected SHA-256, which is checked if the file is read sequentially.
        """
        self._fetch, self._what, self._digest = fetch, what, digest
        self._hash, self._hashed = hashlib.sha256(), 0
        super().__init__(None, what, block_size=READ_AHEAD, size=size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        def fetch() -> bytes:
            data = self._fetch(start, end)
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} bytes came, {end - start} were asked for")
            return data

        data = call_with_retries(fetch, self._what)
        if start == self._hashed:
            self._hash.update(data)
            self._hashed = end
            if end == self.size and self._digest not in (None, self._hash.hexdigest()):
                raise UserError(
                    f"{self._what} (what came has the SHA-256 {self._hash.hexdigest()[:16]}…, the "
                    f"server lists {self._digest[:16]}…)"
                )
        return data
