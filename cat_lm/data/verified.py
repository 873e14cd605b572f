"""Compare files with their recorded SHA-256, each copy once.

A verified file is noted in `.verified.jsonl` beside it, or in the cache if its folder is read-only:
one line per file, with its size, modification time and inode. A file that was changed, touched or
copied no longer matches its line, and is read again. Lines are only appended, each in one write, so
that several processes may add lines at the same time; an incomplete line matches no file. Code that
has just written a file and read it back adds its note, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import checksums, sha256
from cat_lm.core.readers import read_object, resolve, short

if TYPE_CHECKING:
    from cat_lm.data.corpus import Mixture, TokenCorpus

DEFAULT_CACHE = "~/.cache/cat_lm/data"
NOTE = ".verified.jsonl"
BATCH = 64  # number of files that are read before their notes are written


def cache_folder(cache_dir: Path | str | None) -> Path:
    """Return the cache for copies and plans that cannot be beside the data (`data.cache_dir`)."""
    return Path(cache_dir or DEFAULT_CACHE).expanduser()


def note_line(name: str, status: os.stat_result, digest: str) -> str:
    """Return the note of a file with this status and SHA-256, as a JSON line."""
    state = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
    return json.dumps({"format": 1, "name": name, **state, "sha256": digest})


def shard_digests(entry: dict, suffixes: Iterable[str] = (".bin", ".idx")) -> dict[str, str]:
    """Return the SHA-256 of a shard's files by file name, from its entry in the manifest."""
    return {f"{entry['name']}{suffix}": entry[f"{suffix[1:]}_sha256"] for suffix in suffixes}


class Notes:
    """The notes of a folder's verified files, read when the object is made."""

    def __init__(self, folder: Path, cache_dir: Path | str | None = None) -> None:
        self.folder = folder
        own = hashlib.sha256(str(resolve(folder)).encode()).hexdigest()[:32]
        self._places = [folder / NOTE]
        with contextlib.suppress(RuntimeError):  # A user without a home has no cache.
            self._places.append(cache_folder(cache_dir) / "verified" / f"{own}.jsonl")
        self._lines: set[str] = set()
        for place in self._places:
            with contextlib.suppress(OSError):
                self._lines.update(place.read_text(errors="replace").splitlines())

    def line(self, name: str, digest: str) -> str:
        """Return the note of a file with its present status. Raises OSError."""
        return note_line(name, (self.folder / name).stat(), digest)

    def all_verified(self, digests: Mapping[str, str]) -> bool:
        """Return True if all files are noted with these SHA-256 and have not changed since."""
        try:
            return all(self.line(*item) in self._lines for item in digests.items())
        except OSError:
            return False

    def add(self, lines: Iterable[str]) -> None:
        """Append notes beside the files, or else to the cache; do nothing if both are read-only."""
        text = "".join(f"{line}\n" for line in lines)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        for place in self._places if text else ():
            with contextlib.suppress(OSError):
                if place != self._places[0]:
                    place.parent.mkdir(parents=True, exist_ok=True)
                with open(os.open(place, flags, 0o666), "wb", buffering=0) as stream:
                    stream.write(text.encode())
                return


def note_files(folder: Path, digests: Mapping[str, str]) -> None:
    """Note as verified the files that this process has just written and read back."""
    notes = Notes(folder)
    notes.add([notes.line(*item) for item in digests.items()])


def changed_files(
    folder: Path,
    digests: Mapping[str, str],
    cache_dir: Path | str | None = None,
    progress: Callable[[str], object] = lambda what: None,
) -> Iterator[Path]:
    """Yield the files of a folder whose SHA-256 differs from the recorded one, the largest first.

    Files that are noted as verified are not read; files that are right are noted.

    Args:
        digests: file name -> SHA-256.
        progress: called with a text whenever a part of a file was read.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    notes = Notes(folder, cache_dir)
    todo = [name for name, digest in digests.items() if not notes.all_verified({name: digest})]
    todo.sort(key=lambda name: -(folder / name).stat().st_size)
    for first in range(0, len(todo), BATCH):
        # Take the status before reading: a file that changes meanwhile then does not match.
        lines = {
            folder / name: notes.line(name, digests[name]) for name in todo[first : first + BATCH]
        }
        found = checksums(lines, "sha256", lambda path: progress(f"the SHA-256 of {path}"))
        wrong = [path for path in lines if found[path] != digests[path.name]]
        notes.add(line for path, line in lines.items() if path not in wrong)
        yield from wrong


def verify(
    corpora: Iterable[TokenCorpus | Mixture],
    cache_dir: Path | str | None = None,
    suffixes: Iterable[str] = (".bin", ".idx"),
    progress: Callable[[str], object] = lambda what: None,
) -> None:
    """Check the tokenizers of prepared data, and read every shard that was not verified yet.

    Raises UserError for a shard or a tokenizer that differs from the manifest.
    """
    for part in (part for corpus in corpora for part in corpus.parts):
        check_tokenizer(part.folder, part.manifest)
        digests = {}
        for entry in part.entries:
            digests |= shard_digests(entry, suffixes)
        for path in changed_files(part.folder, digests, cache_dir, progress):
            raise UserError(
                f"{path}: its SHA-256 is not the manifest's: the file is damaged or was replaced; "
                "copy it again from where it is whole, or prepare the data again"
            )


def check_tokenizer(folder: Path, manifest: dict) -> None:
    """Check that the tokenizer in a prepared folder is the one that encoded the data.

    Checkpoints get a copy of it. It is small, and read at every call. Raises UserError if it
    differs.
    """
    path, expected = folder / "tokenizer" / "tokenizer.json", manifest["tokenizer"]
    again = "copy it again from where it is whole, or prepare the data again"
    try:
        same = sha256(path) == expected["sha256"]
    except OSError as error:
        raise file_error(f"{path}: {describe_os_error(error)}; {again}", error) from None
    if not same:
        raise UserError(f"{path}: differs from the tokenizer that made the data; {again}")
    settings = path.with_name("tokenizer_config.json")
    if "eod_token" in expected and settings.is_file():
        found = read_object(settings).get("eos_token")
        if found != expected["eod_token"]:
            raise UserError(
                f"{settings}: eos_token is {short(found)}, documents of the data end with "
                f"{short(expected['eod_token'])}; {again}"
            )
