"""Attention with transformed scores, for every implementation that supports the transform."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import repeat_kv

from cat_lm.model.attention.modules.call import AttentionCall, only_visible, softmax, visible_keys
from cat_lm.model.sequence import SequenceGroup

ROWS = 128  # The queries whose logits are computed at a time if no full maps [T, S] are kept.


class ScoreModule(nn.Module):
    """A layer's score transform: its parameters, and the function that uses them.

    A subclass defines `score` or, if its form is separable, `factors`, both static or reading only
    numbers of the module: `flex_attention` calls them inside its kernel. A separable one that is
    not always computed by factors defines `score` and `separates` too.
    """

    no_decay: ClassVar[tuple[str, ...]] = ()
    sequence_group: SequenceGroup | None = None

    def first_head(self, count: int) -> int:
        """Return the index of the first of `count` heads here: 0 without sequence parallelism."""
        return 0 if self.sequence_group is None else self.sequence_group.rank * count

    def heads_of(self, query: Tensor) -> Tensor:
        """Return the indices [H] of heads of query [B, H, T, D] among all heads of the layer."""
        count = query.shape[1]
        return torch.arange(count, device=query.device) + self.first_head(count)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the function reads, by default all parameters in order."""
        return tuple(self.parameters(recurse=False))

    def forward(self) -> tuple[Tensor, ...]:
        """Return `tensors`, with parameters cloned."""
        # An engine may release parameters after this forward.
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
        """Return True if this number of queries per row is scaled by factors instead of scored.

        Args:
            dtype: the dtype in which q·k is computed.

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
    # The product is computed first and rounded once.
    scaled = ((query, of_query), (key, of_key))
    return tuple((x * factor[..., None]).to(x.dtype) for x, factor in scaled)


def attend_with_scores(
    implementation: str,
    module: ScoreModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    training: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend with `module.score`: [B, T, H, D], and from eager the maps [B, H, T, S].

    Args:
        implementation: eager, sdpa or flex_attention; sdpa for additive scores alone.
        query: [B, H, T, D].
        key, value: [B, H or fewer, S, D].
        call: `mask` as transformers makes it for the implementation.
    """
    if implementation == "flex_attention":
        output = _flex(module, query, key, value, call, training)
        return output.transpose(1, 2).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    visible = visible_keys(call.mask, query, key)
    is_sdpa = implementation == "sdpa"
    logits = query.new_zeros(1, 1, 1, 1) if is_sdpa else query @ key.mT * call.scaling
    where = _broadcast_positions(module, query, call.positions, call.key_positions)
    scores = module.score(logits, *where, *module()).to(query.dtype)
    if is_sdpa:
        scores = only_visible(scores, visible)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=scores, dropout_p=call.dropout, scale=call.scaling
        )
        return output.transpose(1, 2).contiguous(), None
    maps = softmax(scores, visible, call.dropout, query.dtype)
    return (maps @ value).transpose(1, 2).contiguous(), maps


def _broadcast_positions(
    module: ScoreModule, query: Tensor, query_positions: Tensor, key_positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions of queries and keys, and head indices, that broadcast to logits [B, H, T,
    S].
    """
    head = module.heads_of(query)[:, None, None]
    return query_positions[:, None, :, None], key_positions[:, None, None, :], head


def _flex(
    module: ScoreModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    training: bool,
) -> Tensor:
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    if call.dropout > 0:
        raise ValueError("attn_implementation='flex_attention' has no dropout; use 'sdpa'")
    tensors, (rows, heads) = module(), query.shape[:2]
    first = module.first_head(heads)
    query_positions, key_positions = (
        positions.expand(rows, -1) for positions in (call.positions, call.key_positions)
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
        block_mask=call.mask,
        enable_gqa=key.shape[1] != heads,
        scale=call.scaling,
    )


def attend_by_rows(
    module: ScoreModule, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
) -> Tensor:
    """Compute `attend_with_scores` for a few queries at a time, so that no maps [T, S] are kept.

    A part's maps are computed again in the backward pass. Without a mask, which is causal or of a
    single query, documents are kept apart by their numbers.
    """
    (batch, heads, time, width), shared = query.shape, key.shape[1]
    tensors = module()
    # Without a mask the queries are the keys, and later keys are masked.
    is_causal = call.mask is None and time > 1

    def attend(start: int) -> Tensor:
        part = slice(start, min(start + ROWS, time))
        read = slice(0, part.stop if is_causal else key.shape[2])
        # Visibility is computed here; otherwise every layer would keep one number for each pair.
        visible = None
        if call.mask is not None:
            visible = visible_keys(call.mask[:, :, part], query[:, :, part], key)
        elif is_causal:
            slots = torch.arange(part.stop, device=query.device)
            visible = (slots <= slots[part, None])[None, None]
            if (documents := call.documents) is not None:
                is_same = documents[:, part, None] == documents[:, None, read]
                visible = visible & is_same[:, None]
        # Keys are not repeated: queries [B, H, n, D] are read as [B, key heads, groups n, D].
        grouped = query[:, :, part].reshape(batch, shared, -1, width)
        logits = (grouped @ key[:, :, read].mT * call.scaling).view(batch, heads, -1, read.stop)
        positions = call.positions[:, part], call.key_positions[:, read]
        scores = module.score(logits, *_broadcast_positions(module, query, *positions), *tensors)
        maps = softmax(scores, visible, call.dropout, value.dtype)
        output = maps.view(batch, shared, -1, read.stop) @ value[:, :, read]
        return output.view(batch, heads, -1, value.shape[3])

    is_kept = time > ROWS and torch.is_grad_enabled()
    outputs = [
        checkpoint(attend, start, use_reentrant=False) if is_kept else attend(start)
        for start in range(0, time, ROWS)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()
