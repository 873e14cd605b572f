"""Files at an address (`s3://`, `gs://`, `hf://`, `https://`, …), read through fsspec."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.retries import reason_of, retrying, status_of

DEFAULT_CACHE = "~/.cache/cat_lm/data"
_log = logging.getLogger(__name__)

# About four minutes in all: longer outages are the job script's to requeue after.
ATTEMPTS = 10
# Where nothing has answered at the address yet: it is more likely wrong than out of order.
FIRST_ATTEMPTS = 2
# Refusals that no second attempt changes, by the names that the libraries give them.
_REFUSALS = re.compile("Credentials|TokenRetrieval|GatedRepo|RefreshError")


def is_remote(folder: Path | str) -> bool:
    """Return True if it is an address, such as s3://bucket/data, and no path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(folder)) is not None


def cache_folder(cache_dir: Path | str | None) -> Path:
    """Return the folder of copies and plans that cannot be beside the data (`data.cache_dir`)."""
    return Path(cache_dir or DEFAULT_CACHE).expanduser()


class Storage:
    """A folder at an address. Raises `UserError` where nothing can read such addresses here."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        self._has_answered = False
        try:
            self._fs, self._root = url_to_fs(self.url)
        except Exception as error:  # Every library has its own; that of fsspec names a package.
            if _is_refusal(error):
                raise self._refusal("", error) from error
            raise UserError(f"{url}: cannot be read here ({reason_of(error)})") from error

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of a file, or all of them; temporary failures are retried.

        Raises:
            FileNotFoundError: there is no such file.
            UserError: access is refused, nothing answers, or the server knows no ranges.
            ConnectionError: every attempt failed. No `UserError`: a run that it ends is to be
                started again.
        """
        place = f"{self.url}/{name}"

        def fetch() -> bytes:
            data = self._fs.cat_file(f"{self._root}/{name}", start=start, end=stop)
            self._has_answered = True
            if start is not None and len(data) > stop - start:
                raise UserError(f"{place}: the server sends whole files only; copy the folder here")
            if start is not None and len(data) < stop - start:
                raise OSError(f"{len(data)} bytes came for a range of {stop - start}")
            return data

        def failure(error: Exception, attempt: int) -> Exception | None:
            if isinstance(error, (FileNotFoundError, UserError)):
                return error
            if _is_refusal(error):
                return self._refusal(f"/{name}", error)
            reason = reason_of(error)
            has_no_server = isinstance(error, OSError) and not isinstance(error, TimeoutError)
            if has_no_server and not self._has_answered and attempt >= FIRST_ATTEMPTS:
                return UserError(f"{place}: nothing answers at this address ({reason})")
            if attempt < ATTEMPTS:
                return None
            return ConnectionError(f"{place}: could not be read in {ATTEMPTS} attempts ({reason})")

        def note(error: Exception, attempt: int, wait: float) -> None:
            _log.warning("%s: %s; again in %.1f s", place, reason_of(error), wait)

        return retrying(fetch, failure, note)

    def _refusal(self, place: str, error: Exception) -> UserError:
        return UserError(
            f"{self.url}{place}: access is refused ({reason_of(error)}); give this process "
            "credentials the way the storage's own tools take them (environment or login)"
        )


def _is_refusal(error: Exception) -> bool:
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    refused = isinstance(error, PermissionError) or bool(_REFUSALS.search(names))
    return refused or status_of(error) in (401, 403)
