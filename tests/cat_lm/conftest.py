"""Fixtures of tests of models."""

import functools

import pytest


@pytest.fixture
def plain_flex_attention(monkeypatch):
    """transformers' `flex_attention` without compilation, which takes longer than the tests do."""
    from torch.nn.attention import flex_attention
    from transformers import masking_utils
    from transformers.integrations.flex_attention import WrappedFlexAttention

    def create_block_mask(*args, _compile=False, **kwargs):
        return flex_attention.create_block_mask(*args, **kwargs)

    uncompiled = functools.wraps(flex_attention.create_block_mask)(create_block_mask)
    monkeypatch.setattr(masking_utils, "create_block_mask", uncompiled)
    monkeypatch.setattr(
        WrappedFlexAttention, "__call__", lambda self: flex_attention.flex_attention
    )
    # Silences the note that this is slow.
    monkeypatch.setattr(
        flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False
    )
