"""Positions, masks and convolution borders from padding, packed documents and the cache.

A mask that keeps documents apart is [B, 1, T, T], which every layer reads and keeps for its
backward pass. Flash attention for rows of many lengths takes the borders of the documents instead
and computes nothing across them. torch has it in its own kernel, the one that
`torch.nn.attention.varlen` calls (and whose arguments that changes from version to version).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from cat_lm.model import attention
from cat_lm.model.attention.modules.call import computing_dtype, why_no_kernel
from cat_lm.model.attention.settings import AttentionSettings, refuse
from cat_lm.model.context import Context
from cat_lm.model.rules import query_width
from cat_lm.ops.landmark.layout import interior_padding
from cat_lm.ops.runtime.documents import document_borders, document_positions, document_runs

# Keyword arguments of a body's forward beside the named ones.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
_FURTHER = (
    *(*_LENGTHS, "seq_idx"),  # These describe packed documents.
    "key_positions",  # [B, S] positions of keys beside a prepared mask, see `count_positions`.
    *("auxiliary_losses", "cache_position"),
    # These are outputs of tokenizers.
    *("token_type_ids", "special_tokens_mask", "length", "offset_mapping"),
    "overflow_to_sample_mapping",
)
_GAP = (
    "attention_mask: the model takes no padding between the tokens of a row; pad rows at their "
    "beginning or their end"
)
_OTHER_MASK = (
    "attention_mask: takes cached tokens for padding that were read as tokens, or padding for "
    "tokens (generate reads what follows the end of a row); begin with an empty cache"
)

# The form in which each implementation takes document boundaries.
_MASKS = {"eager": "a mask", "flex_attention": "a mask of blocks"}


def context_of(
    config: AttentionSettings,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    cache: Cache | None,
    padding_mask: Tensor | None = None,
    borders: Tensor | None = None,
    further: Mapping[str, Any] | None = None,
) -> Context:
    """Build the context that all layers share, without layer state and rotation.

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
        further: the forward's other arguments.

    Raises:
        ValueError: combinations for which the convolution could not know what to read.
    """
    if config.attends:
        check_attention(config)
    further = further or {}
    shape = inputs_embeds.shape[:2]
    rows = _Rows(config, shape, attention_mask, padding_mask, position_ids, cache, further)
    documents = rows.documents(document_ids)
    real = rows.padding(documents)
    if position_ids is None:
        position_ids = rows.positions(documents, inputs_embeds.device)
    plain = {k: v for k, v in further.items() if k not in ("auxiliary_losses", "key_positions")}
    context = Context(
        documents,
        real,
        losses=further.get("auxiliary_losses"),
        cache=cache,
        positions=position_ids,
        arguments={"position_ids": position_ids} | plain,
    )
    if config.attends:
        _add_mask(context, rows, inputs_embeds, borders)
    return context


def _add_mask(context: Context, rows: _Rows, inputs_embeds: Tensor, borders: Tensor | None) -> None:
    """Add what attention reads: a mask or document boundaries, and key positions."""
    config, attention_mask = rows.config, rows.attention_mask
    if config.masks_keys:
        if attention_mask is not None and not _is_plain_mask(attention_mask):
            raise ValueError(
                f"attention_mask: {attention.pattern(config).title} takes [B, S] with 1 at real "
                "tokens, not a prepared mask"
            )
        context.document_borders = borders if context.padding is None else None
        return
    same_document = None
    if context.documents is not None:
        same_document = _separate_documents(context, config, inputs_embeds, attention_mask, borders)
    if config.reads_positions:
        context.key_positions = rows.further.get("key_positions")
        if context.key_positions is None:
            context.key_positions = rows.key_positions(context.positions)
    context.mask = attention.pattern(config).mask(
        config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        past_key_values=context.cache,
        # transformers would infer documents from the positions; here they are known.
        position_ids=None,
        and_mask_function=same_document,
    )


def check_attention(config: AttentionSettings) -> None:
    """Raise ValueError for an attention function that cannot serve the configuration."""
    refuse(attention.implementation_problems(config, config._attn_implementation))


def check_call(config: Any, further: Mapping[str, Any], *layout: Any) -> None:
    """Check that a call has no argument about neighbouring tokens that only attention would read.

    Engines with a cache of their own (vLLM, continuous batching) call a model so.

    Args:
        further: the arguments that the body's forward does not name.
        layout: what else says how rows are read: positions, masks, documents, a cache.

    Raises:
        ValueError: an argument that no layer reads, or an attention function without a mask.
    """
    for name, value in further.items():
        if name not in _FURTHER and not isinstance(value, bool | int | float | str | None):
            raise ValueError(
                f"{name}: a {type(value).__name__} that the layers do not read; say in "
                "document_ids, padding_mask and past_key_values what stands before a token"
            )
    if config.reads_padding and any(said is not None for said in layout):
        _check_function(config)


def _check_function(config: Any) -> None:
    name = config._attn_implementation
    if name is not None and name not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
        raise ValueError(
            f"attn_implementation={name}: transformers makes no mask for it, so that it may read "
            "other tokens than the layers before it; use sdpa, eager or flash_attention_2"
        )


@dataclass
class _Rows:
    """The rows of a call, see `context_of`. `shape` is (B, T)."""

    config: AttentionSettings
    shape: tuple[int, int]
    attention_mask: Any
    padding_mask: Tensor | None
    position_ids: Tensor | None
    cache: Cache | None
    further: Mapping[str, Any]

    def documents(self, document_ids: Tensor | None) -> Tensor | None:
        """Return document numbers [B, T]; None if rows are not packed."""
        name, positions = "document_ids", self.position_ids
        if document_ids is None:
            name, document_ids = "seq_idx", self.further.get("seq_idx")
        found = None
        if document_ids is not None:
            found = document_runs(document_ids)
        elif positions is not None and self.attention_mask is None and positions.shape[1] > 1:
            name = "position_ids that start anew"
            found = _runs_of_positions(positions.expand(self.shape[0], -1), self.cache)
        if found is not None and self.cache is not None:
            if not torch.compiler.is_compiling() and not found.any():
                return None  # A single document needs no numbers.
            raise ValueError(f"{name} cannot be used with a cache; pass use_cache=False")
        for name in _LENGTHS:
            lengths = self.further.get(name)
            if lengths is not None and not self._are_lengths(lengths, found):
                raise ValueError(
                    f"{name}: the layers read documents off document_ids or position_ids, which "
                    "say others; pass document_ids, and no cache"
                )
        return found

    def _are_lengths(self, lengths: Tensor, documents: Tensor | None) -> bool:
        """Return True if flash attention's `lengths` describe the same documents."""
        batch, time = self.shape
        is_continued = self.cache is not None and self.cache.get_seq_length() > 0
        if torch.compiler.is_compiling() or is_continued:
            # Values are unknown while compiling, and cached keys are counted too.
            return documents is not None or len(lengths) - 1 == batch
        if documents is None:
            return lengths.tolist() == [row * time for row in range(batch + 1)]
        return torch.equal(lengths.to(documents.device).int(), document_borders(documents))

    def padding(self, documents: Tensor | None) -> Tensor | None:
        """Return which new tokens are real, [B, T] bool; None if all are.

        The cache's first layer keeps which of its tokens are padding. Masks cost one wait for a
        GPU. Where a graph is compiled, faults raise RuntimeError.
        """
        config, (_, time) = self.config, self.shape
        past = 0 if self.cache is None else self.cache.get_seq_length()
        if self.cache is not None:
            _check_width("attention_mask", self.attention_mask, past, time)
        if not config.reads_padding:
            return None
        record = next(iter(getattr(self.cache, "layers", ())), None)
        kept = getattr(record, "real", None)
        mask = self.attention_mask if self.padding_mask is None else self.padding_mask
        if mask is None:
            if kept is not None:
                raise ValueError(
                    "attention_mask: the cache holds padding; give [B, S] with 0 at padding, S the "
                    "cached and the new tokens"
                )
            return None
        if self.padding_mask is None and not _is_plain_mask(mask):
            raise ValueError(
                "the convolution cannot read padding or documents off a prepared attention mask; "
                "pass padding_mask [B, T] (and document_ids for packed documents) beside it, or "
                "attention_mask as [B, T]"
            )
        real = mask.bool()
        new = real[:, -time:]
        if new.shape[1] < real.shape[1]:
            _check_width("padding_mask", real, past, time)
        faults = self._padding_faults(real, kept, documents)
        if torch.compiler.is_compiling():
            for said, is_found in faults.items():
                torch._assert_async(~is_found, said)
            if time > 1 and hasattr(record, "real") and self.padding_mask is None:
                record.real = real  # Later calls need it for all tokens so far.
            return new
        *found, is_whole = torch.stack([*faults.values(), new.all()]).tolist()
        for said, is_found in zip(faults, found, strict=True):
            if is_found:
                raise ValueError(said)
        if is_whole:
            return None
        if config.keeps_padding and hasattr(record, "real"):
            before = new.new_ones(len(new), int(past))
            if kept is not None:
                before[:, : kept.shape[1]] = kept
            record.real = torch.cat([before, new], dim=1)
        return new

    def _padding_faults(
        self, real: Tensor, kept: Tensor | None, documents: Tensor | None
    ) -> dict[str, Tensor]:
        """Return error message -> single bool that is True if the padding has that fault.

        Args:
            real: [B, S] or [B, T] bool, what the call says.
            kept: [B, n] bool, how the first cached tokens were read.
        """
        faults, row, time = {}, real, self.shape[1]
        if self.config.keeps_padding:
            said, row = real[:, :-time], real[:, -time:]
            read = said[:, :0] if kept is None else kept
            if said.shape[1] > 0:
                count = min(read.shape[1], said.shape[1])
                differs = (said[:, :count] != read[:, :count]).any()
                faults[_OTHER_MASK] = differs | ~said[:, count:].all()
                read = said
            if documents is None and self.cache is not None:
                # Tokens after the recorded ones are real.
                has_real = read.any(dim=1) | (self.cache.get_seq_length() > read.shape[1])
                row = torch.cat([has_real[:, None], row], dim=1)
        if not self.config.takes_gaps and not (self.config.keeps_padding and time == 1):
            faults[_GAP] = interior_padding(row, documents).any()
        return faults

    def positions(self, documents: Tensor | None, device: torch.device) -> Tensor:
        """Return the positions [B or 1, T] of real tokens, from 0 in every document."""
        time, is_plain = self.shape[1], _is_plain_mask(self.attention_mask)
        if documents is not None:
            positions = document_positions(documents)
            if not is_plain:
                return positions
            real = self.attention_mask.long()
            before = real.cumsum(dim=1) - real  # The index of each real token in its row.
            starts = torch.arange(time, device=device) - positions
            return before - before.gather(1, starts)
        if is_plain:
            return count_positions(self.attention_mask)[:, -time:]
        past = 0 if self.cache is None else self.cache.get_seq_length()
        return (torch.arange(time, device=device) + past)[None]

    def key_positions(self, positions: Tensor) -> Tensor | None:
        """Return the positions of cached and new keys, [B or 1, S]; None if every slot counts."""
        if self.cache is None:
            return positions
        mask = self.attention_mask
        if not _is_plain_mask(mask):
            is_prepared, mask = mask is not None, self.padding_mask
            is_short = is_prepared and mask.shape[1] <= self.shape[1]
            if is_short and not torch.compiler.is_compiling() and self.cache.get_seq_length() > 0:
                raise ValueError(
                    "padding_mask must be [B, S] beside a prepared attention mask, S the cached "
                    "and the new tokens, as positions of all keys are read"
                )
        return None if mask is None else count_positions(mask)


def _is_plain_mask(mask: Any) -> bool:
    """Return True for a mask [B, S] with 1 at real tokens, not one prepared for a function."""
    return isinstance(mask, Tensor) and mask.ndim == 2


def _check_width(name: str, mask: Any, past: Any, time: int) -> None:
    # The host does not know how many tokens a static cache holds.
    if isinstance(past, int) and _is_plain_mask(mask) and mask.shape[1] != past + time:
        said = f"says what {mask.shape[1]} tokens are, of {past + time} with those in the cache"
        raise ValueError(f"{name}: {said}; give [B, S] with all of them")


def check_gaps(real: Tensor, documents: Tensor | None) -> None:
    """Raise ValueError for padding between a row's tokens, `real` [B, T] bool; synchronises with
    the GPU.
    """
    if interior_padding(real, documents).any():
        raise ValueError(_GAP)


def count_positions(attention_mask: Tensor, length: int = 0) -> Tensor:
    """Return the positions of real tokens [B, S], padded with zeros up to `length` slots."""
    positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return F.pad(positions, (0, max(0, length - positions.shape[1])))


def positions_restart(position_ids: Tensor | None, attention_mask: Any) -> bool:
    """Return True if only the positions separate documents; False while compiling, where they are
    unknown.
    """
    if position_ids is None or attention_mask is not None or torch.compiler.is_compiling():
        return False
    return bool((position_ids.diff(dim=1) != 1).any())


def _runs_of_positions(position_ids: Tensor, cache: Cache | None) -> Tensor | None:
    """Return the numbers [B, T] of runs of consecutive positions; None if each row is one run."""
    starts = F.pad(position_ids.diff(dim=1) != 1, (1, 0))
    runs = starts.cumsum(dim=1)
    if torch.compiler.is_compiling():
        # While compiling it is unknown whether positions restart; numbering a single document is
        # only slower.
        if cache is None:
            return runs
        torch._assert_async(~runs[:, -1].any(), "position_ids that start anew, beside a cache")
        return None
    if not runs[:, -1].any():
        return None
    is_odd = starts & (position_ids != 0) & (position_ids != position_ids[:, :1])
    if is_odd.any():
        raise ValueError(
            "position_ids: a document within a row begins at another position than 0 or the "
            "row's first; give document_ids, and a document's tokens from its beginning"
        )
    return runs


class DocumentAttention(NamedTuple):
    """Record how documents are kept separate, and why.

    Attributes:
        name: `varlen`, torch's kernel; `flash`, that of the implementation; `rows`, where sdpa's
            place is taken by `attend_by_rows`; or `mask`.
    """

    name: str
    reason: str


def document_attention(
    config: AttentionSettings, device: torch.device, dtype: torch.dtype
) -> DocumentAttention:
    """Choose how documents are kept separate, by `attn_implementation` and for sdpa by the kernel's
    limits.
    """
    implementation = config._attn_implementation
    if "flash" in implementation:
        return DocumentAttention("flash", f"attn_implementation={implementation}")
    if implementation != "sdpa":
        made = _MASKS.get(implementation, "a mask")
        return DocumentAttention("mask", f"attn_implementation={implementation} takes {made}")
    score = attention.score_transform(config)
    if score is not None and score.splits_queries(config):
        return DocumentAttention("rows", f"{score.title}, computed for some queries at a time")
    if obstacle := why_no_kernel(device, dtype, query_width(config)):
        return DocumentAttention("mask", obstacle)
    # The kernel serves whatever the package of that name serves.
    if problems := attention.implementation_problems(config, "flash_attention_2"):
        return DocumentAttention("mask", problems[0].partition(": ")[2])
    return DocumentAttention("varlen", "torch's flash attention for rows of many lengths")


def _separate_documents(
    context: Context,
    config: AttentionSettings,
    inputs_embeds: Tensor,
    attention_mask: Any,
    borders: Tensor | None,
) -> Any:
    """Set what keeps documents separate; return the mask's function if a mask is used."""
    documents, padding = context.documents, context.padding
    context.document_positions = document_positions(documents).int()
    by = document_attention(config, documents.device, computing_dtype(inputs_embeds)).name
    # The boundaries' number depends on data, so that a graph cannot compute them.
    is_known = borders is not None or not torch.compiler.is_compiling()
    is_plain = attention_mask is None and padding is None
    if by == "flash" or (by == "varlen" and is_plain and is_known):
        if padding is not None:
            raise ValueError("flash attention takes document_ids or padding, not both")
        borders = document_borders(documents) if borders is None else borders
        if by == "varlen":
            context.document_borders = borders
        else:
            # The row length bounds every document, so that the host need not wait for the longest
            # one.
            lengths = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
            most = dict.fromkeys(("max_length_q", "max_length_k"), documents.shape[1])
            context.arguments |= lengths | most
        return None
    if by == "rows" and is_plain:
        context.by_rows = True
        return None
    _check_function(config)

    def same_document(batch, head, query, key):
        return documents[batch, query] == documents[batch, key]

    return same_document
