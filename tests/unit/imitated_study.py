"""Stands for the trainings, exports and sweeps of a study, at once."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors.numpy import save_file

from cat_lm.config import load_config
from cat_lm.core.files import write_json
from eval.common.models import folder_sha256
from eval.small_study.execute import Workers
from eval.small_study.plan import ROOT
from tests.unit.calls import call_main

LENGTHS = (64, 128, 256, 512, 1024)


class Imitation:
    """Stands for `Workers.process`: leaves what the real commands leave, at once."""

    LOSS: ClassVar = {"pythia": 4.0, "cat_rope": 3.8, "canon_b": 4.001}

    best_rate = 3e-3
    precision = "fp32"

    def __init__(self, fails: str = "", diverges: str = "") -> None:
        self.fails, self.diverges, self.calls = fails, diverges, []
        self.lock = threading.Lock()

    def __call__(self, workers: Workers, arguments: list[str], log: Path) -> int:
        text = " ".join(arguments)
        with self.lock:
            self.calls.append(text)
        if self.fails and re.search(self.fails, text):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"$ {text}\nTraceback:\nValueError: no such thing\n", encoding="utf-8")
            return 1
        if arguments[0] == "train.py":
            return self.train(arguments)
        if arguments[1] == "cat_lm.export":
            (Path(arguments[3])).mkdir(exist_ok=True)
            write_json(Path(arguments[3]) / "export.json", {"format": 1, "parameters": 1000})
            config = {"model_type": "gpt_neox", "run": Path(arguments[2]).name}
            write_json(Path(arguments[3]) / "config.json", config)
            save_file({"weight": np.zeros(1)}, Path(arguments[3]) / "model.safetensors")
            return 0
        asked = arguments[arguments.index("--methods") + 1]
        methods = ("none", "pi+temperature") if asked == "paper" else asked.split(",")
        self.sweep(Path(arguments[2]), Path(arguments[-1]), methods)
        return 0

    def validation(self, config) -> float:
        return 4.0 + abs(math.log10(config.optimizer.lr / self.best_rate))

    def train(self, arguments: list[str]) -> int:
        # As the real one, which decides what `auto` is and writes that.
        config = load_config(ROOT / arguments[1], arguments[2:]).with_precision(self.precision)
        run = Path(config.train.output_dir)
        run.mkdir(parents=True, exist_ok=True)
        if any(run.glob("checkpoints/step-*")):
            return 0  # finished before
        config.save(run / "config.yaml")
        bad = bool(self.diverges) and self.diverges in run.name and "trial" not in str(run)
        speed = {"tokens_per_second": 5000.0, "step_seconds": 0.01}
        with open(run / "metrics.jsonl", "w", encoding="utf-8") as file:
            for step in range(1, 9):
                record = {"step": step, "tokens": 2048 * step, "loss": 5.0, **speed}
                record |= {"loss": None, "skipped": True} if bad and step > 4 else {}
                file.write(json.dumps(record) + "\n")
            if not bad:
                values = {
                    "val_loss": self.validation(config),
                    "val_perplexity": 54.6,
                    "val_bits_per_byte": 2.0,
                }
                file.write(json.dumps({"step": 8, "tokens": 16384, **values}) + "\n")
        return 2 if bad else 0

    @staticmethod
    def nlls(model: str, loss: float) -> list[float]:
        """Eight documents, easy and hard; one model's are not the others' plus a constant."""
        own = 0.02 if model == "canon_b" else 0.0
        return [1024 * (loss + number / 8 + own * (-1) ** number) for number in range(8)]

    def sweep(self, run: Path, out: Path, methods: Sequence[str]) -> None:
        model, seed = run.name.split("-seed")
        rows = []
        for method in methods:
            slope = 0.05 if method == "yarn" else 0.1
            for length in LENGTHS:
                loss = self.LOSS[model] + 0.01 * int(seed) + slope * math.log2(length / 128)
                row = {"label": run.name, "length": length, "method": method, "loss": loss}
                row |= {"perplexity": math.exp(loss), "bits_per_byte": loss / 3, "tokens": 4096}
                row |= {"tokens_sha256": "a" * 64, "standard_error": 0.1, "groups": 9}
                row |= {"model_sha256": folder_sha256(run / "model")}
                row |= {"group_kind": "documents", "training_length": 128, "document_count": 9}
                row |= {"stride": length, "documents": "per-document", "dtype": "float32"}
                row |= {"factor": 1.0, "temperature_scope": "logits", "positions": []}
                row |= {"document_tokens": [1024] * 8, "document_nlls": self.nlls(model, loss)}
                rows.append(row)
        result = {"format": 1, "text": "x", "protocol": {"windows": "x"}, "command": "x"}
        write_json(out / "length_sweep.json", result | {"rows": rows})


def run_command(
    main: Callable[[], None], monkeypatch, capsys, imitation: Imitation, *arguments: object
) -> tuple[int, str, str]:
    """Call a study's command in this process: its exit code, stdout and stderr."""
    monkeypatch.setattr(Workers, "process", lambda *args: imitation(*args))
    return call_main(main, monkeypatch, capsys, "small_study", *arguments)
