"""A language model as a cell: trained by `train.py`, exported, and scored on held-out documents.

Trainings lie in OUT/runs, where those that were stopped are resumed from their checkpoints and
those of other studies in the same OUT are found; what is measured of them lies in OUT/cells.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cat_lm.config import RunConfig, load_config
from cat_lm.core.errors import UserError
from cat_lm.core.files import replace_nonfinite
from cat_lm.core.readers import Versioned
from cat_lm.pretrained.loading import quiet_transformers
from eval.common.interrupts import Stopped, run_to_end
from eval.common.precision import evaluation_dtype
from eval.common.result_files import read_export, read_metrics, read_sweep
from eval.common.runs import EVALUATION
from eval.lab import cell
from eval.lab.store import CellStore, key_hash
from eval.language.attention import sharpness
from eval.language.models import ROOT, configuration, deciding
from eval.language.recalled import score_recalled

NONE, YARN, PAPER = "none", "yarn", "paper"  # Methods of eval.length_sweep.
_TRIAL_STEPS = 12
_VOCABULARY = 2048  # The vocabulary size that estimates assume.


class _Training(Versioned):
    """The results of a finished training, and of its export."""

    diverged: bool
    loss: float | None  # Nats per token at the last validation.
    precision: str
    parameters: int | None
    tokens_per_second: float | None


class _Record(_Training):
    cell: dict[str, Any]
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    facts: dict[str, float | None]


@dataclass(frozen=True)
class Cell(cell.Cell):
    """All values that decide a language model's result.

    Attributes:
        model: name of a model of configs/study/models.yaml.
        recipe: `cpu` or `gpu`.
        texts: (folder, fingerprint) of prepared data; it is trained on the first, and scored on
            documents that all of them hold out.
        tokens: number of training tokens; None: as the recipe says.
        lengths: context lengths to evaluate at; empty for training only.
        methods: methods of eval.length_sweep for lengths beyond the trained one.
        documents: number of documents of each text to score, each at least as long as the largest
            length.
        skip: tokens at the beginning of the first text's split, which rates are chosen on.
        recall, attention: whether the recall of N-grams and the attention statistics are measured.
    """

    model: str
    recipe: str
    texts: tuple[tuple[str, str], ...]
    lr: float
    seed: int = 0
    tokens: int | None = None
    lengths: tuple[int, ...] = ()
    methods: str = NONE
    documents: int = 0
    skip: int = 0
    recall: bool = False
    attention: bool = False
    shape: ClassVar[type[Versioned]] = _Record

    @property
    def config(self) -> RunConfig:
        """Return the training configuration without its folder."""
        return self._config()

    def _config(self, output_dir: str = "runs/study") -> RunConfig:
        given = self.model, self.recipe, self.texts[0][0], self.tokens, self.lr, self.seed
        return configuration(*given, output_dir)

    @property
    def task(self) -> str:
        return "text"

    @property
    def mixer(self) -> str:
        return self.model

    @property
    def d_model(self) -> int:
        return self.config.model.hidden_size

    @property
    def seq_len(self) -> int:
        return self.config.data.context_length

    def resolved(self) -> dict[str, Any]:
        return {"config": deciding(self.config)}

    def choosing(self) -> Cell:
        return dataclasses.replace(self, lengths=(), methods=NONE, recall=False, attention=False)

    def score(self, record: dict[str, Any]) -> float:
        """Return minus the last validation loss."""
        return float("nan") if record["loss"] is None else -record["loss"]

    def summary(self, record: dict[str, Any]) -> str:
        loss = record["loss"]
        return "no finite validation loss" if loss is None else f"validation loss {loss:.3f}"

    def run_in(self, folder: Path, device: str, *, quiet: bool = False) -> dict[str, Any]:
        """Train and measure in the study's folder; finished parts are reused.

        A training that ends because its steps are not finite is a result as well.

        Raises:
            UserError: a command failed, or runs are of other weights than their exports.
        """
        quiet_transformers()
        folder = folder.resolve()  # Commands run in the checkout.
        training, found = self._train_run(folder, device), {"rows": []}
        if not training["diverged"]:
            found |= self._measure_run(folder / "runs" / self._name, device)
        found["facts"] = self._facts(training)
        return {"cell": self.key(), **self.resolved(), **training, **found}

    def _measure_run(self, run: Path, device: str) -> dict[str, Any]:
        """Measure a finished run; `rows` of what is found are a sweep's."""
        found: dict[str, Any] = {"rows": []}
        if not self.lengths:
            return found
        for number, (text, _) in enumerate(self.texts):
            found["rows"] += self._sweep_text(run, Path(text), number == 0, device)
        model, data, longest = run / "model", Path(self.texts[0][0]), max(self.lengths)
        if self.recall:
            dtype = evaluation_dtype("auto", [model], device)
            numbers = (self.documents, longest, self.seq_len, self.skip)
            found["recall"] = score_recalled(model, dtype, device, data, *numbers)
        if self.attention:
            found["attention"] = sharpness(model, device, data, self.seq_len, self.skip)
        return found

    def _facts(self, training: dict[str, Any]) -> dict[str, float | None]:
        """Return the model's size, cost and decoding state (one sequence in bf16) for reports."""
        import torch

        from cat_lm.counts import state_bytes
        from cat_lm.data.manifest import read_manifest
        from cat_lm.training.estimate import flops_per_token, meta_model

        found = {"parameters": training["parameters"]}
        found["tokens/s"] = training["tokens_per_second"] and round(training["tokens_per_second"])
        if self.recall:
            vocabulary = read_manifest(self.texts[0][0])["tokenizer"]["vocab_size"]
            found["FLOPs a token"] = round(flops_per_token(self.config, vocabulary))
            for length in (self.seq_len, max(self.lengths)):
                model = meta_model(self.config, vocabulary)  # The count changes the model's dtypes.
                size = state_bytes(model, length, torch.bfloat16)
                found[f"bytes of state at {length:,}"] = round(size)
        return found

    @property
    def _name(self) -> str:
        values = {"config": deciding(self.config), "data": self.texts[0][1]}
        return f"{self.model}-lr{self.lr:g}-seed{self.seed}-{key_hash(values, digits=8)}"

    def _train_run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train and export, or return the stored results of the same training."""
        store, name = CellStore(folder / "runs", _Training), self._name
        if (found := store.read(name)) is not None:
            return found
        run, log = folder / "runs" / name, folder / "runs" / f"{name}.log"
        config = self._config(str(run))
        config.save(file := folder / "configs" / f"{name}.yaml")
        code = _command(["train.py", str(file), "train.resume=auto"], log, device)
        is_diverged = bool(code) and _diverged(run)
        if code and not is_diverged:
            raise UserError(f"{name}: train.py ended with code {code}, see {log}: {_last(log)}")
        if not is_diverged:
            check_command(["-m", "cat_lm.export", str(run), str(run / "model")], log, device)
        records = read_metrics(run / "metrics.jsonl")
        losses = [r["val_loss"] for r in records if "val_loss" in r]
        speeds = [r["tokens_per_second"] for r in records if r.get("tokens_per_second")]
        found = {
            "diverged": is_diverged,
            "loss": replace_nonfinite(losses[-1]) if losses and not is_diverged else None,
            "precision": load_config(run / "config.yaml").train.precision,
            "parameters": read_export(run / "model" / "export.json").get("parameters"),
            "tokens_per_second": statistics.median(speeds) if speeds else None,
        }
        store.write(name, found)
        return found

    def _sweep_text(
        self, run: Path, data: Path, is_trained: bool, device: str
    ) -> list[dict[str, Any]]:
        """Score a text's documents at all lengths, with the same tokens of each document."""
        out = run / (EVALUATION if is_trained else f"{EVALUATION}-{data.name}")
        longest, log = str(max(self.lengths)), run.with_name(f"{run.name}.log")
        words = ["--data", str(data), "--lengths", ",".join(map(str, self.lengths))]
        words += ["--methods", self.methods, "--documents", "per-document"]
        words += ["--max-document-tokens", longest, "--out", str(out), "--device", device]
        words += ["--max-tokens", str(self.documents * max(self.lengths))]
        words += ["--skip-tokens", str(self.skip)] if is_trained else []
        check_command(["-m", "eval.length_sweep", str(run), *words], log, device)
        return [
            {name: row[name] for name in ("length", "method", "loss", "tokens_sha256")}
            | {"text": data.name}
            | {"documents": {"tokens": row["document_tokens"], "nats": row["document_nlls"]}}
            for row in read_sweep(out / "length_sweep.json")["rows"]
        ]

    @property
    def all_steps(self) -> int:
        return self.config.total_steps

    @property
    def tested_rows(self) -> float:
        """Return the number of training-length rows that cost as much as validations and sweeps."""
        from cat_lm import counts
        from cat_lm.training.estimate import meta_model

        config = self.config
        validations = config.total_steps / config.validation.every_steps
        tokens = validations * (config.validation.max_tokens or 0)
        if self.lengths:
            model = meta_model(config, _VOCABULARY)
            flops = {n: counts.flops_per_token(model, n) for n in (self.seq_len, *self.lengths)}
            scaled = [n for n in self.lengths if n > self.seq_len and self.methods != NONE]
            cost = sum(flops[n] for n in (*self.lengths, *scaled)) / flops[self.seq_len]
            tokens += cost * self.documents * max(self.lengths) * len(self.texts)
        return tokens / self.seq_len

    def timed(self) -> Cell:
        return dataclasses.replace(self, lr=1e-3, seed=0)

    def seconds(self, device: str) -> tuple[float, float]:
        """Measure the seconds of a step in a short training, with a share of the overhead."""
        config = self.config
        variant = config.architecture.summary(config.model).variant
        kind = (config.model.architecture, variant, self.recipe, self.texts, device)
        rate, start = _SPEEDS.get(kind) or _SPEEDS.setdefault(kind, _speed(config, device))
        programs = 2 + len(self.texts) if self.lengths else 1
        step = self.config.tokens_per_step / rate + programs * start / self.all_steps
        return step, self.seq_len / rate


_SPEEDS: dict[tuple[Any, ...], tuple[float, float]] = {}  # Model configuration -> see `_speed`.


def _speed(config: RunConfig, device: str) -> tuple[float, float]:
    """Return a training's tokens per second, and the seconds spent outside of its steps."""
    values = config.model_dump(mode="json")
    values["train"] |= {"max_steps": _TRIAL_STEPS, "max_tokens": None}
    values["optimizer"] |= {"warmup_steps": 0, "warmup_tokens": None}
    values["validation"] |= {"every_steps": 1000, "max_tokens": 4096}
    with tempfile.TemporaryDirectory() as folder:
        run, log = Path(folder) / "run", Path(folder) / "log"
        values["train"]["output_dir"] = str(run)
        RunConfig.model_validate(values).save(file := Path(folder) / "trial.yaml")
        begin = time.perf_counter()
        check_command(["train.py", str(file)], log, device)
        wall = time.perf_counter() - begin
        records = [r for r in read_metrics(run / "metrics.jsonl") if r.get("step_seconds")]
    rates = [r["tokens_per_second"] for r in records if r.get("tokens_per_second")]
    return statistics.median(rates), max(0.0, wall - sum(r["step_seconds"] for r in records))


def _command(arguments: list[str], log: Path, device: str) -> int:
    """Run `python ARGUMENTS` in the checkout, append its output to a log, and return its exit code.

    The command gets the variables of a launcher, this process: where that is killed, a training
    saves and ends. Its threads do not spin, as they would take the core of another run.
    """
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "study"}
    environment = os.environ | launcher | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if not device.startswith("cuda"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif ":" in device and arguments[0] == "train.py":
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = device.partition(":")[2]
        environment["CUDA_VISIBLE_DEVICES"] = seen[int(number)] if seen[0] else number
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as stream:
        stream.write(f"$ {shlex.join(['python', *arguments])}\n")
        stream.flush()
        words = [sys.executable, *arguments]
        try:
            return run_to_end(words, cwd=ROOT, env=environment, stdout=stream, stderr=stream)
        except Stopped:
            if multiprocessing.parent_process() is not None:
                os._exit(1)  # A pool process would otherwise begin its next cell.
            raise


def check_command(arguments: list[str], log: Path, device: str) -> None:
    """Run a command. Raises UserError where it fails."""
    if code := _command(arguments, log, device):
        what = " ".join(arguments[:2])
        raise UserError(f"{what} ended with code {code}, see {log}: {_last(log)}")


def _last(log: Path) -> str:
    """Return the last line of a failed command's log, which usually is the error."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next(line.strip() for line in reversed(lines) if line.strip())


def _diverged(run: Path) -> bool:
    """Return True if training ended because its last steps were not finite."""
    metrics = run / "metrics.jsonl"
    steps = [r for r in read_metrics(metrics) if "val_loss" not in r] if metrics.is_file() else []
    return bool(steps) and bool(steps[-1].get("skipped"))
