"""Reading over a network that fails now and then: waiting, trying again, going on where it broke.

A preparation runs for days, longer than the few tries of the libraries' own are made for. A failure
is retried up to `RETRIES` times in a row; a byte of progress begins the count anew.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import TypeVar

from fsspec.spec import AbstractBufferedFile

from cat_lm.core.errors import UserError, reason_of, retrying, status_of

RETRIES = 8  # with the waits of cat_lm.core.errors: some four minutes without a byte
READ_AHEAD = 1 << 24  # bytes of a request; a file of SlimPajama is about as large
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
HTTP_LIBRARIES = {"aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

T = TypeVar("T")


def read_patiently(action: Callable[[], T], what: str, retries: int = RETRIES) -> T:
    """Return the result of `action`, tried again after failures that may pass.

    Raises:
        UserError: begins with `what`: the failure is of the lasting kind (no such file, no
            permission, a name that is no name), or came `retries` + 1 times in a row.
        Exception: one that is not the network's or the server's comes through as it is.
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
    """Return True if a failure may pass: a broken connection, a busy server, not a missing file."""
    status = status_of(error)
    if status is not None:
        return status in TRANSIENT_STATUS
    # The Hub's client raises a connection error where HF_HUB_OFFLINE forbids it to connect.
    if isinstance(error, PERMANENT) or type(error).__name__ == "OfflineModeIsEnabled":
        return False
    module = type(error).__module__.partition(".")[0]
    return isinstance(error, (OSError, EOFError)) or module in HTTP_LIBRARIES


class RemoteFile(AbstractBufferedFile):
    """A file of known size behind a network; it is read ahead, a request that fails is repeated."""

    def __init__(
        self, fetch: Callable[[int, int], bytes], what: str, size: int, digest: str | None = None
    ) -> None:
        """Open it.

        Args:
            fetch: gets the bytes [start, stop) in one request.
            what: begins the error of a file that cannot be read.
            digest: the SHA-256 that a file must have which is read from beginning to end.
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

        data = read_patiently(fetch, self._what)
        if start == self._hashed:
            self._hash.update(data)
            self._hashed = end
            if end == self.size and self._digest not in (None, self._hash.hexdigest()):
                raise UserError(
                    f"{self._what} (what came has the SHA-256 {self._hash.hexdigest()[:16]}…, the "
                    f"server lists {self._digest[:16]}…)"
                )
        return data
