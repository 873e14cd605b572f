"""Windows of whole documents: fewer are cut at a window's edge, and none is joined to half another.

`cat_lm.data.best_fit` says which documents go together, for `GROUP` consecutive ones at a time, so
that memory does not grow with the corpus. What comes out depends on the data and the context length
only. It is computed once and kept in `DATA/packing/` (or in the cache, where the data cannot be
written to), 12 bytes a piece and 8 bytes a window; reading any window costs the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.files import checksums, sync_directory, write_json
from cat_lm.core.folders import (
    empty_temporary,
    hold_patiently,
    left_beside,
    make_temporary,
    maker_is_gone,
    own_name,
    remove_temporary,
)
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.core.readers import Record, read_json
from cat_lm.data.best_fit import CUT, FIRST, PIECE, pack
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.manifest import SPLITS, Count, Digest
from cat_lm.data.shards import Shard
from cat_lm.data.storage import cache_folder
from cat_lm.data.verified import NOTE, Listed, Notes, changed_files, verify
from cat_lm.data.windows import Batch, check_batch

PACKING = "packing"  # the folder, beside the shards or in the cache
VERSION = 2
FILES = ("windows.bin", "pieces.bin")
GROUP = 100_000


class Plan(Record):
    """The content of `plan.json`: the plan's data and settings, its size and its files' SHA-256."""

    version: Literal[VERSION]
    fingerprint: Digest
    split: Literal[SPLITS]
    context_length: Count
    group: Count
    windows: Count
    pieces: Count
    cut_documents: Count
    sha256: dict[Literal[FILES], Digest]


class PackedWindows:
    """Whole documents in windows of `context_length`; see the module's text.

    Every token of every document is an input in exactly one window of an epoch. Labels never join
    two documents that merely lie side by side, but for the first token of a whole document after
    the EOD of another, which is a label (unless documents are masked) as it is in a stream. A
    window is padded at its end with EOD; padding is never a label, and is a document of its own.
    """

    def __init__(
        self, corpus: TokenCorpus, context_length: int, cache_dir: Path | str | None = None
    ) -> None:
        self.corpus = corpus
        self.context_length = context_length
        folder = plan_folder(corpus, context_length, cache_dir)
        self._folder = folder
        plan = read_json(folder / "plan.json", Plan)
        self.num_windows = plan.windows
        if self.num_windows < 1:
            raise UserError(f"{corpus.name}: the {corpus.split} split has no tokens")
        self._num_cut = plan.cut_documents
        # Of each window, the end of its pieces.
        self._ends = np.memmap(folder / "windows.bin", dtype="<i8", mode="r")
        self._pieces = np.memmap(folder / "pieces.bin", dtype=PIECE, mode="r")

    def describe(self) -> list[str]:
        slots = self.num_windows * self.context_length
        return [
            f"{self.corpus.name}: best-fit packing, {self.num_windows:,} windows with "
            f"{1 - self.corpus.num_tokens / slots:.2%} padding; {self._num_cut:,} of "
            f"{self.corpus.num_documents:,} documents are longer than a window and cut"
        ]

    def read(self, numbers: np.ndarray, mask_documents: bool) -> Batch:
        """The windows as `input_ids`, `labels` and, if asked for, `document_ids`; int64 [B, T]."""
        rows, starts, lengths, flags = self._pieces_of(numbers)
        # Of a cut document the next token is read too: it is the last label.
        stops = starts + lengths + (flags & CUT > 0)
        views = self.corpus.gather(starts, stops)
        shape = (len(numbers), self.context_length)
        input_ids = np.full(shape, self.corpus.eod_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        document_ids = np.zeros(shape, dtype=np.int64) if mask_documents else None
        row, column, number = -1, 0, 0
        for place, length, flag, tokens in zip(
            rows.tolist(), lengths.tolist(), flags.tolist(), views, strict=True
        ):
            column, number = (column, number + 1) if place == row else (0, 0)
            row, end = place, column + length
            input_ids[row, column:end] = tokens[:length]
            labels[row, column : column + len(tokens) - 1] = tokens[1:]
            if document_ids is not None:
                document_ids[row, column:end] = number
                document_ids[row, end:] = number + 1
            elif column and flag & FIRST:
                labels[row, column - 1] = tokens[0]
            column = end
        batch = {"input_ids": input_ids, "labels": labels}
        check_batch(self.corpus, batch, starts, stops)
        return batch if document_ids is None else {**batch, "document_ids": document_ids}

    def _pieces_of(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the row, start, length and flags of all pieces in these windows."""
        numbers = np.asarray(numbers)
        ends = np.asarray(self._ends[numbers])
        first = np.where(numbers > 0, self._ends[numbers - 1], 0)
        counts = ends - first
        if (counts < 1).any() or (ends > len(self._pieces)).any():
            raise self._damaged()
        rows = np.repeat(np.arange(len(numbers)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        pieces = self._pieces[np.repeat(first, counts) + within]
        starts = pieces["start"].astype(np.int64)
        lengths, flags = (pieces["packed"] >> 2).astype(np.int64), pieces["packed"] & 3
        filled = np.bincount(rows, weights=lengths)
        ends = starts + lengths
        if (filled > self.context_length).any() or (lengths < 1).any() or (starts < 0).any():
            raise self._damaged()
        if (ends > self.corpus.num_tokens).any():
            raise self._damaged()
        return rows, starts, lengths, flags

    def _damaged(self) -> UserError:
        return UserError(f"{self._folder}: the packing plan is damaged; delete this folder")


def plan_folder(
    corpus: TokenCorpus,
    context_length: int,
    cache_dir: Path | str | None = None,
    progress: Callable[[str], object] = lambda what: None,
) -> Path:
    """Return the folder of the plan, made first where there is none yet.

    Ranks of a node, and of all nodes where the file system has locks, wait for the one that makes
    it; without locks each makes its own, and the first one stays.

    Args:
        progress: told of what was done, time and again where a plan is made.
    """
    cache_dir = cache_folder(cache_dir)
    name = _plan_name(corpus.split, context_length, corpus.fingerprint)

    def is_whole(folder: Path) -> bool:
        return _is_whole(folder, identity, cache_dir, progress)

    identity = {
        "version": VERSION,
        "fingerprint": corpus.fingerprint,
        "split": corpus.split,
        "context_length": context_length,
        "group": GROUP,
    }
    places = [corpus.folder / PACKING / name, cache_dir / PACKING / name]
    for place in places:
        if is_whole(place):
            return place
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            # Where there are no locks, each process makes the same plan, and the first one stays.
            lock = hold_patiently(
                place.parent / f".{name}.lock",
                progress,
                "waiting for a packing plan that another process makes",
            )
        except OSError:
            if place is places[-1]:
                raise
            continue  # the data are on a disk that this user may only read
        with lock:
            if not is_whole(place):
                _make(place, corpus, identity, cache_dir, progress)
        return place
    raise AssertionError


def _is_whole(
    folder: Path, identity: dict, cache_dir: Path, progress: Callable[[str], object]
) -> bool:
    """Return True if the folder holds a plan whose files have the recorded SHA-256.

    Raises:
        UserError: it is damaged, or of something else; temporary where it cannot be read now.
    """
    if not folder.is_dir():
        return False
    try:
        plan = read_json(folder / "plan.json", Plan)
        sizes = {name: (folder / name).stat().st_size for name in FILES}
        expected = {"windows.bin": 8 * plan.windows, "pieces.bin": PIECE.itemsize * plan.pieces}
        whole = (
            sizes == expected
            and {key: getattr(plan, key) for key in identity} == identity
            and plan.sha256.keys() == sizes.keys()
            and not changed_files(folder, plan.sha256, cache_dir, progress)
        )
    except (OSError, UserError) as error:
        if is_temporary(error):  # nobody is to delete it for that
            raise
        whole = False
    if whole:
        return True
    raise UserError(f"{folder}: the packing plan is damaged; delete this folder")


def _make(
    folder: Path,
    corpus: TokenCorpus,
    identity: dict,
    cache_dir: Path,
    progress: Callable[[str], object],
) -> None:
    for left in left_beside(folder, "tmp"):
        if maker_is_gone(left):
            with suppress(UserError):  # Another process that starts now may be removing it, too.
                remove_temporary(left)
    temporary = own_name(folder, "tmp")
    make_temporary(temporary)
    try:
        empty_temporary(temporary)  # what a process of this number left that was killed
        corpus.fetch(progress)
        # A plan is kept: it must not come of a damaged index.
        verify([corpus], cache_dir, (".idx",), progress)
        made = temporary / folder.name
        made.mkdir()
        totals = _write_plan(made, corpus, identity["context_length"], progress)
        paths = [made / name for name in FILES]
        digests = checksums(paths, "sha256", lambda path: progress(f"the SHA-256 of {path}"))
        Notes(made).add([Listed(*item).stamp() for item in digests.items()])
        sha256 = {path.name: digest for path, digest in digests.items()}
        write_json(made / "plan.json", {**identity, **totals, "sha256": sha256})
        try:
            os.rename(made, folder)
        except OSError:
            if not _is_whole(folder, identity, cache_dir, progress):
                raise
        sync_directory(folder.parent)
    finally:
        remove_temporary(temporary)


def plan_files(data: Path) -> list[str]:
    """List what this module has put into a prepared folder, by each plan's own record."""
    found = []
    for record in sorted((data / PACKING).glob("*/plan.json")):
        folder = record.parent
        try:
            plan = read_json(record, Plan)
        except (OSError, UserError):
            continue
        name = _plan_name(plan.split, plan.context_length, plan.fingerprint)
        if folder.name != name:
            continue
        place = f"{PACKING}/{folder.name}"
        found += [f"{place}/{name}" for name in ("plan.json", *FILES, NOTE)]
        found.append(f"{PACKING}/.{folder.name}.lock")
    return found


def _plan_name(split: str, context_length: int, fingerprint: str) -> str:
    return f"{split}-{context_length}-v{VERSION}-{fingerprint[:16]}"


def _write_plan(
    folder: Path, corpus: TokenCorpus, context_length: int, progress: Callable[[str], object]
) -> dict[str, int]:
    from tqdm import tqdm

    windows = pieces = cut = 0
    bar = tqdm(
        total=corpus.num_documents, unit="doc", unit_scale=True, desc="packing", file=sys.stderr
    )
    with (
        open(folder / "windows.bin", "wb") as ends_file,
        open(folder / "pieces.bin", "wb") as pieces_file,
        bar,
    ):
        for starts, lengths in _groups(corpus):
            group, counts = pack(starts, lengths, context_length)
            ends_file.write((pieces + np.cumsum(counts)).astype("<i8").tobytes())
            pieces_file.write(group.tobytes())
            windows += len(counts)
            pieces += len(group)
            cut += int((lengths > context_length).sum())
            bar.update(len(lengths))
            progress(f"packing {bar.n:,} documents")
        for file in (ends_file, pieces_file):
            file.flush()
            os.fsync(file.fileno())
    return {"windows": windows, "pieces": pieces, "cut_documents": cut}


def _groups(corpus: TokenCorpus) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield starts in the stream and lengths of the documents, `GROUP` of a shard at a time."""
    base = 0
    for shard in corpus.shards:
        for first in range(0, shard.num_documents, GROUP):
            starts, stops = _documents(shard, first, min(first + GROUP, shard.num_documents))
            yield base + starts, stops - starts
        shard.forget_index()  # thousands of open files would be more than some systems allow
        base += shard.num_tokens


def _documents(shard: Shard, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Find where documents [first, stop) of a shard start and end, in its tokens."""
    marks = np.asarray(shard.document_marks[first : stop + 1])
    last = marks[1:] - 1
    size = shard.dtype.itemsize
    starts = np.asarray(shard.pointers[marks[:-1]]) // size
    stops = np.asarray(shard.pointers[last]) // size + np.asarray(shard.lengths[last])
    return starts, stops
