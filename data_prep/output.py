"""The output folder of a preparation: who may write to it, and what is in it after a kill.

.prepare.lock     held while a preparation runs (by the kernel: a kill releases it)
unfinished.json   written first, removed last: the files beside it may be deleted
manifest.json     written when everything else is in place: the data are complete
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cat_lm.data.corpus import MANIFEST, SPLITS, TokenCorpus, read_manifest
from cat_lm.errors import UserError
from cat_lm.files import write_json

LOCK = ".prepare.lock"
MARKER = "unfinished.json"
TOKENIZER = "tokenizer"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it; a second preparation into it is an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = open(folder / LOCK, "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror})") from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one that finished just now may have removed the file that was opened above.
            ours = os.path.samestat(os.fstat(stream.fileno()), os.stat(folder / LOCK))
        except FileNotFoundError:
            ours = False
        except OSError as error:
            ours = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
            if ours:
                print(
                    f"note: {folder}: no file locks here ({error.strerror}); "
                    "make sure that nothing else prepares data in it",
                    file=sys.stderr,
                )
        if not ours:
            raise UserError(f"--out {folder}: another preparation is writing to it")
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def is_complete(folder: Path, identity: dict, overwrite: bool) -> bool:
    """Whether the folder already holds the data that `identity` (the arguments) asks for.

    Raises `UserError` where it holds other data, or files of someone else.
    """
    if (folder / MANIFEST).is_file():
        found = read_manifest(folder).get("arguments", {})  # an error for a manifest of others
        if overwrite:
            return False
        differing = [key for key in identity if found.get(key) != identity[key]]
        if not differing:
            for split in SPLITS:
                TokenCorpus.open(folder, split)  # an error where a shard is gone or cut short
            return True
        changes = "; ".join(
            f"{key} was {json.dumps(found.get(key))}, now {json.dumps(identity[key])}"
            for key in differing
        )
        raise UserError(
            f"--out {folder}: holds data made otherwise ({changes}); "
            "choose another folder or give --overwrite"
        )
    foreign = [file.name for file in folder.iterdir() if file.name != LOCK]
    if foreign and not (folder / MARKER).is_file():
        raise UserError(
            f"--out {folder}: is not empty ({sorted(foreign)[0]!r} is in it) and was not made by "
            "this command; choose another folder"
        )
    return False


def begin(folder: Path, identity: dict) -> None:
    """Marks the folder as unfinished and removes what an earlier preparation left in it.

    The marker stands before the first file goes and until the last one has come, so that a kill at
    any moment leaves either a complete folder or one that the next run may clean up.
    """
    write_json(folder / MARKER, identity)
    (folder / MANIFEST).unlink(missing_ok=True)
    _remove_data(folder)


def abandon(folder: Path) -> None:
    """Removes what a preparation that failed has made so far: it may be what filled the disk."""
    if (folder / MARKER).is_file() and not (folder / MANIFEST).is_file():
        _remove_data(folder)
        (folder / MARKER).unlink()


def _remove_data(folder: Path) -> None:
    for pattern in (
        ".*.tmp",
        *(f"{split}-*.{kind}" for split in SPLITS for kind in ("bin", "idx")),
    ):
        for file in folder.glob(pattern):
            file.unlink()
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)


@contextmanager
def scratch_folder(folder: Path, scratch: Path | None) -> Iterator[Path]:
    """Where shards grow: `folder` itself, or a folder of its own inside `scratch`.

    Its name depends on `folder` alone, so that the next run finds what a kill has left in it.
    """
    if scratch is None:
        yield folder
        return
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    own = scratch / f"cat-lm-prepare-{name}"
    shutil.rmtree(own, ignore_errors=True)
    try:
        own.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--scratch {scratch}: cannot be written ({error.strerror})") from None
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def finish(folder: Path, manifest: dict) -> None:
    """Writes the manifest, which makes the folder complete."""
    write_json(folder / MANIFEST, manifest)
    (folder / MARKER).unlink()
