"""The part of attention between its projections, shared by all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import repeat_kv

from cat_lm.core.causality import TIME, check_causal, copy_with
from cat_lm.core.plugins import is_own
from cat_lm.model import attention
from cat_lm.model.attention import Pattern, ScoreTransform, ValueTransform
from cat_lm.model.attention.modules.call import (
    AttentionCall,
    attend_within_borders,
    computing_dtype,
)
from cat_lm.model.attention.modules.scores import (
    attend_by_rows,
    attend_with_scores,
    scale_queries_and_keys,
)
from cat_lm.model.attention.settings import AttentionSettings, rename_parameter
from cat_lm.model.context import Context
from cat_lm.model.rope_scaling import logit_temperature
from cat_lm.model.sequence import to_tokens
from cat_lm.model.streams.operations import QueryKeyNorm
from cat_lm.ops.attention.causal_cpu import causal_attention, serves_training

# The fast kernels of these functions require values as wide as keys; R ranks make keys R·D wide.
_OF_ONE_WIDTH = ("sdpa", "flash_attention_2")


class _Ungrouped:
    """Stands for an attention module whose keys and values were already repeated for every query
    head.
    """

    num_key_value_groups = 1

    def __init__(self, module: nn.Module):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_ENTRIES = ("core", "score_transform", "value_transform")


class AttentionMixin:
    """Attends as the configuration asks; precedes a family's transformers class."""

    eager_attention: Callable  # The family's own function from transformers, as is `rotate`.
    rotate: Callable
    output_name: str  # The name of the family's output projection.

    def _add_parts(self, config: AttentionSettings) -> None:
        self.scaling /= logit_temperature(config)
        self.qk_norm = None if config.qk_norm == "none" else QueryKeyNorm(config)
        score = attention.score_transform(config)
        self.core = attention.build(Pattern, config)
        self.score_form = score.form if score else None
        self.score_transform = attention.build(ScoreTransform, config)
        self.value_transform = attention.build(ValueTransform, config)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, T, C] for x [B, T, C], and the attention maps if the function
        returns them.
        """
        streams = self._compute_streams(self._streams, self._project(x), context)
        output, maps = self._attend_to_streams(streams, context)
        return getattr(self, self.output_name)(output.flatten(2).contiguous()), maps

    def _compute_streams(
        self,
        compute: Callable[..., tuple[Tensor, ...]],
        projected: tuple[Tensor, ...],
        context: Context,
    ) -> tuple[Tensor, ...]:
        """Compute queries, keys and values; under sequence parallelism only of this rank's heads.

        Args:
            compute: takes projections and the context of the same tokens; returns streams
                [B, T, heads, D].
            projected: [B, T, channels] each, head by head; of this rank's tokens, where the
                context is of whole sequences.
        """
        group = context.group
        if group is None:
            return compute(*projected, context)
        if self.convolution is None or not self.convolution.mixes_heads:
            return compute(*group.to_heads(*projected), context)
        # Filters that mix heads need all heads, but only the few tokens before each part.
        before = self.convolution.window - 1
        read = group.with_halo(before, *projected)
        part = context.part(before)
        part.padding = group.is_real(before, read[0])
        return group.to_heads(*(stream[:, before:] for stream in compute(*read, part)))

    def _rotate_unconvolved(
        self, query: Tensor, key: Tensor, value: Tensor, context: Context
    ) -> tuple[Tensor, ...]:
        if self.qk_norm is not None:
            query = self.qk_norm(query, "q", context.group)
            key = self.qk_norm(key, "k", context.group)
        if context.rotary is None:
            return query, key, value
        query, key = self.rotate(query.transpose(1, 2), key.transpose(1, 2), *context.rotary)
        return query.transpose(1, 2), key.transpose(1, 2), value

    def _attend_to_streams(
        self, streams: tuple[Tensor, ...], context: Context
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with queries, keys and values [B, T, heads, D] and the extra outputs of a
        convolution.

        Returns:
            [B, T, H, D], of this rank's tokens, and maybe the maps.
        """
        query, key, value, *extra = streams
        if self.value_transform is not None:
            value = self.value_transform(value, context)
        # [B, T, H, D] to [B, H, T, D]
        query, key, value = (stream.transpose(1, 2) for stream in (query, key, value))
        if context.cache is not None:
            key, value = context.cache.update(key, value, context.layer)
        dropout = self.attention_dropout if self.training else 0.0
        how = AttentionCall(**vars(context), scaling=self.scaling, dropout=dropout)
        if self.config.reads_positions:
            known = context.key_positions
            if known is None:
                known = torch.arange(key.shape[2], device=key.device)[None]
            # A static cache has slots for keys that are still to come.
            how.key_positions = F.pad(known, (0, key.shape[2] - known.shape[1]))

        def attend(
            query: Tensor, key: Tensor, value: Tensor, *own: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            if not own:
                return self._attend(query, key, value, how)
            fields = dict(zip(("mask", "positions", "key_positions"), own, strict=True))
            return self._attend(query, key, value, replace(how, documents=None, **fields))

        call = replace(how, attend=attend)
        output, maps = self.core(query, key, value, extra[0] if extra else None, call)
        return to_tokens(context.group, output), maps

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Call the configuration's attention function: [B, T, H, value width], and perhaps the
        maps.
        """
        implementation, transform = self.config._attn_implementation, self.score_transform
        if transform is not None:
            kind = query.shape[2], computing_dtype(query), implementation
            is_separable, streams = self.score_form == "separable", (query, key, value)
            if not is_separable or call.by_rows or not transform.separates(*kind):
                if is_separable and implementation == "sdpa":
                    return attend_by_rows(transform, *streams, call), None
                return attend_with_scores(implementation, transform, *streams, call, self.training)
            positions = call.positions, call.key_positions
            query, key = scale_queries_and_keys(transform, query, key, *positions)
            value = repeat_kv(value, key.shape[1] // value.shape[1])
        width = value.shape[-1]
        if key.shape[-1] > width and implementation in _OF_ONE_WIDTH:
            value = F.pad(value, (0, key.shape[-1] - width))
        if call.document_borders is not None:
            how = call.document_borders, call.scaling, call.dropout
            return attend_within_borders(query, key, value, *how)[..., :width], None
        is_plain = call.mask is None and not call.dropout and call.arguments.get("is_causal", True)
        streams, dtype = (query, key, value), computing_dtype(query)
        if implementation == "sdpa" and is_plain and serves_training(*streams, dtype):
            streams = [stream.to(dtype) for stream in streams]
            output, maps = causal_attention(*streams, call.scaling), None
        else:
            output, maps = self._call_function(query, key, value, call)
        return (output[..., :width] if output.shape[-1] > width else output), maps

    def _call_function(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Call the attention function that the configuration names, as `_attend`."""
        name, eager = self.config._attn_implementation, type(self).eager_attention
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        # Avoid repeating keys that were already repeated for every query head.
        is_repeated = getattr(self, "num_key_value_groups", 1) > query.shape[1] // key.shape[1]
        module = _Ungrouped(self) if is_repeated else self
        how = {"scaling": call.scaling, "dropout": call.dropout} | call.arguments
        return function(module, query, key, value, call.mask, **how)


def entry_weights(model: nn.Module) -> set[str]:
    """Return the names of the parameters and buffers of a model's attention entries."""
    return {
        f"{name}.{part}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, AttentionMixin)
        for part in _ENTRIES
        for key in (getattr(module, part) or nn.Module()).state_dict()
    }


def rename_library_parameters(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    renamings = module.config.renamings(convolved=True)
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[rename_parameter(name, renamings)] = state_dict.pop(name)


# The check that a plugin's attention does not read later tokens

# Keys of a configuration that may be small, since one layer needs little beside its attention.
_SMALL = {"num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 8}
_SMALL |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def check_attention(body: nn.Module) -> None:
    """Check a transformer's plugged-in pattern and transforms for causality. Raises UserError."""
    config = body.config
    entries = attention.chosen_entries(config)
    foreign = {kind: entry for kind, entry in entries.items() if not is_own(entry)}
    names = sorted(("sdpa", "eager"), key=lambda name: name != config._attn_implementation)
    able = [name for name in names if not attention.implementation_problems(config, name)]
    is_computed = able and all(entry.computes_on_cpu for entry in foreign.values())
    if not (foreign and is_computed) or attention.length_problems(config, TIME):
        return
    named = " with ".join(attention.describe_entry(kind, config) for kind in foreign)
    small = copy_with(config, _SMALL | {"_attn_implementation": able[0]})
    shape = config.num_attention_heads, config.stream_heads("k"), config.head_width
    key = type(body), *map(id, foreign.values()), named, able[0], shape
    check_causal(named, key, partial(layer_of, type(body), small))


def layer_of(family: type[nn.Module], config: Any) -> tuple[nn.Module, Callable[..., Tensor], int]:
    """Return a one-layer transformer, a function from inputs to its attention output, and C."""
    body = family(config).eval()
    body.initialize_weights()  # `no_init_weights` skips the initialization.
    seen: list[Any] = []
    core = next(module.core for module in body.modules() if hasattr(module, "core"))
    core.register_forward_hook(lambda module, given, output: seen.append(output[0]))

    def attend(x: Tensor, **how: Any) -> Tensor:
        attend.cache = body(inputs_embeds=x, **{"use_cache": False} | how).past_key_values
        return seen.pop()

    return body, attend, config.hidden_size
