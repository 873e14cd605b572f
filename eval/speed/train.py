"""`python -m eval.speed train`: how fast a training step is, and how much memory it takes.

Models of one size take turns in one process. A step is a forward pass with its loss and a backward
pass; with `--optimizer` it is a run's own, in DeepSpeed's engine: gradients accumulated in fp32,
their norm and clipping, AdamW with fp32 weights and moments, the loss read back, at a rate of zero,
so that the weights stay what they are. Peak memory is measured in a process of its own for each
model. Before anything is timed, every model with identity filters must give the logits of
transformers' own class on the shapes to be timed; then the filters are drawn at random.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.counts import count_parameters, flops_per_token, meta_model
from cat_lm.model.hf.causal_lm import CausalLanguageModel
from cat_lm.training.estimate import device_peak_flops
from eval.common.interrupts import terminated_as_interrupt
from eval.speed.choices import PYTHIA, models
from eval.speed.models import (
    ModelSize,
    build,
    check_logits,
    convolution_of,
    model_config,
    random_ids,
    randomize_filters,
)
from eval.speed.timing import Timing, log, summary, time_in_turn, times_as_fast

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks

STEP = "a run's own: fp32 accumulation, clipping, AdamW in fp32, ZeRO-1"
_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
# Imports are most of what a small model takes, and no part of a step's memory.
_PRELOADED = (__name__, "cat_lm.model.hf.modeling", "cat_lm.training.engine")
_DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")


@dataclass(frozen=True)
class TrainCase:
    """A benchmark case: models of one size on `batch_size` x `context_length` tokens."""

    size: ModelSize
    batch_size: int
    context_length: int
    optimizer: bool = False
    compile: bool = False

    @property
    def tokens(self) -> int:
        return self.batch_size * self.context_length

    @property
    def on_gpu(self) -> bool:
        return self.size.device.startswith("cuda")


def train_speed(
    case: TrainCase,
    names: Sequence[str],
    repeats: int,
    peak_tflops: float | None = None,
    peak_memory: bool = True,
) -> dict[str, Any]:
    """Measure the models of a case.

    Args:
        names: of `choices.models`; each speed is relative to those of its family's plain model
            and of Pythia, where they are among them.
        peak_tflops: of the device in this dtype, for MFU; default: by its name, for bf16.
        peak_memory: whether to measure it, which takes a process for each model.

    Raises:
        UserError: a model's logits are wrong, or it cannot be built.
    """
    device, known = torch.device(case.size.device), models()
    built = {}
    for name in dict.fromkeys([*names, *(known[n].stock for n in names if known[n].stock)]):
        log(f"building {name}")
        built[name] = build(case.size, name, case.context_length).train()
    ids = random_ids(case.size, 1, case.context_length)
    differences = check_logits(built, ids, case.size.dtype)
    peak = peak_tflops * 1e12 if peak_tflops else None
    if peak is None and case.size.dtype == "bfloat16":
        peak = device_peak_flops(device)
    rows, steps = {}, {}
    with _ranks_for(case) as ranks:
        for name in names:
            rows[name] = _facts(case, name, built[name])
            randomize_filters(built[name])
            steps[name] = training_step(case, name, built[name], ranks)
        timings = time_in_turn(steps, device, repeats, min_seconds=0, alone=False)
    del built, steps
    memory = _peak_memories(case, names) if peak_memory else {}
    for name, row in rows.items():
        row |= _speed(case, name, timings, row["flops_per_step"], peak)
        row["peak_memory_bytes"] = memory.get(name)
    return {
        "case": asdict(case),
        "step": STEP if case.optimizer else "forward and backward",
        "peak_flops": peak,
        "largest_relative_logit_difference": differences,
        "results": rows,
    }


def _facts(case: TrainCase, name: str, model: nn.Module) -> dict[str, Any]:
    counted = meta_model(model_config(case.size, name, case.context_length))
    return {
        "model": models()[name].label,
        "parameters": count_parameters(model),
        "convolution": convolution_of(model, case.size),
        "flops_per_step": flops_per_token(counted, case.context_length) * case.tokens,
    }


def _speed(
    case: TrainCase, name: str, timings: Mapping[str, Timing], flops: float, peak: float | None
) -> dict[str, Any]:
    """Return a model's speed, relative to its family's plain model's and Pythia's by rounds."""
    timing = timings[name]
    found = {
        "step_seconds": summary(timing.seconds),
        "tokens_per_second": case.tokens / timing.median,
        "mfu": flops / timing.median / peak if peak else None,
    }
    for rival, median, ends in (
        (models()[name].plain, "relative_to_plain", "relative_range"),
        (PYTHIA, "relative_to_pythia", "relative_to_pythia_range"),
    ):
        timed = rival in timings
        ratio = times_as_fast(timing.seconds, timings[rival].seconds) if timed else {}
        found |= {median: ratio.get("median"), ends: ratio.get("range")}
    return found


def training_step(
    case: TrainCase, name: str, model: nn.Module, ranks: Ranks | None
) -> Callable[[], None]:
    """Return the call that is timed: loss and gradients; on `ranks`, all that a run's step does."""
    if ranks is not None:
        return _run_step(case, name, model, ranks)
    ids = random_ids(case.size, case.batch_size, case.context_length)
    if case.compile:
        model.compile()
    # As in a run, which asks for no logits; transformers' classes know nothing of it.
    asked = {"skip_logits": True} if isinstance(model, CausalLanguageModel) else {}

    def step() -> None:
        model(input_ids=ids, labels=ids, **asked).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


@contextmanager
def _ranks_for(case: TrainCase) -> Iterator[Ranks | None]:
    """Join a group of one for a run's own step, on the device that training takes.

    Raises:
        UserError: the case's device is another one.
    """
    if not case.optimizer:
        yield None
        return
    from cat_lm.training import distributed

    with distributed.start() as ranks:
        if torch.device(case.size.device).type != ranks.device.type:
            raise UserError(
                f"--device {case.size.device}: a run's own step is on {ranks.device.type} here; "
                "leave out --optimizer or --device"
            )
        yield ranks


def _run_step(case: TrainCase, name: str, model: nn.Module, ranks: Ranks) -> Callable[[], None]:
    """Return a function that runs one optimizer step of one micro-batch in a run's engine.

    Raises:
        UserError: from the call, where the engine skipped the step.
    """
    from cat_lm.training.engine import Engine

    values = {
        "model": case.size.section(name, case.context_length).model_dump(),
        "data": {"path": "random", "context_length": case.context_length},
        "optimizer": {"lr": 1e-3},
        "train": {
            "output_dir": "none",
            "global_batch_size": case.batch_size,
            "micro_batch_size": case.batch_size,
            "max_steps": 1000,
            "precision": _PRECISIONS[case.size.dtype],
            "compile": case.compile,
        },
    }
    trained = _LibraryModel(model) if models()[name].stock == name else model
    engine = Engine(trained, RunConfig.model_validate(values), ranks)
    ids = random_ids(case.size, case.batch_size, case.context_length).cpu().numpy()

    def step() -> None:
        if engine.train_step({"input_ids": ids, "labels": ids}, lr=0.0).skipped:
            raise UserError(f"model {name}: its gradients are not finite; the step was skipped")

    return step


class _LibraryModel(nn.Module):
    """A model of transformers that accepts the engine's keywords, and ignores those it lacks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for module in model.modules():
            # Its norms do not say what decays (`parameters_by_decay`); at a rate of zero nothing.
            kind = type(module)
            if kind.__module__.startswith("transformers.") and module._parameters:
                kind.no_decay = getattr(kind, "no_decay", ())

    def forward(
        self, input_ids: Tensor, shift_labels: Tensor, num_items_in_batch: float, **_: Any
    ) -> Any:
        """Return the output with the loss: the sum over `shift_labels` [B, T] by the number."""
        return self.model(
            input_ids=input_ids,
            labels=shift_labels,
            shift_labels=shift_labels,
            num_items_in_batch=num_items_in_batch,
            use_cache=False,
        )


def _peak_memories(case: TrainCase, names: Sequence[str]) -> dict[str, int]:
    """Measure each model in a process of its own, after this one has let its memory go."""
    gc.collect()
    if case.on_gpu:
        torch.cuda.empty_cache()
        method = "spawn"  # CUDA does not work in forked processes.
    else:
        method = "forkserver"
        multiprocessing.set_forkserver_preload([*_PRELOADED, *_DEEPSPEED * case.optimizer])
    log("peak memory of each model, in processes of their own")
    context = multiprocessing.get_context(method)
    with terminated_as_interrupt(), context.Pool(1, maxtasksperchild=1) as pool:
        return {name: pool.apply(peak_memory, (case, name)) for name in names}


def peak_memory(case: TrainCase, name: str) -> int:
    """Return the bytes that two steps need beyond the weights; run in a process of its own."""
    # Exclude imported objects, since DeepSpeed's garbage collections would copy their pages.
    gc.freeze()
    model = build(case.size, name, case.context_length).train()
    gc.collect()
    if case.on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Reset the peak memory.
        before = _resident_bytes("VmRSS")
    with _ranks_for(case) as ranks:
        step = training_step(case, name, model, ranks)
        for _ in range(2):
            step()
        peak = torch.cuda.max_memory_allocated() if case.on_gpu else _resident_bytes("VmHWM")
        return peak - before


def _resident_bytes(field: str) -> int:
    """Return this process's memory: `VmRSS`, what it has now, or `VmHWM`, the most so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
