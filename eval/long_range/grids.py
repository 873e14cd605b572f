"""The grids of the LaS paper's figures and tables at three scales, and what is measured."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas

from cat_lm.core.errors import UserError
from eval.lab.contrasts import Contrast, first_minus_others
from eval.lab.frame import Line, Record
from eval.lab.places import CONTROL, NEGATIVE, Run
from eval.lab.places import Place as Point
from eval.lab.study import Control, Rows, Study, StudyOptions, Table, check_models, choose
from eval.long_range import mixers
from eval.long_range.cell import Cell, check_origins, fitted, recipe_of, with_option
from eval.long_range.tasks import Place, Task, check_read, make_task

_SHARE = 0.9  # Steps are counted until this share of the best model's score.
LEARNS = {"cummax": 0.95, "cumsum": 0.95, "select": 0.9}  # R² that the first model must have
GUESSES = 0.05  # R² on Select that a model which mixes nothing must not have
_DEVIATIONS = 5  # number of standard deviations of an accuracy
LRA = ("listops", "imdb", "aan", "cifar10", "pathfinder")
ATOMIC = ("select", "cumsum", "cummax")
MODELS = {
    "lra": ("vanilla", "rope", "l", "l-steep", "s", "las", "las:chunk={chunk}", "cat-v"),
    # ALiBi has no positions beside it: decays stand beside it without them too.
    "ablation": (
        *(f"{name}:chunk={{chunk}}" for name in ("vanilla", "alibi", "l", "s", "s-alibi", "las")),
        "nope:chunk={chunk}",
        *(f"{name}:position=none,chunk={{chunk}}" for name in ("l", "las")),
    ),
    "context": ("las", "vanilla"),
    "data-size": ("las", "vanilla", "cat-v"),
    # Rows have a cosine and a sine of the position: nothing is added.
    "atomic": (
        "nope",
        *("l:position=none", "s:position=none", "las:position=none"),
        *("cat-v:position=none", "cat-v-box:position=none", "l-cat-v:position=none"),
    ),
    "smnist": ("vanilla", "rope", "l", "l-steep", "s", "las", "cat-v"),
}


@dataclass(frozen=True)
class Scale:
    """The size of the grids.

    Attributes:
        tasks: task -> its specification, in the order of the panels.
        options: options of all cells, which replace the recipe's.
        of_task: task -> options of its cells, which replace both.
        seeds: number of runs of each model.
        seeds_of: figure -> number of runs, if the paper has another number there.
        rates: learning rates to choose from; empty for the recipe's rate.
        chunk: positions in a chunk.
        chunks: sizes of chunks in the figure `context`, 0 for the whole row.
        shares: fractions of the training rows in the study `data-size`.
    """

    tasks: Mapping[str, str]
    options: Mapping[str, Any]
    of_task: Mapping[str, Mapping[str, Any]]
    seeds: int
    rates: tuple[float, ...]
    chunk: int
    chunks: tuple[int, ...]
    shares: tuple[float, ...]
    seeds_of: Mapping[str, int] = field(default_factory=dict)


_SMALL = "train=64,validation=32,test=64"
_CPU = "train=96000,validation=1000,test=1000"
_CPU_PIXELS = {"epochs": 4, "patience": 1, "eval_steps": 50}
_CPU_PIXELS |= {"train_rows": 8_000, "validation_rows": 500, "test_rows": 2_000}
SCALES = {
    "smoke": Scale(
        tasks={
            "listops": f"listops:min_length=5,max_length=30,{_SMALL}",
            "smnist": "smnist:size=14",
            "pmnist": "pmnist:size=14",
            "select": f"select:noise=12,marked=2,{_SMALL}",
            "cumsum": f"cumsum:seq_len=16,{_SMALL}",
            "cummax": f"cummax:seq_len=16,{_SMALL}",
        },
        options={"d_model": 16, "layers": 1, "batch_size": 16, "epochs": 1, "eval_steps": None},
        of_task={
            name: {"train_rows": 64, "validation_rows": 32, "test_rows": 64}
            for name in ("smnist", "pmnist")
        },
        seeds=1,
        rates=(),
        chunk=8,
        chunks=(8, 0),
        shares=(0.5, 1.0),
    ),
    # Two cores, less than an hour a figure.
    "cpu": Scale(
        tasks={
            "listops": "listops:min_length=50,max_length=200,train=20000,validation=2000,test=2000",
            "smnist": "smnist:size=14",
            "pmnist": "pmnist:size=14",
            "select": f"select:noise=64,marked=8,{_CPU}",
            "cumsum": f"cumsum:seq_len=64,{_CPU}",
            "cummax": f"cummax:seq_len=64,{_CPU}",
        },
        options={"d_model": 64, "layers": 2, "batch_size": 32},
        of_task={
            "listops": {"epochs": 3, "patience": 1},
            **{name: _CPU_PIXELS for name in ("smnist", "pmnist")},
            # With fewer rows in a step plain attention does not learn Select.
            **{name: {"epochs": 1, "eval_steps": 500} for name in ATOMIC},
        },
        seeds=3,
        rates=(),
        chunk=32,
        chunks=(16, 64, 0),
        shares=(0.25, 0.5, 1.0),
    ),
    "paper": Scale(
        tasks={name: name for name in (*LRA, "smnist", "pmnist", *ATOMIC)},
        options={},
        of_task={name: {"eval_steps": 250} for name in ATOMIC},
        seeds=3,
        rates=(1e-4, 1e-3),
        chunk=128,
        chunks=(16, 32, 64, 128, 256, 512, 0),
        shares=(0.1, 0.25, 0.5, 0.75, 1.0),
        seeds_of={"atomic": 5},
    ),
}
TASKS = {
    "lra": LRA,
    "ablation": ("listops", "imdb", "aan", "cifar10"),
    "context": ("cifar10", "imdb", "listops", "pathfinder"),
    "data-size": ("cifar10", "imdb", "listops", "pathfinder"),
    "atomic": ATOMIC,
    "smnist": ("smnist", "pmnist"),
}


@dataclass(frozen=True)
class Choice:
    """The options of a command that change a figure.

    Attributes:
        protocol: lra takes the test split for validation where the official pipeline does (IMDB);
            clean never.
        is_causal: causal models, as all of the paper's are; or encoders that read both sides.
        place: location of the data.
    """

    protocol: str = "clean"
    is_causal: bool = True
    place: Place = field(default=Place(), compare=False)

    def check(self, tasks: Sequence[Task]) -> None:
        """Check that it can be had of tasks, and changes some. Raises UserError."""
        names, needing = (
            ", ".join(task.name for task in each)
            for each in (tasks, [task for task in tasks if task.needs_folder])
        )
        if needing and self.place.folder is None:
            raise UserError(
                f"--data: {needing} is read from official files alone; name their folder"
            )
        check_read(self.place.folder, tasks)
        if self.protocol != "clean" and not any(hasattr(task, "protocol") for task in tasks):
            raise UserError(f"--protocol {self.protocol}: has no effect on {names}; leave it out")


def figure_places(figure: str) -> Callable[[StudyOptions], list[Point]]:
    """Return a study's `places`: those of a figure's tasks, with their controls."""

    def places(asked: StudyOptions) -> list[Point]:
        scale, choice = SCALES[asked.scale], asked.more.get("long_range", Choice())
        models = check_models(asked.models, mixers.make) or tuple(
            model.format(chunk=scale.chunk) for model in MODELS[figure]
        )
        seeds = asked.seeds or scale.seeds_of.get(figure, scale.seeds)
        known = (name for name in TASKS[figure] if name in scale.tasks)
        names = choose("--rows", known, asked.rows)
        choice.check([make_task(scale.tasks[name]) for name in names])
        return [
            point
            for name in names
            for point in _row(figure, models, seeds, scale, _base(scale, choice, name))
        ]

    return places


def _base(scale: Scale, choice: Choice, name: str) -> Cell:
    options = {**recipe_of(name), **scale.options, **scale.of_task.get(name, {})}
    text = scale.tasks[name]
    if choice.protocol != "clean" and hasattr(make_task(text), "protocol"):
        text = with_option(text, f"protocol={choice.protocol}")
    return Cell(text, NEGATIVE, is_causal=choice.is_causal, place=choice.place, **options)


def _row(
    figure: str, models: Sequence[str], seeds: int, scale: Scale, base: Cell
) -> Iterator[Point]:
    """Yield a task's places: its models, what mixes nothing, and controls with other rows' labels
    or without a bag of tokens."""
    task = base.make_task()
    rates = tuple(sorted({*scale.rates, base.lr}))
    for model in models:
        for cell, across in _axis_cells(
            figure, scale, replace(base, mixer=fitted(model, task.name))
        ):
            yield Point(Run(task.name, "", model, cell, across), rates, seeds)
    nothing, rate = base, (base.lr,)
    if task.classes and base.pool == "last":
        # A position alone knows nothing, and the mean over all is what models must be better than.
        yield Point(Run(CONTROL, task.name, NEGATIVE, nothing), rate, 1)
        nothing = replace(nothing, pool="mean")
    across = "rows" if figure == "data-size" else "length"
    yield Point(Run(task.name, "", NEGATIVE, nothing, across), rate, 1)
    if task.classes:
        shuffled = replace(base, mixer=fitted(models[0], task.name), is_shuffled=True)
        yield Point(Run(CONTROL, task.name, models[0], shuffled), rate, 1)


def _axis_cells(figure: str, scale: Scale, cell: Cell) -> Iterator[tuple[Cell, str]]:
    """Yield the cells of a line, and the name of its axis."""
    if figure == "context":
        for chunk in scale.chunks:
            yield replace(cell, mixer=with_option(cell.mixer, f"chunk={chunk}")), "chunk"
    elif figure == "data-size":
        most = cell.rows_of("train")
        for share in scale.shares:
            # All that there are: without what is held out of them, which nobody has counted yet.
            rows = None if share == 1 else int(most * share)
            yield replace(cell, train_rows=rows), "rows"
    else:
        yield cell, "length"


def place_on_axis(run: Run, record: Mapping[str, Any]) -> int:
    """Return a run's position on the figure's axis."""
    if run.across == "rows":
        return record["data"]["train"]["rows"]
    if run.across == "chunk":
        return run.cell.make_mixer().options.chunk or run.cell.seq_len
    return run.cell.seq_len


def measured_values(run: Run, record: Record) -> dict[int, dict[str, float]]:
    """Return accuracy or R² on the test, once, by the model of the best validation."""
    return {place_on_axis(run, record): {"value": record["value"]}}


def controls(rows: Rows) -> list[Control]:
    """Check each task: that its models learned it, and that nothing was learned from nothing.

    Positive, for classes: the mean of a line's seeds, of the best model, is five deviations of a
    test above that of a model which mixes nothing and takes the mean over positions, a bag of
    tokens; of values, the first model's mean R² is that of LEARNS. Negative: a model that was
    trained with other rows' labels, the first model on test rows with others' inputs, and one that
    mixes nothing where classes are read from the last position, are at most five deviations above
    the share of the most frequent class; on Select, R² of what mixes nothing is at most 0.05.
    """
    found: list[Control] = []
    for row in dict.fromkeys(run.row for run, _ in rows if run.row != CONTROL):
        of_row = [(run, record) for run, record in rows if run.row == row]
        beside = [x for x in rows if x[0].row == CONTROL and x[0].column == row]
        nothing = next(record for run, record in of_row if run.line == NEGATIVE)
        if nothing["data"]["test"]["most_frequent"] is None:
            found += _of_values(row, of_row, nothing)
        else:
            found += _of_classes(row, of_row, nothing, beside)
    return found


def _of_values(row: str, of_row: Rows, nothing: dict[str, Any]) -> Iterator[Control]:
    first, mean = next(iter(_means(of_row).items()))
    yield _at_least(row, "learns", first, mean, LEARNS[row])
    if row == "select":
        yield _at_most(row, "mixes nothing", NEGATIVE, nothing["value"], GUESSES)


def _of_classes(row: str, of_row: Rows, nothing: dict[str, Any], beside: Rows) -> Iterator[Control]:
    best, mean = max(_means(of_row).items(), key=lambda item: item[1])
    # The control may diverge.
    share = max(nothing["value"], nothing["data"]["test"]["most_frequent"])
    yield _at_least(row, "learns", best, mean, _accuracy_bound(nothing, share))
    first = next(run.line for run, _ in of_row if run.line != NEGATIVE)
    tested = [record for run, record in of_row if run.line == first]
    most = max(record["exchanged"] for record in tested)
    yield _at_most(row, "other rows' inputs", first, most, _guessing_accuracy(tested[0]))
    for run, record in beside:
        what = "mixes nothing" if run.line == NEGATIVE else "other rows' labels"
        yield _at_most(row, what, run.line, record["value"], _guessing_accuracy(record))


def _means(of_row: Rows) -> dict[str, float]:
    """Return each line's mean over seeds, in order; for several cells, the best."""
    values: dict[str, dict[Any, list[float]]] = {}
    for run, record in of_row:
        if run.line != NEGATIVE:
            cells = values.setdefault(run.line, {})
            cells.setdefault(replace(run.cell, seed=0), []).append(record["value"])
    return {line: max(map(statistics.fmean, cells.values())) for line, cells in values.items()}


def _accuracy_bound(record: dict[str, Any], share: float) -> float:
    """Return a share of correct answers plus five standard deviations of a test's accuracy."""
    return share + _DEVIATIONS * math.sqrt(share * (1 - share) / record["data"]["test"]["rows"])


def _guessing_accuracy(record: dict[str, Any]) -> float:
    """Return the highest accuracy of a model that knows nothing of a row."""
    return _accuracy_bound(record, record["data"]["test"]["most_frequent"])


def _at_least(row: str, what: str, mixer: str, value: float, bound: float) -> Control:
    means = "Models may be under-trained; their order says nothing."
    return Control(row, "positive", what, mixer, value, bound, means)


def _at_most(row: str, what: str, mixer: str, value: float, bound: float) -> Control:
    means = "Labels reach the model by another way than its rows."
    if what == "mixes nothing":
        means = "Positions hold their own answers: nothing has to be mixed."
    return Control(row, "negative", what, mixer, value, bound, means)


def steps_and_tasks(rows: Rows) -> dict[str, Any]:
    """Return the facts of each task, and the steps of each line to the required score.

    The level is the same for all lines of a task: nine tenths of the largest mean of a test.
    """
    shown = [(run, record) for run, record in rows if run.row != CONTROL]
    tests: dict[str, dict[tuple, list[float]]] = {}
    for run, record in shown:
        line = run.line, place_on_axis(run, record)
        tests.setdefault(run.row, {}).setdefault(line, []).append(record["value"])
    tasks: dict[str, dict[str, Any]] = {}
    for row, lines in tests.items():
        best = max(map(statistics.fmean, lines.values()))
        run, record = next(each for each in shown if each[0].row == row)
        task, data = run.cell.make_task(), record["data"]
        tasks[row] = {
            "task": record["task"],
            "counted": [task.counted(split, found["rows"]) for split, found in data.items()],
            "most_frequent": data["test"]["most_frequent"],
            "notes": record["notes"],
            "layers": record["layers"],
            "d_model": record["cell"]["d_model"],
            "level": _SHARE * best if best > 0 else None,
        }
    steps = [
        {
            **{"row": run.row, "line": run.line, "x": place_on_axis(run, record)},
            **{"seed": run.cell.seed, "steps": steps_to(record, tasks[run.row]["level"])},
        }
        for run, record in shown
    ]
    return {"tasks": tasks, "steps": steps}


def steps_to(record: Mapping[str, Any], level: float | None) -> int | None:
    """Return the first step with at least this validation score; None if there is none."""
    if level is None:
        return None
    return next((p["step"] for p in record["history"] if p["value"] >= level), None)


def _tables(printed: Mapping[str, Mapping[str, float]], record: Record) -> list[Table]:
    """Return the tasks, the steps to nine tenths of the best, and what the paper printed."""
    tasks = record["extra"]["tasks"]
    of_tasks = [
        [
            *(name, ", ".join(task["counted"]), f"{task['layers']} x {task['d_model']}"),
            "" if task["most_frequent"] is None else f"{task['most_frequent']:.3f}",
            " ".join(task["notes"]),
        ]
        for name, task in tasks.items()
    ]
    of_steps = []
    frame = pandas.DataFrame(record["extra"]["steps"])
    for (row, line, x), own in frame.groupby(["row", "line", "x"], sort=False)["steps"]:
        said = f"{own.mean():,.0f}" if own.count() else ""
        said += f" ({own.count()} of {own.size})" if 0 < own.count() < own.size else ""
        of_steps.append([row, f"`{line}`", f"{x:,}", said])
    papers = [
        [task, f"`{model}`", f"{number:.4f}"]
        for task in printed
        if task in tasks
        for model, number in printed[task].items()
    ]
    found = [
        Table(
            "Tasks",
            "What models are trained and tested on.",
            ["task", "rows", "layers x width", "most frequent class of the test", "notes"],
            of_tasks,
        ),
        Table(
            "Steps",
            "Steps until validation was at nine tenths of the best model's mean test, mean of the "
            "seeds that were there.",
            ["task", "model", "length, chunk or rows", "steps"],
            of_steps,
        ),
        Table(
            "The paper's numbers",
            "These are of the paper's scale, and do not compare with those of another.",
            ["task", "model", "value"],
            papers,
        ),
    ]
    return [table for table in found if table.rows]


def long_range_study(
    name: str,
    title: str,
    figure: str,
    *,
    pairs: Sequence[tuple[str, str]] = (),
    printed: Mapping[str, Mapping[str, float]] | None = None,
    **declared: Any,
) -> Study:
    """Return a study of long-range tasks.

    Args:
        figure: of `MODELS` and `TASKS`.
        pairs: of models to compare beside those with the first; `{chunk}` is the scale's.
        printed: task -> model -> the paper's number.
        declared: further attributes.
    """

    def contrasts(lines: Sequence[Line]) -> list[Contrast]:
        names = {line["line"] for line in lines}
        more = [
            tuple(name.format(chunk=scale.chunk) for name in pair)
            for scale in SCALES.values()
            for pair in pairs
        ]
        return first_minus_others(lines, [x for x in dict.fromkeys(more) if names.issuperset(x)])

    return Study(
        name,
        title,
        figure_places(figure),
        measured_values,
        contrasts=contrasts,
        controls=controls,
        extra=steps_and_tasks,
        tables=functools.partial(_tables, printed or {}),
        check=check_origins,
        options=("models", "rows", "data", "long_range"),
        **declared,
    )


# Comparisons that test whether learned filters of values are as good as a fixed box filter.
FILTER_PAIRS = (("cat-v", "s"), ("cat-v", "las"), ("cat-v-box", "s"), ("l-cat-v", "las"))


def with_options(options: str, *pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Return pairs of mixers with options."""
    return tuple((f"{one}:{options}", f"{other}:{options}") for one, other in pairs)
