"""Name what the command offers. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from typing import Any, NamedTuple

from cat_lm import architectures
from cat_lm.ops.convolution.kinds import DEPTHWISE, HEAD, MULTIHEAD

DTYPES = ("float32", "bfloat16")
# `qkv` is the whole step from the packed projection to attention's inputs.
CONV_TYPES = (HEAD.name, DEPTHWISE.name, MULTIHEAD.name, "qkv")
# This project's backends, and what else convolves: `eval.speed.conv.kernels`.
KERNELS = ("reference", "cpu", "triton", "conv1d", "fla", "causal-conv1d")
# [B, T, H, D] of the 370M and of the 1.4B model; on a GPU, tensors larger than its cache.
SHAPES = {
    "cpu": ((2, 2048, 16, 64), (2, 2048, 16, 128)),
    "cuda": ((32, 2048, 16, 64), (16, 2048, 16, 128)),
}


class Model(NamedTuple):
    """A model to be timed.

    Attributes:
        label: what it is called in a table.
        keys: of its section, beside its size's.
        architecture: its name.
        stock: whether it is transformers' own class, which the others must agree with.
    """

    label: str
    keys: dict[str, Any]
    architecture: str = architectures.DEFAULT
    stock: bool = False


MODELS = {
    "pythia": Model("Pythia, this code", {}),
    "cat": Model("CAT, a filter for each head", {"conv_type": "head"}),
    "mh_cat": Model("MH-CAT, a filter for each pair of heads", {"conv_type": "multihead"}),
    "depthwise": Model("depthwise, a filter for each channel", {"conv_type": "depthwise"}),
    "stock": Model("Pythia, transformers' own class", {}, stock=True),
}
SIZES = {
    "small": {"layers": 8, "hidden_size": 512, "heads": 8, "context_length": 1024},
    "370m": {"layers": 24, "hidden_size": 1024, "heads": 16, "context_length": 2048},
    "1.4b": {"layers": 24, "hidden_size": 2048, "heads": 16, "context_length": 2048},
}
VOCAB_SIZE = 32_000  # of the paper's tokenizer
