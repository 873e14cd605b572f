"""`python -m eval.speed train`: how fast a training step is, and how much memory it takes.

Models of one size take turns in one process. A step is a forward pass with its loss and a backward
pass, and with `--optimizer` AdamW's update. Peak memory is measured in a process of its own for
each model. Before anything is timed, every model with identity filters must give the logits of
transformers' own class on the shapes to be timed; then the filters are drawn at
random.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from cat_lm.training.estimate import count_parameters, device_peak_flops, flops_per_token
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
from eval.speed.progress import say
from eval.speed.timing import summary, time_in_turn, times_as_fast


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
    case: TrainCase, names: Sequence[str], repeats: int, peak_tflops: float | None = None
) -> dict[str, Any]:
    """Measure the models of a case.

    Args:
        names: of `choices.models`; each speed is relative to that of its family's plain model,
            where that is among them.
        peak_tflops: of the device in this dtype, for MFU; default: by its name, for bf16.

    Raises:
        UserError: a model's logits are wrong, or it cannot be built.
    """
    device = torch.device(case.size.device)
    known, models = choices.models(), {}
    stocks = [known[name].stock for name in names if known[name].stock]
    for name in dict.fromkeys([*names, *stocks]):
        say(f"building {name}")
        models[name] = build(case.size, name, case.context_length).train()
    parameters = {name: count_parameters(model) for name, model in models.items()}
    differences = check_logits(
        models, random_ids(case.size, 1, case.context_length), case.size.dtype
    )
    convolutions = {name: convolution_of(models[name], case.size) for name in names}
    steps = {}
    for name in names:
        randomize_filters(models[name])
        steps[name] = training_step(case, models[name])
    timings = time_in_turn(
        steps, device, repeats, min_seconds=0, cuda_graphs=False, flush_cache=False, title="steps"
    )
    del models, steps
    memory = _peak_memories(case, names)
    peak = peak_tflops * 1e12 if peak_tflops else None
    if peak is None and case.size.dtype == "bfloat16":
        peak = device_peak_flops(device)
    rows = {}
    for name in names:
        seconds = timings[name].median
        config = model_config(case.size, name, case.context_length)
        flops = flops_per_token(config, parameters[name], case.context_length) * case.tokens
        rows[name] = {
            "model": known[name].label,
            "convolution": convolutions[name],
            "parameters": parameters[name],
            "step_seconds": summary(timings[name].seconds),
            "tokens_per_second": case.tokens / seconds,
            "relative_to_plain": times_as_fast(timings[name], timings[known[name].plain])
            if known[name].plain in timings
            else None,
            "flops_per_step": flops,
            "mfu": flops / seconds / peak if peak else None,
            "peak_memory_bytes": memory[name],
        }
    return {
        "case": asdict(case),
        "peak_flops": peak,
        "largest_relative_logit_difference": differences,
        "results": rows,
    }


def _peak_memories(case: TrainCase, names: Sequence[str]) -> dict[str, int]:
    """Measure each model in a process of its own, after this one has let its memory go."""
    gc.collect()
    if case.size.device.startswith("cuda"):
        torch.cuda.empty_cache()
    say("peak memory of each model, in processes of their own")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return {name: pool.apply(peak_memory, (case, name)) for name in names}


def training_step(case: TrainCase, model: nn.Module) -> Callable[[], None]:
    """The call that is timed: loss, gradients and, if asked for, the update."""
    ids = random_ids(case.size, case.batch_size, case.context_length)
    optimizer = None
    if case.optimizer:
        # No decay and no rate: the work of an update, but the weights stay what they are.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    if case.compile:
        model.compile()

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    return step


def peak_memory(case: TrainCase, name: str) -> int:
    """Bytes that two training steps need beyond the weights; run in a process of its own."""
    model = build(case.size, name, case.context_length).train()
    step = training_step(case, model)
    gc.collect()
    if case.size.device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
        return torch.cuda.max_memory_allocated() - before
    forget_peak()
    before = resident_bytes("VmRSS")
    for _ in range(2):
        step()
    return resident_bytes("VmHWM") - before
