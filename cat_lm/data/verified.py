"""Shards compared with their manifest's SHA-256, and kept files with their record's, once a copy.

What was compared is noted in `.verified.jsonl` beside the shards, or in the cache where their
folder may not be written to: a line for each file, with its size, time and inode of then. A file
that was changed, touched or copied has another stamp, and is read anew. Lines are only ever
appended, each in one write, so that processes may note at once; one that was torn counts for
nothing. Whoever has just read a file back (`data_prep`, the copies of remote data) notes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import checksums, sha256
from cat_lm.core.readers import Versioned, parse_json, read_object, resolve, short
from cat_lm.data.manifest import Count, Digest
from cat_lm.data.storage import cache_folder

if TYPE_CHECKING:
    from cat_lm.data.corpus import TokenCorpus
    from cat_lm.data.mixture import Mixture

NOTE = ".verified.jsonl"
# File systems that all hosts see alike; those of other kinds (fuse.…) are told by their name.
NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "wekafs"}


class Stamp(Versioned):
    """A file as it was when its SHA-256 was found to be `sha256`; another copy has another one."""

    name: str
    size: Count
    mtime_ns: int
    inode: Count
    sha256: Digest


class Listed(NamedTuple):
    """A file that a manifest lists, with the checksum that it must have."""

    path: Path
    sha256: str

    def stamp(self) -> Stamp:
        """Look at the file. Raises OSError."""
        status = self.path.stat()
        return Stamp(
            format=1,
            name=self.path.name,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
            sha256=self.sha256,
        )


def shard_files(
    folder: Path, entry: dict, suffixes: Iterable[str] = (".bin", ".idx")
) -> list[Listed]:
    """Return the files of a shard; `entry` is what its manifest says of it."""
    return [
        Listed(folder / f"{entry['name']}{suffix}", entry[f"{suffix[1:]}_sha256"])
        for suffix in suffixes
    ]


def note_shards(folder: Path, entries: Iterable[dict]) -> None:
    """Note shards that this process has just written into `folder` and read again."""
    files = (file for entry in entries for file in shard_files(folder, entry))
    Notes(folder).add([file.stamp() for file in files])


class Notes:
    """The notes of a folder's verified files. Safe to use from several threads."""

    def __init__(self, folder: Path, cache_dir: Path | str | None = None) -> None:
        own = hashlib.sha256(str(resolve(folder)).encode()).hexdigest()[:32]
        self.places = [folder / NOTE]
        with contextlib.suppress(RuntimeError):  # a user without a home has no cache
            self.places.append(cache_folder(cache_dir) / "verified" / f"{own}.jsonl")
        self._lock = threading.Lock()
        self._read: dict[Path, _ReadNote] = {}

    def holds(self, file: Listed) -> bool:
        """Return True if the file, as it is now, was found to be what the manifest says."""
        try:
            stamp = file.stamp()
        except OSError:
            return False
        return any(stamp in self._stamps(place) for place in self.places)

    def _stamps(self, place: Path) -> set[Stamp]:
        with self._lock:
            try:
                status = os.stat(place)
                known = self._read.get(place)
                # Notes only ever grow; what is shorter, or another file, is read from its start.
                if known is None or known.inode != status.st_ino or known.end > status.st_size:
                    known = self._read[place] = _ReadNote(status.st_ino)
                known.update(place, status)
            except OSError:
                self._read.pop(place, None)
                return set()
            return known.stamps

    def add(self, stamps: Sequence[Stamp]) -> None:
        """Note what was verified, beside the data where that is possible; where not, nothing is."""
        if not stamps:
            return
        lines = "".join(json.dumps(stamp.model_dump()) + "\n" for stamp in stamps).encode()
        for place in self.places:
            try:
                if place != self.places[0]:
                    place.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
                handle = os.open(place, flags, 0o666)
            except OSError:
                continue  # the data are on a disk that this user may only read
            try:
                os.write(handle, lines)
            except OSError:
                continue
            finally:
                os.close(handle)
            return


@dataclass
class _ReadNote:
    """The stamps read from a note, and the place in the file where they end."""

    inode: int
    end: int = 0  # of the last whole line, in bytes
    seen: tuple[int, int] = (0, 0)  # size and time of the file when it was read
    stamps: set[Stamp] = field(default_factory=set)

    def update(self, place: Path, status: os.stat_result) -> None:
        """Read what was added. Raises OSError."""
        now = (status.st_size, status.st_mtime_ns)
        if now == self.seen:
            return
        if now[0] == self.seen[0]:
            self.end, self.stamps = 0, set()  # another one wrote over it
        with open(place, "rb") as stream:
            stream.seek(self.end)
            added = stream.read()
        whole = added[: added.rfind(b"\n") + 1]
        self.stamps |= _parse(whole)
        self.end, self.seen = self.end + len(whole), now


def _parse(text: bytes) -> set[Stamp]:
    found = set()
    for line in text.splitlines():
        try:
            found.add(parse_json(line, Stamp, NOTE))
        except UserError:
            continue  # torn by a kill, or of another version: the file is read anew
    return found


def check_tokenizer(folder: Path, manifest: dict) -> None:
    """Check that the tokenizer in a prepared folder is the one that made the data.

    Its folder goes into every checkpoint. It is small, so that it is read each time.

    Raises:
        UserError: it is another one, or cannot be read.
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


class Check:
    """Files of prepared data that are not noted as verified, and their verification.

    Raises `UserError` at once where the tokenizer is not what the manifest says.

    Attributes: `todo`, what has to be read, largest first; `copy`, a text that two processes share
    where they see the same copy of the same files.
    """

    def __init__(
        self,
        corpora: Iterable[TokenCorpus | Mixture],
        cache_dir: Path | str | None = None,
        suffixes: Iterable[str] = (".bin", ".idx"),
    ) -> None:
        self._notes: dict[Path, Notes] = {}
        self._stamps: dict[Path, Stamp] = {}
        parts = [part for corpus in corpora for part in getattr(corpus, "parts", [corpus])]
        for part in parts:
            check_tokenizer(part.folder, part.manifest)
            notes = self._notes.setdefault(part.folder, Notes(part.folder, cache_dir))
            listed = (shard_files(part.folder, entry, suffixes) for entry in part.entries_here())
            for file in (file for files in listed for file in files):
                if not notes.holds(file):
                    self._stamps[file.path] = file.stamp()
        self.todo = sorted(self._stamps, key=lambda path: (-self._stamps[path].size, str(path)))
        seen = "".join(f"{path} {self._stamps[path].model_dump()}\n" for path in self.todo)
        places = {os.path.dirname(os.path.realpath(path)) for path in self.todo}
        disks = {_disk(place) for place in places}
        self.copy = hashlib.sha256(f"{sorted(disks)}\n{seen}".encode()).hexdigest()

    def size(self, paths: Iterable[Path]) -> int:
        """Add up the bytes of some of the files."""
        return sum(self._stamps[path].size for path in paths)

    def read(self, paths: Sequence[Path], progress: Callable[[str], object]) -> list[str]:
        """Hash some of the files, in threads; `progress` is told of each, while it is read, too.

        Returns:
            A line for each file that is not what its manifest says.
        """
        found = checksums(paths, "sha256", lambda path: progress(f"the SHA-256 of {path}"))
        return [line for path in paths for line in self._problems(path, found[path])]

    def _problems(self, path: Path, digest: str) -> Iterable[str]:
        stamp = self._stamps[path]
        if digest != stamp.sha256:
            yield (
                f"{path}: its SHA-256 is {digest[:16]}…, the manifest says {stamp.sha256[:16]}…: "
                "the file is damaged or was replaced; copy it again from where it is whole, or "
                "prepare the data again"
            )
        elif Listed(path, stamp.sha256).stamp() != stamp:
            yield f"{path}: was written to while it was read; start again when nothing writes to it"

    def note(self, paths: Iterable[Path]) -> None:
        """Note that these are what the manifest says."""
        by_folder: dict[Path, list[Stamp]] = {}
        for path in paths:
            by_folder.setdefault(path.parent, []).append(self._stamps[path])
        for folder, stamps in by_folder.items():
            self._notes[folder].add(stamps)


def _disk(folder: str) -> str:
    """Name the host whose disk a folder is on; nothing where all hosts see the same one.

    Size, time and inode do not tell: disks that were filled alike have equal ones.
    """
    try:
        device = os.stat(folder).st_dev
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return socket.gethostname()
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            kind = after.split()[0]
            return "" if kind in NETWORK or kind.startswith("fuse.") else socket.gethostname()
    return socket.gethostname()


def verify(
    corpora: Iterable[TokenCorpus | Mixture],
    cache_dir: Path | str | None = None,
    suffixes: Iterable[str] = (".bin", ".idx"),
    progress: Callable[[str], object] = lambda what: None,
) -> None:
    """Read whatever of these data was not verified yet.

    Args:
        progress: told of the file that is read, each time that some of it is read.

    Raises:
        UserError: a file is not what the manifest says.
    """
    check = Check(corpora, cache_dir, suffixes)
    problems = check.read(check.todo, progress)
    if problems:
        raise UserError(problems[0])
    check.note(check.todo)


def changed_files(
    folder: Path,
    digests: Mapping[str, str],
    cache_dir: Path | str | None = None,
    progress: Callable[[str], object] = lambda what: None,
) -> list[Path]:
    """Return the files of a folder in a cache that are not what was written there.

    Each is read once for every copy of it, as shards are.

    Args:
        digests: the SHA-256 of each file, by its name in `folder`.

    Raises:
        OSError: one is missing, or cannot be read.
    """
    notes = Notes(folder, cache_dir)
    listed = [Listed(folder / name, digest) for name, digest in digests.items()]
    stamps = {file.path: file.stamp() for file in listed if not notes.holds(file)}
    found = checksums(stamps, "sha256", lambda path: progress(f"the SHA-256 of {path}"))
    changed = [path for path, stamp in stamps.items() if found[path] != stamp.sha256]
    notes.add([stamp for path, stamp in stamps.items() if path not in changed])
    return changed
