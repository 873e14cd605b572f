"""Reading over a network that fails now and then: waiting, trying again, going on where it broke.

A preparation runs for days, longer than the few tries of the libraries' own are made for. A failure
is retried up to `RETRIES` times in a row; a byte of progress begins the count anew.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable
from typing import TypeVar

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

        self._block, self._block_start = read_patiently(fetch, self._what), start
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
