"""Shards compared with their manifest's SHA-256, and kept files with their record's, once a copy.

What was compared is noted in `.verified.jsonl` beside the files, or in the cache where their folder
may not be written to: a line for each file, with its size, time and inode. A file that was changed,
touched or copied has another line, and is read again. Lines are only appended, each in one write,
so that processes may note at once; a torn line is no file's. Whoever has just read a file back
(`data_prep`, the copies of remote data) notes it.
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
BATCH = 64  # Files are noted together after so many were read.


def cache_folder(cache_dir: Path | str | None) -> Path:
    """Return the folder of copies and plans that cannot be beside the data (`data.cache_dir`)."""
    return Path(cache_dir or DEFAULT_CACHE).expanduser()


def note_line(name: str, status: os.stat_result, digest: str) -> str:
    """Return the note of a file: its state when its SHA-256 was found to be `digest`."""
    state = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
    return json.dumps({"format": 1, "name": name, **state, "sha256": digest})


def shard_digests(entry: dict, suffixes: Iterable[str] = (".bin", ".idx")) -> dict[str, str]:
    """Return the SHA-256 of a shard's files, by their names, from its entry in the manifest."""
    return {f"{entry['name']}{suffix}": entry[f"{suffix[1:]}_sha256"] for suffix in suffixes}


class Notes:
    """The notes of a folder's verified files, as they are when this object is made."""

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
        """Return the note of a file as it is now. Raises OSError."""
        return note_line(name, (self.folder / name).stat(), digest)

    def hold(self, digests: Mapping[str, str]) -> bool:
        """Return True if all files, as they are now, were found to have these SHA-256."""
        try:
            return all(self.line(*item) in self._lines for item in digests.items())
        except OSError:
            return False

    def add(self, lines: Iterable[str]) -> None:
        """Note what was verified, beside the files or in the cache; nowhere if both are denied."""
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
    """Note files that this process has just written into `folder` and read again."""
    notes = Notes(folder)
    notes.add([notes.line(*item) for item in digests.items()])


def changed_files(
    folder: Path,
    digests: Mapping[str, str],
    cache_dir: Path | str | None = None,
    progress: Callable[[str], object] = lambda what: None,
) -> Iterator[Path]:
    """Yield the files of a folder that are not what was written there, the largest first.

    What is noted as verified is not read, and what is right is noted. `digests` has the SHA-256 of
    each file by its name; `progress` is told of a file each time that some of it is read. Raises
    OSError for one that is missing, or cannot be read.
    """
    notes = Notes(folder, cache_dir)
    todo = [name for name, digest in digests.items() if not notes.hold({name: digest})]
    todo.sort(key=lambda name: -(folder / name).stat().st_size)
    for first in range(0, len(todo), BATCH):
        # A file that is written to while it is read has another line afterwards.
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
    """Check the tokenizers of prepared data, and read whatever shard was not verified yet.

    Raises UserError for a shard or a tokenizer that is not what the manifest says.
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
    """Check that the tokenizer in a prepared folder, which goes into checkpoints, made the data.

    It is small, so that it is read each time. Raises UserError for another one.
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
