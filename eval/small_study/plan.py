"""Plan the small study: nine models, three seeds, two sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from cat_lm.config import RunConfig, changed_values, load_config
from cat_lm.errors import UserError
from cat_lm.io.files import write_json
from cat_lm.io.readers import read_object

ROOT = Path(__file__).resolve().parents[2]  # of the checkout; all commands run there
CONFIGS = Path("configs/study")  # a file for each model, and one base for each size

# File in configs/study -> what tables and figures call the model, in the order they show.
MODELS = {
    "pythia": "Pythia (RoPE)",
    "nope": "no convolution, NoPE",
    "cat_rope": "CAT, RoPE",
    "cat_nope": "CAT, NoPE",
    "mh_cat_rope": "MH-CAT, RoPE",
    "mh_cat_nope": "MH-CAT, NoPE",
    "cat_v": "CAT on v only, RoPE",
    "cat_k": "CAT on k only, RoPE",
    "canon_b": "depthwise W=4, RoPE",
}
BASELINE = "pythia"
SEEDS = (0, 1, 2)
FACTORS = (0.5, 1, 2, 4, 8)  # of the training length


@dataclasses.dataclass(frozen=True)
class Size:
    """A form of the study.

    Attributes:
        vocabulary: of the sentencepiece tokenizer that is trained on the text.
        methods: position scaling of the sweep, in the words of eval.length_sweep.
        cells: that a sweep of a model with rotary positions computes.
        sweep_tokens: held-out tokens that are scored at every length.
        parallel: whether several runs share the machine, a thread each.
    """

    name: str
    vocabulary: int
    methods: str
    cells: int
    sweep_tokens: int
    parallel: bool


SIZES = {
    "cpu": Size("cpu", 2048, "paper", 8, 65_536, parallel=True),
    "gpu": Size("gpu", 8192, "all", 14, 131_072, parallel=False),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of the study: a model with a seed."""

    model: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.model}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Study:
    """All that is to be run, and where.

    Attributes:
        tokens: training tokens of a run; None: as the configurations say.
    """

    size: Size
    models: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    data: Path
    tokens: int | None = None

    def jobs(self) -> list[Job]:
        """Seed by seed, so that all models have one run before any has two."""
        return [
            Job(model, seed, self.out / "runs" / f"{model}-seed{seed}")
            for seed in self.seeds
            for model in self.models
        ]

    def config_file(self, model: str) -> Path:
        return CONFIGS / f"{model}.yaml"

    def overrides(self, job: Job) -> list[str]:
        """Set the study's values on top of the model's file."""
        budget = []
        if self.tokens is not None:
            # The warm-up keeps its share of the run.
            budget = [f"train.max_tokens={self.tokens}", "optimizer.warmup_steps=null"]
            budget.append(f"optimizer.warmup_tokens={self.tokens // 20}")
        return [
            f"base={CONFIGS / f'base_{self.size.name}.yaml'}",
            f"data.path={self.data}",
            f"train.seed={job.seed}",
            f"train.output_dir={job.folder}",
            *budget,
        ]

    def config(self, job: Job) -> RunConfig:
        return load_config(ROOT / self.config_file(job.model), self.overrides(job))

    def lengths(self) -> list[int]:
        trained = self.config(self.jobs()[0]).data.context_length
        return [int(factor * trained) for factor in FACTORS]

    def settings(self, fingerprint: str) -> dict[str, Any]:
        """Gather what decides the numbers; one folder holds runs of one such setting only.

        Args:
            fingerprint: of the prepared data.
        """
        configs = {}
        for model in MODELS:
            values = self.config(Job(model, 0, self.out)).model_dump(mode="json")
            # Where things lie, and what is only written, changes no number.
            values["data"].pop("path")
            for section in ("logging", "checkpoint"):
                values.pop(section)
            for key in ("output_dir", "resume", "seed", "log_every_steps"):
                values["train"].pop(key)
            configs[model] = values
        return {
            "size": self.size.name,
            "configs": configs,
            "data_fingerprint": fingerprint,
            "lengths": self.lengths(),
            "methods": self.size.methods,
            "sweep_tokens": self.size.sweep_tokens,
        }


def check(study: Study, fingerprint: str) -> dict[str, Any]:
    """The study's settings, compared with those that are in its folder.

    Raises UserError where the folder holds runs of a study with other settings.
    """
    path = study.out / "settings.json"
    settings = study.settings(fingerprint)
    if not path.is_file():
        return settings
    earlier = read_object(path, f"remove {study.out}, or give another --out")
    if not earlier.keys() & settings.keys():
        raise UserError(f"{path}: is of no study; move it away, or give another --out")
    changes = changed_values(earlier, settings)
    # A key that a later version added was not decided otherwise before; null is a decision.
    other = [name for name in changes if _has(earlier, name) and _has(settings, name)]
    if other:
        # Of two values, one of which may follow from the other, a number says more than null.
        name = min(other, key=lambda name: None in changes[name])
        old, new = changes[name]
        raise UserError(
            f"--out {study.out}: holds a study with another {name} ({old}, now {new}); give "
            f"another folder, or remove this one"
        )
    return settings


def claim(study: Study, fingerprint: str) -> None:
    """Writes the settings into the study's folder, after `check`."""
    write_json(study.out / "settings.json", check(study, fingerprint))


def _has(values: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
