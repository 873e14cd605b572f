"""Losses and gradient norms of short runs of `train.py`, at full precision."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from tests.guards.models import CAT, LANDMARK, LLAMA, MODELS, NEOX, RECURRENT
from tests.guards.processes import Command, Job, run_jobs

STEPS = 12
WORDS = "the a cat sat saw heard on under near mat dog bird tree house and then slept ran 7 12"
DROPOUT = {"hidden_dropout": 0.1}
# Models that have a run of their own; the rest differ from one of these by what values guard.
TRAINED = (
    *("pythia", "pythia_nope", "cat", "cat_nope", "cat_filter_norm", "cat_rms_before"),
    *("cat_l2_after", "cat_rank", "multihead", "maps_v", "depthwise_silu", "canon_abcd"),
    *("exponential", "ssm", "chunk", "multi_token", "landmark", "las", "las_filter"),
    *("tfpp", "tfpp_cat_canon", "gla", "delta_net", "gated_deltanet", "mamba", "mamba2"),
    *("mixer_cat", "mixer_landmark", "mixer_based", "mixer_mamba"),
)
# Name: sections that differ from the base; `ranks`; `stop`, a step to stop at and resume from;
# `start`, a model that is trained for four steps and exported, and whose weights the run takes.
OTHERS: dict[str, dict[str, Any]] = {
    "landmark_dense": {"model": NEOX | CAT | LANDMARK, "train": {"landmark_loss": "dense"}},
    "landmark_guided": {"model": NEOX | CAT | LANDMARK, "train": {"landmark_loss": "guided"}},
    "landmark_calibrate": {
        "model": MODELS["landmark_learned"],
        "train": {"landmark_loss": "calibrate"},
        "optimizer": {"weight_decay": 0.0},
        "start": MODELS["landmark"],
    },
    "zero_0": {"model": NEOX | CAT | DROPOUT, "train": {"zero_stage": 0}},
    "zero_2": {"model": NEOX | CAT | DROPOUT, "train": {"zero_stage": 2}},
    "zero_3": {"model": NEOX | CAT | DROPOUT, "train": {"zero_stage": 3}},
    "bf16": {"model": NEOX | CAT, "train": {"precision": "bf16"}},
    "bf16_zero_0": {"model": NEOX | CAT, "train": {"precision": "bf16", "zero_stage": 0}},
    "checkpointed_activations": {
        "model": LLAMA | CAT | {"attention_dropout": 0.1},
        "train": {"activation_checkpointing": True},
    },
    "documents": {"model": NEOX | CAT, "data": {"mask_documents": True}},
    "documents_mamba2": {"model": MODELS["mamba2"], "data": {"mask_documents": True}},
    "documents_ssm": {"model": MODELS["ssm"], "data": {"mask_documents": True}},
    "best_fit": {"model": NEOX | CAT, "data": {"mask_documents": True, "packing": "best_fit"}},
    "wsd": {
        "model": NEOX | CAT,
        "optimizer": {"schedule": "wsd", "decay_steps": 4, "grad_clip": 0.5},
    },
    "two_ranks_zero_1": {"model": NEOX | CAT, "ranks": 2},
    "two_ranks_zero_2": {"model": MODELS["multihead"], "train": {"zero_stage": 2}, "ranks": 2},
    "two_ranks_zero_3": {"model": LLAMA | CAT, "train": {"zero_stage": 3}, "ranks": 2},
    "sequence_parallel": {"model": NEOX | CAT, "train": {"sequence_parallel": 2}, "ranks": 2},
    "sequence_parallel_canon": {
        "model": MODELS["tfpp_cat_canon"],
        "train": {"sequence_parallel": 2},
        "ranks": 2,
    },
    "resumed": {"model": NEOX | CAT | DROPOUT, "stop": 5},
    "resumed_gla": {
        "model": RECURRENT | {"architecture": "gla", "num_heads": 2},
        "stop": 5,
        "train": {"zero_stage": 2},
    },
}
CASES = {name: {"model": MODELS[name]} for name in TRAINED} | OTHERS


def write_text(folder: Path, documents: int = 200) -> Path:
    """Write a file of sentences whose words are drawn by seed, a blank line between documents."""
    draw, words = random.Random(0), WORDS.split()
    texts = []
    for _ in range(documents):
        lengths = [draw.randint(4, 12) for _ in range(draw.randint(1, 6))]
        texts.append(". ".join(" ".join(draw.choices(words, k=length)) for length in lengths))
    path = folder / "text.txt"
    path.write_text("\n\n".join(texts), encoding="utf-8")
    return path


def preparation(folder: Path, out: Path, *options: str) -> Command:
    """Return the command that prepares the text of `write_text` as bytes."""
    words = ["-m", "data_prep.prepare", "--source", "files", "--path", str(write_text(folder))]
    words += ["--document-separator", r"\n\n", "--tokenizer", "bytes", "--workers", "1"]
    words += ["--validation-fraction", "0.1", "--out", str(out), *options]
    return Command(words, folder / "prepare.log")


def configuration(case: dict[str, Any], data: Path, out: Path) -> dict[str, Any]:
    """Return the configuration of a case."""
    values: dict[str, Any] = {
        "model": case["model"],
        "data": {"path": str(data), "context_length": 64},
        "optimizer": {"lr": 3e-3, "warmup_steps": 3, "weight_decay": 0.1},
        "train": {
            "output_dir": str(out),
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "max_steps": STEPS,
            "precision": "fp32",
            "seed": 1,
        },
        "validation": {"every_steps": 6, "max_tokens": 1024},
        "checkpoint": {"every_steps": 5, "keep_last": 3},
        "logging": {"tensorboard": False},
    }
    for section in ("data", "optimizer", "train"):
        values[section] |= case.get(section, {})
    return values


def training(name: str, data: Path, folder: Path, found: dict[str, Any]) -> Job:
    """Train a case, which may be stopped and resumed, and add its losses to `found`."""
    case = CASES[name]
    path, run, log = folder / f"{name}.yaml", folder / name, folder / f"{name}.log"
    path.write_text(yaml.safe_dump(configuration(case, data, run)), encoding="utf-8")
    words, ranks = ["train.py", str(path)], case.get("ranks", 1)
    if "start" in case:
        start, exported = folder / f"{name}_start", folder / f"{name}_exported"
        values = configuration({"model": case["start"]}, data, start)
        start.with_suffix(".yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        yield Command(["train.py", f"{start}.yaml", "train.max_steps=4"], log)
        yield Command(["-m", "cat_lm.export", str(start), str(exported)], log)
        words.append(f"train.init_from={exported}")
    if "stop" in case:
        yield Command([*words, f"train.max_steps={case['stop']}"], log, ranks)
        words.append("train.resume=auto")
    yield Command(words, log, ranks)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found[name] = [_numbers(json.loads(line)) for line in lines]


def _numbers(record: dict[str, Any]) -> list[float]:
    if "val_loss" in record:
        return [record["step"], record["val_loss"]]
    return [record["step"], record["loss"], record["grad_norm"], record["lr"]]


def measure(folder: Path) -> dict[str, Any]:
    """Return [step, loss, gradient norm, learning rate] and [step, validation loss] by case."""
    found: dict[str, Any] = {}
    data = folder / "data"

    def prepare() -> Job:
        yield preparation(folder, data)

    run_jobs([prepare()])
    run_jobs(training(name, data, folder, found) for name in CASES)
    return {name: found[name] for name in CASES}
