"""The output folder of a preparation: who may write to it, and what is in it after a kill.

.prepare.lock     held while a preparation runs (by the kernel: a kill releases it)
.setup.lock       held while one of several that run together begins or takes up the work
unfinished.json   written first, removed last: the arguments, and the files that may be here
manifest.json     written when everything else is in place: the data are complete

The parts and all that a restart needs to know lie in `data_prep.encode.work_folder`. What is not
listed in one of the two files is somebody else's: it stays, and is not written over.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from cat_lm.core.folders import Busy, is_marked
from cat_lm.core.folders import remove_temporary as remove_temporary_folder
from cat_lm.core.outputs import remove_files
from cat_lm.data.manifest import MANIFEST, SPLITS, read_manifest
from cat_lm.data.opening import open_corpus
from cat_lm.data.verified import NOTE
from data_prep.common.locks import file_lock
from data_prep.common.unfinished import (
    MARKER,
    PROGRAM,
    Unfinished,
    claim,
    finished_files,
    is_making,
    put,
    read_marker,
    remove_making,
    tokenizer_names,
)
from data_prep.encode.work_folder import ASSEMBLY, WorkFolder

LOCK = ".prepare.lock"
SETUP_LOCK = ".setup.lock"
_TOKENIZER_TEMPORARY = re.compile(r"\.tokenizer\..+\.tmp")
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
                    _remove_locks(folder, LOCK)
    except Busy:
        raise UserError(f"--out {folder}: another preparation is writing to it") from None
    except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
        if error.filename not in (str(folder), str(folder / LOCK)):
            raise
        raise UserError(f"--out {folder}: cannot be written ({error.strerror})") from None


def is_complete(folder: Path, identity: dict, overwrite: bool) -> bool:
    """Return True if the folder already holds the data that `identity` (the arguments) asks for.

    Raises `UserError` where it holds other data, or files of someone else.
    """
    if (folder / MANIFEST).is_file():
        found = read_manifest(folder).get("arguments", {})  # an error for a manifest of others
        if overwrite:
            return False
        if not (differing := _differing(found, identity)):
            for split in SPLITS:
                open_corpus(folder, split)  # an error where a shard is gone or cut short
            return True
        raise UserError(
            f"--out {folder}: holds data made otherwise ({_changes(found, identity, differing)}); "
            "choose another folder or give --overwrite"
        )
    # What a kill leaves before there is a marker: a lock, or the marker on its way.
    files = [path for path in folder.iterdir() if not is_making(path)]
    foreign = [path.name for path in files if not path.name.startswith((LOCK, SETUP_LOCK))]
    if foreign and not (folder / MARKER).is_file():
        raise UserError(
            f"--out {folder}: is not empty ({sorted(foreign)[0]!r} is in it) and was not made by "
            "this command; choose another folder"
        )
    return False


def _differing(found: dict, identity: dict) -> list[str]:
    return [k for k in identity if _decisive(k, found.get(k)) != _decisive(k, identity[k])]


def _decisive(key: str, value: object) -> object:
    """Return the part of an argument that decides the result, such as a source's contents."""
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


def begin(
    folder: Path, work: WorkFolder, identity: dict, overwrite: bool, together: bool = False
) -> None:
    """Takes up an unfinished preparation, or marks the folder and removes what is in it.

    A marker stands before the first finished file goes and until the last one has come, so that a
    kill at any moment leaves either a complete folder or one that the next run continues. What
    other arguments have left in the work folder goes before there is a marker with the new ones.
    Where only the choice of documents has changed, the parts stay.
    Raises `UserError` for an unfinished preparation with other arguments unless `overwrite`, and
    where one that several machines may work on `together` has its parts where this one has none.
    """
    marker = read_marker(folder)
    complete = (folder / MANIFEST).is_file()
    if marker and not complete:
        differing = _differing(marker.identity, identity)
        if differing and not overwrite:
            raise UserError(
                f"--out {folder}: holds an unfinished preparation made otherwise "
                f"({_changes(marker.identity, identity, differing)}); give its arguments to "
                "continue it, or --overwrite for these"
            )
        if not overwrite and not differing:
            _check_place(folder, marker, work, together)
        if _can_continue(marker, work, differing, identity):
            _continue(folder, marker, work, identity, differing)
            return
    files = finished_files(folder, read_manifest(folder)) if complete else []
    files += marker.files if marker else []
    if marker and marker.scratch not in (work.scratch, None):
        print(f"note: parts that other arguments left in {marker.scratch} stay there")
    # Before the new marker, under which a restart would take it for its own.
    inside = WorkFolder.of(folder, None)
    if inside != work and inside.is_ours():
        inside.remove()
    work.remove()
    if os.path.lexists(work.path):
        raise UserError(f"{work.path}: holds files that are not of a preparation; move it away")
    own = Unfinished(
        format=1, program=PROGRAM, identity=identity, scratch=work.scratch, files=files
    )
    own.save(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    remove_temporary(folder)
    remove_files(folder, files)
    own.model_copy(update={"files": []}).save(folder)
    _tell_what_stays(folder)
    claim(folder, [*tokenizer_names(), NOTE])
    work.make()


def _check_place(folder: Path, marker: Unfinished, work: WorkFolder, together: bool) -> None:
    """Raises `UserError` where the parts of a preparation to be continued are not at hand."""
    if marker.scratch != work.scratch:
        there = Path(marker.scratch) if marker.scratch else None
        raise UserError(
            f"--out {folder}: its unfinished preparation keeps its parts in "
            f"{WorkFolder.of(folder, there).path}; give the same --scratch to continue it, or "
            "--overwrite"
        )
    if work.path.is_dir():
        return
    if together:
        raise UserError(
            f"--scratch {work.path.parent}: the parts that were begun ({work.path.name}) are not "
            "there; several machines need one that they share (to begin anew: --overwrite)"
        )
    print(f"note: the parts that were begun are not in {work.path}; encoding begins anew")


def _can_continue(
    marker: Unfinished, work: WorkFolder, differing: list[str], identity: dict
) -> bool:
    # Other sets under a limit are other documents; the same arguments are the same ones.
    reusable = not differing or (set(differing) <= set(SELECTING) and not _limited(identity))
    return reusable and marker.scratch == work.scratch and work.path.is_dir()


def _continue(
    folder: Path, marker: Unfinished, work: WorkFolder, identity: dict, differing: list[str]
) -> None:
    work.make()
    if not differing:
        return
    # What was chosen, and made of it, goes while the old marker stands.
    (work.path / ASSEMBLY).unlink(missing_ok=True)
    work.remove_shards()
    remove_temporary(folder)
    kept = tokenizer_names()
    remove_files(folder, [name for name in marker.files if name not in kept])
    own = marker.model_copy(update={"identity": identity, "files": kept})
    own.save(folder)
    claim(folder, [NOTE])


def _tell_what_stays(folder: Path) -> None:
    ours = (LOCK, SETUP_LOCK, MARKER)
    others = sorted(path.name for path in folder.iterdir() if path.name not in ours)
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        print(f"note: {folder}: not of the earlier data, and left: {', '.join(others[:5])}{more}")


def _limited(identity: dict) -> bool:
    """Return True if the parts end where --max-documents or --max-bytes, and so the sets, said."""
    return bool(identity["max_documents"] or identity["max_bytes"])


def abandon(folder: Path, work: WorkFolder) -> None:
    """Removes what a preparation that failed has made, unless there are finished parts in it.

    So a mistake that shows at once leaves nothing in the way of the next attempt.
    """
    worth_keeping = any(work.path.glob("part-*.json"))
    if not worth_keeping:
        discard(folder, work)


def discard(folder: Path, work: WorkFolder) -> None:
    """Removes an unfinished preparation."""
    marker = read_marker(folder)
    if marker and not (folder / MANIFEST).is_file():
        remove_temporary(folder)
        remove_files(folder, marker.files)
        _end(folder, work)


def _end(folder: Path, work: WorkFolder) -> None:
    if work.is_ours():
        work.remove()
    _remove_locks(folder, SETUP_LOCK)
    (folder / MARKER).unlink(missing_ok=True)


def _remove_locks(folder: Path, name: str) -> None:
    """Removes a lock's file, which is empty."""
    path = folder / name
    if path.is_file() and path.stat().st_size == 0:
        path.unlink(missing_ok=True)


def remove_temporary(folder: Path) -> None:
    """Removes what a killed process has left between its making and its renaming."""
    remove_making(folder)
    for path in folder.iterdir():
        if _TOKENIZER_TEMPORARY.fullmatch(path.name) and is_marked(path):
            remove_temporary_folder(path)


def finish(folder: Path, work: WorkFolder, manifest: dict) -> None:
    """Writes the manifest, which makes the folder complete, and tidies up."""
    remove_temporary(folder)
    with put(folder, MANIFEST) as path:
        write_json(path, manifest)
    tidy(folder, work)


def tidy(folder: Path, work: WorkFolder) -> None:
    """Removes the parts and the marker of complete data, where a kill has left them."""
    if not os.access(folder, os.W_OK):
        return  # of a mount that is only read, or somebody else's
    try:
        marker = read_marker(folder)
    except UserError:
        return  # a file of that name is somebody else's
    if marker and marker.scratch != work.scratch:
        print(
            f"note: parts are left in {marker.scratch or folder}; the same --scratch removes them"
        )
        return
    _end(folder, work)
