"""The lines of the short run: `python -m tests.gpu.lines NAME RECORD.json`, see run.sh.

RECORD.json holds the numbers of all lines, and is written after every number. Speeds are medians
with ranges; contenders take turns. `plan` checks the lines where there is no GPU; `table` shows the
numbers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda"
# 370M, as `eval.speed train --size 370m` has it; rounds are written down in blocks.
SIZE = (24, 1024, 16, 32_000, 21, "bfloat16")
CONTEXT, BATCH = 2048, 8
ROUNDS, BLOCK = 30, 5
RIVALS = ("pythia", "cat", "pythia-compiled-rotary")
# M, N, K of the products of a layer forward, of a weight's gradient, of the head, and a large one.
PRODUCTS = (
    *((16384, 3072, 1024), (16384, 1024, 1024), (16384, 4096, 1024), (16384, 1024, 4096)),
    *((1024, 4096, 16384), (16384, 32_000, 1024), (8192, 8192, 8192)),
)
STEPS, WARM_UPS = 10, 3
# Two micro-batches a step, as the records of the H100 have it.
STEP = ("train.global_batch_size=16", "train.micro_batch_size=8", "train.max_tokens=null")
STEP += ("train.max_steps=1000", "optimizer.warmup_tokens=null", "optimizer.warmup_steps=1")
CONFIGS = {
    "cat": ("configs/pretrain/cat_rope.yaml", STEP),
    "pythia": ("configs/pretrain/pythia.yaml", STEP),
}
SEVEN = (*STEP, "model.num_hidden_layers=8")
SIZES = {
    "1.4B, micro 8": ("configs/pretrain/cat_rope_1b4.yaml", STEP),
    "7B of 8 layers, micro 1": (
        "configs/pretrain/cat_rope_7b.yaml",
        (*SEVEN, "train.global_batch_size=2", "train.micro_batch_size=1"),
    ),
    "7B of 8 layers, micro 4": (
        "configs/pretrain/cat_rope_7b.yaml",
        (*SEVEN, "train.global_batch_size=8", "train.micro_batch_size=4"),
    ),
}
CONVOLUTIONS = (("qkv", 21), ("head", 21), ("depthwise", 4))
# Kernels of a step by what they do: the first that fits.
CLASSES = {
    "convolution": r"forward_(qkv_)?kernel|backward_(qkv_)?kernel|reduce_kernel<512, 1",
    "attention": r"fmha|flash|sdpa|cudnn",
    "products": r"gemm|nvjet|cutlass|xmma",
    "norms": r"layer_norm|LayerNorm|GammaBeta",
    "loss": r"cross_entropy",
    "activation": r"[Gg]elu",
    "optimizer": r"adam|Adam|multi_tensor|lpnorm",
}


def shown(numbers: dict[str, Any]) -> str:
    """Return numbers in a line: of what was repeated the median, and no lists."""
    numbers = {k: v.get("median") if isinstance(v, dict) else v for k, v in numbers.items()}
    numbers = {k: v for k, v in numbers.items() if v is not None and not isinstance(v, list)}
    cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
    return " ".join("; ".join(cells).split())


class Record:
    """A line's numbers in the file of all lines."""

    def __init__(self, path: Path, line: str) -> None:
        self._path, self._line = path, line
        self._all = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._own = self._all[line] = {}

    def keep(self, name: str, /, **numbers: Any) -> None:
        """Write a number down, at once."""
        from cat_lm.core.files import write_json

        self._own[name] = numbers
        write_json(self._path, self._all)
        print(f"{self._line}: {name}: {shown(numbers)}", flush=True)

    @contextlib.contextmanager
    def part(self, name: str) -> Any:
        """Let what fails inside not end the rest of the line."""
        try:
            yield
        except Exception as error:
            self.keep(f"{name} failed", error=f"{type(error).__name__}: {error}"[:500])


def versions(record: Record) -> None:
    """What the numbers are of."""
    import torch

    from eval.common.provenance import provenance
    from eval.speed.timing import describe

    known = provenance()
    record.keep("machine", **describe(torch.device(DEVICE)))
    record.keep("code", **known)
    for path in ptxas():
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        record.keep(f"ptxas {path}", version=said.stdout.strip().rpartition("\n")[2])


def ptxas() -> list[str]:
    """Return every ptxas at hand, the one in use first."""
    import triton

    home = Path(triton.__file__).parent / "backends/nvidia/bin"
    found = [os.environ.get("TRITON_PTXAS_PATH"), *map(str, sorted(home.glob("ptxas*")))]
    found += [shutil.which("ptxas"), "/usr/local/cuda/bin/ptxas"]
    return list(dict.fromkeys(os.path.realpath(p) for p in found if p and os.access(p, os.X_OK)))


def ceilings(record: Record) -> None:
    """The rates of copies, products and attention on this device."""
    import torch
    from torch.nn import functional as F

    from eval.speed.timing import copy_bandwidth, summary, time_in_turn

    device = torch.device(DEVICE)
    for size, rate in copy_bandwidth(device, [2**32, 100 * 2**20], 20).items():
        record.keep(f"copy of {size:,} bytes", bytes_per_second=rate)
    half = {"dtype": torch.bfloat16, "device": device}
    for m, n, k in PRODUCTS:
        a, b = torch.randn(m, k, **half), torch.randn(k, n, **half)
        timing = time_in_turn({"product": functools.partial(torch.mm, a, b)}, device, 20)["product"]
        record.keep(f"product {m} x {n} x {k}", tflops=2e-12 * m * n * k / timing.median)
    for width in (64, 128):
        heads = [torch.randn(8, 16, CONTEXT, width, **half).requires_grad_() for _ in range(3)]

        def forward(heads: list = heads) -> Any:
            return F.scaled_dot_product_attention(*heads, is_causal=True)

        def both(heads: list = heads, forward: Callable = forward) -> Any:
            y = forward()
            return torch.autograd.grad(y, heads, y)

        for name, timing in time_in_turn({"forward": forward, "both": both}, device, 20).items():
            record.keep(f"attention D={width}, {name}", seconds=summary(timing.seconds))


def tests(record: Record) -> None:
    """The chosen tests, each with its outcome."""
    import pytest

    from tests.gpu.kernels import chosen_tests

    class Recorder:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                crash = getattr(report.longrepr, "reprcrash", None)
                said = {"message": crash.message[:300]} if crash else {}
                name = report.nodeid.rpartition("::")[2]
                record.keep(name, outcome=report.outcome, seconds=report.duration, **said)

    options = ("-q", "-o", "minversion=7", "-p", "no:cacheprovider")
    if code := pytest.main([*options, *chosen_tests()], plugins=[Recorder()]):
        raise SystemExit(int(code))


def train(record: Record) -> None:
    """A training step of CAT beside Pythia's, in turn."""
    with group() as ranks:
        time_models(record, ranks, RIVALS, BATCH, ROUNDS)


def group() -> contextlib.AbstractContextManager:
    """Join the group of one rank that training needs, which a process can do once."""
    from eval.speed.train import ranks_of

    return ranks_of(DEVICE)


def time_models(
    record: Record,
    ranks: Any,
    names: Sequence[str],
    batch: int,
    repeats: int,
    label: str = "",
    alter: Callable[[Any], None] | None = None,
) -> None:
    """Time whole steps of models; `alter` changes each before it is trained."""
    import torch

    from cat_lm.counts import flops_per_token, meta_model
    from cat_lm.training.estimate import device_peak_flops
    from eval.speed.choices import models
    from eval.speed.models import (
        ModelSize,
        build,
        compile_rotation,
        model_config,
        random_ids,
        randomize_filters,
    )
    from eval.speed.timing import summary, time_in_turn, times_as_fast
    from eval.speed.train import TrainCase, training_step

    gc.collect()
    torch.cuda.empty_cache()
    size = ModelSize(*SIZE, DEVICE)
    case = TrainCase(size, batch, CONTEXT, optimizer=True)
    steps, flops = {}, {}
    peak = device_peak_flops(ranks.device)
    for name in names:
        model = build(size, name, CONTEXT).train()
        randomize_filters(model)
        if models()[name].compiled_rotation:
            why_not = compile_rotation(model, random_ids(size, 1, 8))
            if why_not is not None:
                record.keep(f"{name}{label}", absent=why_not)
                continue
        if alter is not None:
            alter(model)
        config = model_config(size, name, CONTEXT)
        flops[name] = flops_per_token(meta_model(config), CONTEXT) * case.tokens
        steps[name] = training_step(case, name, model, ranks)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-(-repeats // BLOCK)):
        timed = time_in_turn(
            *(steps, ranks.device, BLOCK),
            **{"min_seconds": 0, "cuda_graphs": False, "flush_cache": False},
            warm_ups=1 if number else WARM_UPS,
        )
        for name, timing in timed.items():
            seconds[name] += timing.seconds
            median = summary(seconds[name])["median"]
            numbers = {"tokens_per_second": case.tokens / median}
            if peak:
                numbers["mfu"] = flops[name] / median / peak
            if "pythia" in seconds and len(seconds["pythia"]) == len(seconds[name]):
                ratio = times_as_fast(seconds[name], seconds["pythia"])
                numbers |= {"of_pythia": ratio["median"], "range": ratio["range"]}
            record.keep(f"{name}{label}", **numbers, seconds=summary(seconds[name]))


def step(record: Record) -> None:
    """A run's own steps without a profiler, then one with it."""
    time_steps(record, CONFIGS, profiled=True)


def sizes(record: Record) -> None:
    """A run's own steps at larger sizes."""
    time_steps(record, SIZES, profiled=False)


def time_steps(record: Record, configs: dict[str, tuple], profiled: bool) -> None:
    """Time steps of runs by the device's clock, and how long the host takes to launch them."""
    import torch

    from cat_lm.config import load_config
    from cat_lm.training.building import build_model
    from cat_lm.training.engine import Engine

    with group() as ranks:
        for name, (file, overrides) in configs.items():
            with record.part(name):
                config = load_config(ROOT / file, overrides)
                engine = Engine(build_model(config, config.model.vocab_size), config, ranks)
                _steps_of(record, name, engine)
                if profiled:
                    _profile(record, name, engine)
            engine = None
            gc.collect()
            torch.cuda.empty_cache()


def _batch(engine: Any) -> dict[str, Any]:
    import numpy as np

    config = engine.config
    shape = config.train.global_batch_size, config.data.context_length
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
    return {"input_ids": ids, "labels": ids}


def _steps_of(record: Record, name: str, engine: Any) -> None:
    import torch

    from cat_lm.training.estimate import flops_per_token, peak_flops
    from eval.speed.timing import summary

    config, batch = engine.config, _batch(engine)
    flops = flops_per_token(config, config.model.vocab_size)
    torch.cuda.reset_peak_memory_stats()
    host, seconds, before = [], [], None
    for _ in range(WARM_UPS + STEPS):
        start = time.perf_counter()
        launched = engine.launch_step(batch, 0.0)
        host.append(time.perf_counter() - start)
        if before is not None:  # a step is read when the next is launched, as in training
            before[0].result()
            seconds.append(before[0].seconds(before[1]))
        before = launched, before and before[0]
    before[0].result()
    seconds.append(before[0].seconds(before[1]))
    told, tokens = summary(seconds[WARM_UPS:]), batch["labels"].size
    peak = peak_flops(config, engine.ranks.device)
    record.keep(
        name,
        tokens_per_second=tokens / told["median"],
        mfu=flops * tokens / told["median"] / peak if peak else None,
        host_seconds=summary(host[WARM_UPS:])["median"],
        peak_memory_bytes=torch.cuda.max_memory_allocated(),
        seconds=told,
    )


def _profile(record: Record, name: str, engine: Any) -> None:
    import torch
    from torch.autograd import DeviceType

    batch = _batch(engine)
    on_gpu = engine.ranks.device.type == "cuda"
    with torch.profiler.profile() as found:
        engine.train_step(batch, 0.0)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    clock = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [e for e in found.key_averages() if e.device_type == kind and not e.is_user_annotation]
    rows = [{"name": e.key, "count": e.count, "seconds": getattr(e, clock) / 1e6} for e in events]
    rows.sort(key=lambda row: row["seconds"], reverse=True)
    classes: dict[str, float] = {}
    for row in rows:
        fits = (c for c, words in CLASSES.items() if re.search(words, row["name"]))
        place = next(fits, "others")
        classes[place] = classes.get(place, 0.0) + row["seconds"]
    busy = sum(classes.values())
    record.keep(f"{name}, profile", busy_seconds=busy, **classes, kernels=rows[:60])


def conv(record: Record) -> None:
    """Convolutions against the copy bandwidth, fla's and a compiled sum of shifted inputs."""
    import torch

    from cat_lm import ops
    from eval.speed.conv import ConvOptions, conv_speed
    from eval.speed.kernels import ConvCase
    from eval.speed.timing import summary, time_in_turn

    device, shape = torch.device(DEVICE), (BATCH, CONTEXT, SIZE[2], SIZE[1] // SIZE[2])
    for kind, window in CONVOLUTIONS:
        with record.part(kind):
            options = ConvOptions([shape], ["bfloat16"], [kind], [window], ("triton", "fla"), 20)
            (case,) = conv_speed(options, device)["cases"]
            for row in case["kernels"]:
                numbers = {}
                for way in ("forward", "forward_backward"):
                    if way in row:
                        numbers[way] = row[way]["seconds"]["median"]
                        numbers[f"{way}_of_copy"] = row[way]["of_copy_bandwidth"]
                record.keep(f"{kind}, {row['kernel']}", refused=row["refused"], **numbers)
            for name, why_not in case["absent"].items():
                record.keep(f"{kind}, {name}", absent=why_not)
    for kind, window in CONVOLUTIONS[1:]:
        with record.part(f"{kind}, compiled"):
            case = ConvCase(kind, *shape, window, "bfloat16", DEVICE)
            reference = functools.partial(ops.convolve, kind, backend="reference")
            half = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
            x, filters = torch.randn(shape, **half), torch.randn(case.filter_shape, **half)
            dy, compiled = torch.randn_like(x), torch.compile(reference)

            def both(compiled: Any = compiled, given: tuple = (x, filters), dy: Any = dy) -> Any:
                return torch.autograd.grad(compiled(*given), given, dy)

            timing = time_in_turn({"both": both}, device, 20)["both"]
            record.keep(f"{kind}, compiled", forward_backward=summary(timing.seconds)["median"])


def decode(record: Record) -> None:
    """Tokens a second after a prompt, one row, launched by the host."""
    import torch

    from eval.speed.decode import decode_cached
    from eval.speed.models import ModelSize, build, random_ids, randomize_filters
    from eval.speed.timing import summary

    size, count = ModelSize(*SIZE, DEVICE), 64
    models = {name: build(size, name, CONTEXT + count).eval() for name in ("pythia", "cat")}
    prompt = random_ids(size, 1, CONTEXT)
    rates: dict[str, list[float]] = {name: [] for name in models}
    prompts: dict[str, list[float]] = {name: [] for name in models}
    with torch.no_grad():
        for model in models.values():
            randomize_filters(model)
            decode_cached(model, prompt, count)
        for _ in range(5):
            for name, model in models.items():
                found = decode_cached(model, prompt, count)
                rates[name].append(found.rate)
                prompts[name].append(found.prompt_seconds)
                told = {"tokens_per_second": summary(rates[name])["median"]}
                told["range"] = summary(rates[name])["range"]
                record.keep(name, **told, prompt_seconds=summary(prompts[name])["median"])


def hazard(record: Record) -> None:
    """The fused rotation of 128 taps under every ptxas, and memcheck of the packed step."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor, as_completed

    def run(words: tuple[str, ...], window: int, assembler: str | None) -> dict[str, Any]:
        command = [*words, sys.executable, "-m", "tests.gpu.lines", "fused", str(window)]
        with tempfile.TemporaryDirectory() as cache:
            given = dict(os.environ)
            if assembler is not None:
                given |= {"TRITON_PTXAS_PATH": assembler, "TRITON_CACHE_DIR": cache}
            done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
        return {"code": done.returncode, "said": (done.stdout + done.stderr)[-300:]}

    work: dict[str, tuple] = {f"{path}, W = 128": ((), 128, path) for path in ptxas()}
    if shutil.which("compute-sanitizer") is None:
        record.keep("memcheck", absent="compute-sanitizer is not there")
    else:
        words = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
        work |= {f"memcheck, W = {window}": (words, window, None) for window in (21, 64, 128)}
    with ThreadPoolExecutor(len(work)) as pool:  # nothing is timed here
        names = {pool.submit(run, *given): name for name, given in work.items()}
        for done in as_completed(names):
            record.keep(names[done], **done.result())


def fused(window: int) -> None:
    """Run the packed step with a fused rotation of 20 of 80 channels, three times."""
    import torch

    from cat_lm.ops.convolution.triton import launch
    from tests.gpu.test_ops_cuda import test_packed_equals_the_definition as compare

    launch.WIDEST_FUSED_ROTATION = max(window, launch.WIDEST_FUSED_ROTATION)
    for _ in range(3):
        compare((1, 300, 5, 80), 20, window, "qv", False, torch.bfloat16)
    print("right three times")


def compiled(record: Record) -> None:
    """Steps with every layer compiled by itself."""

    def compile_layers(model: Any) -> None:
        for layer in model.base_model.layers:
            layer.compile(fullgraph=True, dynamic=False)

    with group() as ranks:
        for name in ("cat", "pythia"):
            with record.part(name):
                how = ", layers compiled", compile_layers
                time_models(record, ranks, (name,), BATCH, 10, *how)


def rows(record: Record) -> None:
    """Steps of more rows, and with either attention kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with group() as ranks:
        for batch in (16, 32):
            with record.part(f"{batch} rows"):
                time_models(record, ranks, ("cat",), batch, BLOCK, f", {batch} rows")
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with record.part(backend.name), sdpa_kernel([backend]):
                time_models(record, ranks, ("cat",), BATCH, BLOCK, f", {backend.name}")


LINES = (versions, ceilings, tests, train, step, conv, sizes, decode, hazard, compiled, rows)


def plan(lines: Sequence[str], cache: str) -> None:
    """Check names, order, tests, models and configurations of the lines, and the cache's keys.

    Args:
        lines: "NAME SECONDS" each, as run.sh has them.
        cache: a folder, or empty: then keys are computed and not looked for.

    Raises:
        AssertionError: something is wrong.
    """
    import tempfile

    import pytest

    from cat_lm.config import load_config
    from eval.speed.kernels import ConvCase
    from eval.speed.models import ModelSize
    from tests.gpu import kernels

    known = {line.__name__: line for line in LINES}
    names = [line.split()[0] for line in lines]
    assert names == list(known), f"run.sh's lines are {', '.join(names)}"
    start = 0
    for name, seconds in map(str.split, lines):
        print(f"{start // 60:2}:{start % 60:02} {seconds:>4} s  {name:10}{known[name].__doc__}")
        start += int(seconds)
    assert start <= 600, f"the lines take {start} s"
    for file, overrides in (CONFIGS | SIZES).values():
        load_config(ROOT / file, overrides)
    for name in RIVALS:
        ModelSize(*SIZE, DEVICE).section(name, CONTEXT)
    for kind, window in CONVOLUTIONS:
        assert ConvCase(kind, BATCH, CONTEXT, 16, 64, window, "bfloat16", DEVICE).filter_shape
    # Before the tests are collected, which are skipped where they are imported without a GPU.
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = cache or empty
        found = kernels.find(compile_them=False)
    assert not found.failed, "\n".join(found.failed)
    options = ("-q", "--collect-only", "-o", "minversion=7", "-p", "no:cacheprovider")
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = pytest.main([*options, *kernels.chosen_tests()])
    assert code == 0, f"short_tests.txt: {told.getvalue()[-500:]}"
    print(f"{len(kernels.chosen_tests())} tests and {len(CONFIGS | SIZES)} runs are there")
    print(found if cache else f"{len(found.hits)} kernels have keys; --cache FOLDER looks for them")
    missing = [name for name, hit in found.hits.items() if not hit]
    few = not cache or len(missing) <= 0.05 * len(found.hits)
    assert few, f"{cache}: lacks {', '.join(missing)}"


def table(path: Path) -> None:
    """Show every number of a record on one line."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for line in LINES:
        for name, numbers in found.get(line.__name__, {}).items():
            print(f"{line.__name__:10} {name:44} {shown(numbers)}"[:200])


def main() -> None:
    what, *given = sys.argv[1:]
    if what == "plan":
        plan(given[1:], given[0])
    elif what == "table":
        table(Path(given[0]))
    elif what == "fused":
        fused(int(given[0]))
    else:
        line = next(line for line in LINES if line.__name__ == what)
        line(Record(Path(given[0]), what))


if __name__ == "__main__":
    main()
