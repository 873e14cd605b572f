"""The operations of a model, of which the model FLOPs utilisation (MFU) is a share.

A token's FLOPs are three times those of its forward pass, in which a product and a sum are two:
the backward pass takes twice as many, and what is computed again counts once (Chowdhery et al.,
2022, appendix B). Attention counts over the full square of queries and keys. Operators say what
they count beside their definitions (`cat_lm.ops.runtime.flops`), and what else is computed element
by element counts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cat_lm.counts.fake import fake_model
from cat_lm.ops.runtime.fake import standing_for_gpu
from cat_lm.ops.runtime.flops import FlopCounter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def flops_per_token(meta: PreTrainedModel, length: int) -> float:
    """Count a token's FLOPs, forward and backward, in training with rows of `length` tokens.

    Args:
        meta: the model on the meta device, which is used up.
    """
    # Chosen blocks count by their number, and a GPU's kernel has no loop over them.
    with fake_model(meta) as fake, standing_for_gpu(), FlopCounter() as counter, torch.no_grad():
        found: list[float] = []
        for layer in fake.layers:
            layer.register_forward_pre_hook(lambda *_: found.append(-counter.total))
            layer.register_forward_hook(lambda *_: found.append(found.pop() + counter.total))
        fake.model.train()
        fake.model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
        return 3 * fake.whole(counter.total - sum(found), found) / length
