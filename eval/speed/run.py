"""Measure one benchmark in this process, as its environment has it."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from typing import Any

from cat_lm import architectures
from cat_lm.core.errors import UserError
from cat_lm.core.host import GIB
from eval.speed.choices import SHAPES, SIZES, models


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of the benchmark that the command's options ask for.

    Raises:
        UserError: the options, the device or a model is wrong.
    """
    # Before torch loads: it may bind this thread to one core.
    _check_threads(options.threads)
    from cat_lm.pretrained.loading import quiet_transformers
    from eval.common.provenance import provenance
    from eval.speed.machine import describe, open_device

    quiet_transformers()
    device = open_device(_device_name(options), options.threads)
    started = provenance()
    runs = {"conv": run_conv, "train": run_train, "decode": run_decode}
    measured = runs[options.benchmark](options, device)
    return {
        "format": 1,
        "benchmark": options.benchmark,
        **started,
        "device": describe(device),
        "repeats": options.repeats,
        **measured,
    }


def _device_name(options: argparse.Namespace) -> str:
    """Name the device: `auto` is the CPU for what is timed there alone."""
    if options.device == "auto" and getattr(options, "contexts", None) is not None:
        return "cpu"
    return options.device


def _check_threads(threads: int | None) -> None:
    cores = len(os.sched_getaffinity(0))
    if threads is not None and threads > cores:
        raise UserError(f"--threads {threads}: there are {cores} cores; use at most that")


def run_conv(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.conv.measure import ConvOptions, conv_speed

    options.repeats = options.repeats or {"cpu": 10, "cuda": 100}[device.type]
    shapes = options.shape or SHAPES[device.type]
    for sizes in shapes:
        _check_room(f"--shape {','.join(map(str, sizes))}", 4 * math.prod(sizes), device)
    asked = ConvOptions(
        shapes=shapes,
        dtypes=options.dtype,
        conv_types=options.conv_type,
        windows=options.windows,
        kernels=options.kernels,
        repeats=options.repeats,
        cuda_graphs=not options.eager,
    )
    return conv_speed(asked, device)


def run_train(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.model.train import TrainCase, train_speed

    context_length = options.context_length or SIZES[options.size]["context_length"]
    case = TrainCase(
        _model_size(options, device, options.models, context_length),
        options.batch_size,
        context_length,
        options.optimizer,
        options.compile,
    )
    return train_speed(case, options.models, options.repeats, options.peak_tflops)


def run_decode(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    if options.contexts is not None:
        return _run_contexts(options, device)
    given = [name for name in ("block", "top_k", "local") if getattr(options, name) is not None]
    if given:
        raise UserError(f"--{given[0].replace('_', '-')}: says nothing without --contexts")
    from eval.speed.model.decode import DecodeCase, decode_speed

    size = _model_size(options, device, options.models, max(options.prompts))
    uncached = options.uncached_tokens or 4
    cases = [
        DecodeCase(size, options.batch_size, prompt, options.new_tokens, uncached)
        for prompt in options.prompts
    ]
    return decode_speed(cases, options.models, options.repeats)


def _run_contexts(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    from eval.speed.model.contexts import ContextCase, contexts_speed

    if options.uncached_tokens is not None or options.attention != "sdpa":
        name = "--attention" if options.attention != "sdpa" else "--uncached-tokens"
        raise UserError(f"{name}: says nothing with --contexts; leave it out")
    for name in options.models:
        family = architectures.get(models()[name].architecture)
        if "attention_options" not in family.Section.model_fields:
            raise UserError(f"--models {name}: {family.title} has no landmark attention to time")
    if device.type != "cpu":
        raise UserError(f"--contexts: is timed on a CPU alone; --device {device} is none")
    size = _model_size(options, device, options.models, max(options.contexts))
    itemsize = 2 if options.dtype == "bfloat16" else 4
    numbers = 2 * size.layers * options.batch_size * max(options.contexts) * size.hidden_size
    what = f"a cache of --contexts {max(options.contexts)} in --layers {size.layers}"
    _check_room(f"{what}, {options.dtype}", numbers * itemsize, device)
    landmark = {
        "block": options.block or 64,
        "top_k": 8 if options.top_k is None else options.top_k,
        "local": options.local or 2,
    }
    cases = [
        ContextCase(size, options.batch_size, context, options.new_tokens, landmark)
        for context in options.contexts
    ]
    return contexts_speed(cases, options.models, options.repeats)


def _check_room(what: str, size: int, device: Any) -> None:
    """Raise UserError where not even the numbers themselves have room, before they are made."""
    from cat_lm.training.preflight.facts import free_memory

    if size > (free := free_memory(device)):
        raise UserError(
            f"{what}: takes {size / GIB:,.1f} GiB, but {free / GIB:,.1f} GiB of memory are free"
        )


def _model_size(
    options: argparse.Namespace, device: Any, names: Sequence[str], positions: int
) -> Any:
    """Make the size of the models of these names, all of which there is room for."""
    from eval.speed.model.build import ModelSize

    named = SIZES[options.size]
    hidden_size = options.hidden_size or named["hidden_size"]
    heads = options.heads or named["heads"]
    if hidden_size % heads:
        raise UserError(f"--hidden-size {hidden_size}: must be a multiple of --heads {heads}")
    layers = options.layers or named["layers"]
    size = ModelSize(
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        vocab_size=options.vocab_size,
        window=options.window,
        dtype=options.dtype,
        device=str(device),
        attention=options.attention,
    )
    what = f"a model of --hidden-size {hidden_size}, --layers {layers}"
    for name in names:
        parameters = size.num_parameters(name, positions)
        _check_room(what, parameters * (2 if options.dtype == "bfloat16" else 4), device)
    return size
