"""Compile the rotary rotation of a model without convolutions.

transformers rotates queries and keys by a dozen small kernels, which this project's convolutions
have inside of theirs. Beside the eager rotation a convolution would win by what it is not about.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from cat_lm.model.attention.core import AttentionMixin

# What the modules of transformers' families call their rotation.
_ROTATION = "apply_rotary_pos_emb"


def compile_rotation(model: nn.Module, ids: Tensor) -> str | None:
    """Let torch.compile fuse the rotation in this model's forward and backward pass.

    Args:
        ids: [B, T], for a pass that shows whether it compiles here.

    Returns:
        Why it cannot; None where it does.
    """
    own = [m for m in model.modules() if isinstance(m, AttentionMixin)]
    home = sys.modules[type(model).__module__]
    eager = own[0].rotate if own else getattr(home, _ROTATION)
    # One graph a shape: those that are timed are few, and sizes that may change cost speed.
    compiled = torch.compile(eager, dynamic=False)
    for attention in own:
        attention.rotate = compiled

    def begin(*_: Any) -> None:
        setattr(home, _ROTATION, compiled)

    def end(*_: Any) -> None:
        setattr(home, _ROTATION, eager)

    if not own:
        # The model's alone: others of its module keep the eager one.
        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end, always_call=True)
    try:
        model(input_ids=ids, labels=ids).loss.backward()
    except Exception as error:  # whatever a compiler that is broken or missing makes torch raise
        words = str(error).split()
        return f"torch.compile failed: {type(error).__name__}: {' '.join(words)[:200]}"
    model.zero_grad(set_to_none=True)
    return None
