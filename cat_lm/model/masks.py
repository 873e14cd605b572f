"""What padding, packed documents and the cache mean for positions, attention and convolution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from cat_lm.model import attention
from cat_lm.model.attention.documents import document_attention
from cat_lm.model.attention.varlen import computing_dtype
from cat_lm.model.settings import AttentionSettings, refuse
from cat_lm.ops.documents import document_borders, document_positions, document_runs
from cat_lm.ops.landmark.layout import interior_padding


@dataclass
class SequenceLayout:
    """Say how the rows of a batch are read.

    position_ids: [B or 1, T].
    attention_mask: what the attention function of transformers takes: None, [B, 1, T, S], a
        BlockMask, or for flash attention [B, S].
    padding_mask: [B, T] bool, False at padding; None where there is no padding.
    documents: [B, T] document numbers; None where rows are not packed.
    document_positions: [B, T] int32, the position of each token in its document, or None.
    attention_kwargs: more arguments for the attention function.
    """

    position_ids: Tensor
    attention_mask: Any
    padding_mask: Tensor | None
    documents: Tensor | None
    document_positions: Tensor | None = None
    attention_kwargs: dict[str, Any] = field(default_factory=dict)


def sequence_layout(
    config: AttentionSettings,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    cache: Cache | None,
    padding_mask: Tensor | None = None,
    borders: Tensor | None = None,
) -> SequenceLayout:
    """Derives the layout from what the caller said, so that attention and convolution agree.

    Args:
        inputs_embeds: [B, T, C].
        attention_mask: [B, S] with 1 at real tokens, S the cached and the new ones; or a mask that
            was prepared for the attention function.
        position_ids: [B, T]; by default they count real tokens, from 0 in every document.
        document_ids: [B, T]; a change of the id starts a document. Without it, position ids that
            do not count up by one start a document too, as everywhere in transformers.
        cache: holds the tokens before these.
        padding_mask: [B, T], or [B, S] as `attention_mask`, 0 at padding; needed only beside a
            prepared attention mask, off which it cannot be read.
        borders: `document_borders` of the documents, if they are known without waiting for a GPU.

    Raises:
        ValueError: combinations for which the convolution could not know what to read.
    """
    check_attention(config)
    time = inputs_embeds.shape[1]
    documents = documents_of(document_ids, position_ids, attention_mask, cache)
    given_padding = padding_mask
    padding_mask = padding_of(config, attention_mask, padding_mask, time)
    if position_ids is None:
        position_ids = positions_of(inputs_embeds, attention_mask, documents, cache)

    attention_kwargs: dict[str, Any] = {}
    if config.masks_keys:
        check_maskless(config, attention_mask, padding_mask, documents)
        known = {} if borders is None or padding_mask is not None else {"document_borders": borders}
        return SequenceLayout(position_ids, None, padding_mask, documents, None, known)
    same_document = positions = None
    if documents is not None:
        positions = document_positions(documents).int()
        by = document_attention(config, documents.device, computing_dtype(inputs_embeds)).name
        # Borders that a graph would have to find are of a length that it cannot know.
        is_known = borders is not None or not torch.compiler.is_compiling()
        if by == "flash":
            attention_kwargs = _flash_documents(documents, padding_mask, borders)
        elif by == "varlen" and attention_mask is None and padding_mask is None and is_known:
            borders = document_borders(documents) if borders is None else borders
            attention_kwargs = {"document_borders": borders}
        elif by == "rows" and attention_mask is None and padding_mask is None:
            attention_kwargs = {"by_rows": True}
        else:
            same_document = _same_document_function(documents)
    if config.reads_positions:
        attention_kwargs["key_positions"] = _key_positions(
            attention_mask, given_padding, position_ids, cache
        )
    prepared_mask = attention.pattern(config).mask(
        config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        past_key_values=cache,
        # transformers reads documents off the positions; here they are known.
        position_ids=None,
        and_mask_function=same_document,
    )
    return SequenceLayout(
        position_ids, prepared_mask, padding_mask, documents, positions, attention_kwargs
    )


def check_attention(config: AttentionSettings) -> None:
    """Raise ValueError for an attention function that cannot serve the configuration."""
    refuse(attention.implementation_problems(config, config._attn_implementation))


def check_maskless(
    config: AttentionSettings,
    attention_mask: Any,
    padding_mask: Tensor | None,
    documents: Tensor | None,
) -> None:
    """Check that a pattern which masks keys itself can know all that it has to.

    Args:
        padding_mask, documents: [B, T], of the new tokens.

    Raises:
        ValueError: a prepared mask, or padding between tokens of a document.
    """
    title = attention.pattern(config).title
    if attention_mask is not None and getattr(attention_mask, "ndim", None) != 2:
        raise ValueError(
            f"attention_mask: {title} takes [B, S] with 1 at real tokens, not a prepared mask"
        )
    if padding_mask is None or torch.compiler.is_compiling():
        return
    if interior_padding(padding_mask, documents).any():
        raise ValueError(
            f"attention_mask: {title} takes no padding between the tokens of a row; "
            "pad rows at their beginning or their end"
        )


def documents_of(
    document_ids: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    cache: Cache | None,
) -> Tensor | None:
    """Number the documents, [B, T]; None where rows are not packed. As `sequence_layout`."""
    if document_ids is not None:
        if cache is not None:
            raise ValueError("document_ids cannot be used with a cache; pass use_cache=False")
        return document_runs(document_ids)
    if position_ids is None or attention_mask is not None or cache is not None:
        return None
    if torch.compiler.is_compiling():
        # Whether positions restart is not known while compiling; one document is never wrong to
        # number, only slower.
        return _runs_of_positions(position_ids)
    runs = _runs_of_positions(position_ids)
    return runs if runs[:, -1].any() else None


def _runs_of_positions(position_ids: Tensor) -> Tensor:
    return F.pad(position_ids.diff(dim=1) != 1, (1, 0)).cumsum(dim=1)


def padding_of(
    config: Any, attention_mask: Any, padding_mask: Tensor | None, time: int
) -> Tensor | None:
    """Tell the real ones of the `time` new tokens, [B, T] bool; None where all are real.

    Args:
        config: says by `reads_padding` whether that matters to the model.
        attention_mask, padding_mask: as of `sequence_layout`.
    """
    if not config.reads_padding or (attention_mask is None and padding_mask is None):
        return None
    if padding_mask is None:
        if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
            raise ValueError(
                "the convolution cannot read padding or documents off a prepared attention mask; "
                "pass padding_mask [B, T] (and document_ids for packed documents) beside it, or "
                "attention_mask as [B, T]"
            )
        padding_mask = attention_mask
    new = padding_mask[:, -time:].bool()
    if not torch.compiler.is_compiling() and new.all():
        return None
    return new


def positions_of(
    inputs_embeds: Tensor,
    attention_mask: Any,
    documents: Tensor | None,
    cache: Cache | None,
) -> Tensor:
    """Count real tokens, from 0 in every document; [B or 1, T]."""
    time, device = inputs_embeds.shape[1], inputs_embeds.device
    is_known = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    if documents is not None:
        positions = document_positions(documents)
        if not is_known:
            return positions
        real = attention_mask.long()
        counted = real.cumsum(dim=1) - real  # before each token, in its row
        starts = torch.arange(time, device=device) - positions
        return counted - counted.gather(1, starts)
    if is_known:
        counted = attention_mask.long().cumsum(dim=1) - 1
        return counted.clamp(min=0)[:, -time:]
    past = 0 if cache is None else cache.get_seq_length()
    return (torch.arange(time, device=device) + past)[None]


def _key_positions(
    attention_mask: Any, padding_mask: Tensor | None, position_ids: Tensor, cache: Cache | None
) -> Tensor | None:
    """Positions of the cached keys and the new ones, [B or 1, S]; None where every slot counts."""
    if cache is None:
        return position_ids
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        _check_covers_cache(attention_mask, padding_mask, position_ids.shape[1], cache)
        attention_mask = padding_mask
    if attention_mask is None:
        return None
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _check_covers_cache(
    attention_mask: Any, padding_mask: Tensor | None, time: int, cache: Cache
) -> None:
    """Check that padding among cached keys is known, whose mask was prepared elsewhere."""
    if attention_mask is None or padding_mask.shape[1] > time or torch.compiler.is_compiling():
        return
    if cache.get_seq_length() > 0:
        raise ValueError(
            "padding_mask must be [B, S] beside a prepared attention mask, S the cached and the "
            "new tokens, as positions of all keys are read"
        )


def _same_document_function(documents: Tensor):
    def same_document(batch, head, query, key):
        return documents[batch, query] == documents[batch, key]

    return same_document


def _flash_documents(
    documents: Tensor, padding_mask: Tensor | None, borders: Tensor | None
) -> dict[str, Any]:
    """Cumulative lengths for flash attention's packed form, all rows joined end to end."""
    if padding_mask is not None:
        raise ValueError("flash attention takes document_ids or padding, not both")
    borders = document_borders(documents) if borders is None else borders
    time = documents.shape[1]  # no document is longer, and the host need not wait for the longest
    return {
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": time,
        "max_length_k": time,
    }
