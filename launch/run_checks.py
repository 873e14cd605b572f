"""What `launch.doctor` looks at in a run's configuration on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.config import RunConfig
from launch.findings import Finding

if TYPE_CHECKING:
    import torch

    from cat_lm.model import CatForCausalLM


def run_data(config: RunConfig) -> Iterator[Finding]:
    """The training and validation split, opened as training opens them."""
    from cat_lm.data.corpus import TokenCorpus

    for split in ("train", "validation"):
        corpus = TokenCorpus.open(config.data.path, split)
        value = {"tokens": corpus.num_tokens, "fingerprint": corpus.fingerprint}
        text = f"{corpus.num_tokens:,} {split} tokens"
        yield Finding("run data", text, split, value)


def run_model(config: RunConfig) -> Iterator[Finding]:
    """The model without its weights, and its precision."""
    from cat_lm.training.engine import resolve_precision
    from cat_lm.training.estimate import count_parameters

    precision, reason = resolve_precision(config, _device())
    yield Finding("run model", f"{precision}: {reason}", "precision", precision)
    parameters = count_parameters(_model(config))
    yield Finding("run model", f"{parameters:,} parameters", "parameters", parameters)


def run_convolutions(config: RunConfig) -> Iterator[Finding]:
    """What computes the model's convolutions in the run's precision."""
    from cat_lm.training.engine import convolution_backend, resolve_precision

    precision, _ = resolve_precision(config, _device())
    # Whether the asked-for attention is there is another check's business.
    section = config.model.model_copy(update={"attn_implementation": "eager"})
    config = config.with_precision(precision).model_copy(update={"model": section})
    backend = convolution_backend(config, _model(config), _device())
    yield Finding("run convolutions", backend, "convolutions", backend)


def run_output(config: RunConfig) -> Iterator[Finding]:
    """Whether the output folder can be made."""
    folder = Path(config.train.output_dir).absolute()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    problem = None
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        problem = f"train.output_dir={config.train.output_dir}: {parent} cannot be written to"
    text = f"writes to {config.train.output_dir}"
    yield Finding("run output", text, "output_dir", str(folder), problem, problem is not None)


ALL = (run_data, run_model, run_convolutions, run_output)


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _model(config: RunConfig) -> CatForCausalLM:
    """The configuration's model on the meta device; the vocabulary of data that are not there is
    taken to be the smallest possible, which decides nothing about how it computes."""
    import torch

    from cat_lm.data.corpus import TokenCorpus
    from cat_lm.errors import UserError
    from cat_lm.training.engine import build_model

    vocab_size = config.model.vocab_size
    if vocab_size is None:
        try:
            vocab_size = TokenCorpus.open(config.data.path, "train").vocab_size
        except UserError:
            vocab_size = 256
    with torch.device("meta"):
        return build_model(config, vocab_size)
