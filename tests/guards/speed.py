"""Speed of this checkout beside another one's, in pairs of old and new on the same machine.

Each checkout has a process that prepares the probes and times one when it is asked to, so that the
two take turns. `python -m tests.guards.speed FOLDER` is that process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.guards.losses import configuration, write_text
from tests.guards.models import CAT, NEOX, ROOT

PAIRS = 11
# A probe fails where the whole interval of old seconds / new seconds lies below.
LEAST_RATIO = 0.97
HELPS = {
    "train.py --help": ["train.py", "--help"],
    "data_prep.prepare --help": ["-m", "data_prep.prepare", "--help"],
    "cat_lm.export --help": ["-m", "cat_lm.export", "--help"],
}


def compare(old: Path, new: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Time all probes in both checkouts; return a line for each, and the lines that fail."""
    lines, failures = [], []
    with _Timer(old, folder / "old") as before, _Timer(new, folder / "new") as after:
        for name in before.names:
            pairs = [(before.time(name), after.time(name)) for _ in range(PAIRS + 1)][1:]
            low, ratio, high = ratio_interval(pairs)
            seconds = sorted(pair[1] for pair in pairs)[len(pairs) // 2]
            lines.append(f"{name:28} {seconds:9.4f} s {ratio:6.3f} [{low:.3f}, {high:.3f}]")
            if high < LEAST_RATIO:
                failures.append(lines[-1])
    return lines, failures


def ratio_interval(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the mean ratio of old to new seconds with its 95% interval, of paired logarithms."""
    from scipy.stats import t

    logs = [math.log(old / new) for old, new in pairs]
    mean = sum(logs) / len(logs)
    variance = sum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    half = t.ppf(0.975, len(logs) - 1) * math.sqrt(variance / len(logs))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


class _Timer(contextlib.AbstractContextManager):
    """The process of a checkout that times its probes."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.guards.speed", str(folder)],
            cwd=checkout,
            env=os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names: list[str] = self._read()

    def time(self, name: str) -> float:
        print(name, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process that times a checkout's probes has ended")
        return json.loads(line)

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()
        self.process.wait()


def _probes(folder: Path) -> dict[str, Callable[[], float]]:
    """Return the probes; each returns the seconds of one repetition."""
    from cat_lm.ops import depthwise_conv, head_conv, multihead_conv

    filters = {head_conv: (8, 21), depthwise_conv: (8, 64, 21), multihead_conv: (21, 8, 8)}
    probes: dict[str, Callable[[], float]] = {}
    for operator, shape in filters.items():
        probes[operator.__name__] = _timed(_convolution(operator, shape))
    probes["model step, CAT"] = _timed(_model_step(CAT | {"conv_window": 21}))
    probes["model step, Pythia"] = _timed(_model_step({"conv_type": "none"}))
    probes["loader"] = _timed(_loader(folder))
    probes["train.py step, CAT"] = lambda: _training_step(folder)
    probes["prepare 16 MB"] = _timed(lambda: _prepare(folder, folder / "prepared", 16))
    for name, words in HELPS.items():
        probes[name] = _timed(lambda words=words: _run(words))
    return probes


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return measure


def _convolution(operator: Callable, shape: tuple[int, ...]) -> Callable[[], None]:
    import torch

    x = torch.randn(4, 1024, 8, 64, requires_grad=True)
    weight = torch.randn(shape, requires_grad=True)

    def work() -> None:
        for _ in range(5):
            operator(x, weight).sum().backward()

    return work


def _model_step(keys: dict[str, Any]) -> Callable[[], None]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import cat_lm  # noqa: F401

    fields = NEOX | keys | {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8000}
    del fields["architecture"]
    config = AutoConfig.for_model("cat_neox", max_position_embeddings=256, **fields)
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 8000, (8, 256))

    def work() -> None:
        for _ in range(2):
            model(input_ids=ids, labels=ids, skip_logits=True).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def _loader(folder: Path) -> Callable[[], None]:
    import train
    from cat_lm.config import load_config

    config = load_config(_write_config(folder, max_steps=20_000), [])
    *_, loader = train.open_data(config)

    def work() -> None:
        for step in range(400):
            for _ in loader.prefetch(step, step + 1):
                pass

    return work


def _training_step(folder: Path) -> float:
    """Run `train.py` for 20 steps and return the median of the later ones' seconds."""
    path = _write_config(folder, max_steps=20)
    run = folder / "runs" / str(time.monotonic_ns())
    _run(["train.py", str(path), f"train.output_dir={run}"])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(record["step_seconds"] for record in records if "step_seconds" in record)
    return seconds[len(seconds) // 2]


def _write_config(folder: Path, max_steps: int) -> Path:
    data = folder / "data"
    if not data.exists():
        _prepare(folder, data, 1)
    model = NEOX | CAT | {"hidden_size": 128, "intermediate_size": 512, "conv_window": 21}
    values = configuration({"model": model}, data, folder / "run")
    values["data"]["context_length"] = 256
    values["train"]["max_steps"] = max_steps
    values["validation"]["every_steps"] = values["checkpoint"]["every_steps"] = 100_000
    path = folder / f"steps_{max_steps}.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def _prepare(folder: Path, out: Path, megabytes: int) -> None:
    source = folder / f"text_{megabytes}"
    if not source.exists():
        source.mkdir(parents=True)
        text = write_text(source).read_bytes()
        (source / "text.txt").write_bytes(text * (megabytes * 1_000_000 // len(text)))
    words = ["-m", "data_prep.prepare", "--source", "files", "--path", str(source)]
    words += ["--document-separator", r"\n\n", "--tokenizer", "bytes", "--workers", "1"]
    _run([*words, "--validation-fraction", "0.01", "--out", str(out), "--overwrite"])


def _run(words: list[str]) -> None:
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)


def _commands(probes: dict[str, Callable[[], float]]) -> Iterator[object]:
    yield list(probes)
    for line in sys.stdin:
        yield probes[line.rstrip("\n")]()


def main() -> None:
    """Answer each probe's name on stdin with its seconds on stdout."""
    folder = Path(sys.argv[1])
    out = os.dup(1)
    os.dup2(2, 1)  # What the project prints must not mix with the answers.
    for answer in _commands(_probes(folder)):
        os.write(out, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main()
