"""The paper's figures as grids of cells, at three scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cat_lm.errors import UserError
from cat_lm.mixers import make_mixer
from eval.recall.grids.catalog import FIGURES
from eval.recall.train.trial import Cell

# The paper's models, attention with RoPE beside its learned positions, and the negative control.
MODELS = ("cat", "lincat", "attention", "attention:position=rope", "linear-attention", "based")
MODELS += ("mamba",)
NEGATIVE = "none"
# Theorem 4 lets the query see all tokens copied so far and adds positions; with three taps and no
# positions one layer cannot know the order of tokens that noise separates.
COPYING = "cat:window={copies},position=learned"


@dataclass(frozen=True)
class Scale:
    """Fix how large the grids are.

    Attributes:
        widths, lengths, bigram_lengths, copy_lengths: the grid of the accuracy figures.
        rates, length_rates: learning rates; seeds, length_seeds: runs with each.
        trained, tested: lengths of the length figures.
        examples, bigram_examples: training rows of MQAR and copying, and of MQNAR.
        batch_size: none for Zoology's.
        control_len, control_epochs: of the positive control.
        copies, signals: tokens to copy, and different ones to choose from.
        models: mixers, without the negative control.
    """

    vocab_size: int
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    bigram_lengths: tuple[int, ...]
    copy_lengths: tuple[int, ...]
    rates: tuple[float, ...]
    length_rates: tuple[float, ...]
    seeds: int
    length_seeds: int
    trained: int
    tested: tuple[int, ...]
    examples: int
    bigram_examples: int
    epochs: int
    batch_size: int | None
    control_len: int
    control_epochs: int
    copies: int = 16
    signals: int = 16
    models: tuple[str, ...] = MODELS


SCALES = {
    "smoke": Scale(
        vocab_size=64,
        widths=(16,),
        lengths=(16, 32),
        bigram_lengths=(24,),
        copy_lengths=(16,),
        rates=(1e-2,),
        length_rates=(1e-2,),
        seeds=1,
        length_seeds=1,
        trained=16,
        tested=(16, 32),
        examples=1280,
        bigram_examples=1280,
        epochs=2,
        batch_size=64,
        control_len=32,
        control_epochs=2,
        copies=4,
        signals=4,
    ),
    # Small enough for two cores, and long enough that two layers of attention find the answer.
    "cpu": Scale(
        vocab_size=128,
        widths=(64,),
        lengths=(16, 32),
        bigram_lengths=(16, 32),
        copy_lengths=(16, 32),
        rates=(3e-3, 1e-2),
        length_rates=(3e-3, 1e-2),
        seeds=3,
        length_seeds=3,
        trained=32,
        tested=(16, 32, 64, 128),
        examples=16_000,
        bigram_examples=16_000,
        epochs=12,
        batch_size=64,
        control_len=32,
        control_epochs=16,
        copies=4,
        signals=8,
    ),
    "paper": Scale(
        vocab_size=8192,
        widths=(32, 64, 128),
        lengths=(64, 128, 256, 512),
        bigram_lengths=(64, 128, 256),
        copy_lengths=(64, 128, 256, 512),
        rates=(1e-3, 1e-2, 1e-1),
        length_rates=(1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
        seeds=3,
        length_seeds=5,
        trained=128,
        tested=(32, 64, 128, 256, 512, 1024),
        examples=100_000,
        bigram_examples=200_000,
        epochs=64,
        batch_size=None,
        control_len=64,
        control_epochs=64,
    ),
}


@dataclass(frozen=True)
class Run:
    """A cell, and where it goes in a figure: the panel's row and column, and its line.

    Attributes:
        across_tests: whether the figure shows the cell at its test lengths, or where it trained.
    """

    row: str
    column: str
    line: str
    cell: Cell
    across_tests: bool = False


def plan(figure: str, scale: Scale) -> list[Run]:
    """All runs of a figure, with the negative control on every panel and the positive control.

    Raises:
        UserError: an unknown figure.
    """
    if figure not in FIGURES:
        raise UserError(f"figure {figure!r}: choose one of {', '.join(FIGURES)}")
    _, _, grid, one_layer, _ = FIGURES[figure]
    return [*GRIDS[grid](scale, one_layer), positive_control(scale)]


def positive_control(scale: Scale) -> Run:
    """Two layers of attention on four keys, which must learn them for a comparison to mean much."""
    cell = Cell(
        f"mqar:keys=4,filler=zeros,vocab_size={scale.vocab_size}",
        "attention",
        64,
        scale.control_len,
        lr=3e-3,
        layers=2,
        epochs=scale.control_epochs,
        train_examples=scale.examples,
        batch_size=scale.batch_size,
    )
    return Run("control", "positive control", "attention", cell)


def _tasks(scale: Scale) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Row -> (task, lengths, examples)."""
    vocabulary = f"vocab_size={scale.vocab_size}"
    return {
        "MQAR": (f"mqar:{vocabulary}", scale.lengths, scale.examples),
        "MQNAR": (f"mqnar:{vocabulary}", scale.bigram_lengths, scale.bigram_examples),
    }


def _accuracy(scale: Scale, one_layer: bool) -> Iterator[Run]:
    for row, (task, lengths, examples) in _tasks(scale).items():
        for width in scale.widths:
            for mixer in (*scale.models, NEGATIVE):
                for length in lengths:
                    base = _base(scale, task, mixer, width, length, examples, one_layer)
                    if length == scale.trained:  # the length figure's cells, which serve both
                        base = _tested(base, scale)
                    cells = _sweep(base, scale.rates, scale.seeds)
                    yield from (Run(row, f"d = {width}", mixer, cell) for cell in cells)


def _generalization(scale: Scale, one_layer: bool) -> Iterator[Run]:
    for row, (task, _, examples) in _tasks(scale).items():
        for width in scale.widths:
            for mixer in (*scale.models, NEGATIVE):
                base = _base(scale, task, mixer, width, scale.trained, examples, one_layer)
                base = _tested(base, scale)
                for cell in _sweep(base, scale.length_rates, scale.length_seeds):
                    yield Run(row, f"d = {width}", mixer, cell, across_tests=True)


def _copying(scale: Scale, one_layer: bool) -> Iterator[Run]:
    task = f"selective-copy:copies={scale.copies},signals={scale.signals}"
    models = (COPYING.format(copies=scale.copies), *scale.models, NEGATIVE)
    for layers in (1,) if one_layer else (1, 2):
        for width in scale.widths:
            for mixer in models:
                for length in scale.copy_lengths:
                    base = _base(scale, task, mixer, width, length, scale.examples, False)
                    for cell in _sweep(replace(base, layers=layers), scale.rates, scale.seeds):
                        yield Run(f"{layers} layer{'s'[: layers - 1]}", f"d = {width}", mixer, cell)


# What a figure of the catalog may be made of.
GRIDS = {"accuracy": _accuracy, "length": _generalization, "copying": _copying}


def _tested(cell: Cell, scale: Scale) -> Cell:
    return replace(cell, test_lengths=scale.tested, fixed_items=True)


def _base(
    scale: Scale, task: str, mixer: str, width: int, length: int, examples: int, one_layer: bool
) -> Cell:
    return Cell(
        task,
        mixer,
        width,
        length,
        layers=1 if one_layer and make_mixer(mixer).layers != 1 else None,  # one hash for one thing
        epochs=scale.epochs,
        train_examples=examples,
        batch_size=scale.batch_size,
    )


def _sweep(base: Cell, rates: tuple[float, ...], seeds: int) -> Iterator[Cell]:
    # The control cannot learn: one run of it shows chance.
    if base.mixer == NEGATIVE:
        rates, seeds = rates[:1], 1
    for rate in rates:
        for seed in range(seeds):
            yield replace(base, lr=rate, seed=seed)
