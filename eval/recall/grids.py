"""The grids of the recall figures at three scales, their controls, and what is compared."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.mixers import make_mixer
from eval.lab.contrasts import Contrast, difference_of, first_minus_others
from eval.lab.frame import Line, Record
from eval.lab.places import CONTROL, NEGATIVE, Place, Run
from eval.lab.study import Control, Rows, Study, StudyOptions, check_models, choose, is_finite
from eval.recall import filter_plots
from eval.recall.cell import Cell
from eval.recall.tasks import generate

# CAT with a filter for each channel. It can rank all bigrams, unlike a filter for each head (see
# README.md).
CHANNELS = "cat:conv_type=depthwise"
# The paper's models, attention with RoPE and without positions beside its learned ones, and the
# negative control.
_PAPER = ("lincat", "attention", "attention:position=rope", "attention:position=none")
_PAPER += ("linear-attention", "based", "mamba")
MODELS = ("cat", CHANNELS, *_PAPER)
BIGRAMS = {"mqnar": "MQNAR", "hard-mqnar:pool=dense": "hard MQNAR"}  # task -> its row
# What must learn each row's task: (mixer, layers).
POSITIVE = {"MQAR": ("attention", 2), "MQNAR": ("attention", 2), "hard MQNAR": ("cat:heads=2", 1)}
COPIER = ("mamba", 2)
# How rows end that have, beside one layer of a model, its two: for the difference alone.
TWO_LAYERS = ", two layers"
ONE_LAYER_NOTE = (
    "One layer of Based is its short convolution alone, as its attention stands in every second "
    "layer."
)
TRAINED = "trained length"  # the test of the task that was trained
CONTROL_AT_LEAST = 0.99
SOLVED = 0.99  # accuracy from which a run counts as having solved its task
_DEVIATIONS = 5  # standard deviations from chance that are allowed to the negative control
# What tests find beside the accuracy -> what it is.
ALSO = {
    "accuracy_shared": "accuracy of queries whose last token another key has too",
    "accuracy_unshared": "accuracy of the other queries",
    "one_token_ceiling": "what matching the last token alone scores on these rows",
    "free_running_accuracy": "accuracy with a model's own answers fed back",
    "fixed_keys": "accuracy with as many keys as in training",
}
# Theorem 4 lets the query see all tokens copied so far and adds positions; with three taps and no
# positions one layer cannot know the order of tokens that noise separates.
COPY_MODELS = ("cat:window={copies},position=learned", "cat", *_PAPER)


@dataclass(frozen=True)
class Scale:
    """Fix how large the grids are; the defaults are the paper's.

    Attributes:
        length_rates, length_seeds, trained, tested: options of the length figures.
        bigrams: tasks with bigrams as keys, of BIGRAMS; bigram_keys: at length 64, more in
            proportion; none: as many as fit.
        memory_…: of the figure `width`; memory_one_layer: those of its models that have one layer,
            where their own number takes longer to learn than there is time.
        copies, signals: tokens to copy, and different ones to choose from.
        models, copy_models: mixers, without the negative control; in the latter {copies} is the
            number of tokens to copy.
        batch_size: none for Zoology's.
    """

    vocab_size: int = 8192
    widths: tuple[int, ...] = (32, 64, 128)
    lengths: tuple[int, ...] = (64, 128, 256, 512)
    bigram_lengths: tuple[int, ...] = (64, 128, 256)
    copy_lengths: tuple[int, ...] = (64, 128, 256, 512)
    rates: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    length_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    seeds: int = 3
    length_seeds: int = 5
    trained: int = 128
    tested: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    examples: int = 100_000
    bigram_examples: int = 200_000
    epochs: int = 64
    batch_size: int | None = None
    memory_widths: tuple[int, ...] = (32, 64, 128, 256)
    memory_vocab: int = 8192
    memory_len: int = 256
    memory_epochs: int = 64
    memory_rates: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    memory_models: tuple[str, ...] = ("cat", "attention", "based", "mamba")
    memory_one_layer: tuple[str, ...] = ()
    bigrams: tuple[str, ...] = ("mqnar", "hard-mqnar:pool=dense")
    bigram_keys: int | None = 10
    copies: int = 16
    signals: int = 16
    models: tuple[str, ...] = MODELS
    copy_models: tuple[str, ...] = COPY_MODELS


_SMALL = Scale(
    bigrams=("hard-mqnar:pool=dense",),
    bigram_keys=None,
    batch_size=64,
    copies=4,
    lengths=(16, 32),
)
SCALES = {
    "smoke": replace(
        _SMALL,
        vocab_size=64,
        widths=(16,),
        bigram_lengths=(24,),
        copy_lengths=(16,),
        rates=(3e-3, 1e-2),
        length_rates=(3e-3, 1e-2),
        seeds=1,
        length_seeds=1,
        trained=16,
        tested=(16, 32),
        examples=1280,
        bigram_examples=1280,
        epochs=2,
        memory_widths=(8, 16),
        memory_vocab=64,
        memory_len=16,
        memory_epochs=2,
        memory_rates=(3e-3, 1e-2),
        signals=4,
    ),
    # Small enough for two cores, and long enough that two layers of attention find the answer.
    "cpu": replace(
        _SMALL,
        vocab_size=128,
        widths=(64,),
        bigram_lengths=(32, 64),
        copy_lengths=(16, 32),
        rates=(3e-3, 1e-2, 3e-2),
        length_rates=(3e-3, 1e-2, 3e-2),
        length_seeds=3,
        trained=32,
        tested=(16, 32, 64, 128),
        examples=16_000,
        bigram_examples=16_000,
        epochs=12,
        memory_widths=(16, 32, 64, 128),
        # Our records: at L = 32, width 64 and 128 tokens one layer of Mamba has 0.88 to 0.99 after
        # 3,000 steps, where two, trained otherwise, took 7,250 and 9,500. Here are 4,000.
        memory_vocab=512,
        memory_len=32,
        memory_epochs=16,
        memory_rates=(1e-3, 3e-3, 1e-2, 3e-2),  # A larger width may need a smaller learning rate.
        memory_one_layer=("mamba",),
        signals=8,
    ),
    "paper": Scale(),
}


LENGTHS_NOTE = "Models are trained at one length: " + ", ".join(
    f"{scale.trained} tokens at {name} scale" for name, scale in SCALES.items()
)
LENGTHS_NOTE += ". Items are in proportion to the length, but in the table of as many keys."

Grid = Callable[[Scale], Iterator[Place]]


def figure_places(grid: Grid) -> Callable[[StudyOptions], list[Place]]:
    """Return a study's `places`: those of a grid, with the controls of each row."""

    def places(asked: StudyOptions) -> list[Place]:
        scale = SCALES[asked.scale]
        if asked.models:
            models = check_models(asked.models, make_mixer)
            scale = replace(scale, models=models, memory_models=models, copy_models=models)
        if asked.seeds is not None:
            scale = replace(scale, seeds=asked.seeds, length_seeds=asked.seeds)
        found = list(grid(scale))
        rows = choose("--rows", map(_task_row, found), asked.rows)
        found = [place for place in found if _task_row(place) in rows]
        found += positive_controls(found)
        for place in found:
            place.run.cell.tests()  # Raise now, and not after hours of training.
        return found

    return places


def _task_row(place: Place) -> str:
    """Return the panel row of a place; places of two layers stand in the row of one."""
    return place.run.row.removesuffix(TWO_LAYERS)


def positive_controls(places: Sequence[Place]) -> Iterator[Place]:
    """For each row a model that must learn its task: at the row's largest length and width, with
    its rows, epochs and rates. A control that is easier or longer would vouch for nothing. Across
    widths there is one at each: a width at which nothing learns says nothing of memory."""
    for row in dict.fromkeys(map(_task_row, places)):
        of_row = [p for p in places if _task_row(p) == row and p.run.line != NEGATIVE]
        by_width = of_row[0].run.across == "width"
        widths = {p.run.cell.d_model for p in of_row}
        for width in sorted(widths) if by_width else [max(widths)]:
            of_width = [p for p in of_row if p.run.cell.d_model == width]
            hardest = max(of_width, key=lambda p: p.run.cell.seq_len)
            mixer, layers = POSITIVE.get(row, COPIER)
            cell = replace(hardest.run.cell, mixer=mixer, layers=_layers(mixer, layers))
            across = "width" if by_width else "length"
            yield replace(hardest, run=Run(CONTROL, row, mixer, cell, across))


def _tasks(scale: Scale) -> Iterator[tuple[str, Callable[[int], str], tuple[int, ...], int]]:
    """Return (row, task at a length, lengths, examples) for each task."""
    vocabulary = f"vocab_size={scale.vocab_size}"
    yield "MQAR", lambda length: f"mqar:{vocabulary}", scale.lengths, scale.examples
    for task in scale.bigrams:

        def at_length(length: int, task: str = task) -> str:
            keys = scale.bigram_keys and f",keys={scale.bigram_keys * length // 64}"
            return f"{task}{',' if ':' in task else ':'}{vocabulary}{keys or ''}"

        yield BIGRAMS[task], at_length, scale.bigram_lengths, scale.bigram_examples


def accuracy(scale: Scale, one_layer: bool = False) -> Iterator[Place]:
    """Yield places for accuracy by length of each task, with one layer or the paper's number."""
    yield from _by_length(scale, scale.models, one_layer)
    # What one layer is compared with: the cells of the figure `accuracy`.
    two = [mixer for mixer in scale.models if make_mixer(mixer).layers == 2]
    for place in _by_length(scale, two, False) if one_layer and two else ():
        yield replace(place, run=replace(place.run, row=place.run.row + TWO_LAYERS))


def _by_length(scale: Scale, models: Sequence[str], one_layer: bool) -> Iterator[Place]:
    for row, task, lengths, examples in _tasks(scale):
        every = itertools.product(scale.widths, (*models, NEGATIVE), lengths)
        for width, mixer, length in every:
            base = _base(scale, task(length), mixer, width, length, examples, one_layer)
            if length == scale.trained:  # These are also the cells of the length figure.
                base = _tested(base, scale)
            yield _place(Run(row, f"d = {width}", mixer, base), scale.rates, scale.seeds)


def other_lengths(scale: Scale, one_layer: bool = False) -> Iterator[Place]:
    """Yield places for models that are trained at one length and tested at others."""
    for row, task, _, examples in _tasks(scale):
        length = scale.trained
        for width, mixer in itertools.product(scale.widths, (*scale.models, NEGATIVE)):
            base = _base(scale, task(length), mixer, width, length, examples, one_layer)
            run = Run(row, f"d = {width}", mixer, _tested(base, scale), "lengths")
            yield _place(run, scale.length_rates, scale.length_seeds)


def copying(scale: Scale) -> Iterator[Place]:
    """Yield places for selective copying by length, with one and two layers."""
    task = f"selective-copy:copies={scale.copies},signals={scale.signals}"
    models = (*(mixer.format(copies=scale.copies) for mixer in scale.copy_models), NEGATIVE)
    every = itertools.product((1, 2), scale.widths, models, scale.copy_lengths)
    for layers, width, mixer, length in every:
        base = _base(scale, task, mixer, width, length, scale.examples, False)
        base = replace(base, layers=_layers(mixer, layers))
        row = f"{layers} layer{'s'[: layers - 1]}"
        yield _place(Run(row, f"d = {width}", mixer, base), scale.rates, scale.seeds)


def widths(scale: Scale) -> Iterator[Place]:
    """Yield places for accuracy by width."""
    task, length = f"mqar:vocab_size={scale.memory_vocab}", scale.memory_len
    for mixer in (*scale.memory_models, NEGATIVE):
        one = mixer.partition(":")[0] in scale.memory_one_layer
        for width in scale.memory_widths:
            base = _base(scale, task, mixer, width, length, scale.examples, one)
            base = replace(base, epochs=scale.memory_epochs)
            run = Run("MQAR", f"L = {length}", mixer, base, "width")
            yield _place(run, scale.memory_rates, scale.seeds)


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
        layers=_layers(mixer, 1) if one_layer else None,
        epochs=scale.epochs,
        train_examples=examples,
        batch_size=scale.batch_size,
        stop_above=None,  # All models train equally long, and none stops just above a threshold.
    )


def _layers(mixer: str, layers: int) -> int | None:
    """Return None if `layers` is the mixer's default, so that equal configurations hash equally."""
    return None if make_mixer(mixer).layers == layers else layers


def _place(run: Run, rates: tuple[float, ...], seeds: int) -> Place:
    # The negative control cannot learn: one run of it shows chance.
    return Place(run, rates[:1], 1) if run.line == NEGATIVE else Place(run, rates, seeds)


def measured_values(run: Run, record: Record) -> dict[int, dict[str, float]]:
    """Return a run's accuracy by length or width, and what else its tests found.

    At other lengths the items are in proportion to the length; `fixed_keys` is the accuracy with as
    many as in training.
    """
    tests = record["tests"]
    if run.across != "lengths":
        x = run.cell.d_model if run.across == "width" else run.cell.seq_len
        return {x: _select_measures(tests[TRAINED])}
    found = {t["seq_len"]: _select_measures(t) for name, t in tests.items() if "," not in name}
    fixed = {t["seq_len"]: t["accuracy"] for name, t in tests.items() if "," in name}
    if fixed:
        fixed[run.cell.seq_len] = tests[TRAINED]["accuracy"]
    return {x: one | ({"fixed_keys": fixed[x]} if x in fixed else {}) for x, one in found.items()}


def _select_measures(test: dict[str, float]) -> dict[str, float]:
    return {"value": test["accuracy"], **{k: v for k, v in test.items() if k in ALSO}}


def contrasts(lines: Sequence[Line]) -> list[Contrast]:
    """Compare each panel's first model with the others, and one layer of a model with its two."""
    shown = [line for line in lines if not line["row"].endswith(TWO_LAYERS)]
    generated = [
        {**line, "row": f"{line['row']}, its own answers fed back", "runs": found}
        for line in shown
        if (found := line["also"].get("free_running_accuracy", {})).keys() == line["runs"].keys()
    ]
    place = ("row", "column", "line", "x")
    two = {tuple(line[key] for key in place): line for line in lines}
    layers = [
        difference_of(line, {**other, "row": line["row"], "line": line["line"] + TWO_LAYERS})
        for line in shown
        if line["line"] != NEGATIVE
        if (other := two.get((line["row"] + TWO_LAYERS, *(line[key] for key in place[1:]))))
    ]
    return [*first_minus_others(shown), *first_minus_others(generated), *layers]


def width_contrasts(lines: Sequence[Line]) -> list[Contrast]:
    """Compare models as `contrasts` does, each with itself at the least and the largest width, and
    what each gains so with what the first one does."""
    models: dict[tuple, list[Line]] = defaultdict(list)
    for line in lines:
        if line["line"] != NEGATIVE:
            models[line["row"], line["column"], line["line"]].append(line)
    found = contrasts(lines)
    first: dict[tuple, Contrast] = {}
    gains = []
    for (row, column, name), of_model in models.items():
        least, widest = (end(of_model, key=lambda line: line["x"]) for end in (min, max))
        if least is widest:
            continue
        said = f"{name}, d = {widest['x']} - {name}, d = {least['x']}"
        gain = Contrast(row, column, widest["x"], said, (widest,), (least,))
        found.append(gain)
        other = first.setdefault((row, column), gain)
        if other is not gain:
            said = f"gain of {name} - gain of {other.plus[0]['line']}"
            sides = (gain.plus + other.minus, gain.minus + other.plus)
            gains.append(Contrast(row, column, widest["x"], said, *sides))
    return found + gains


def controls(rows: Rows) -> list[Control]:
    """Check that a model learned each row's task, and that models without mixing are at chance.

    Positive: the mean over seeds is at least 0.99 at the row's largest length and width, or at
    each width of a figure across them, trained as all are. Negative: at most five standard
    deviations of a guesser's accuracy above chance, in every test.
    """
    positive, negative = defaultdict(list), defaultdict(dict)
    for run, record in rows:
        if run.row == CONTROL:
            positive[run.column, run.cell.d_model].append((run, record))
        elif run.line == NEGATIVE:  # A cell that is in two places of a figure is one control.
            seen = any(run.cell in cells for cells in negative.values())
            if not seen:
                negative[run.row][run.cell] = (run, record)
    found = [_positive(row, runs) for (row, _), runs in positive.items()]
    return found + [_negative(row, [*cells.values()]) for row, cells in negative.items()]


def _positive(row: str, runs: Rows) -> Control:
    run, first = runs[0]
    layers = first["layers"]
    return Control(
        row,
        "positive",
        f"learns with {layers} layer{'s'[: layers - 1]} at width {run.cell.d_model} and length "
        f"{run.cell.seq_len}, trained as all are",
        run.line,
        statistics.fmean(record["accuracy"] for _, record in runs),
        CONTROL_AT_LEAST,
        "Models that fail there may be under-trained; only those that succeed say anything.",
    )


def _negative(row: str, rows: Rows) -> Control:
    """Return the negative control: the test in which the control model is nearest to its bound."""
    found = []
    for run, record in rows:
        apart: dict[Any, str] = {}
        tasks = run.cell.tests()
        for name in record["tests"]:
            apart.setdefault(tasks[name], name)  # Two tests may use the same rows.
        for task, name in apart.items():
            accuracy = record["tests"][name]["accuracy"]
            labels = generate(task, 1, seed=0, split="test").labels
            answers = run.cell.test_examples * int((labels != IGNORE_INDEX).sum())
            spread = math.sqrt(task.chance * (1 - task.chance) / answers)
            bound = min(task.chance + _DEVIATIONS * spread, 1.0)
            value = accuracy if is_finite(accuracy) else math.inf
            what = f"mixes nothing; of all tests the nearest to its limit, at {run.column}, length "
            found.append(Control(row, "negative", f"{what}{task.seq_len}", NEGATIVE, value, bound))
    return max(found, key=lambda control: control.value - control.bound)


def filters(rows: Rows) -> dict[str, Any]:
    """Return the filters of each place's best run."""
    return {"filters": filter_plots.table(rows)}


def recall_study(name: str, title: str, grid: Grid, **declared: Any) -> Study:
    """Return a study of recall: `declared` are further attributes, and override those here."""
    return Study(
        name,
        title,
        figure_places(grid),
        measured_values,
        **{
            "also": ALSO,
            "contrasts": contrasts,
            "controls": controls,
            "solved": SOLVED,
            "extra": filters,
            "tables": filter_plots.tables,
            "pictures": filter_plots.pictures,
        }
        | declared,
    )
