"""How sharply trained models attend: entropy of their attention, and the largest logit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

ROWS = 64  # number of windows of the training length, from the scored text
_BATCH = 16


def sharpness(folder: Path, device: str, data: Path, length: int, skip: int) -> dict[str, Any]:
    """Measure an exported model's attention on the validation split, behind its first tokens."""
    import torch

    from cat_lm.data.opening import open_verified
    from cat_lm.pretrained.loading import load_model

    corpus = open_verified(data, "validation")
    rows = min(ROWS, (corpus.num_tokens - skip) // length)
    tokens = torch.as_tensor(corpus.tokens(skip, skip + rows * length).astype("int64"))
    return attention_statistics(load_model(folder, device=device), tokens.view(rows, length))


def attention_statistics(model: PreTrainedModel, rows: Tensor) -> dict[str, Any]:
    """Measure a model's attention over rows of tokens [N, T], T at least 2.

    Returns:
        entropy: of a query that may read n keys, −Σ p ln p / ln n, which is 1 where all are read
            alike; mean over queries with n > 1, heads and layers.
        largest_logit: the largest input of the softmax, with temperatures.
        layers: both for each layer.

    Raises:
        UserError: attention is no softmax of q·k.
    """
    import torch

    from cat_lm.model import attention
    from cat_lm.model.attention.core import AttentionMixin

    transform = attention.score_transform(model.config)
    if attention.pattern(model.config).name != "softmax" or transform is not None:
        words = (transform or attention.pattern(model.config)).title
        raise UserError(f"attention statistics: are of softmax attention, not of {words}")
    modules = [module for module in model.modules() if isinstance(module, AttentionMixin)]
    found: list[list[tuple[float, float]]] = [[] for _ in modules]

    def record(own: list[tuple[float, float]]) -> Any:
        return lambda _, arguments: own.append(_entropy_and_largest(*arguments))

    hooks = [
        module.core.register_forward_pre_hook(record(own))
        for module, own in zip(modules, found, strict=True)
    ]
    try:
        with torch.inference_mode():
            for batch in rows.to(model.device).split(_BATCH):
                model.base_model(batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    shares = [len(batch) / len(rows) for batch in rows.split(_BATCH)]
    layers = [
        {
            "entropy": sum(share * e for share, (e, _) in zip(shares, own, strict=True)),
            "largest_logit": max(largest for _, largest in own),
        }
        for own in found
    ]
    return {
        "entropy": sum(layer["entropy"] for layer in layers) / len(layers),
        "largest_logit": max(layer["largest_logit"] for layer in layers),
        "layers": layers,
    }


def _entropy_and_largest(
    query: Tensor, key: Tensor, value: Tensor, extra: Tensor | None, call: Any
) -> tuple[float, float]:
    """Return the entropy and the largest logit of one layer, for the arguments of `SoftmaxCore`."""
    import torch
    from transformers.models.llama.modeling_llama import repeat_kv

    from cat_lm.model.attention.modules.call import visible_keys

    visible = visible_keys(call.mask, query, key)
    key = repeat_kv(key, query.shape[1] // key.shape[1]).float()
    logits = query.float() @ key.mT * call.scaling  # [B, H, T, T]
    logits = logits.masked_fill(~visible, -torch.inf)
    maps = logits.log_softmax(dim=-1)
    entropy = -(maps.exp() * maps.masked_fill(~visible, 0.0)).sum(dim=-1)
    read = visible.sum(dim=-1).expand_as(entropy)
    several = read > 1
    return float((entropy[several] / read[several].log()).mean()), float(logits.max())
