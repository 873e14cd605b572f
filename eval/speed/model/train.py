"""`python -m eval.speed train`: how fast a training step is, and how much memory it takes.

Models of one size take turns in one process. A step is a forward pass with its loss and a backward
pass; with `--optimizer` it is a run's own (`eval.speed.model.update`). Peak memory is measured in a
process of its own for each model. Before anything is timed, every model with identity filters must
give the logits of transformers' own class on the shapes to be timed; then the filters are drawn at
random.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cat_lm.core.errors import UserError
from cat_lm.counts import count_parameters, flops_per_token, meta_model
from cat_lm.model.hf.causal_lm import CausalLanguageModel
from cat_lm.training.estimate import device_peak_flops
from eval.common.interrupts import terminated_as_interrupt
from eval.speed import choices
from eval.speed.machine import forget_peak, resident_bytes
from eval.speed.model.build import (
    ModelSize,
    build,
    check_logits,
    convolution_of,
    model_config,
    random_ids,
    randomize_filters,
)
from eval.speed.model.rotation import compile_rotation
from eval.speed.model.update import STEP, ranks_of, run_step
from eval.speed.progress import say
from eval.speed.timing import Timing, summary, time_in_turn, times_as_fast

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks


@dataclass(frozen=True)
class TrainCase:
    """Fix what is timed: models of one size on `batch_size` x `context_length` tokens."""

    size: ModelSize
    batch_size: int
    context_length: int
    optimizer: bool = False
    compile: bool = False

    @property
    def tokens(self) -> int:
        return self.batch_size * self.context_length


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

    Returns:
        The record's part; `absent` of it says which models are left out, and why.

    Raises:
        UserError: a model's logits are wrong, or it cannot be built.
    """
    device = torch.device(case.size.device)
    models, absent = _models(case, names)
    names = [name for name in names if name not in absent]
    parameters = {name: count_parameters(model) for name, model in models.items()}
    differences = check_logits(
        models, random_ids(case.size, 1, case.context_length), case.size.dtype
    )
    convolutions = {name: convolution_of(models[name], case.size) for name in names}
    with ranks_of(case.size.device) if case.optimizer else nullcontext() as ranks:
        steps = {}
        for name in names:
            randomize_filters(models[name])
            steps[name] = training_step(case, name, models[name], ranks)
        timings = time_in_turn(
            steps, device, repeats, min_seconds=0, cuda_graphs=False, flush_cache=False
        )
    del models, steps
    memory = _peak_memories(case, names) if peak_memory else {}
    peak = peak_tflops * 1e12 if peak_tflops else None
    if peak is None and case.size.dtype == "bfloat16":
        peak = device_peak_flops(device)
    return {
        "case": asdict(case),
        "step": STEP if case.optimizer else "forward and backward",
        "absent": absent,
        "peak_flops": peak,
        "largest_relative_logit_difference": differences,
        "results": {
            name: _row(case, name, timings, parameters[name], peak)
            | {"convolution": convolutions[name], "peak_memory_bytes": memory.get(name)}
            for name in names
        },
    }


def _row(
    case: TrainCase, name: str, timings: Mapping[str, Timing], parameters: int, peak: float | None
) -> dict[str, Any]:
    """Return a model's speed; `peak` in FLOP/s, if it is known."""
    timing = timings[name]
    config = model_config(case.size, name, case.context_length)
    flops = flops_per_token(meta_model(config), case.context_length) * case.tokens
    return {
        "model": choices.models()[name].label,
        "parameters": parameters,
        "step_seconds": summary(timing.seconds),
        "tokens_per_second": case.tokens / timing.median,
        **relative_speeds(name, {each: of_it.seconds for each, of_it in timings.items()}),
        "flops_per_step": flops,
        "mfu": flops / timing.median / peak if peak else None,
    }


def _models(case: TrainCase, names: Sequence[str]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Build the models with the stock of each, and say which cannot be compiled here, and why.

    Raises:
        UserError: none of the names is left, or another of them cannot be built.
    """
    known, models, absent = choices.models(), {}, {}
    stocks = [known[name].stock for name in names if known[name].stock]
    for name in dict.fromkeys([*names, *stocks]):
        say(f"building {name}")
        model, why_not = _built(case, name)
        if why_not is None:
            models[name] = model
        else:
            absent[name] = why_not
    if absent.keys() >= set(names):
        raise UserError("--models: " + "; ".join(f"{n}: {why}" for n, why in absent.items()))
    return models, absent


def _built(case: TrainCase, name: str) -> tuple[nn.Module, str | None]:
    """Build a model to be trained, and say why it cannot be compiled here, if it cannot."""
    model = build(case.size, name, case.context_length).train()
    if not choices.models()[name].compiled_rotation:
        return model, None
    if case.compile:
        return model, "--compile compiles the rotation of every model"
    return model, compile_rotation(model, random_ids(case.size, 1, 8))


def relative_speeds(name: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Compare a model's speed with its family's plain model's and Pythia's, by rounds.

    Args:
        seconds: of a step, one for each round, of every model that was timed.

    Returns:
        Median and range of each ratio of tokens a second; None where that rival was not timed.
    """
    found: dict[str, Any] = {}
    for rival, median, ends in (
        (choices.models()[name].plain, "relative_to_plain", "relative_range"),
        (choices.PYTHIA, "relative_to_pythia", "relative_to_pythia_range"),
    ):
        ratio = times_as_fast(seconds[name], seconds[rival]) if rival in seconds else {}
        found |= {median: ratio.get("median"), ends: ratio.get("range")}
    return found


# Imports are most of what a small model takes, and no part of a step's memory.
_PRELOADED = (__name__, "cat_lm.model.hf.modeling", "cat_lm.training.engine")
_DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")


def _peak_memories(case: TrainCase, names: Sequence[str]) -> dict[str, int]:
    """Measure each model in a process of its own, after this one has let its memory go."""
    gc.collect()
    if case.size.device.startswith("cuda"):
        torch.cuda.empty_cache()
        method = "spawn"  # no fork survives a driver
    else:
        method = "forkserver"
        multiprocessing.set_forkserver_preload([*_PRELOADED, *_DEEPSPEED * case.optimizer])
    say("peak memory of each model, in processes of their own")
    context = multiprocessing.get_context(method)
    with terminated_as_interrupt(), context.Pool(1, maxtasksperchild=1) as pool:
        return {name: pool.apply(peak_memory, (case, name)) for name in names}


def training_step(
    case: TrainCase, name: str, model: nn.Module, ranks: Ranks | None
) -> Callable[[], None]:
    """Return the call that is timed: loss and gradients; on `ranks`, all that a run's step does."""
    if ranks is not None:
        return run_step(case, name, model, ranks)
    ids = random_ids(case.size, case.batch_size, case.context_length)
    if case.compile:
        model.compile()

    # As in a run, which asks for no logits; transformers' classes know nothing of it.
    asked = {"skip_logits": True} if isinstance(model, CausalLanguageModel) else {}

    def step() -> None:
        model(input_ids=ids, labels=ids, **asked).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def peak_memory(case: TrainCase, name: str) -> int:
    """Bytes that two training steps need beyond the weights; run in a process of its own."""
    gc.freeze()  # what was imported: DeepSpeed collects a dozen times, which would copy its pages
    model, _ = _built(case, name)
    gc.collect()
    on_gpu = case.size.device.startswith("cuda")
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak()
        before = resident_bytes("VmRSS")
    with ranks_of(case.size.device) if case.optimizer else nullcontext() as ranks:
        step = training_step(case, name, model, ranks)
        for _ in range(2):
            step()
        return (torch.cuda.max_memory_allocated() if on_gpu else resident_bytes("VmHWM")) - before
