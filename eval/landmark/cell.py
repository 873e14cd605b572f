"""A model trained for landmarks as a cell, and what it loses at longer text with chosen blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cat_lm.config import RunConfig, load_config
from cat_lm.core.readers import read_object
from cat_lm.pretrained.loading import quiet_transformers
from eval.landmark.sweep import DENSE
from eval.language import cell
from eval.language.cell import check_command
from eval.language.models import ROOT

CONFIG = ROOT / "configs/quickstart.yaml"
POSITIONS, WAYS = ("none", "rope"), ("dense", "guided")  # the latter of train.landmark_loss
# Recipe -> changes of the configuration.
RECIPES = {
    "cpu": (),
    "smoke": (
        *("model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
        *("data.context_length=32", "train.max_steps=2", "optimizer.warmup_steps=1"),
        *("train.global_batch_size=2", "train.micro_batch_size=2", "validation.max_tokens=64"),
    ),
}


@dataclass(frozen=True)
class Cell(cell.Cell):
    """All that decides the results of a model with landmarks.

    Attributes:
        model: POSITION-WAY, of POSITIONS and WAYS; recipe: of RECIPES.
        lengths: the one at which it is read; documents: windows of that length that are scored.
        block: of its landmarks, and of the sweep; diagnosed: the sizes that are diagnosed.
        top_k, select: of the sweep.
        lessons: tokens that selectors learn from; 0: none learns.
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

    def run_in(self, folder: Path, device: str, *, quiet: bool = False) -> dict[str, Any]:
        """Train and measure in the study's folder; what is finished there is not made again."""
        quiet_transformers()
        training = self._trained(folder, device)
        found: dict[str, Any] = {"rows": [], "diagnosis": {}}
        if not training["diverged"]:
            found = self._measured(folder / "runs" / self._name, device)
        return {"cell": self.key(), **self.resolved(), **training, **found}

    def _measured(self, run: Path, device: str) -> dict[str, Any]:
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
        """Rows of the trained length that cost as much as validations and the sweep do."""
        return super().tested_rows * (1 + len(self.select) * len(self.top_k))


def over_dense(rows: list[dict[str, Any]], select: str) -> dict[int, dict[str, float]]:
    """Return by the number of blocks what a selector loses to all keys, in nats a token.

    Args:
        rows: of one model and length, as `eval.landmark.sweep` gives them.
    """
    (dense,) = (row["loss"] for row in rows if row["select"] == DENSE)
    found = {}
    for row in rows:
        if row["select"] == select:
            measured = {"value": row["loss"] - dense, "loss": row["loss"], "share": row["share"]}
            if row["over_dense_error"] is not None:  # of a perplexity's ratio
                measured["error"] = row["over_dense_error"] / (1 + row["over_dense"])
            found[row["top_k"]] = measured
    return found
