"""The options of the commands; imports nothing heavy."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from typing import Annotated

from cat_lm.core import numbers
from cat_lm.core.cli import comma_separated, path_name
from cat_lm.core.errors import UserError
from eval.common.options import Option

# Ways to choose blocks, see `eval.landmark.choosers`; in the order of tables and colours.
SELECTORS = ("oracle", "ssm", "learned", "box", "exponential", "local", "random")
LEARNED = ("ssm", "learned")  # These selectors are trained after the model, on data.
STATE = 16  # default state size of `ssm`
TOKENS = 1_000_000  # default number of tokens to learn from


@dataclass(frozen=True)
class Selection:
    """Choose how a layer selects blocks: the selector, the block size and the number of blocks."""

    select: str
    block: int
    top_k: int
    local: int


def selector(text: str) -> str:
    """Check the name of a selector, for argparse."""
    if text not in SELECTORS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(SELECTORS)}")
    return text


def _list(what: str, example: str) -> Option:
    return Option(what, numbers.CONTEXT, metavar="LIST", example=example)


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The candidate blocks, and how many are selected."""

    blocks: Annotated[tuple[int, ...], _list("tokens of a block", "16,32")] = (16, 32, 64)
    top_k: Annotated[tuple[int, ...], _list("blocks chosen", "2,4")] = (1, 2, 4, 8)
    local: Annotated[
        int,
        Option("blocks near the query that it always reads", numbers.CONTEXT, metavar="N"),
    ] = 2

    def check(self, length: int, where: str) -> None:
        """Raise UserError if a row of this number of tokens has no block to select."""
        largest, most = max(self.blocks), length // (self.local + 1)
        if largest > most:
            raise UserError(
                f"--blocks {largest}: with --local {self.local} there is no block to choose "
                f"{where}; give blocks of at most {most}"
            )


@dataclass(frozen=True, kw_only=True)
class Grid(_Choice):
    """The cells of a sweep, in addition to dense attention, and how they are scored."""

    lengths: Annotated[tuple[int, ...], _list("tokens that models read", "256,512")]
    select: Annotated[
        tuple[str, ...],
        Option(
            f"selectors to compare, from {', '.join(SELECTORS)}",
            metavar="LIST",
            kind=comma_separated(selector, "box,local"),
        ),
    ] = tuple(name for name in SELECTORS if name not in LEARNED)
    calibrate: Annotated[
        str | None,
        Option("prepared data to train selectors on", metavar="DATA", kind=path_name),
    ] = None
    tokens: Annotated[
        int | None,
        Option(
            f"tokens to train selectors on (default: {TOKENS:,})",
            numbers.TOKENS.at_least(1),
            metavar="N",
        ),
    ] = None
    state: Annotated[
        int | None,
        Option(
            f"state size per channel of --select ssm (default: {STATE})",
            numbers.CONV_STATE.at_least(1),
            metavar="N",
        ),
    ] = None
    max_tokens: Annotated[
        int | None, Option("score at most N tokens", numbers.SCORED_TOKENS, metavar="N")
    ] = None
    batch_tokens: Annotated[
        int, Option("tokens per forward pass", numbers.BATCH_TOKENS, metavar="N")
    ] = 8192

    @property
    def choices(self) -> list[Selection]:
        """Return all combinations of selector, block size and number of blocks."""
        chosen = itertools.product(dict.fromkeys(self.select), self.blocks, self.top_k)
        return [Selection(*choice, self.local) for choice in chosen]


@dataclass(frozen=True, kw_only=True)
class Questions(_Choice):
    """The options of a diagnosis: number and length of windows, and queries in each."""

    length: Annotated[
        int, Option("tokens per window that the model reads", numbers.CONTEXT, metavar="N")
    ]
    windows: Annotated[
        int, Option("number of windows of the text", numbers.Range(1, 10**6), metavar="N")
    ] = 8
    queries: Annotated[
        int, Option("number of queries of each window", numbers.CONTEXT, metavar="N")
    ] = 64
    blocks: Annotated[tuple[int, ...], _list("numbers of tokens per block", "8,16")] = (
        8,
        16,
        32,
        64,
    )
    top_k: Annotated[tuple[int, ...], _list("numbers of selected blocks", "1,2")] = (1, 2, 4, 8, 16)
    wanted: Annotated[
        float,
        Option(
            "fraction of the attention mass of dense attention", numbers.FRACTION, metavar="SHARE"
        ),
    ] = 0.9
