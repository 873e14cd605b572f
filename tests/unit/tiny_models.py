"""Small models for the tests of `cat_lm.model`."""

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from cat_lm.model import CatConfig, CatForCausalLM

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


def each_variant(*without):
    """Parametrises a test over all of VARIANTS but those named."""
    chosen = [pytest.param(f, id=name) for name, f in VARIANTS.items() if name not in without]
    return pytest.mark.parametrize("variant", chosen)


def cat_model(seed=0, **fields):
    """A model whose filters and biases are random, so that no test passes because they are not."""
    fields = {"attn_implementation": "sdpa", "conv_init": "uniform", **fields}
    torch.manual_seed(seed)
    model = CatForCausalLM(CatConfig(**SIZES | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif name.endswith("filter"):
                parameter.normal_(std=0.5)
    return model


def stock_model(seed=0, **fields):
    """transformers' GPT-NeoX of the same size, with random biases."""
    torch.manual_seed(seed)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def with_weights_of(stock, **fields):
    """A CAT model with the weights of `stock`; its filters stay as initialised."""
    model = CatForCausalLM(CatConfig(**SIZES | fields)).eval()
    missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert not unexpected and all(name.endswith("_filter") for name in missing)
    return model


def random_ids(*shape, seed=0):
    """Token ids without 0, the padding."""
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))
