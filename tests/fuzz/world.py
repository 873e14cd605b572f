"""Every kind of file that the project reads, small, made once by its own commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.conftest import generated_text, write_jsonl
from tests.runs import run_values
from tests.zero_shot_rows import write_rows

# (family, module, words): runs a command in the world's folder; anything but code 0 is an error.
Run = Callable[..., None]

# A long-range cell of the files in `long`.
LONG_RANGE = ("--task", "smnist:size=14", "--mixer", "nope", "--d-model", "16", "--layers", "1")
LONG_RANGE += ("--epochs", "1", "--device", "cpu", "--data", "long", "--cache", "cache")
LONG_RANGE += ("--out", "long-range")


def build_world(folder: Path, run: Run, with_harness: bool) -> None:
    """Fills `folder`; `run(family, module, *words)` runs a command there.

    Args:
        with_harness: whether zero-shot results can be made.
    """
    _write_inputs(folder)
    prepare = ("plain", "data_prep.prepare", "--source", "files", "--workers", "1")
    separated = ("--document-separator", r"\n\n")
    bytes_ = (*prepare, "--path", "text", "--tokenizer", "bytes", "--validation-fraction", "0.2")
    run(*bytes_, *separated, "--out", "data")
    run(*bytes_, "--stage", "encode", "--out", "unfinished")
    trained = ("--tokenizer", "train:sentencepiece:300", "--out", "trained")
    run(*prepare, "--path", "text/a.txt", *separated, *trained)
    run("torch", "train", "config.yaml")
    run("torch", "cat_lm.export", "run", "run/model")
    for out in ("model", "exported"):
        run("torch", "cat_lm.export", "run", out)
    (folder / "model/precious.txt").write_text("a user's own notes\n")
    sweep = ("--lengths", "16,32", "--max-tokens", "200", "--out", "run/eval")
    run("torch", "eval.length_sweep", "run", "--data", "data", *sweep)
    cell = ("--task", "mqar:keys=2", "--mixer", "cat", "--d-model", "16", "--seq-len", "16")
    cell += ("--epochs", "1", "--train-examples", "32", "--test-examples", "16")
    run("torch", "eval.recall", "run", *cell, "--batch-size", "16", "--out", "recall")
    run("torch", "eval.long_range", "run", *LONG_RANGE)
    if with_harness:
        zero_shot = ("--tasks", "piqa", "--data-dir", "tasks", "--limit", "3")
        run("harness", "eval.zero_shot", "run", *zero_shot)
    run("torch", "tests.fuzz.variants")


def _write_inputs(folder: Path) -> None:
    (folder / "text").mkdir()
    texts = generated_text(80)
    (folder / "text/a.txt").write_text("\n\n".join(texts[:60]), encoding="utf-8")
    write_jsonl(folder / "text/b.jsonl", texts[60:70])
    _write_packed(folder / "text", texts[70:])
    values = run_values(Path("data"), Path("run"), max_steps=2, global_batch_size=4)
    values["optimizer"] |= {"warmup_steps": 1}
    values["validation"] = {"every_steps": 2, "max_tokens": 128}
    values["checkpoint"] = {"every_steps": 1, "keep_last": 2}
    values["train"]["precision"] = "fp32"
    base = {key: values.pop(key) for key in ("model", "data", "validation")}
    (folder / "base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    values = {"base": "base.yaml", **values}
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    write_rows(folder / "tasks")
    _write_long_range(folder / "long")
    site = {"partition": "p", "time": "1:00:00", "cpus_per_task": 2, "sbatch": ["--hint=x"]}
    site |= {"srun": ["--cpu-bind=none"], "setup": ["true"], "env": {"A": "b"}}
    (folder / "site.yaml").write_text(yaml.safe_dump(site), encoding="utf-8")


def _write_long_range(folder: Path) -> None:
    """Writes the official files of each long-range task that has any."""
    from tests.eval.long_range.files import (
        write_cifar,
        write_files,
        write_folder,
        write_mnist,
        write_pairs,
        write_reviews,
    )

    write_mnist(folder / "mnist", packed=False)
    write_cifar(folder / "cifar-10-batches-bin")
    write_folder(folder)
    write_pairs(folder / "tsv_data")
    write_reviews(folder)
    write_files(folder / "listops-1000", [("( [MAX 4 ( [MIN 7 2 ] ) ] )", 4), ("[SM 8 5 ]", 3)])


def _write_packed(folder: Path, texts: list[str]) -> None:
    import gzip

    import pyarrow
    import pyarrow.parquet
    import zstandard

    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "d.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "e.parquet")


class World:
    """The files, kept in memory, to be laid out again and again."""

    def __init__(self, folder: Path) -> None:
        self._here = os.fsencode(folder)
        self._entries: dict[str, bytes] = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.endswith(".lock")
        }

    def lay_out(self, folder: Path, needs: tuple[str, ...]) -> None:
        """Writes what is needed into `folder`; absolute names lead there, too."""
        there = os.fsencode(folder)
        made: set[Path] = set()
        for name, content in self._entries.items():
            if not any(name == need or name.startswith(f"{need}/") for need in needs):
                continue
            path = folder / name
            if path.parent not in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.add(path.parent)
            if self._here in content:
                content = content.replace(self._here, there)
            path.write_bytes(content)
