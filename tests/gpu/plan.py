"""What a session on a GPU runs, in order of importance: what may fail, then what RESULTS.md lacks.

First a run as train.py makes it, which shows at once what ends one; then the tests, whether a run's
bits come again, and what is measured.

Kinds of convolution, families of models, mixers and configurations are asked for, not named: what
is added to the project is measured without a change here. Each step is a command of its own, short
enough that little is lost with it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cat_lm.config import load_config
from eval.speed.choices import conv_types

REPOSITORY = Path(__file__).resolve().parents[2]
# Sizes at which every step takes a CPU seconds.
_TINY_MODEL = ("--layers=1", "--hidden-size=32", "--heads=2", "--vocab-size=61", "--window=3")
# Those of these keys that a configuration's family has.
_TINY_KEYS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_TINY_KEYS |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 61}
_TINY_RUN = ("data.context_length=32", "train.global_batch_size=4", "train.micro_batch_size=2")
# Of `tests.gpu.runs`: two checkpoints, and a line in the log for each step.
_FIRST_STEPS = (
    *("train.global_batch_size=16", "train.max_tokens=null", "train.max_steps=12"),
    *("optimizer.warmup_tokens=null", "optimizer.warmup_steps=2", "train.log_every_steps=1"),
    *("validation.max_tokens=64K", "checkpoint.every_steps=6", "logging.tensorboard=false"),
)
_SHORT_RUN = (
    *("train.max_tokens=null", "train.max_steps=100"),
    *("optimizer.warmup_tokens=null", "optimizer.warmup_steps=1"),
)


@dataclass(frozen=True)
class Step:
    """One process of a session.

    Attributes:
        name: of its record, NAME.json, and its log, NAME.log.
        command: with `{record}` where the record's path belongs.
        minutes: it may take.
        needs: modules without which it cannot run; `cc` is a C compiler.
        optional: the project does without what it needs.
    """

    name: str
    command: tuple[str, ...]
    minutes: float = 3
    needs: tuple[str, ...] = ()
    optional: bool = False

    def lacks(self) -> list[str]:
        """What it needs and this machine does not have."""
        return lacking(self.needs)


def lacking(names: Sequence[str]) -> list[str]:
    """Those of the modules (and `cc`, a C compiler) that are not there."""

    def is_there(name: str) -> bool:
        if name == "cc":
            return any(map(shutil.which, ("cc", "gcc", "clang")))
        return importlib.util.find_spec(name) is not None

    return [name for name in names if not is_there(name)]


def plan(rehearsal: bool) -> list[Step]:
    """All steps in order; of a rehearsal, the same ones at tiny sizes on the CPU."""
    doctor, run, *runs = _runs(rehearsal)
    steps = [doctor, run, *_tests(rehearsal), *runs, *_benchmarks(rehearsal)]
    # On a CPU, perhaps beside other work, a limit ends only what hangs.
    return [replace(step, minutes=10 * step.minutes) for step in steps] if rehearsal else steps


def _runs(rehearsal: bool) -> list[Step]:
    """A run of 12 steps: whether it can start, what it does, the same bits again, its kernels."""
    file = "configs/pretrain/cat_rope.yaml"
    # Real text, of which a byte is a token.
    tiny = (*_tiny(REPOSITORY / file), "model.vocab_size=257", "validation.max_tokens=256")
    sizes = tiny if rehearsal else ()

    def step(name: str, what: str, *overrides: str, minutes: float) -> Step:
        words = (what, file, *_FIRST_STEPS, *sizes, *overrides, "--json", "{record}")
        command = (sys.executable, "-m", "tests.gpu.runs", *words)
        return Step(name, command, minutes, needs=("deepspeed",))

    return [
        step("doctor", "doctor", minutes=2),
        step("run", "run", minutes=3),
        step("same-bits", "repeat", minutes=4),
        step("same-bits-deterministic", "repeat", "train.deterministic=true", minutes=4),
        step("profile", "profile", minutes=2),
    ]


def _tests(rehearsal: bool) -> list[Step]:
    """All files of tests in one process, the operators' first; on a CPU they say that they skip."""
    files = sorted(Path(__file__).parent.glob("test_*.py"), key=lambda file: "ops" not in file.name)
    spread, minutes = (), 30.0
    cores = len(os.sched_getaffinity(0))
    if not lacking(["xdist"]) and cores > 4 and not rehearsal:
        # Most of the time goes into compiling kernels.
        spread, minutes = ("-n", str(min(cores - 2, 12)), "--dist", "worksteal"), 8.0
    # What is asked of pytest's version is for the whole suite.
    options = ("-q", "-o", "minversion=7", "-p", "no:cacheprovider", "-p", "tests.gpu.recorder")
    pytest = (sys.executable, "-m", "pytest", *options, "--record", "{record}", *spread)
    names = (str(file.relative_to(REPOSITORY)) for file in files)
    return [Step("tests", (*pytest, *names), minutes, needs=("pytest",))]


def _benchmarks(rehearsal: bool) -> list[Step]:
    def conv(suffix: str, windows: str, dtype: str) -> list[Step]:
        # cuDNN's rivals take most of the time.
        full = (f"--windows={windows}", "--shape=8,2048,16,64", "--repeats=20")
        tiny = ("--windows=3", "--shape=1,20,2,16", "--repeats=2", "--device=cpu")
        sizes = tiny if rehearsal else full
        return [
            _speed(
                f"conv-{kind}{suffix}", "conv", f"--conv-type={kind}", f"--dtype={dtype}", *sizes
            )
            for kind in conv_types()
        ]

    def train(name: str, *arguments: str, rows: int = 8, **step) -> Step:
        full = ("--size=370m", f"--batch-size={rows}", "--repeats=10")
        tiny = ("--context-length=16", "--batch-size=2", "--repeats=2", "--device=cpu")
        if name != "train":
            # Each model's memory is measured in an interpreter of its own: all of them once.
            tiny += ("--models=cat",)
        sizes = (*_TINY_MODEL, *tiny) if rehearsal else full
        # torch's compiler writes C++ for bf16 that does not compile (2.13).
        model = ("--dtype=float32" if rehearsal else "--dtype=bfloat16", "--optimizer")
        return _speed(name, "train", *model, *arguments, *sizes, **step)

    def decode(name: str, prompt: int) -> Step:
        full = ("--size=370m", f"--prompts={prompt}")
        tiny = (*_TINY_MODEL, "--prompts=8", "--new-tokens=4", "--repeats=1", "--device=cpu")
        return _speed(name, "decode", "--dtype=bfloat16", *(tiny if rehearsal else full))

    def lengths() -> Step:
        tiny = ("--lengths=20,40", "--heads=2", "--head-dim=16", "--state=4", "--repeats=2")
        full = ("--lengths=1024,4096,16384", "--batch-size=4", "--heads=16", "--repeats=50")
        sizes = (*tiny, "--device=cpu") if rehearsal else (*full, "--dtype=bfloat16")
        return _speed("lengths", "lengths", *sizes)

    small = ("--models=1,2", "--d-model=16", "--seq-len=16", "--batch-size=4", "--repeats=1")
    flash = ("--attention=flash_attention_2",)
    return [
        *conv("", "4,21", "bfloat16"),
        train("train", minutes=4),
        train("train-compiled", "--compile", minutes=5, needs=("cc",)),
        decode("decode", 2048),
        *_engines(rehearsal),
        *_ranks(rehearsal),
        _speed("stacks", "stacks", *((*small, "--device=cpu") if rehearsal else ()), minutes=4),
        train("train-flash", *flash, needs=("flash_attn",), optional=True),
        train("train-32-rows", rows=32, minutes=4),
        *conv("-windows", "3,8,64,128", "bfloat16"),
        *conv("-fp32", "4,21", "float32"),
        lengths(),
        decode("decode-long", 16384),
    ]


def _engines(rehearsal: bool) -> list[Step]:
    """A run's own step with every configuration of the paper's table: its memory and its MFU."""
    folder = REPOSITORY / "configs/pretrain"
    files = [file for file in sorted(folder.glob("*.yaml")) if not file.stem.startswith("base_")]
    # Smaller models first, 370M where the name holds no size; 7B is not for one GPU.
    files = [file for file in files if not file.stem.endswith("_7b")]
    files.sort(key=lambda file: file.stem.endswith("_1b4"))

    def sizes(file: Path) -> tuple[str, ...]:
        full = ("train.global_batch_size=16", "train.micro_batch_size=8")
        return (*_tiny(file), "--repeats=1") if rehearsal else full

    return [
        _speed(
            f"engine-{file.stem}".replace("_", "-"),
            *("engine", str(file.relative_to(REPOSITORY)), *_SHORT_RUN, *sizes(file)),
            minutes=2,
            needs=("deepspeed",),
        )
        for file in files
    ]


def _tiny(file: Path) -> tuple[str, ...]:
    """Sizes of a configuration's step for a rehearsal."""
    section = load_config(file).model
    keys = [f"model.{key}={n}" for key, n in _TINY_KEYS.items() if hasattr(section, key)]
    return (*keys, *_TINY_RUN)


def _ranks(rehearsal: bool) -> list[Step]:
    """A run's own step on all GPUs of the machine, where it has several, by ZeRO stage."""
    ranks = 2 if rehearsal else torch.cuda.device_count()
    if ranks < 2:
        return []
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    launcher += (f"--nproc-per-node={ranks}", "-m", "eval.speed", "engine")
    sizes = (f"train.global_batch_size={8 * ranks}", "train.micro_batch_size=8")
    file = "configs/pretrain/cat_rope.yaml"
    config = (file, *_SHORT_RUN)
    sizes = (*_tiny(REPOSITORY / file), "--repeats=1") if rehearsal else sizes
    return [
        Step(
            f"ranks-zero-{stage}",
            (*launcher, *config, f"train.zero_stage={stage}", *sizes, "--json", "{record}"),
            needs=("deepspeed",),
        )
        for stage in (1, 2, 3)
    ]


def _speed(name: str, *arguments: str, **step) -> Step:
    command = (sys.executable, "-m", "eval.speed", *arguments, "--json", "{record}")
    return Step(name, command, **step)
