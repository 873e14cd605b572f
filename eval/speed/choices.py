"""What the command offers, by name. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from cat_lm.ops.convolution import kinds

DTYPES = ("float32", "bfloat16")
# `qkv` is the whole step from the packed projection to attention's inputs.
CONV_TYPES = (*kinds.names(), "qkv")
# This project's backends, and what else convolves: `eval.speed.conv.kernels`.
KERNELS = ("reference", "cpu", "triton", "conv1d", "fla", "causal-conv1d")
# [B, T, H, D] of the 370M and of the 1.4B model; on a GPU, tensors larger than its cache.
SHAPES = {
    "cpu": ((2, 2048, 16, 64), (2, 2048, 16, 128)),
    "cuda": ((32, 2048, 16, 64), (16, 2048, 16, 128)),
}
# What each model is called in a table, and its convolution; "stock" is transformers' own class.
MODELS = {
    "pythia": ("Pythia, this code", "none"),
    "cat": ("CAT, a filter for each head", "head"),
    "mh_cat": ("MH-CAT, a filter for each pair of heads", "multihead"),
    "depthwise": ("depthwise, a filter for each channel", "depthwise"),
    "stock": ("GPTNeoXForCausalLM of transformers", "none"),
}
SIZES = {
    "small": {"layers": 8, "hidden_size": 512, "heads": 8, "context_length": 1024},
    "370m": {"layers": 24, "hidden_size": 1024, "heads": 16, "context_length": 2048},
    "1.4b": {"layers": 24, "hidden_size": 2048, "heads": 16, "context_length": 2048},
}
VOCAB_SIZE = 32_000  # of the paper's tokenizer
