"""What attention of every family does between its projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import repeat_kv

from cat_lm.model import attention
from cat_lm.model.attention import Pattern, ScoreTransform, ValueTransform
from cat_lm.model.attention.modules.call import AttentionCall
from cat_lm.model.attention.modules.rows import attend_by_rows
from cat_lm.model.attention.modules.scores import attend_with_scores, scale_queries_and_keys
from cat_lm.model.attention.modules.varlen import attend_within_borders, computing_dtype
from cat_lm.model.cache import follows_cache, state_of
from cat_lm.model.names import renamed
from cat_lm.model.qk_norm import QueryKeyNorm
from cat_lm.model.rope_scaling import logit_temperature
from cat_lm.model.sequence import SequenceGroup, to_tokens

if TYPE_CHECKING:
    from cat_lm.model.hf.settings import AttentionSettings

# Whose fast kernels want values as wide as keys, which a kernel of scores of rank R makes R·D wide.
_OF_ONE_WIDTH = ("sdpa", "flash_attention_2")


@dataclass
class SequenceContext:
    """What the layers' arguments say of the sequence.

    padding_mask: [B, T] bool, False at padding. document_ids: [B, T]. mask: as `AttentionCall` has
    it. cache: whole. key_positions: [B, S]; None where every slot counts. arguments: for the
    attention function.
    """

    mask: Any
    cache: Cache | None
    padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    key_positions: Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


class _Ungrouped:
    """An attention module whose keys and values have been repeated for every head of queries."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# Where the modules of a pattern and of transforms stand; None for a transform that there is not.
_ENTRIES = ("core", "score_transform", "value_transform")


class AttentionMixin:
    """Attends as the configuration says; before a family's attention of transformers."""

    eager_attention: Callable  # the family's own, of transformers
    sequence_group: SequenceGroup | None = None

    def _add_parts(self, config: AttentionSettings) -> None:
        """Add what lies between the module's projections, and the temperature."""
        self.scaling /= logit_temperature(config)
        self.qk_norm = None if config.qk_norm == "none" else QueryKeyNorm(config)
        score = attention.score_transform(config)
        self.core = attention.build(Pattern, config)
        self.score_form = score.form if score else None
        self.score_transform = attention.build(ScoreTransform, config)
        self.value_transform = attention.build(ValueTransform, config)

    def _take_library_names(self) -> None:
        """Read the library's names of what the convolution holds."""
        self.register_load_state_dict_pre_hook(_rename_library_parameters)

    def _divided(
        self,
        compute: Callable[..., tuple[Tensor, ...]],
        projected: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor] | None,
        padding_mask: Tensor | None,
        document_ids: Tensor | None,
        document_positions: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Compute queries, keys and values; where ranks share sequences, of this rank's heads.

        Args:
            compute: takes projections, and then what follows here, of the same tokens; gives
                streams [B, T, heads, D].
            projected: [B, T, channels] each, head by head; of a part of the tokens where ranks
                share sequences. The other arguments are always of whole sequences.
        """
        group = self.sequence_group
        if group is None:
            return compute(*projected, rotary, padding_mask, document_ids, document_positions)
        if self.convolution is None or not self.convolution.mixes_heads:
            heads = group.to_heads(*projected)
            return compute(*heads, rotary, padding_mask, document_ids, document_positions)
        # Filters between heads read all of them, and only the tokens just before.
        before = self.convolution.window - 1
        read = group.with_halo(before, *projected)
        if rotary is not None:
            rotary = tuple(group.part(turned, before) for turned in rotary)
        is_real = group.is_real(before, read[0])
        streams = compute(*read, rotary, is_real, group.part(document_ids, before), None)
        return group.to_heads(*(stream[:, before:] for stream in streams))

    def _normalized(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Normalise queries and keys [B, T, heads, D] of a model without convolutions."""
        if self.qk_norm is not None:
            query, key = self.qk_norm(query, key)
        return query, key, value

    def _continues(self, cache: Cache | None) -> bool:
        return follows_cache(cache, self.layer_idx)

    def _meet(
        self, streams: tuple[Tensor, ...], context: SequenceContext
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with queries, keys and values [B, T, heads, D], and what a convolution added.

        Returns:
            [B, T, H, D], of a part of the tokens where ranks share sequences, and the attention
            maps if the attention function gives them.
        """
        query, key, value, *extra = streams
        cache, continues = context.cache, self._continues(context.cache)
        state = state_of(cache, self.layer_idx)
        if self.value_transform is not None:
            where = {}
            if getattr(self.value_transform, "reads_positions", False):
                where["positions"] = context.arguments["position_ids"]
            given = context.padding_mask, context.document_ids, state
            value = self.value_transform(value, *given, **where)
        # [B, T, H, D] to [B, H, T, D]
        query, key, value = (stream.transpose(1, 2) for stream in (query, key, value))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        positions = None, None
        if self.config.reads_positions:
            positions = self._positions(query, key, context)

        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *own: Tensor | None,
        ) -> tuple[Tensor, Tensor | None]:
            if not own:
                return self._attend(query, key, value, *positions, context)
            mask, query_positions, key_positions = own
            part = replace(context, mask=mask, document_ids=None)
            return self._attend(query, key, value, query_positions, key_positions, part)

        call = AttentionCall(
            attend,
            context.mask,
            self.scaling,
            self._dropout,
            continues,
            state,
            context.document_ids,
            context.padding_mask,
            *positions,
            context.arguments.get("auxiliary_losses"),
            context.arguments.get("document_borders"),
        )
        output, maps = self.core(query, key, value, extra[0] if extra else None, call)
        return to_tokens(self.sequence_group, output), maps

    @property
    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _positions(
        self, query: Tensor, key: Tensor, context: SequenceContext
    ) -> tuple[Tensor, Tensor]:
        """Positions of queries [B or 1, T] and of all keys [B or 1, S]."""
        keys, known = key.shape[2], context.key_positions
        if known is None:
            known = torch.arange(keys, device=key.device)[None]
        # A static cache has room for keys that are still to come.
        return context.arguments["position_ids"], F.pad(known, (0, keys - known.shape[1]))

    def _scales(self, query: Tensor, context: SequenceContext) -> bool:
        """Return True if scaled queries and keys have the scores; else they are computed."""
        if self.score_form != "separable" or context.arguments.get("by_rows"):
            return False
        return self.score_transform.separates(
            query.shape[2], computing_dtype(query), self.config._attn_implementation
        )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_positions: Tensor | None,
        key_positions: Tensor | None,
        context: SequenceContext,
    ) -> tuple[Tensor, Tensor | None]:
        """The configuration's attention function: [B, T, H, values' width], and maybe the maps."""
        implementation = self.config._attn_implementation
        if self.score_form is not None and self._scales(query, context):
            query, key = scale_queries_and_keys(
                self.score_transform, query, key, query_positions, key_positions
            )
            value = repeat_kv(value, key.shape[1] // value.shape[1])
        elif self.score_form == "separable" and implementation == "sdpa":
            return attend_by_rows(
                self.score_transform, query, key, value, context.mask, context.document_ids,
                query_positions, key_positions, self.scaling, self._dropout,
            ), None  # fmt: skip
        elif self.score_form is not None:
            return attend_with_scores(
                implementation, self.score_transform, query, key, value, context.mask,
                query_positions, key_positions, self.scaling, self._dropout, self.training,
            )  # fmt: skip
        width = value.shape[-1]
        wider = key.shape[-1] - width
        if wider > 0 and implementation in _OF_ONE_WIDTH:
            value = F.pad(value, (0, wider))
        borders = context.arguments.get("document_borders")
        if borders is not None:
            dropout = self._dropout
            output = attend_within_borders(query, key, value, borders, self.scaling, dropout)
            return output[..., :width], None
        function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, type(self).eager_attention)
        output, maps = function(
            self if self.score_form is None else _Ungrouped(self),
            query,
            key,
            value,
            context.mask,
            scaling=self.scaling,
            dropout=self._dropout,
            **context.arguments,
        )
        return (output[..., :width] if output.shape[-1] > width else output), maps


def entry_weights(model: nn.Module) -> set[str]:
    """List the names of what entries of the registry have in a model: parameters and buffers."""
    return {
        f"{name}.{part}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, AttentionMixin)
        for part in _ENTRIES
        for key in (getattr(module, part) or nn.Module()).state_dict()
    }


def _rename_library_parameters(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Take the library's names for what the convolution holds."""
    renamings = module.config.renamings(convolved=True)
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[renamed(name, renamings)] = state_dict.pop(name)
