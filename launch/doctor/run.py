"""Checks of `launch.doctor CONFIG`: a run's configuration on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import netrc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from cat_lm.config import RunConfig
from cat_lm.config.run import check_replaceable
from cat_lm.core.errors import UserError
from cat_lm.core.folders import check_output
from cat_lm.core.host import GIB
from launch.doctor.findings import Finding

if TYPE_CHECKING:
    import torch

# The vocabulary of the paper's tokenizer, which is assumed if the data are missing.
ASSUMED_VOCABULARY = 32_000


def run_data(config: RunConfig) -> Iterator[Finding]:
    """Yield the sizes of the training and validation split, which are opened as in training."""
    from cat_lm.data.opening import open_data

    train, validation, _ = open_data(config)
    for split, corpus in (("train", train), ("validation", validation)):
        value = {"tokens": corpus.num_tokens, "fingerprint": corpus.fingerprint}
        yield Finding("run data", f"{corpus.num_tokens:,} {split} tokens", split, value)


def run_model(config: RunConfig) -> Iterator[Finding]:
    """Yield precision and parameters; building the model also checks its attention."""
    from cat_lm.counts import count_parameters
    from cat_lm.training.building import build_model, resolve_precision

    precision, reason = resolve_precision(config, _device())
    yield Finding("run model", f"{precision}: {reason}", "precision", precision)
    parameters = count_parameters(build_model(config, vocabulary(config)[0], weights=False))
    words = f"{config.model.architecture}, {config.architecture.summary(config.model).words}"
    yield Finding("run model", f"{parameters:,} parameters, {words}", "parameters", parameters)


def run_backends(config: RunConfig) -> Iterator[Finding]:
    """Yield the backends of convolutions and recurrences in the run's precision."""
    from cat_lm.training.building import describe_backend, model_config

    config = config.with_precision(precision_here(config))
    model = model_config(config, vocabulary(config)[0])
    for name, key in (("convolutions", "conv_backend"), ("recurrences", "mixer_backend")):
        try:
            backend, problem = describe_backend(config, model, _device(), key), None
        except UserError as error:
            backend, problem = "", str(error)
        if backend or problem:
            yield Finding(f"run {name}", backend, name, backend, problem, problem is not None)


def run_memory(config: RunConfig) -> Iterator[Finding]:
    """Yield the memory of one rank, compared with the free memory of this machine's device."""
    from cat_lm.training.estimate import (
        MEMORY_ACCURACY,
        fitting_micro_batch,
        memory_per_rank,
        num_parameters,
    )
    from cat_lm.training.preflight.facts import free_memory

    device, config = _device(), config.with_precision(precision_here(config))
    # The number of ranks is unknown: assume the fewest possible, sequence_parallel.
    vocab_size, ranks = vocabulary(config)[0], config.train.sequence_parallel
    parameters = num_parameters(config, vocab_size)
    free, problem, on_gpu = free_memory(device), None, device.type == "cuda"
    if config.train.micro_batch_size == "auto":
        size = fitting_micro_batch(config, parameters, ranks, vocab_size, free, on_gpu)
        config = config.with_micro_batch(size)
        text = f"train.micro_batch_size=auto would be {size}"
        yield Finding("run memory", text, "micro_batch_size", size)
    memory = memory_per_rank(config, parameters, ranks, vocab_size, on_gpu)
    text = f"about {memory.total / GIB:.2f} GiB for one rank, {free / GIB:.2f} GiB free"
    if memory.total > free:
        problem = f"{text} ({memory}); {memory.advice}"
    surely = memory.states > free or memory.total > free * MEMORY_ACCURACY
    yield Finding("run memory", text, "memory", memory.total, problem, surely)


def run_output(config: RunConfig) -> Iterator[Finding]:
    """Yield findings about the output folder and its space for checkpoints."""
    from cat_lm.training.estimate import check_disk, checkpoint_bytes, num_parameters
    from cat_lm.training.preflight.facts import saved_checkpoints

    folder = Path(config.train.output_dir).absolute()
    check_output(config.train.output_dir, "train.output_dir")
    check_replaceable(folder / "config.yaml")
    yield Finding("run output", f"writes to {config.train.output_dir}", "output_dir", str(folder))
    parameters = num_parameters(config, vocabulary(config)[0])
    saved = saved_checkpoints(folder, config.checkpoint.keep_last)
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    problem, text = check_disk(config, parameters, shutil.disk_usage(parent).free, saved)
    value = checkpoint_bytes(config, parameters)
    yield Finding("run output", text, "checkpoint", value, problem, problem is not None)


def run_trackers(config: RunConfig) -> Iterator[Finding]:
    """Yield whether the configured trackers are installed, and whether W&B has a login."""
    logging = config.logging
    asked = []
    if logging.tensorboard:
        asked.append(("tensorboard", "logging.tensorboard=true", "."))
    if logging.wandb_project:
        asked.append(("wandb", f"logging.wandb_project={logging.wandb_project}", ".[wandb]"))
    for name, key, extra in asked:
        text, problem = name, None
        if importlib.util.find_spec(name) is None:
            problem = f"{key}: {name} is not installed; pip install -e '{extra}'"
        elif name == "wandb":
            text, problem = _wandb_login()
        yield Finding("run trackers", text, name, text, problem, problem is not None)


def _wandb_login() -> tuple[str, str | None]:
    """Return the login of W&B by its variables and ~/.netrc, and the problem or None."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        return f"wandb: {mode} (WANDB_MODE)", None
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(os.environ.get("NETRC")).authenticators(host):
            return f"wandb: logged in to {host}", None
    if os.environ.get("WANDB_API_KEY"):
        return f"wandb: logged in to {host} (WANDB_API_KEY)", None
    return "", f"wandb has no login for {host}: run `wandb login`, or set WANDB_MODE=offline"


ALL = (run_data, run_model, run_memory, run_backends, run_output, run_trackers)


def precision_here(config: RunConfig) -> str:
    """Return the precision, bf16 or fp32, of a run on this machine."""
    from cat_lm.training.building import resolve_precision

    return resolve_precision(config, _device())[0]


def vocabulary(config: RunConfig) -> tuple[int, bool]:
    """Return (vocabulary size, True if it is assumed because the data are missing)."""
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
