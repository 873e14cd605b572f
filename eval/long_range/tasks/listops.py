"""ListOps: the value of nested operations on digits (Nangia and Bowman, 2018; LRA, 2020).

Trees have the Long Range Arena's distribution: a node is an operator with probability ¼ where its
depth allows one, else a digit; operators and their 2 to 10 arguments are uniform; a tree is kept
if its tokens without parentheses are more than 500 and fewer than 2,000. The rows are others than
LRA's own, whose order cannot be made again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cat_lm.core.errors import UserError
from eval.long_range.tasks.base import Examples, Place
from eval.long_range.tasks.generated import GeneratedTask
from eval.long_range.tasks.listops_files import FILES, LAYOUT, read_rows
from eval.long_range.tasks.official import Files, find
from eval.long_range.tasks.rows import Sequences, save_sequences
from eval.long_range.tasks.store import Work, in_parts, stored

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
# S4's text: the closing bracket is X, parentheses are left out, and a row ends with <eos>.
TOKENS = ("<pad>", "<eos>", *"0123456789", *OPERATORS, "X")
_IDS = {token: place for place, token in enumerate(TOKENS)}
_FIRST_OPERATOR, _CLOSE = _IDS[OPERATORS[0]], _IDS["X"]
_OPERATOR_SHARE = 0.25
_BLOCK = 500  # rows that one seed makes
_TRIES = 5_000_000  # trees in a row that do not fit before a task counts as impossible


@dataclass(frozen=True)
class ListOps(GeneratedTask):
    """Ten classes: the value of the outermost operation.

    Attributes:
        min_length, max_length: a row has more tokens than the one and fewer than the other,
            brackets among them, <eos> not.
        max_depth: depth at which all nodes are digits; the root's is 1.
        max_args: most arguments of an operator.
    """

    name: ClassVar[str] = "listops"
    official: ClassVar[dict[str, int]] = {"train": 96_000, "validation": 2_000, "test": 2_000}
    min_length: int = 500
    max_length: int = 2_000
    max_depth: int = 10
    max_args: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if self.longest() <= self.min_length:
            raise ValueError(
                f"min_length={self.min_length}: no tree of max_depth={self.max_depth} and "
                f"max_args={self.max_args} has more than {self.longest():,} tokens"
            )

    def longest(self) -> int:
        """Count the tokens of the largest tree."""
        tokens = 1
        for _ in range(self.max_depth - 1):
            tokens = 2 + self.max_args * tokens
        return tokens

    @property
    def length(self) -> int:
        return self.max_length  # fewer tokens than that, and <eos>

    @property
    def vocabulary(self) -> int:
        return len(TOKENS)

    @property
    def classes(self) -> int:
        return 10

    def load(self, split: str, place: Place | None = None) -> Examples:
        place = place or Place()
        if self.source == "official":
            files = find(place.folder, LAYOUT, FILES)
            key = {"source": self.source, "version": self.version, **files.key()}
            kept = stored(place, self.name, key, lambda work: self._read(work, files))
        else:
            key = {**self.generator(), "rows": self.rows}
            kept = stored(place, self.name, key, self._generate)
        return Sequences(kept, split, self.length)

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        return decode(inputs)

    def _read(self, work: Work, files: Files) -> dict[str, Any]:
        for split, path in files.paths.items():
            rows = list(read_rows(path, encode, answer, self.length))
            save_sequences(work, split, [ids for _, ids in rows], [label for label, _ in rows])
        return files.origin()

    def _generate(self, work: Work) -> dict[str, Any]:
        rows = self._unique(work)
        for split, count in self.rows.items():
            chosen = [next(rows) for _ in range(count)]
            save_sequences(work, split, [row[1:] for row in chosen], [row[0] for row in chosen])
        return self.generator()

    def _unique(self, work: Work) -> Iterator[bytes]:
        """Yield different rows without end: the answer, then a byte for each id less one."""
        seen: set[bytes] = set()
        total, first = sum(self.rows.values()), 0
        while True:
            blocks = range(first, first + max(1, -(-(total - len(seen)) // _BLOCK)))
            pieces = {f"{block:06}": (self, block) for block in blocks}
            before = len(seen)
            for piece in in_parts(work, _block, pieces, f"{self.name}: blocks of {_BLOCK} rows"):
                for row in _split(piece):
                    if row not in seen:
                        seen.add(row)
                        yield row
            if len(seen) == before:
                raise UserError(
                    f"task {self.name}: {total:,} different rows were asked for, and there seem "
                    f"to be {len(seen):,}; give fewer, or larger trees"
                )
            first = blocks.stop


def _block(task: tuple[ListOps, int]) -> np.ndarray:
    """Make the rows of one seed: each its length in two bytes, its answer, its ids less one."""
    options, block = task
    rng = random.Random(f"{options.generator()} {block}")
    parts = []
    for _ in range(_BLOCK):
        answer, ids = _row(options, rng)
        parts += [len(ids).to_bytes(4, "little"), bytes([answer]), bytes(i - 1 for i in ids)]
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _split(piece: np.ndarray) -> Iterator[bytes]:
    data, place = piece.tobytes(), 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "little")
        yield data[place + 4 : place + 5 + length]
        place += 5 + length


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


def answer(ids: bytes) -> int | None:
    """Compute what the operations of a row, a byte for each id less one, give; None if it is no
    whole tree.
    """
    *tree, _ = ids
    open_nodes: list[list[Any]] = [[]]
    for place in tree:
        token = TOKENS[place + 1]
        if token in OPERATORS:
            open_nodes.append([token])
        elif token.isdigit():
            open_nodes[-1].append(int(token))
        elif token != "X" or len(open_nodes) == 1 or len(open_nodes[-1]) == 1:
            return None
        else:
            operator, *values = open_nodes.pop()
            open_nodes[-1].append(_apply(operator, values))
    return open_nodes[0][0] if len(open_nodes) == 1 == len(open_nodes[0]) else None


def encode(source: str) -> bytes:
    """Read a row of LRA's files: a byte for each id less one. Raises KeyError at other tokens."""
    text = source.replace("(", " ").replace(")", " ").replace("]", "X")
    return bytes(_IDS[token] - 1 for token in [*text.split(), "<eos>"])


def decode(ids: Any) -> str:
    """Write ids as tokens with spaces between, without padding."""
    return " ".join(TOKENS[i] for i in ids if i)
