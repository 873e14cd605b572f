"""Reading over a network that fails now and then: waiting, trying again, going on where it broke.

A preparation runs for days, longer than the few tries of the libraries' own are made for. A failure
is retried up to `RETRIES` times in a row with waits that double; a byte of progress begins
the count anew. Where the server says how long to wait (429, 503), that is how long the wait is.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
import sys
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

from cat_lm.errors import UserError

RETRIES = 8  # with the waits below: some four minutes without a byte
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds
READ_AHEAD = 1 << 24  # bytes of a request; a file of SlimPajama is about as large
LONGEST_ASKED_WAIT = 3600.0  # more than a server's rate limit window
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
HTTP_LIBRARIES = {"aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

T = TypeVar("T")


def retrying(action: Callable[[], T], what: str, retries: int = RETRIES) -> T:
    """The result of `action`, tried again after failures that may pass.

    Raises `UserError` that begins with `what` where the failure is of the lasting kind (no such
    file, no permission, a name that is no name), or comes `retries` + 1 times in a row. Errors
    that are not the network's or the server's come through as they are.
    """
    for attempt in range(retries + 1):
        try:
            return action()
        except Exception as error:
            transient = is_transient(error)
            if not transient and not isinstance(error, (OSError, ValueError)):
                raise
            if not transient or attempt == retries:
                tries = f", {attempt + 1} times" if transient else ""
                raise UserError(f"{what} ({_reason(error)}{tries})") from None
            wait = wait_before_retry(attempt, error)
            note = f"note: {what} ({_reason(error)}); trying again in {wait:.0f} s"
            print(f"{note} [{attempt + 1}/{retries}]", file=sys.stderr, flush=True)
            time.sleep(wait)
    raise AssertionError("not reached")


def is_transient(error: Exception) -> bool:
    """Whether a failure may pass: a broken connection, a busy server, not a missing file."""
    status = _status(error)
    if status is not None:
        return status in TRANSIENT_STATUS
    # The Hub's client raises a connection error where HF_HUB_OFFLINE forbids it to connect.
    if isinstance(error, PERMANENT) or type(error).__name__ == "OfflineModeIsEnabled":
        return False
    module = type(error).__module__.partition(".")[0]
    return isinstance(error, (OSError, EOFError)) or module in HTTP_LIBRARIES


def wait_before_retry(attempt: int, error: Exception) -> float:
    """Seconds to wait: what the server asks for, or else 1, 2, 4, … up to a minute.

    A little more by chance, so that many workers do not come back at the same moment.
    """
    asked = _asked_wait(error)
    wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) if asked is None else asked
    return wait * random.uniform(1.0, 1.25)


class RemoteFile(io.RawIOBase):
    """A file of known size behind a network; `read` gives all bytes asked for, or `UserError`.

    `fetch(start, stop)` gets these bytes of it in one request; a request that fails is repeated.
    Whoever reads on gets the next `READ_AHEAD` bytes at once. With `digest`, a file that is read
    from beginning to end must have this SHA-256.
    """

    def __init__(
        self, fetch: Callable[[int, int], bytes], what: str, size: int, digest: str | None = None
    ) -> None:
        super().__init__()
        self._fetch = fetch
        self._what = what
        self._size = size
        self._digest = digest
        self._position = 0
        self._block, self._block_start = b"", 0
        self._hash = hashlib.sha256()
        self._hashed = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Up to `size` bytes (all that are left by default); fewer only at the file's end."""
        left = max(0, self._size - self._position)
        stop = self._position + (left if size is None or size < 0 else min(size, left))
        pieces = []
        while self._position < stop:
            pieces.append(self._piece(stop))
            self._position += len(pieces[-1])
        return b"".join(pieces)

    def readinto(self, buffer) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _piece(self, stop: int) -> bytes:
        """The bytes from the position to `stop`, or to the end of the block that holds it."""
        end = self._block_start + len(self._block)
        if not self._block_start <= self._position < end:
            last = max(stop, self._position + READ_AHEAD) if self._position == end else stop
            self._load(min(last, self._size))
        offset = self._position - self._block_start
        return self._block[offset : stop - self._block_start]

    def _load(self, stop: int) -> None:
        start = self._position

        def fetch() -> bytes:
            data = self._fetch(start, stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} bytes came, {stop - start} were asked for")
            return data

        self._block, self._block_start = retrying(fetch, self._what), start
        if start == self._hashed:
            self._hash.update(self._block)
            self._hashed = stop
            if stop == self._size:
                self._compare(self._hash.hexdigest())

    def _compare(self, found: str) -> None:
        if self._digest and found != self._digest:
            raise UserError(
                f"{self._what} (what came has the SHA-256 {found[:16]}…, "
                f"the server lists {self._digest[:16]}…)"
            )


def _status(error: Exception) -> int | None:
    """The HTTP status that an error of one of the HTTP libraries carries."""
    response = getattr(error, "response", None)
    for owner, name in ((response, "status_code"), (error, "status"), (error, "code")):
        if isinstance(value := getattr(owner, name, None), int):
            return value
    return None


def _asked_wait(error: Exception) -> float | None:
    """The seconds that the server's answer asks to wait (`Retry-After`, `RateLimit`)."""
    headers = getattr(getattr(error, "response", error), "headers", None) or {}
    values = {str(key).lower(): str(value) for key, value in headers.items()}
    asked = None
    if match := re.search(r";\s*t\s*=\s*(\d+)", values.get("ratelimit", "")):
        asked = float(match.group(1))
    if after := values.get("retry-after"):
        asked = float(after) if after.isdecimal() else _seconds_until(after)
    return None if asked is None else min(asked, LONGEST_ASKED_WAIT)


def _seconds_until(date: str) -> float | None:
    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - time.time())
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
