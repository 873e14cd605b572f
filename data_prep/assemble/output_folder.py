"""The output folder of a preparation: its locks, and its contents before and after completion.

    .prepare.lock      locked while a preparation runs; the kernel unlocks it after a kill
    .setup.lock        locked while one of several processes starts or resumes the work
    unfinished/        a temporary folder of this program for the result
      preparation.json   the arguments and the folder of --scratch
      parts/             the parts and other state for a restart, unless --scratch is given
      manifest.json      written last; then all files of the result move up, the manifest last
    manifest.json      its presence means that the data are complete

Earlier data are kept until the new ones are complete; then the files that their manifest lists are
deleted. Other files belong to somebody else: they are neither deleted nor overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import sync_directory, write_json
from cat_lm.core.folders import (
    MARK,
    Busy,
    Lock,
    files_below,
    is_marked,
    make_temporary,
    remove_temporary,
    take_lock,
)
from cat_lm.core.outputs import remove_files
from cat_lm.core.readers import Versioned, read_bytes, read_json, resolve
from cat_lm.data.manifest import MANIFEST, SPLITS, listed_shards, parse_manifest, read_manifest
from cat_lm.data.opening import open_corpus
from cat_lm.data.packing import plan_files
from cat_lm.data.verified import NOTE
from data_prep.assemble.shards import ASSEMBLY
from data_prep.encode.plan import TOKENIZER, TOKENIZER_FILES

LOCK, SETUP_LOCK = ".prepare.lock", ".setup.lock"
UNFINISHED, RECORD, PARTS, REPLACED = "unfinished", "preparation.json", "parts", "replaced.json"
MALFORMED = "malformed.log"
# Arguments that select among the encoded documents: parts can be reused if only these change.
SELECTING = {"sets", "exclude_sets", "tokens", "mixture", "repeat", "max_repeats", "shard_tokens"}
_SHARD = r"(?:train|validation)-\d+\.(?:bin|idx)|shard-(?:train|validation)-\d+\.json"
_FILE = rf"{_SHARD}|part-\d+\.\w+|(?:plan|assembly|preparation|manifest|replaced)\.json|{MALFORMED}"
_TOKENIZER_FILE = "|".join(map(re.escape, TOKENIZER_FILES))
# All files that a preparation writes, and temporary files that a kill has left.
_OURS = re.compile(
    rf"{re.escape(NOTE)}|(?:{PARTS}/)?(?:{_FILE}|\.(?:{_FILE}|{MARK})\..+\.tmp)"
    rf"|{TOKENIZER}/(?:{_TOKENIZER_FILE}|\.(?:{_TOKENIZER_FILE})\..+\.tmp)"
)
# The files that depend on the selection of documents.
_CHOSEN = re.compile(rf"{_SHARD}|{ASSEMBLY}|{MALFORMED}|{re.escape(NOTE)}")


class Preparation(Versioned):
    """The schema of preparation.json: the arguments and --scratch of an unfinished preparation."""

    program: Literal["cat_lm data_prep.prepare"]
    identity: dict[str, Any]
    scratch: str | None


def finished_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return the relative paths of all files that belong to a manifest, except the manifest."""
    shards = [shard["name"] for shard in listed_shards(manifest)]
    names = [f"{name}{suffix}" for name in shards for suffix in (".bin", ".idx")]
    names += [*(f"{TOKENIZER}/{name}" for name in TOKENIZER_FILES), NOTE, *plan_files(folder)]
    return [*names, MALFORMED] if manifest.get("malformed_documents") else names


@dataclass(frozen=True)
class OutputFolder:
    """The output folder of a command, and the absolute path of --scratch or None."""

    out: Path
    scratch: str | None

    @classmethod
    def of(cls, out: Path, scratch: Path | None) -> OutputFolder:
        return cls(out, None if scratch is None else str(resolve(scratch)))

    @property
    def staging(self) -> Path:
        """Return the temporary folder for the result."""
        return self.out / UNFINISHED

    @property
    def work(self) -> Path:
        """Return the folder of the parts, which is the same in every attempt."""
        if self.scratch is None:
            return self.staging / PARTS
        name = hashlib.sha256(str(resolve(self.out)).encode()).hexdigest()[:16]
        return Path(self.scratch) / f"cat-lm-prepare-{name}"

    @contextmanager
    def locked(self, shared: bool = False) -> Iterator[None]:
        """Make the folder and lock it; with `shared`, other processes may encode parts as well."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            lock = take_lock(self.out / LOCK, shared=shared, wait=False)
        except Busy:
            raise UserError(f"--out {self.out}: another preparation is writing to it") from None
        except OSError as error:
            reason = describe_os_error(error)
            raise file_error(f"--out {self.out}: cannot be written ({reason})", error) from None
        if lock.error is not None:
            print(
                f"note: {self.out}: no file locks here ({lock.error.strerror}); start no two "
                "preparations into one folder, they would do the work twice",
                file=sys.stderr,
            )
        with lock:
            try:
                yield
            finally:
                if not shared:
                    for name in (SETUP_LOCK, LOCK):
                        (self.out / name).unlink(missing_ok=True)

    def setup_lock(self) -> Lock:
        """Return the lock that is held while the work is started or resumed."""
        return take_lock(self.out / SETUP_LOCK)

    def is_complete(self, identity: dict, overwrite: bool) -> bool:
        """Return True if the folder has complete data of these arguments (`identity`).

        Raises:
            UserError: the folder has other data, or other files.
        """
        if not self.out.is_dir():
            return False
        if not (self.out / MANIFEST).is_file():
            ours = {LOCK, SETUP_LOCK, UNFINISHED}
            others = sorted({path.name for path in self.out.iterdir()} - ours)
            if others and not is_marked(self.staging):
                raise UserError(
                    f"--out {self.out}: is not empty ({others[0]!r} is in it) and was not made by "
                    "this command; choose another folder"
                )
            return False
        found = read_manifest(self.out).get("arguments", {})  # Raises for another file format.
        if overwrite:
            return False
        if not (differing := _changed_keys(found, identity)):
            for split in SPLITS:
                open_corpus(self.out, split)  # Raises if a shard is missing or cut short.
            return True
        # Work that was started with --overwrite continues without it.
        record = self.read() if is_marked(self.staging) else None
        if record and not _changed_keys(record.identity, identity):
            return False
        changes = _describe_changes(found, identity, differing)
        raise UserError(
            f"--out {self.out}: holds data made otherwise ({changes}); choose another folder or "
            "give --overwrite"
        )

    def remove_leftovers(self) -> None:
        """Remove leftovers of a killed preparation beside complete data, unless one is running."""
        # A folder with a record is an unfinished preparation of other data.
        if is_marked(self.staging) and not (self.staging / RECORD).exists():
            with suppress(Busy, OSError, UserError), take_lock(self.out / LOCK, wait=False):
                self.remove()
                (self.out / LOCK).unlink()

    def read(self) -> Preparation | None:
        """Return the record of an unfinished preparation, or None.

        Raises:
            UserError: another version of the command wrote it, or it is damaged.
        """
        path = self.staging / RECORD
        return read_json(path, Preparation, "move it away") if os.path.lexists(path) else None

    def earlier_arguments(self, overwrite: bool) -> list[dict[str, Any]]:
        """Return the arguments of unfinished work, and without `overwrite` of complete data."""
        if not self.out.is_dir():
            return []
        record = self.read() if is_marked(self.staging) else None
        folders = (self.staging,) if overwrite else (self.staging, self.out)
        manifests = [read_manifest(f) for f in folders if (f / MANIFEST).is_file()]
        earlier = [manifest.get("arguments", {}) for manifest in manifests]
        return [record.identity, *earlier] if record else earlier

    def start_or_resume(self, identity: dict, overwrite: bool, stage: str) -> None:
        """Resume an unfinished preparation, or start one.

        The parts are reused if only the selection of documents has changed.

        Raises:
            UserError: without `overwrite`, an unfinished preparation has other arguments, or its
                parts are missing.
        """
        record = self.read()
        differing = _changed_keys(record.identity, identity) if record else []
        if record and not overwrite:
            self._check_record(record, differing, identity, stage)
        # Under a limit, other sets mean other documents; parts then cannot be reused.
        is_limited = identity["max_documents"] or identity["max_bytes"]
        reusable = not differing or (SELECTING.issuperset(differing) and not is_limited)
        if not (record and reusable and record.scratch == self.scratch and self.work.is_dir()):
            OutputFolder(self.out, record.scratch if record else self.scratch).remove()
        elif differing:
            for folder in (self.staging, self.work):
                remove_files(folder, filter(_CHOSEN.fullmatch, files_below(folder)))
        make_temporary(self.staging)
        try:
            make_temporary(self.work)
        except OSError as error:
            flag, reason = "--scratch" if self.scratch else "--out", describe_os_error(error)
            text = f"{flag} {self.work.parent}: cannot be written ({reason})"
            raise file_error(text, error) from None
        program = "cat_lm data_prep.prepare"
        own = Preparation(format=1, program=program, identity=identity, scratch=self.scratch)
        write_json(self.staging / RECORD, own.model_dump())

    def _check_record(
        self, record: Preparation, differing: list[str], identity: dict, stage: str
    ) -> None:
        work = OutputFolder(self.out, record.scratch).work
        if differing:
            raise UserError(
                f"--out {self.out}: holds an unfinished preparation made otherwise "
                f"({_describe_changes(record.identity, identity, differing)}); give its arguments "
                "to continue it, or --overwrite for these"
            )
        if record.scratch != self.scratch:
            raise UserError(
                f"--out {self.out}: its unfinished preparation keeps its parts in {work}; give the "
                "same --scratch to continue it, or --overwrite"
            )
        if stage != "all" and not work.is_dir():
            raise UserError(
                f"--scratch {work.parent}: the parts that were begun ({work.name}) are not there; "
                "several machines need one that they share (to begin anew: --overwrite)"
            )

    def remove_temporary_files(self) -> None:
        """Remove temporary files of killed processes."""
        for folder in (self.staging, self.work):
            left = (path.name for path in folder.glob(".*.tmp"))
            remove_files(folder, filter(_OURS.fullmatch, left))

    def publish(self, identity: dict) -> bool:
        """Move a complete result into the output folder, and delete the earlier data there.

        If a kill interrupts it, the next call completes it. Return True if the output folder then
        has complete data of `identity`, moved by this call or by one that was killed at its end.
        """
        if not is_marked(self.staging):
            return False
        if (self.staging / MANIFEST).is_file():
            self._replace_data()
        elif os.path.lexists(self.staging / RECORD) or not (self.out / MANIFEST).is_file():
            return False
        return not _changed_keys(read_manifest(self.out).get("arguments", {}), identity)

    def _replace_data(self) -> None:
        made = finished_files(self.staging, read_manifest(self.staging))
        made = [name for name in made if (self.staging / name).is_file()]
        replaced, current, earlier = self.staging / REPLACED, self.out / MANIFEST, []
        for path in filter(Path.is_file, (replaced, current)):
            earlier = finished_files(self.out, parse_manifest(read_bytes(path), str(path)))
        for name in made:
            if os.path.lexists(self.out / name) and name not in earlier:
                raise UserError(
                    f"--out {self.out}: {name} is not of this preparation and would be replaced; "
                    "move it away"
                )
        if current.is_file():
            os.replace(current, replaced)
        remove_files(self.out, earlier)
        replaced.unlink(missing_ok=True)
        for name in made:
            (self.out / name).parent.mkdir(exist_ok=True)
            os.replace(self.staging / name, self.out / name)
        # Delete the record before the last move, after which it would mean unfinished work.
        (self.staging / RECORD).unlink(missing_ok=True)
        os.replace(self.staging / MANIFEST, current)
        sync_directory(self.out)

    def remove(self) -> None:
        """Remove the temporary files of a complete or abandoned preparation, and no others."""
        for folder in filter(is_marked, (self.work, self.staging)):
            remove_files(folder, filter(_OURS.fullmatch, files_below(folder) - {MARK}))
            with suppress(OSError):
                (folder / TOKENIZER).rmdir()
            if os.listdir(folder) == [MARK]:
                remove_temporary(folder)


def _changed_keys(found: dict, identity: dict) -> list[str]:
    return [
        k
        for k in identity
        if _determining_part(k, found.get(k)) != _determining_part(k, identity[k])
    ]


def _determining_part(key: str, value: object) -> object:
    """Return the part of an argument that determines the result, such as a source's contents."""
    if key != "source" or not isinstance(value, dict) or not value.get("path"):
        return value
    if "contents_sha256" in value:
        return {k: v for k, v in value.items() if k != "path"}
    return {**value, "path": os.path.normpath(value["path"])}


def _describe_changes(found: dict, identity: dict, differing: list[str]) -> str:
    changes = []
    for key in differing:
        was, now = found.get(key), identity[key]
        if key == "source" and isinstance(was, dict):
            keys = [k for k in now if was.get(k) != now[k]]
            was, now = ({k: source.get(k) for k in keys} for source in (was, now))
        changes.append(f"{key} was {json.dumps(was)}, now {json.dumps(now)}")
    return "; ".join(changes)
