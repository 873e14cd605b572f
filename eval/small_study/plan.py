"""Plan the small study: its questions, models, seeds, sizes, and what its runs are told."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cat_lm.config import RunConfig, changed_values, load_config
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from cat_lm.core.readers import Versioned, check_shape, read_json, read_object, read_yaml
from eval.small_study.questions import NONE, QUESTIONS, YARN, Question

ROOT = Path(__file__).resolve().parents[2]  # of the checkout; all commands run there
CONFIGS = Path("configs/study")  # a file for each model, and bases for each size
SEEDS = (0, 1, 2)
TUNING_SEED = 1000  # the first of the runs that choose a rate; no --seeds may be one of them
SETTINGS = "settings.json"  # in a study's folder: what decides its numbers
WITH_YARN = f"{NONE},{YARN}"
# Of eval.length_sweep -> those beside none for rotary positions.
METHODS = {NONE: 0, "paper": 1, "all": 3, WITH_YARN: 1}


@dataclasses.dataclass(frozen=True)
class Size:
    """A form of the study.

    Attributes:
        vocabulary: of the sentencepiece tokenizer that is trained on the text.
        methods: position scaling of the sweep where the question compares none, but shows it, in
            the words of eval.length_sweep.
        documents: held-out ones that are scored, where no number is given.
        parallel: whether several runs share the machine, a thread each.
    """

    name: str
    vocabulary: int
    methods: str
    documents: int
    parallel: bool


SIZES = {
    # Of the standard library without codec tables, some 164 held-out files are long enough.
    "cpu": Size("cpu", 2048, "paper", 150, parallel=True),
    # It has few files of 4,096 tokens.
    "gpu": Size("gpu", 8192, "all", 80, parallel=False),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of the study: a model with a seed.

    Attributes:
        rate: of a run that is trained to choose a rate, and not measured; None for the others.
    """

    model: str
    seed: int
    folder: Path
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-seed{self.seed}" if self.rate is None else self.folder.name


@dataclasses.dataclass(frozen=True)
class Study:
    """All that is to be run, and where.

    Attributes:
        question: a name of `QUESTIONS`.
        tokens: training tokens of a run; None: as the configurations say.
        documents: held-out ones that are scored of each text; None: the size's.
        held_out: further prepared folders whose validation splits are scored beside the data's.
        rates: learning rates to choose among for each model; none: the configurations'.
        tuning_seeds: how many runs there are of a model at each of them.
        chosen: model -> the rate that was chosen; empty before.
        reuse: folders of other studies, whose trainings are taken over where they are the same.
    """

    size: Size
    models: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    data: Path
    tokens: int | None = None
    question: str = "variants"
    documents: int | None = None
    held_out: tuple[Path, ...] = ()
    rates: tuple[float, ...] = ()
    tuning_seeds: int = 1
    chosen: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reuse: tuple[Path, ...] = ()

    def jobs(self) -> list[Job]:
        """Seed by seed, so that all models have one run before any has two."""
        return [
            Job(model, seed, self.out / "runs" / f"{model}-seed{seed}")
            for seed in self.seeds
            for model in self.models
        ]

    def tuning_jobs(self, tried: Mapping[str, tuple[float, ...]] | None = None) -> list[Job]:
        """The runs that choose rates: of the study's rates, or of those tried for each model."""
        return [
            Job(model, seed, self.out / "tuning" / f"{model}-lr{rate:g}{suffix}", rate)
            for model in self.models
            for rate in (tried[model] if tried else self.rates)
            for seed in tuning_seeds(self.tuning_seeds)
            # The name that a study of one such seed gives it, for --reuse.
            for suffix in ("" if seed == TUNING_SEED else f"-seed{seed}",)
        ]

    @property
    def asked(self) -> Question:
        return QUESTIONS[self.question]

    @property
    def contrasts(self) -> list[tuple[str, str]]:
        """Those of the question that have both of their models here."""
        return [pair for pair in self.asked.contrasts if {*pair} <= {*self.models}]

    @property
    def interactions(self) -> list[tuple[tuple[str, str], tuple[str, str]]]:
        """Those of the question that have all of their models here."""
        asked = self.asked.interactions
        return [pair for pair in asked if {*pair[0], *pair[1]} <= {*self.models}]

    def texts(self) -> dict[str, Path]:
        """What a sweep is called in a run's folder -> the prepared data whose text it scores."""
        return {"": self.data} | {folder.name: folder for folder in self.held_out}

    def config_file(self, model: str) -> Path:
        return CONFIGS / f"{model}.yaml"

    def base_file(self, model: str) -> Path:
        """Name the model's base of this size, which its own file names for a CPU."""
        own = read_yaml(ROOT / self.config_file(model), "configuration file")["base"]
        return CONFIGS / f"{own.removesuffix('_cpu.yaml')}_{self.size.name}.yaml"

    def overrides(self, job: Job) -> list[str]:
        """Set the study's values on top of the model's file, for a command that runs in ROOT."""
        return [f"base={self.base_file(job.model)}", *self._values(job)]

    def _values(self, job: Job) -> list[str]:
        budget = []
        if self.tokens is not None:
            # The warm-up keeps its share of the run.
            budget = [f"train.max_tokens={self.tokens}", "optimizer.warmup_steps=null"]
            budget.append(f"optimizer.warmup_tokens={self.tokens // 20}")
        rate = job.rate or self.chosen.get(job.model)
        if rate is not None:
            own = self._loaded(job.model, []).optimizer
            # The schedule keeps its shape.
            budget += [f"optimizer.lr={rate}", f"optimizer.min_lr={rate * own.min_lr / own.lr}"]
        return [
            f"data.path={self.data}",
            f"train.seed={job.seed}",
            f"train.output_dir={job.folder}",
            *budget,
        ]

    def config(self, job: Job) -> RunConfig:
        return self._loaded(job.model, self._values(job))

    def _loaded(self, model: str, values: list[str]) -> RunConfig:
        """Load a model's configuration, in any working folder."""
        base = f"base={ROOT / self.base_file(model)}"
        return load_config(ROOT / self.config_file(model), [base, *values])

    @functools.cached_property
    def trained_length(self) -> int:
        """The context length that all models are trained at."""
        return self.config(self.jobs()[0]).data.context_length

    def lengths(self) -> list[int]:
        return [int(factor * self.trained_length) for factor in self.asked.factors]

    def sweep_tokens(self) -> int:
        """Held-out tokens that are scored of a text at every length."""
        return (self.documents or self.size.documents) * max(self.lengths())

    @property
    def methods(self) -> str:
        """Name the position scaling of the sweeps, in the words of eval.length_sweep."""
        if YARN in self.asked.beyond:
            return WITH_YARN
        return self.size.methods if self.asked.scaled else NONE

    def methods_of(self, job: Job) -> str:
        """Name those of a run, which may have no rotary positions to scale."""
        if self.methods != WITH_YARN:
            return self.methods
        config = self.config(job)
        facts = config.architecture.summary(config.model).facts
        return WITH_YARN if facts.get("position_embedding") == "rope" else NONE

    def columns(self) -> list[tuple[int, str]]:
        """Return lengths at which losses are compared, each with how positions are read there."""
        longest = max(self.lengths())
        beyond = self.asked.beyond if longest > self.trained_length else ()
        return [(self.trained_length, NONE), *((longest, method) for method in beyond)]

    @functools.cached_property
    def skip_tokens(self) -> int:
        """Count the data's first held-out tokens, which rates are chosen on and none is scored on.

        Raises UserError where a model's configuration validates on all held-out tokens.
        """
        found = []
        for model in self.asked.models:
            most = self.config(Job(model, 0, self.out)).validation.max_tokens
            if most is None:
                raise UserError(
                    f"{self.config_file(model)}: has no validation.max_tokens; the held-out text "
                    "behind them is scored"
                )
            found.append(most)
        return max(found)

    def places(self) -> list[tuple[tuple[str, ...], int, str]]:
        """Return what is compared on a text: models, length, and how positions are read there.

        The models are two, four of a difference of differences, or one, whose loss there is
        compared with its own at the trained length.
        """
        scaled = {
            model
            for model in self.models
            if YARN in self.methods_of(Job(model, 0, self.out)).split(",")
        }
        pairs = [*self.contrasts, *((*a, *b) for a, b in self.interactions)]
        alone = [(model,) for model in self.models if self.asked.growth]
        # Where none of them has positions to scale, a second way of reading is the first.
        once = len(self.asked.beyond) == 1
        return [
            (models, length, method)
            for length, method in self.columns()
            for models in (*pairs, *(alone if length > self.trained_length else ()))
            if method == NONE or once or scaled.intersection(models)
        ]

    def comparisons(self) -> int:
        """Count all that are made together, which intervals are corrected for."""
        return len(self.places()) * len(self.texts())

    def scored_tokens(self) -> int:
        """Held-out tokens that a finished run is scored on, over all lengths, methods and texts."""
        return len(self.texts()) * self.cells() * self.sweep_tokens()

    def cells(self) -> int:
        """Those that a sweep of a model with rotary positions computes."""
        scaled = [factor for factor in self.asked.factors if factor > 1]
        return len(self.asked.factors) + len(scaled) * METHODS[self.methods]

    def settings(self, fingerprints: Mapping[str, str]) -> dict[str, Any]:
        """Gather what decides the numbers; one folder holds runs of one such setting only.

        Args:
            fingerprints: of the prepared data, by the names of `texts`.
        """
        fingerprint, *_ = fingerprints.values()
        held_out = {name: value for name, value in fingerprints.items() if name}
        configs = {}
        for model in self.asked.models:
            values = deciding(self.config(Job(model, 0, self.out)))
            values["train"].pop("seed")
            if self.rates:
                values["optimizer"] |= {"lr": list(self.rates), "min_lr": None}
            configs[model] = values
        return {
            "format": 1,
            "question": self.question,
            "contrasts": [list(pair) for pair in self.asked.contrasts],
            "interactions": [[list(one) for one in pair] for pair in self.asked.interactions],
            "size": self.size.name,
            "configs": configs,
            "tuning_seeds": self.tuning_seeds,
            "data_fingerprint": fingerprint,
            "lengths": self.lengths(),
            "methods": self.methods,
            "beyond": list(self.asked.beyond),
            "growth": self.asked.growth,
            "skip_tokens": self.skip_tokens,
            "sweep_tokens": self.sweep_tokens(),
            "held_out": held_out,
        }


def tuning_seeds(count: int) -> range:
    """Return the seeds of the runs that choose a rate."""
    return range(TUNING_SEED, TUNING_SEED + count)


def deciding(config: RunConfig) -> dict[str, Any]:
    """Return the values that decide a training's numbers: no places, nothing that is printed."""
    values = config.model_dump(mode="json")
    values["data"].pop("path")
    for section in ("logging", "checkpoint"):
        values.pop(section)
    for key in ("output_dir", "resume", "log_every_steps"):
        values["train"].pop(key)
    return values


class _Settings(Versioned):
    """Hold what `--reuse` reads of another study's settings."""

    data_fingerprint: str


def read_fingerprint(folder: Path) -> str:
    """Read the fingerprint of the text of the study in a folder. Raises UserError."""
    return read_json(folder / SETTINGS, _Settings).data_fingerprint


def check(study: Study, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """The study's settings, compared with those that are in its folder.

    Raises UserError where the folder holds runs of a study with other settings.
    """
    path = study.out / SETTINGS
    settings = study.settings(fingerprints)
    if not path.is_file():
        return settings
    advice = f"remove {study.out}, or give another --out"
    there = read_object(path, advice)
    if not there.keys() & settings.keys():
        raise UserError(f"{path}: is of no study; move it away, or give another --out")
    check_shape(there, _Settings, str(path), advice)
    if changes := changed_values(there, settings):
        # Of two values, one of which may follow from the other, a number says more than null.
        name = min(changes, key=lambda name: None in changes[name])
        old, new = changes[name]
        raise UserError(
            f"--out {study.out}: holds a study with another {name} ({old}, now {new}); give "
            f"another folder, or remove this one"
        )
    return settings


def claim(study: Study, fingerprints: Mapping[str, str]) -> None:
    """Writes the settings into the study's folder, after `check`."""
    write_json(study.out / SETTINGS, check(study, fingerprints))
