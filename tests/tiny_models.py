"""Small models for the tests of `cat_lm.model`."""

import pytest
import torch

from cat_lm import architectures

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


# Every kind of model, by the configuration fields that make it.
VARIANTS = {
    "none": {"conv_type": "none"},
    "head": {"conv_type": "head"},
    "depthwise": {"conv_type": "depthwise"},
    "silu": {"conv_type": "depthwise", "conv_activation": "silu"},
    "multihead": {"conv_type": "multihead"},
    "maps": {"conv_type": "multihead", "conv_mixing": "maps"},
}


# The other family: with keys and values of fewer heads, and biases.
GROUPED = {"family": "llama", "num_key_value_heads": 2, "attention_bias": True}
LLAMA_VARIANTS = {
    f"llama-{name}": GROUPED | VARIANTS[name] for name in ("none", "head", "silu", "multihead")
}


def each_model(*without):
    """Parametrize a test over the variants of every family but those named."""
    return each_kind(*VARIANTS, *LLAMA_VARIANTS, without=without)


def each_kind(*short, without=()):
    """Parametrize a test as `each_model`; all models but `short` are for `--all`."""
    chosen = [
        pytest.param(fields, id=name, marks=() if name in short else pytest.mark.long)
        for name, fields in (VARIANTS | LLAMA_VARIANTS).items()
        if not {name, name.rpartition("-")[2]} & set(without)
    ]
    return pytest.mark.parametrize("variant", chosen)


def cat_model(seed=0, family="gpt_neox", **fields):
    """A model whose filters and biases are random, so that no test passes because they are not."""
    fields = {"attn_implementation": "sdpa", "conv_init": "uniform", **fields}
    torch.manual_seed(seed)
    kinds = architectures.get(family).classes()
    model = kinds.causal_lm(kinds.config(**SIZES | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif name.endswith("filter"):
                parameter.normal_(std=0.5)
    return model


def stock_model(seed=0, family="gpt_neox", **fields):
    """transformers' model of the same size, with random biases."""
    torch.manual_seed(seed)
    kinds = architectures.get(family).library_classes()
    model = kinds.causal_lm(kinds.config(**SIZES | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def random_ids(*shape, seed=0):
    """Token ids without 0, the padding."""
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))
