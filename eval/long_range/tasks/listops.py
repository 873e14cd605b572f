"""ListOps: the value of nested operations on digits (Nangia and Bowman, 2018; LRA, 2020).

Trees have the Long Range Arena's distribution: a node is an operator with probability ¼ where its
depth allows one, else a digit; operators and their 2 to 10 arguments are uniform; a tree is kept
if its tokens without parentheses are more than 500 and fewer than 2,000. The rows are others than
LRA's own, whose order cannot be made again: those are read from LRA's files.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from cat_lm.core.errors import UserError
from cat_lm.core.fields import changed_options
from cat_lm.core.readers import clipped, read_text
from cat_lm.mixers.parts.base import check_choice
from data_prep.common.workers import run_tasks
from eval.long_range.tasks.base import SPLITS, GeneratedTask, Place
from eval.long_range.tasks.sources import LRA, MAX_FILE_BYTES, Source
from eval.long_range.tasks.store import Made, StoredTask

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
# S4's text: the closing bracket is X, parentheses are left out, and a row ends with <eos>.
TOKENS = ("<pad>", "<eos>", *"0123456789", *OPERATORS, "X")
_IDS = {token: place for place, token in enumerate(TOKENS)}
_FIRST_OPERATOR, _CLOSE = _IDS[OPERATORS[0]], _IDS["X"]
_OPERATOR_SHARE = 0.25
_BLOCK = 500  # rows that one seed makes
_TRIES = 5_000_000  # trees in a row that do not fit before a task counts as impossible
_SOURCE = Source(
    "listops",
    ("listops-1000", "lra_release/listops-1000", "listops", ""),
    {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"},
    LRA,
)


@dataclass(frozen=True)
class ListOps(GeneratedTask, StoredTask):
    """Ten classes: the value of the outermost operation.

    Test rows are made first, then those of validation, then of training: another number of
    training rows changes no other split.

    Attributes:
        source: generated; or official, files in `Place.folder`.
        min_length, max_length: a row has more tokens than the one and fewer than the other,
            brackets among them, <eos> not.
        max_depth: depth at which all nodes are digits; the root's is 1.
        max_args: most arguments of an operator.
    """

    name: ClassVar[str] = "listops"
    vocabulary: ClassVar[int] = len(TOKENS)
    classes: ClassVar[int] = 10
    official: ClassVar[dict[str, int]] = {"train": 96_000, "validation": 2_000, "test": 2_000}
    source: str = "generated"
    min_length: int = 500
    max_length: int = 2_000
    max_depth: int = 10
    max_args: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "source", ("generated", "official"))
        changed = [name for name in changed_options(self) if name != "source"]
        if self.source == "official" and changed:
            raise ValueError(f"{', '.join(changed)}: of the generator, without effect on files")
        if not 0 <= self.min_length <= self.max_length - 2:
            raise ValueError(
                f"min_length={self.min_length}, max_length={self.max_length}: must leave a length "
                "between them"
            )
        if not 1 <= self.max_depth <= 30 or not 2 <= self.max_args <= 1_000:
            raise ValueError(
                f"max_depth={self.max_depth}, max_args={self.max_args}: must be from 1 to 30, and "
                "from 2 to 1,000"
            )
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_args * longest
        if longest <= self.min_length:
            raise ValueError(
                f"min_length={self.min_length}: no tree of max_depth={self.max_depth} and "
                f"max_args={self.max_args} has more than {longest:,} tokens"
            )

    @property
    def length(self) -> int:
        return self.max_length  # A row has fewer tokens, and <eos>.

    @property
    def reads_files(self) -> bool:
        return self.source == "official"

    @property
    def generator(self) -> dict[str, Any]:
        """Return all that decides a generated row, without how many there are."""
        options = asdict(self)
        kept = {name: options[name] for name in options if name not in (*SPLITS, "source")}
        return {"generator": self.name, "version": self.version, **kept}

    def key(self, place: Place) -> dict[str, Any]:
        if self.source == "official":
            return {"source": self.source, **_SOURCE.key(place.folder)}
        return {**self.generator, "rows": [getattr(self, split) for split in SPLITS]}

    def make(self, place: Place) -> Made:
        if self.source == "official":
            splits = {split: _read(path) for split, path in _SOURCE.find(place.folder).items()}
            origin = _SOURCE.origin(place.folder)
        else:
            rows, origin = self._unique(place.workers), self.generator
            splits = {
                split: list(itertools.islice(rows, getattr(self, split)))
                for split in reversed(SPLITS)
            }
        return {
            s: ([r[1:] for r in rows], [r[0] for r in rows]) for s, rows in splits.items()
        }, origin

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        return " ".join(TOKENS[i] for i in inputs if i)

    def _unique(self, workers: int) -> Iterator[bytes]:
        """Yield different rows without end, as `make_block` does."""
        seen: set[bytes] = set()
        total, first = self.train + self.validation + self.test, 0
        while True:
            count, before = max(1, -(-(total - len(seen)) // _BLOCK)), len(seen)
            tasks = [(self, block) for block in range(first, first + count)]
            made = run_tasks(_numbered_block, tasks, min(workers, count), lambda done: None)
            what = f"{self.name}: blocks of {_BLOCK} rows"
            blocks = dict(tqdm(made, desc=what, total=count, disable=None))
            for row in itertools.chain.from_iterable(map(blocks.get, sorted(blocks))):
                if row not in seen:
                    seen.add(row)
                    yield row
            if len(seen) == before:
                raise UserError(
                    f"task {self.name}: {total:,} different rows were asked for, and there seem "
                    f"to be {len(seen):,}; give fewer, or larger trees"
                )
            first += count


def _numbered_block(
    task: tuple[ListOps, int], report: Callable[[int], None]
) -> tuple[int, list[bytes]]:
    options, block = task
    return block, make_block(options, block)


def make_block(options: ListOps, block: int) -> list[bytes]:
    """Make the rows of one seed: each its answer, then a byte for each id less one."""
    rng = random.Random(f"{options.generator} {block}")
    rows = (_row(options, rng) for _ in range(_BLOCK))
    return [bytes([answer, *(i - 1 for i in ids)]) for answer, ids in rows]


def _row(options: ListOps, rng: random.Random) -> tuple[int, list[int]]:
    """Draw trees until one fits; give its answer and its ids with <eos>."""
    for _ in range(_TRIES):
        ids: list[int] = []
        answer = _grow(ids, 1, options, rng.random)
        if answer is not None and len(ids) > options.min_length:
            return answer, [*ids, _IDS["<eos>"]]
    raise UserError(
        f"task {options.name}: of {_TRIES:,} trees none had more than {options.min_length:,} and "
        f"fewer than {options.max_length:,} tokens; give other lengths, or larger trees"
    )


def _grow(ids: list[int], depth: int, options: ListOps, draw: Any) -> int | None:
    """Append a node's ids and give its value; None as soon as the tree is too long."""
    if depth >= options.max_depth or draw() > _OPERATOR_SHARE:
        digit = int(draw() * 10)
        ids.append(digit + 2)
        return digit if len(ids) < options.max_length else None
    operator = int(draw() * len(OPERATORS))
    ids.append(_FIRST_OPERATOR + operator)
    values = []
    for _ in range(2 + int(draw() * (options.max_args - 1))):
        value = _grow(ids, depth + 1, options, draw)
        if value is None:
            return None
        values.append(value)
    ids.append(_CLOSE)
    return _apply(OPERATORS[operator], values) if len(ids) < options.max_length else None


def _apply(operator: str, values: list[int]) -> int:
    """Apply an operator. The median of an even number is the mean of the two, rounded down."""
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2


def _read(path: Path) -> list[bytes]:
    """Read a file of LRA's, of columns Source and Target. Raises UserError for others."""
    header, *lines = read_text(path, limit=MAX_FILE_BYTES).splitlines() or [""]
    if header.split("\t") != ["Source", "Target"] or not lines:
        what = f"has {len(lines):,} rows below {clipped(header)!r}"
        _SOURCE.refuse(path, f"{what}, must have some below the columns Source and Target")
    return [_encoded(line, f"{path}, line {number}") for number, line in enumerate(lines, 2)]


def _encoded(line: str, where: str) -> bytes:
    source, _, target = line.rpartition("\t")
    if not source or not re.fullmatch("[0-9]", target):
        _SOURCE.refuse(where, "is truncated or another file: must be a row and its digit")
    tokens = source.replace("(", " ").replace(")", " ").replace("]", "X").split()
    if unknown := [token for token in tokens if token not in TOKENS[2:]]:
        _SOURCE.refuse(where, f"has the token {clipped(unknown[0])!r}")
    if sum(token in OPERATORS for token in tokens) != tokens.count("X"):
        _SOURCE.refuse(where, "is no whole tree: its brackets do not match")
    if len(tokens) >= ListOps.max_length:
        _SOURCE.refuse(where, f"has {len(tokens):,} tokens, must have fewer than 2,000")
    return bytes([int(target), *(_IDS[token] - 1 for token in (*tokens, "<eos>"))])
