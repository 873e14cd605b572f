"""The paper's figures as grids of cells, at three scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.fields import parse_specification
from eval.common.grids.places import CONTROL, NEGATIVE, Run
from eval.common.grids.places import Place as Point
from eval.long_range import mixers
from eval.long_range.cell import Cell
from eval.long_range.recipes import Recipe, recipe_of
from eval.long_range.tasks import Place, Task, make_task
from eval.long_range.tasks.commands import check_read

SHUFFLED = "other rows' labels"  # the column of the negative control
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
    """Fix how large the grids are.

    Attributes:
        tasks: task -> its specification, in the order of the panels; a figure shows those that it
            is about.
        options: of all cells, over the recipe's; of_task: of a task's cells, over those.
        seeds: runs of each model; seeds_of: of a figure's, where the paper has others.
        rates: to choose from, none for the recipe's alone.
        chunk: positions in a chunk; chunks: those of `context`, 0 for the whole row.
        shares: of the training rows, of `data-size`.
        models: figure -> mixers, none for those of MODELS.
    """

    tasks: Mapping[str, str]
    options: Mapping[str, Any]
    of_task: Mapping[str, Mapping[str, Any]]
    seeds: int
    rates: tuple[float, ...]
    chunk: int
    chunks: tuple[int, ...]
    shares: tuple[float, ...]
    models: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MODELS)
    seeds_of: Mapping[str, int] = field(default_factory=dict)

    def with_models(self, figure: str, models: Sequence[str]) -> Scale:
        """The same with these mixers in a figure.

        Raises:
            UserError: one that is no mixer, is the negative control or is given twice.
        """
        for mixer in models:
            mixers.make(mixer, "--models")
            if mixer == NEGATIVE:
                raise UserError(f"--models {mixer}: is in every figure, as its control")
            if models.count(mixer) > 1:
                raise UserError(f"--models {mixer}: is given twice")
        return replace(self, models={**self.models, figure: tuple(models)})


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
    """What a command may change of a figure.

    Attributes:
        protocol: lra takes the test split for validation where the official pipeline does (IMDB);
            clean never.
        is_causal: causal models, as all of the paper's are; or encoders that read both sides.
        rows: tasks; none: all that the scale has.
        place: where data lies.
    """

    protocol: str = "clean"
    is_causal: bool = True
    rows: tuple[str, ...] = ()
    place: Place = field(default=Place(), compare=False)


def plan(figure: str, scale: Scale, choice: Choice) -> list[Point]:
    """All places of a figure, with its controls.

    Raises:
        UserError: a row that the figure does not have at this scale, or has twice; a protocol or a
            place that none of its tasks heeds.
    """
    known = [name for name in TASKS[figure] if name in scale.tasks]
    for row in choice.rows:
        if row not in known:
            raise UserError(f"--rows {row!r}: of {figure} at this scale, choose {', '.join(known)}")
        if choice.rows.count(row) > 1:
            raise UserError(f"--rows {row!r}: is given twice")
    tasks = [make_task(scale.tasks[name]) for name in choice.rows or known]
    if choice.place.folder is not None:
        check_read(tasks)
    if choice.protocol != "clean" and not any(map(has_protocol, tasks)):
        names = ", ".join(task.name for task in tasks)
        raise UserError(f"--protocol {choice.protocol}: has no effect on {names}; leave it out")
    points = []
    for name in choice.rows or known:
        points += _row(figure, scale, choice, name)
    return points


def has_protocol(task: Task) -> bool:
    """Return True if the official pipeline of a task validates on its test split."""
    return "protocol" in {field.name for field in fields(task)}


def _row(figure: str, scale: Scale, choice: Choice, name: str) -> Iterator[Point]:
    """A task's places: its models, what mixes nothing, and controls with other rows' labels or
    without a bag of tokens."""
    base = _base(scale, choice, name)
    rates = scale.rates or (base.lr,)
    rates = tuple(sorted({*rates, base.lr})) if len(rates) > 1 else rates
    seeds = scale.seeds_of.get(figure, scale.seeds)
    models = [model.format(chunk=scale.chunk) for model in scale.models[figure]]
    for model in models:
        for cell, across in _along(figure, scale, replace(base, mixer=fitted(model, name))):
            yield Point(Run(name, "", model, cell, across), rates, seeds)
    nothing = replace(base, mixer=NEGATIVE)
    if base.make_task().classes and base.pool == "last":
        # A position alone knows nothing, and the mean over all is what models must be better than.
        yield Point(Run(CONTROL, name, NEGATIVE, nothing), (base.lr,), 1)
        nothing = replace(nothing, pool="mean")
    across = "rows" if figure == "data-size" else "length"
    yield Point(Run(name, "", NEGATIVE, nothing, across), (base.lr,), 1)
    if base.make_task().classes:
        shuffled = replace(base, mixer=fitted(models[0], name), is_shuffled=True)
        yield Point(Run(CONTROL, name, models[0], shuffled), (base.lr,), 1)


def _along(figure: str, scale: Scale, cell: Cell) -> Iterator[tuple[Cell, str]]:
    """The cells of a line, and what its axis is."""
    if figure == "context":
        for chunk in scale.chunks:
            joined = "," if ":" in cell.mixer else ":"
            yield replace(cell, mixer=f"{cell.mixer}{joined}chunk={chunk}"), "chunk"
    elif figure == "data-size":
        most = cell.rows_of("train")
        for share in scale.shares:
            # All that there are: without what is held out of them, which nobody has counted yet.
            rows = None if share == 1 else int(most * share)
            yield replace(cell, train_rows=rows), "rows"
    else:
        yield cell, "length"


def _base(scale: Scale, choice: Choice, name: str) -> Cell:
    options = {**recipe_of(name).cell_options(), **scale.options, **scale.of_task.get(name, {})}
    text = scale.tasks[name]
    if choice.protocol != "clean" and has_protocol(make_task(text)):
        text += f"{',' if ':' in text else ':'}protocol={choice.protocol}"
    return Cell(text, NEGATIVE, is_causal=choice.is_causal, place=choice.place, **options)


def fitted(mixer: str, task: str) -> str:
    """Make a mixer with the paper's widths and bounds for a task, where it names none."""
    name, given = parse_specification(mixer)
    recipe, preset = recipe_of(task), mixers.VARIANTS.get(name, {})
    own = {f.name: f.default for f in fields(Recipe) if f.name in ("width", "bound")}
    wanted = {}
    if given.get("values", preset.get("values", "none")) != "none":
        wanted["width"] = recipe.width
    if given.get("decay", preset.get("decay", "none")) == "slow":
        wanted["bound"] = recipe.bound
    more = [f"{k}={v}" for k, v in wanted.items() if k not in given and v != own[k]]
    return mixer + "".join(f"{':' if not given and not i else ','}{x}" for i, x in enumerate(more))


def place_on_axis(run: Run, record: Mapping[str, Any]) -> int:
    """Return where a run with its record stands on the figure's axis."""
    if run.across == "rows":
        return record["data"]["train"]["rows"]
    if run.across == "chunk":
        return run.cell.make_mixer().options.chunk or run.cell.seq_len
    return run.cell.seq_len
