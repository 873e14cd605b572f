"""Checks of `launch.doctor` on a run's configuration on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.config import RunConfig
from cat_lm.config.run import check_replaceable
from cat_lm.core.errors import UserError
from cat_lm.core.folders import check_output
from cat_lm.core.host import GIB
from launch.doctor.findings import Finding

# Of data that are not there: that of the paper's tokenizer.
ASSUMED_VOCABULARY = 32_000

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def run_data(config: RunConfig) -> Iterator[Finding]:
    """The training and validation split, opened as training opens them."""
    from cat_lm.data.opening import open_data

    train, validation, _ = open_data(config)
    for split, corpus in (("train", train), ("validation", validation)):
        value = {"tokens": corpus.num_tokens, "fingerprint": corpus.fingerprint}
        text = f"{corpus.num_tokens:,} {split} tokens"
        yield Finding("run data", text, split, value)


def run_model(config: RunConfig) -> Iterator[Finding]:
    """The model without its weights, and its precision."""
    import torch

    from cat_lm.counts import count_parameters
    from cat_lm.training.building import build_model, resolve_precision

    precision, reason = resolve_precision(config, _device())
    yield Finding("run model", f"{precision}: {reason}", "precision", precision)
    with torch.device("meta"):
        parameters = count_parameters(build_model(config, vocabulary(config)[0]))
    words = f"{config.model.architecture}, {config.architecture.summary(config.model).words}"
    text = f"{parameters:,} parameters, {words}"
    yield Finding("run model", text, "parameters", parameters)


def run_memory(config: RunConfig) -> Iterator[Finding]:
    """Compare the memory of one rank alone with this machine's device."""
    from cat_lm.training.estimate import MEMORY_ACCURACY, memory_per_rank, num_parameters
    from cat_lm.training.preflight.facts import free_memory

    device, config = _device(), config.with_precision(precision_here(config))
    vocab_size, on_gpu = vocabulary(config)[0], device.type == "cuda"
    parameters = num_parameters(config, vocab_size)
    ranks = config.train.sequence_parallel  # fewer cannot compute it
    memory = memory_per_rank(config, parameters, ranks, vocab_size, on_gpu)
    free, problem = free_memory(device), None
    if memory.total > free:
        problem = (
            f"one rank needs about {memory.total / GIB:.2f} GiB ({memory}), "
            f"{free / GIB:.2f} GiB are free here; {memory.advice}"
        )
    text = f"about {memory.total / GIB:.2f} GiB for one rank, {free / GIB:.2f} GiB free"
    surely = memory.states > free or memory.total > free * MEMORY_ACCURACY
    yield Finding("run memory", text, "memory", memory.total, problem, surely)


def run_convolutions(config: RunConfig) -> Iterator[Finding]:
    """Name the backend of the model's convolutions in the run's precision."""
    from cat_lm.training.building import describe_backend, model_config

    config = config.with_precision(precision_here(config))
    model = model_config(config, vocabulary(config)[0])
    backend = describe_backend(config, model, _device(), "conv_backend")
    yield Finding("run convolutions", backend, "convolutions", backend)


def run_recurrences(config: RunConfig) -> Iterator[Finding]:
    """Name the backend of the model's recurrences in the run's precision, if it has any."""
    from cat_lm.training.building import describe_backend

    if not config.architecture.recurrent and config.train.mixer_backend == "auto":
        return
    config = config.with_precision(precision_here(config))
    if backend := describe_backend(config, _model(config).config, _device(), "mixer_backend"):
        yield Finding("run recurrences", backend, "recurrences", backend)


def run_output(config: RunConfig) -> Iterator[Finding]:
    """Yield whether the output folder can be made."""

    folder, problem = Path(config.train.output_dir).absolute(), None
    try:
        check_output(config.train.output_dir, "train.output_dir")
        check_replaceable(folder / "config.yaml")
    except UserError as error:
        problem = str(error)
    text = f"writes to {config.train.output_dir}"
    yield Finding("run output", text, "output_dir", str(folder), problem, problem is not None)
    if problem is None:
        parent = next(path for path in (folder, *folder.parents) if path.exists())
        yield _room(config, folder, parent)


def _room(config: RunConfig, folder: Path, parent: Path) -> Finding:
    """Return whether all checkpoints have room that the run has at the same time."""
    from cat_lm.training.estimate import check_disk, checkpoint_bytes, num_parameters
    from cat_lm.training.preflight.facts import saved_checkpoints

    parameters = num_parameters(config, vocabulary(config)[0])
    saved = saved_checkpoints(folder, config.checkpoint.keep_last)
    free = shutil.disk_usage(parent).free
    problem, text = check_disk(config, parameters, free, saved)
    value = checkpoint_bytes(parameters)
    return Finding("run output", text, "checkpoint", value, problem, problem is not None)


ALL = (run_data, run_model, run_memory, run_convolutions, run_recurrences, run_output)


def precision_here(config: RunConfig) -> str:
    """bf16 or fp32, as a run on this machine decides it."""
    from cat_lm.training.building import resolve_precision

    return resolve_precision(config, _device())[0]


def vocabulary(config: RunConfig) -> tuple[int, bool]:
    """(the vocabulary's size, whether it is only taken to be so as the data are not there)."""
    from cat_lm.data.opening import open_data

    if config.model.vocab_size is not None:
        return config.model.vocab_size, False
    try:
        return open_data(config)[0].vocab_size, False
    except UserError:
        return ASSUMED_VOCABULARY, True


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _model(config: RunConfig) -> PreTrainedModel:
    """The configuration's model on the meta device, whatever attention it asks for."""
    from cat_lm.training.estimate import meta_model

    return meta_model(config, vocabulary(config)[0])
