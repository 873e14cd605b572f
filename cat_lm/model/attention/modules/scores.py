"""Attention with transformed scores, for each implementation that can compute the form."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import repeat_kv

from cat_lm.model.attention.modules.call import visible_keys
from cat_lm.model.sequence import SequenceGroup


class ScoreModule(nn.Module):
    """A layer's transform of scores: its parameters, and a function of them.

    A subclass defines either `score` or, if its form is separable, `factors`. Both
    are static, or read numbers alone of the module: `flex_attention` calls them inside its kernel.
    With parameters it also has what `cat_lm.model.attention.base.Entry` asks of modules. A
    separable one that is not always computed by factors has `score` and `separates` too.
    """

    no_decay: ClassVar[tuple[str, ...]] = ()
    sequence_group: SequenceGroup | None = None

    def first_head(self, count: int) -> int:
        """Number the first of `count` heads that are computed here: 0, but where ranks share."""
        return 0 if self.sequence_group is None else self.sequence_group.rank * count

    def heads_of(self, query: Tensor) -> Tensor:
        """Number the heads of query [B, H, T, D] among all of the layer's, [H]."""
        count = query.shape[1]
        return torch.arange(count, device=query.device) + self.first_head(count)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what the function reads, such as a number for each head [H].

        By default the module's parameters, in the order in which it got them.
        """
        return tuple(self.parameters(recurse=False))

    def forward(self) -> tuple[Tensor, ...]:
        """Return `tensors`, none of which is a parameter itself.

        An engine may take parameters away after this forward.
        """
        return tuple(
            tensor.clone() if isinstance(tensor, nn.Parameter) else tensor
            for tensor in self.tensors()
        )

    @staticmethod
    def score(
        logits: Tensor, query_position: Tensor, key_position: Tensor, head: Tensor, *tensors: Tensor
    ) -> Tensor:
        """Transform logits.

        Args:
            logits: q·k / (t sqrt(D)); all arguments broadcast against each other, and are single
                numbers inside flex attention.
            query_position, key_position: integers, counted from 0 in every document and without
                padding.
            head: the number of the query's head, integers, for `tensors[0][head]`.
        """
        raise NotImplementedError

    @staticmethod
    def factors(position: Tensor, head: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of a query and of a key at a position, broadcast as in `score`."""
        raise NotImplementedError

    def separates(self, queries: int, dtype: torch.dtype, implementation: str) -> bool:
        """Return True if so many new queries of a row are scaled by factors, not scored.

        Args:
            dtype: in which q·k is computed.

        Raises:
            ValueError: the implementation knows nothing but factors, and they do not serve.
        """
        return True

    def separated(
        self,
        query_positions: Tensor,
        key_positions: Tensor,
        head: Tensor,
        dtype: torch.dtype,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the factors of queries [B or 1, H, T] and of keys [B or 1, H, S].

        Args:
            query_positions, key_positions: [B or 1, 1, T] and [B or 1, 1, S].
            head: [H, 1].
            dtype: fp32 or fp64, what the factors are computed in.
        """
        of_query, _ = self.factors(query_positions, head, *tensors)
        _, of_key = self.factors(key_positions, head, *tensors)
        return of_query, of_key


def scale_queries_and_keys(
    module: ScoreModule, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale query [B, H, T, D] and key [B, H or fewer, S, D], which gets as many heads."""
    head = module.heads_of(query)[:, None]
    dtype = torch.promote_types(query.dtype, torch.float32)
    of_query, of_key = module.separated(
        query_positions[:, None], key_positions[:, None], head, dtype, *module()
    )
    key = repeat_kv(key, query.shape[1] // key.shape[1])
    # Rounded once, after the product.
    query, key = (
        (x * factor[..., None]).to(x.dtype) for x, factor in ((query, of_query), (key, of_key))
    )
    return query, key


def attend_with_scores(
    implementation: str,
    module: ScoreModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    dropout: float,
    training: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend with scores that a function makes of logits.

    Args:
        implementation: eager, sdpa or flex_attention; the last for additive scores alone.
        query: [B, H, T, D].
        key, value: [B, H or fewer, S, D].
        mask: as transformers makes it for the implementation.
        query_positions: [B or 1, T].
        key_positions: [B or 1, S].

    Returns:
        [B, T, H, D], and from eager the maps [B, H, T, S].
    """
    tensors = module()
    if implementation == "flex_attention":
        output = _flex(
            module, tensors, query, key, value, mask, query_positions, key_positions, scaling,
            dropout, training,
        )  # fmt: skip
        return output.transpose(1, 2).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    visible = visible_keys(mask, query, key)
    head = module.heads_of(query)[:, None, None]
    where = query_positions[:, None, :, None], key_positions[:, None, None, :], head
    is_sdpa = implementation == "sdpa"
    logits = query.new_zeros(1, 1, 1, 1) if is_sdpa else query @ key.mT * scaling
    scores = module.score(logits, *where, *tensors).to(query.dtype)
    if visible is not None:
        # Not -inf: a query of a padding token may see nothing, and must not become NaN.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if is_sdpa:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=scores, dropout_p=dropout, scale=scaling
        )
        return output.transpose(1, 2).contiguous(), None
    maps = softmax(scores).to(query.dtype)
    maps = F.dropout(maps, dropout, training=dropout > 0)
    return (maps @ value).transpose(1, 2).contiguous(), maps


def softmax(scores: Tensor) -> Tensor:
    """Return maps over the last dimension, in fp32 or fp64."""
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def _flex(
    module: ScoreModule,
    tensors: tuple[Tensor, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    dropout: float,
    training: bool,
) -> Tensor:
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    if dropout > 0:
        raise ValueError("attn_implementation='flex_attention' has no dropout; use 'sdpa'")
    rows, first = query.shape[0], module.first_head(query.shape[1])
    query_positions, key_positions = (
        positions.expand(rows, -1) for positions in (query_positions, key_positions)
    )

    def score_mod(score, batch, head, row, column):
        where = query_positions[batch, row], key_positions[batch, column], head + first
        return module.score(score, *where, *tensors)

    return compile_friendly_flex_attention(
        query,
        key,
        value,
        training=training,
        score_mod=score_mod,
        block_mask=mask,
        enable_gqa=key.shape[1] != query.shape[1],
        scale=scaling,
    )
