"""The output folder of a preparation: who may write to it, and what is in it after a kill.

.prepare.lock     held while a preparation runs (by the kernel: a kill releases it)
.setup.lock       held while one of several that run together begins or takes up the work
unfinished.json   written first, removed last: the arguments, and where the parts are
manifest.json     written when everything else is in place: the data are complete

The parts and all that a restart needs to know lie in the work folder: `parts` in the output folder,
or a folder of its own in --scratch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cat_lm.data.corpus import PACKING, TokenCorpus
from cat_lm.data.manifest import MANIFEST, SPLITS, read_manifest
from cat_lm.errors import UserError
from cat_lm.io.files import sync_directory, write_json
from data_prep.locks import Busy, file_lock

LOCK = ".prepare.lock"
SETUP_LOCK = ".setup.lock"
MARKER = "unfinished.json"
TOKENIZER = "tokenizer"
MALFORMED = "malformed.log"
# Arguments that choose among the encoded documents: a change leaves the parts useful.
SELECTING = ("sets", "exclude_sets", "tokens", "mixture", "repeat", "max_repeats", "shard_tokens")


@contextmanager
def locked(folder: Path, shared: bool = False) -> Iterator[None]:
    """Makes the folder and holds it, alone or together with others that encode parts (`shared`)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / LOCK, shared, wait=False):
            try:
                yield
            finally:
                if not shared:
                    (folder / LOCK).unlink(missing_ok=True)
    except Busy:
        raise UserError(f"--out {folder}: another preparation is writing to it") from None
    except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
        if error.filename not in (str(folder), str(folder / LOCK)):
            raise
        raise UserError(f"--out {folder}: cannot be written ({error.strerror})") from None


def is_complete(folder: Path, identity: dict, overwrite: bool) -> bool:
    """Whether the folder already holds the data that `identity` (the arguments) asks for.

    Raises `UserError` where it holds other data, or files of someone else.
    """
    if (folder / MANIFEST).is_file():
        found = read_manifest(folder).get("arguments", {})  # an error for a manifest of others
        if overwrite:
            return False
        if not (differing := _differing(found, identity)):
            for split in SPLITS:
                TokenCorpus.open(folder, split)  # an error where a shard is gone or cut short
            return True
        raise UserError(
            f"--out {folder}: holds data made otherwise ({_changes(found, identity, differing)}); "
            "choose another folder or give --overwrite"
        )
    # What a kill leaves before there is a marker: a lock, or the marker on its way.
    ours = (LOCK, SETUP_LOCK, f".{MARKER}.")
    foreign = [file.name for file in folder.iterdir() if not file.name.startswith(ours)]
    if foreign and not (folder / MARKER).is_file():
        raise UserError(
            f"--out {folder}: is not empty ({sorted(foreign)[0]!r} is in it) and was not made by "
            "this command; choose another folder"
        )
    return False


def _differing(found: dict, identity: dict) -> list[str]:
    return [k for k in identity if _decisive(k, found.get(k)) != _decisive(k, identity[k])]


def _decisive(key: str, value: object) -> object:
    """What of an argument decides the result: not where the source lies, if its contents say all"""
    if key != "source" or not isinstance(value, dict) or not value.get("path"):
        return value
    if "contents_sha256" in value:
        return {k: v for k, v in value.items() if k != "path"}
    return {**value, "path": os.path.normpath(value["path"])}


def _changes(found: dict, identity: dict, differing: list[str]) -> str:
    changes = []
    for key in differing:
        was, now = found.get(key), identity[key]
        if key == "source" and isinstance(was, dict):
            keys = [k for k in now if was.get(k) != now[k]]
            was, now = ({k: source.get(k) for k in keys} for source in (was, now))
        changes.append(f"{key} was {json.dumps(was)}, now {json.dumps(now)}")
    return "; ".join(changes)


def work_folder(folder: Path, scratch: Path | None) -> Path:
    """Where the parts of a preparation into `folder` go; the same in every run."""
    if scratch is None:
        return folder.resolve() / "parts"
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return scratch.resolve() / f"cat-lm-prepare-{name}"


def begin(
    folder: Path, work: Path, identity: dict, overwrite: bool, together: bool = False
) -> None:
    """Takes up an unfinished preparation, or marks the folder and removes what is in it.

    A marker stands before the first finished file goes and until the last one has come, so that a
    kill at any moment leaves either a complete folder or one that the next run continues. What
    other arguments have left in the work folder goes before there is a marker with the new ones.
    Where only the choice of documents has changed, the parts stay.
    Raises `UserError` for an unfinished preparation with other arguments unless `overwrite`, and
    where one that several machines may work on `together` has its parts where this one has none.
    """
    marker = _read_marker(folder)
    if marker and not (folder / MANIFEST).is_file():
        found, there = marker["identity"], Path(marker["work"])
        differing = _differing(found, identity)
        if differing and not overwrite:
            raise UserError(
                f"--out {folder}: holds an unfinished preparation made otherwise "
                f"({_changes(found, identity, differing)}); give its arguments to continue it, "
                "or --overwrite for these"
            )
        reusable = set(differing) <= set(SELECTING) and not _limited(identity)
        if there != work and not overwrite and not differing:
            raise UserError(
                f"--out {folder}: its unfinished preparation keeps its parts in {there}; give the "
                "same --scratch to continue it, or --overwrite"
            )
        if together and there == work and not work.is_dir() and not overwrite:
            raise UserError(
                f"--scratch {work.parent}: the parts that were begun ({work.name}) are not there; "
                "several machines need one that they share (to begin anew: --overwrite)"
            )
        if there == work and work.is_dir() and reusable:
            if differing:  # what was chosen and made of it goes while the old marker stands
                (work / "assembly.json").unlink(missing_ok=True)
                _remove(work / "shards")
                _remove_shards(folder)
                write_json(folder / MARKER, {"identity": identity, "work": str(work)})
            return
    # Before the new marker, under which a restart would take it for its own.
    for stale in {work, Path(marker["work"]) if marker else work}:
        _remove(stale)
    write_json(folder / MARKER, {"identity": identity, "work": str(work)})
    (folder / MANIFEST).unlink(missing_ok=True)
    _remove_data(folder, work)
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--scratch {work.parent}: cannot be written ({error.strerror})") from None


def _limited(identity: dict) -> bool:
    """Whether the parts end where --max-documents or --max-bytes, and so the sets, said."""
    return bool(identity["max_documents"] or identity["max_bytes"])


def _read_marker(folder: Path) -> dict | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return {"identity": dict(marker["identity"]), "work": str(marker["work"])}
    return None


def abandon(folder: Path, work: Path) -> None:
    """Removes what a preparation that failed has made, unless there are finished parts in it.

    So a mistake that shows at once leaves nothing in the way of the next attempt.
    """
    worth_keeping = any(work.glob("part-*.json"))
    if not worth_keeping:
        discard(folder, work)


def discard(folder: Path, work: Path) -> None:
    """Removes an unfinished preparation."""
    if (folder / MARKER).is_file() and not (folder / MANIFEST).is_file():
        _remove_data(folder, work)
        for name in (SETUP_LOCK, MARKER):
            (folder / name).unlink(missing_ok=True)


def _remove_data(folder: Path, work: Path) -> None:
    _remove_shards(folder)
    for name in (TOKENIZER, PACKING):
        _remove(folder / name)
    _remove(work)


def _remove(folder: Path) -> None:
    """Removes a folder; raises `UserError` where it stays, since it must not be taken for new."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise UserError(f"{folder}: cannot be removed; remove it and try again")
    if folder.parent.is_dir():
        sync_directory(folder.parent)


def _remove_shards(folder: Path) -> None:
    remove_temporary(folder)
    for split in SPLITS:
        for kind in ("bin", "idx"):
            for file in folder.glob(f"{split}-*.{kind}"):
                file.unlink()
    (folder / MALFORMED).unlink(missing_ok=True)


def remove_temporary(folder: Path) -> None:
    """Removes what a killed process has left between its making and its renaming."""
    for file in folder.glob(".*.tmp"):
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)


def finish(folder: Path, manifest: dict) -> None:
    """Writes the manifest, which makes the folder complete, and tidies up."""
    remove_temporary(folder)
    write_json(folder / MANIFEST, manifest)
    tidy(folder)


def tidy(folder: Path) -> None:
    """Removes the parts and the marker of complete data, where a kill has left them."""
    if marker := _read_marker(folder):
        shutil.rmtree(marker["work"], ignore_errors=True)
    for name in (SETUP_LOCK, MARKER):
        (folder / name).unlink(missing_ok=True)
