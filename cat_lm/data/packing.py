"""Windows of whole documents, of which only those longer than a window are cut.

Documents longer than a window are cut into full windows and a rest. Rests and shorter documents are
packed by best-fit decreasing: the longest first, each into the fullest window with space for it.
`GROUP` consecutive documents are packed at a time, so that memory does not grow with the corpus.
The packing plan depends on the data and the context length only. It is computed once and stored in
`DATA/packing/` (or in the cache, if the data folder is read-only), with 12 bytes per piece and 8
bytes per window. Reading any window costs the same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.files import checksums, write_json
from cat_lm.core.folders import atomic_folder, wait_for_lock
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.core.readers import Record, read_json
from cat_lm.data.best_fit import CUT, FIRST, PIECE, pack
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.manifest import SPLITS, Count, Digest
from cat_lm.data.verified import NOTE, cache_folder, changed_files, note_files, verify

PACKING = "packing"  # the folder of plans, beside the shards or in the cache
VERSION = 2
FILES = ("windows.bin", "pieces.bin")
PLAN_FILES = ("plan.json", *FILES, NOTE)
GROUP = 100_000

Progress = Callable[[str], object]


class Plan(Record):
    """The schema of `plan.json`: data, settings, size and checksums of a packing plan."""

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
    """Whole documents packed into windows of `context_length` tokens, as the module describes.

    Every token of every document is an input in exactly one window of an epoch. As in a stream, and
    unless documents are masked, the first token of a whole document is the label of the EOD before
    it; no other label is a token of another document. A window is padded at its end with EOD.
    Padding is never a label, and has a document id of its own.
    """

    def __init__(
        self, corpus: TokenCorpus, context_length: int, cache_dir: Path | str | None = None
    ) -> None:
        self.corpus = corpus
        self.context_length = context_length
        folder = plan_folder(corpus, context_length, cache_dir)
        plan = read_json(folder / "plan.json", Plan)
        self.num_windows = plan.windows
        if self.num_windows < 1:
            raise UserError(f"{corpus.name}: the {corpus.split} split has no tokens")
        self._num_cut = plan.cut_documents
        # For each window, the end of its range of pieces.
        self._ends = np.memmap(folder / "windows.bin", dtype="<i8", mode="r")
        self._pieces = np.memmap(folder / "pieces.bin", dtype=PIECE, mode="r")

    def describe(self) -> list[str]:
        slots = self.num_windows * self.context_length
        return [
            f"{self.corpus.name}: best-fit packing, {self.num_windows:,} windows with "
            f"{1 - self.corpus.num_tokens / slots:.2%} padding; {self._num_cut:,} of "
            f"{self.corpus.num_documents:,} documents are longer than a window and cut"
        ]

    def read(self, numbers: np.ndarray, mask_documents: bool) -> dict[str, np.ndarray]:
        groups = [self._pieces[self._ends[n - 1] if n else 0 : self._ends[n]] for n in numbers]
        pieces, rows = (
            np.concatenate(groups),
            np.repeat(np.arange(len(groups)), [*map(len, groups)]),
        )
        starts, lengths = pieces["start"].astype(np.int64), (pieces["packed"] >> 2).astype(np.int64)
        flags = pieces["packed"] & 3
        # For a cut document, read one more token, which is the last label.
        views = self.corpus.gather(starts, starts + lengths + (flags & CUT > 0))
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
        return batch if document_ids is None else {**batch, "document_ids": document_ids}


def plan_folder(
    corpus: TokenCorpus,
    context_length: int,
    cache_dir: Path | str | None = None,
    progress: Progress = lambda what: None,
) -> Path:
    """Return the folder of the plan, made first where there is none yet.

    Ranks of a node, and of all nodes where the file system has locks, wait for the one that makes
    it; without locks each makes the same one. `progress` is told of what was done, time and again.
    Raises UserError for a plan that is damaged, or of something else, or cannot be made.
    """
    identity = {
        "version": VERSION,
        "fingerprint": corpus.fingerprint,
        "split": corpus.split,
        "context_length": context_length,
        "group": GROUP,
    }
    name = f"{corpus.split}-{context_length}-v{VERSION}-{corpus.fingerprint[:16]}"
    places = [corpus.folder / PACKING / name, cache_folder(cache_dir) / PACKING / name]

    def is_made(place: Path) -> bool:
        return place.is_dir() and _check_plan(place, identity, cache_dir, progress)

    if found := next(filter(is_made, places), None):
        return found
    what = "waiting for a packing plan that another process makes"
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            lock = wait_for_lock(place.with_name(f".{name}.lock"), progress, what)
        except OSError:
            if place is places[-1]:
                raise
            continue  # The data folder is read-only for this user.
        with lock:
            if not is_made(place):
                corpus.fetch(progress)
                # Verify first, because a plan of a damaged index would be kept.
                verify([corpus], cache_dir, (".idx",), progress)
                _make_plan(place, corpus, identity, progress)
        return place
    raise AssertionError


def _check_plan(
    folder: Path, identity: dict, cache_dir: Path | str | None, progress: Progress
) -> Literal[True]:
    """Raise UserError unless the folder holds the complete plan; a TemporaryError if unreadable."""
    try:
        plan = read_json(folder / "plan.json", Plan)
        is_it = plan.model_dump(include=set(identity)) == identity and set(plan.sha256) == {*FILES}
        if is_it and not any(changed_files(folder, plan.sha256, cache_dir, progress)):
            return True
    except (OSError, UserError) as error:
        if is_temporary(error):  # It is no damage, and no reason to delete the plan.
            raise
    raise UserError(f"{folder}: the packing plan is damaged; delete this folder")


def _make_plan(folder: Path, corpus: TokenCorpus, identity: dict, progress: Progress) -> None:
    with atomic_folder(folder, lambda _: PLAN_FILES, "packing plan") as made:
        totals = _write_plan(made, corpus, identity["context_length"], progress)
        paths = [made / name for name in FILES]
        sha256 = {path.name: digest for path, digest in checksums(paths, "sha256").items()}
        note_files(made, sha256)
        write_json(made / "plan.json", {**identity, **totals, "sha256": sha256})


def _write_plan(
    folder: Path, corpus: TokenCorpus, context_length: int, progress: Progress
) -> dict[str, int]:
    from tqdm import tqdm

    windows = pieces = cut = 0
    total = corpus.num_documents
    with (
        open(folder / "windows.bin", "wb") as ends_file,
        open(folder / "pieces.bin", "wb") as pieces_file,
        tqdm(total=total, unit="doc", unit_scale=True, desc="packing", file=sys.stderr) as bar,
    ):
        for starts, lengths in _document_groups(corpus):
            group, counts = pack(starts, lengths, context_length)
            ends_file.write((pieces + np.cumsum(counts)).astype("<i8").tobytes())
            pieces_file.write(group.tobytes())
            windows += len(counts)
            pieces += len(group)
            cut += int((lengths > context_length).sum())
            bar.update(len(lengths))
            progress(f"packing {bar.n:,} documents")
    return {"windows": windows, "pieces": pieces, "cut_documents": cut}


def _document_groups(corpus: TokenCorpus) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the starts in the stream and the lengths of `GROUP` documents of a shard at a time."""
    base = 0
    for shard in corpus.shards:
        for first in range(0, shard.num_documents, GROUP):
            starts, stops = shard.documents(first, min(first + GROUP, shard.num_documents))
            yield base + starts, stops - starts
        shard.forget_index()  # Some systems do not allow thousands of open files.
        base += shard.num_tokens


def plan_files(data: Path) -> list[str]:
    """Return the relative paths of packing plans and their locks in a prepared folder."""
    named = re.compile(rf"(?:{'|'.join(SPLITS)})-\d+-v{VERSION}-[0-9a-f]{{16}}")
    found = []
    for folder in sorted((data / PACKING).glob("*/")):
        place = f"{PACKING}/{folder.name}"
        if named.fullmatch(folder.name):
            found += [f"{PACKING}/.{folder.name}.lock", *(f"{place}/{name}" for name in PLAN_FILES)]
    return found
