"""What models lose that read chosen blocks of keys, trained with the landmarks' loss and without.

The quickstart's CAT is trained on all keys (`dense`) or with a loss for its landmarks in addition
(`guided`), without positions and with rotary ones, and is read at four times its training length
with the blocks that selectors choose. `random` and `local`, the blocks just before, are controls:
a selector that is not better than both finds nothing; `oracle` chooses by attention's own weight.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.config import RunConfig, load_config
from cat_lm.core.errors import UserError
from cat_lm.core.readers import read_object
from cat_lm.data.manifest import read_manifest
from eval.lab.contrasts import compare_pairs
from eval.lab.frame import Record
from eval.lab.places import Place, Run
from eval.lab.study import Rows, Study, StudyOptions
from eval.landmark.diagnose import retrieval_points
from eval.landmark.options import LEARNED, SELECTORS
from eval.landmark.sweep import DENSE
from eval.language import cell as language
from eval.language.cell import check_command
from eval.language.grids import Question, check, texts
from eval.language.models import ROOT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = ROOT / "configs/quickstart.yaml"
POSITIONS, WAYS = ("none", "rope"), ("dense", "guided")  # WAYS are values of train.landmark_loss.
# Recipe -> changes of the configuration.
RECIPES = {
    "cpu": (),
    "smoke": (
        *("model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
        *("data.context_length=32", "train.max_steps=2", "optimizer.warmup_steps=1"),
        *("train.global_batch_size=2", "train.micro_batch_size=2", "validation.max_tokens=64"),
    ),
}
TRAINED = "as trained"  # name of the row of validation losses
RATE = 2e-3  # learning rate of the quickstart
MODELS = tuple(f"{position}-{way}" for position in POSITIONS for way in WAYS)
NAMES = {"none": "no positions", "rope": "RoPE"}
# Compared at every number of blocks; of trainings, the ways.
PAIRS = (
    *((one, control) for one in ("box", "ssm") for control in ("random", "local")),
    *(("ssm", other) for other in ("box", "learned", "exponential", "oracle")),
)
# What cells of a scale have; without lessons, selectors that learn are left out.
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {"lengths": (4 * 32,), "documents": 4, "block": 4, "diagnosed": (4, 8)},
    "cpu": {"lengths": (4 * 256,), "documents": 54, "lessons": 262_144},
}
SEEDS = {"smoke": 2, "cpu": 3}


@dataclass(frozen=True)
class Cell(language.Cell):
    """Everything that determines the results of a model with landmarks.

    Attributes:
        model: POSITION-WAY, with values of POSITIONS and WAYS.
        recipe: a key of RECIPES.
        lengths: the length at which the model is scored.
        documents: number of windows of this length.
        block: block size of the landmarks and of the sweep.
        diagnosed: block sizes for the diagnosis.
        top_k: numbers of selected blocks in the sweep.
        select: selectors in the sweep.
        lessons: number of tokens to train selectors on; 0: no selector is trained.
    """

    block: int = 16
    diagnosed: tuple[int, ...] = (8, 16, 32, 64)
    top_k: tuple[int, ...] = (2, 4, 6)
    select: tuple[str, ...] = ()
    lessons: int = 0

    def _config(self, output_dir: str = "runs/study") -> RunConfig:
        position, way = self.model.split("-")
        changes = {
            "model.attention": "landmark",
            "model.attention_options": f"{{block: {self.block}, top_k: 4}}",
            "model.position_embedding": position,
            "optimizer.lr": self.lr,
            "train.landmark_loss": way,
            "train.seed": self.seed,
            "data.path": self.texts[0][0],
            "train.output_dir": output_dir,
        }
        given = [f"{key}={value}" for key, value in changes.items()]
        return load_config(CONFIG, [*RECIPES[self.recipe], *given])

    def _measure_run(self, run: Path, device: str) -> dict[str, Any]:
        out, log, (length,) = run / "landmark", run.with_name(f"{run.name}.log"), self.lengths
        data = self.texts[0][0]
        common = ["--data", data, "--out", str(out), "--device", device]
        words = ["--lengths", str(length), "--blocks", str(self.block)]
        words += ["--top-k", ",".join(map(str, self.top_k)), "--select", ",".join(self.select)]
        words += ["--max-tokens", str(self.documents * length)]
        words += ["--calibrate", data, "--tokens", str(self.lessons)] if self.lessons else []
        program = ["-m", "eval.landmark"]
        check_command([*program, "sweep", str(run), *common, *words], log, device)
        words = ["--length", str(length), "--blocks", ",".join(map(str, self.diagnosed))]
        check_command([*program, "diagnose", str(run), *common, *words], log, device)
        rows = [
            row | {"text": Path(data).name}
            for row in read_object(out / "landmark_sweep.json")["rows"]
        ]
        diagnosis = read_object(out / "diagnosis.json")
        return {"rows": rows, "diagnosis": {key: diagnosis[key] for key in ("rows", "means")}}

    @property
    def tested_rows(self) -> float:
        """Return the rows of the trained length that cost as validations and the sweep do."""
        return super().tested_rows * (1 + len(self.select) * len(self.top_k))


def plan_places(asked: StudyOptions) -> list[Place]:
    """Return a place for each model's training, and each of its selectors.

    Raises:
        UserError: a model that there is not, or text that is too short.
    """
    sizes, seeds = SCALES[asked.scale], asked.seeds or SEEDS[asked.scale]
    for model in asked.models:
        if model not in MODELS:
            raise UserError(f"--models {model}: choose among {', '.join(MODELS)}")
    data = texts(tuple(asked.more.get("data", ())), "landmark", 4096, held_out=0.02)
    if len(data) > 1:
        raise UserError("--data: name one folder")
    (folder, _), (length,) = *data, sizes["lengths"]
    there = read_manifest(folder)["splits"]["validation"]["tokens"]
    if there <= length:
        raise UserError(
            f"--data {folder}: its validation split has {there:,} tokens, models are read at "
            f"{length:,}; hold out more text"
        )
    select = tuple(name for name in SELECTORS if "lessons" in sizes or name not in LEARNED)
    found = []
    for model in asked.models or MODELS:
        position, way = model.split("-")
        cell = Cell(model, asked.scale, data, RATE, select=select, **sizes)
        runs = [Run(NAMES[position], f"{way}, {length:,} tokens", name, cell) for name in select]
        runs.append(Run(TRAINED, NAMES[position], way, cell))
        found += [Place(run, (RATE,), seeds) for run in runs]
    return found


def measured_values(run: Run, record: Record) -> dict[int, dict[str, Any]]:
    """Return the validation loss of training; or by the number of blocks what a selector loses.

    The latter is to all keys, in nats a token.
    """
    if run.row == TRAINED:
        loss = math.nan if record["loss"] is None else record["loss"]
        return {run.cell.seq_len: {"value": loss}}
    if record["diverged"]:
        return {top_k: {"value": math.nan} for top_k in run.cell.top_k}
    (dense,) = (row["loss"] for row in record["rows"] if row["select"] == DENSE)
    found = {}
    for row in record["rows"]:
        if row["select"] == run.line:
            measured = {"value": row["loss"] - dense, "loss": row["loss"], "share": row["share"]}
            if row["over_dense_error"] is not None:  # The error is that of a ratio of perplexities.
                measured["error"] = row["over_dense_error"] / (1 + row["over_dense"])
            found[row["top_k"]] = measured
    return found


def collect_extra(rows: Rows) -> dict[str, Any]:
    """Return how often blocks are found: in bins over heads, and means over them for each run."""
    heads: dict[str, list[Record]] = {}
    means = []
    for run, record in rows:
        if run.row == TRAINED and not record["diverged"]:
            name = f"{run.column}, {run.line}"
            heads.setdefault(name, []).extend(record["diagnosis"]["rows"])
            label = {"label": f"{name}, seed {run.cell.seed}"}
            means += [label | row for row in record["diagnosis"]["means"]]
    return {
        # The place on the axis of the figure's strips.
        "training_length": max(rows[0][0].cell.top_k),
        "retrieval": {name: retrieval_points(of_model) for name, of_model in heads.items()},
        "diagnoses": means,
    }


def pictures(record: Record) -> dict[str, Figure]:
    """Draw how often a match's block is chosen against SNR²."""
    from eval.landmark.figures import retrieval_figure

    found = record["extra"].get("retrieval")
    return {"retrieval": retrieval_figure(found)} if found else {}


ENTRY = Study(
    "landmark",
    "what models lose that read chosen blocks of keys",
    plan_places,
    measured_values,
    source="CAT, section 7",
    notes="Every query reads its own block, the one before it, and the chosen ones. A selector "
    "that is not better than random blocks and the ones just before says nothing for landmarks.",
    measures={
        "": "loss over that with all keys, nats a token",
        TRAINED: "validation loss, nats a token",
    },
    also={
        "loss": "loss, nats a token",
        "error": "standard error over documents of the difference to all keys",
        "share": "keys read, of all",
    },
    axis="top-k",
    figure="losses",
    contrasts=functools.partial(compare_pairs, pairs=(*PAIRS, WAYS[::-1])),
    extra=collect_extra,
    pictures=pictures,
    check=functools.partial(check, Question((), documents=0)),
    options=("models", "data"),
    scales=tuple(SCALES),
)
