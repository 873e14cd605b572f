"""Files at an address (`s3://`, `gs://`, `hf://`, `https://`, …), read through fsspec."""

from __future__ import annotations

import ftplib
import logging
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError
from cat_lm.core.retries import reason_of, retrying, status_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

DEFAULT_CACHE = "~/.cache/cat_lm/data"
_log = logging.getLogger(__name__)

# About four minutes in all: longer outages are the job script's to requeue after.
ATTEMPTS = 10
# Where nothing has answered at the address yet: it is more likely wrong than out of order.
FIRST_ATTEMPTS = 2
# fsspec's addresses whose packages are not among this project's requirements.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "abfs": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "oss": "ossfs",
}
# Refusals that no second attempt changes, by the names that the libraries give them.
_REFUSALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "TokenRetrievalError",
    "GatedRepoError",
    "DefaultCredentialsError",
    "RefreshError",
)


def is_remote(folder: Path | str) -> bool:
    """Return True if it is an address, such as s3://bucket/data, and no path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(folder)) is not None


def cache_folder(cache_dir: Path | str | None) -> Path:
    """Return the folder of copies and plans that cannot be beside the data (`data.cache_dir`)."""
    return Path(cache_dir or DEFAULT_CACHE).expanduser()


class Storage:
    """A folder at an address. Raises `UserError` where nothing can read such addresses here."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = _file_system(self.url)
        self._answered = False

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of a file, or all of them; temporary failures are retried.

        Raises:
            FileNotFoundError: there is no such file.
            UserError: access is refused, the server knows no ranges, or there is no server: the
                host is unknown, or takes no connections and never did.
            ConnectionError: every attempt failed. No `UserError`: a run that it ends is to be
                started again.
        """

        def fetch() -> bytes:
            data = self._fs.cat_file(f"{self._root}/{name}", start=start, end=stop)
            self._answered = True
            if start is not None:
                self._check_range(name, len(data), stop - start)
            return data

        def note(error: Exception, attempt: int, wait: float) -> None:
            reason = reason_of(error)
            _log.warning("%s/%s: %s; again in %.1f s", self.url, name, reason, wait)

        return retrying(fetch, lambda error, attempt: self._failure(name, error, attempt), note)

    def _failure(self, name: str, error: Exception, attempt: int) -> Exception | None:
        """Return what ends the reading of a file after an attempt; None where another may do."""
        place, reason = f"{self.url}/{name}", reason_of(error)
        if isinstance(error, (FileNotFoundError, UserError)):
            return error
        if _is_refusal(error):
            return UserError(
                f"{place}: access is refused ({reason}); give this process credentials the way the "
                "storage's own tools take them (environment variables or their login)"
            )
        if not _has_no_server(error):
            self._answered = True
        elif not self._answered and attempt >= FIRST_ATTEMPTS:
            return UserError(f"{place}: nothing answers at this address ({reason})")
        if attempt < ATTEMPTS:
            return None
        return ConnectionError(f"{place}: could not be read in {ATTEMPTS} attempts ({reason})")

    def _check_range(self, name: str, found: int, asked: int) -> None:
        if found > asked:
            raise UserError(
                f"{self.url}/{name}: {found} bytes came for a range of {asked}: the server sends "
                "whole files only; copy the folder to this machine"
            )
        if found < asked:
            raise OSError(f"{found} bytes came for a range of {asked}")


def _file_system(url: str) -> tuple[AbstractFileSystem, str]:
    protocol = url.partition("://")[0].lower()
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UserError(f"{url}: addresses need fsspec; pip install fsspec") from None
    try:
        return url_to_fs(url)
    except ImportError as error:
        package = PACKAGES.get(protocol)
        hint = f"pip install {package}" if package else reason_of(error)
        raise UserError(f"{url}: reading {protocol}:// needs another package: {hint}") from None
    except ValueError as error:
        raise UserError(f"{url}: nothing here reads {protocol}:// ({reason_of(error)})") from None
    except Exception as error:
        if _is_refusal(error):
            raise UserError(f"{url}: access is refused ({reason_of(error)})") from error
        if isinstance(error, ftplib.all_errors):  # what connects at once: FTP, SFTP
            raise UserError(f"{url}: cannot be connected to ({reason_of(error)})") from error
        raise


def _is_refusal(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    refused = isinstance(error, PermissionError) or bool(names & set(_REFUSALS))
    return refused or status_of(error) in (401, 403)


def _has_no_server(error: BaseException | None) -> bool:
    """Return True if an error comes of an unknown host, or of one that takes no connections."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        inner = getattr(error, "os_error", None)  # aiohttp's
        kinds = (socket.gaierror, ConnectionRefusedError)
        if isinstance(error, kinds) or isinstance(inner, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False
