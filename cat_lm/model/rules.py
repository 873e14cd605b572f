"""Contradictions between the keys of a model with attention, as messages that begin with the key.

One table for a run's YAML and for a model's own configuration, whose keys have the same names. It
holds what is mathematically meaningless, or would be without effect; every other combination is
computed. Neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cat_lm.core.readers import short
from cat_lm.model.rope_scaling import has_rope, rope_type_of, yarn_magnitude
from cat_lm.ops.convolution.kinds import STREAMS, option_problems
from cat_lm.ops.long_filter import filters

DEFAULT_WINDOW = 21
CANON_PLACES = "ACD"
CHUNK_SIZE = 128  # the chunk size of LaS-chunk
WIDEST_FLASH_HEAD = 256  # the most channels per head that flash attention's kernels support
# Numbers of the rotary positions that have a key of their own, and their keys in rope_parameters.
_ROPE_NUMBERS = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "partial_rotary_factor": "partial_rotary_factor",
}


# Rows of whether a combination is wrong, and what is wrong with it.
Rows = tuple[tuple[Any, str], ...]


def problems(model: Any) -> list[str]:
    """Return meaningless combinations of keys, except those of `cat_lm.model.attention`.

    Args:
        model: a section or configuration, each of whose values is allowed by itself.
    """
    given = {name: getattr(model, name, None) for name in _ROPE_NUMBERS}
    return [
        *(said for is_wrong, said in (*_head_rows(model), *_filter_rows(model)) if is_wrong),
        *given_once_problems(model.rope_parameters, given),
        *scope_problems(model.temperature_scope, has_rope(model)),
        *option_problems(model),
        *filters.problems(model.conv_filter, model.conv_state, model.conv_type),
    ]


def _head_rows(model: Any) -> Rows:
    part, channels = getattr(model, "rotary_pct", None), head_width(model)
    rotated = channels if part is None else int(channels * part)
    shared, heads = key_heads(model), model.num_attention_heads
    rotates, rope, magnitude = has_rope(model), model.rope_parameters or {}, 1.0
    if rope_type_of(rope) == "yarn":  # YaRN also scales cosines and sines.
        magnitude = rope.get("attention_factor") or yarn_magnitude(rope["factor"])
    return (
        (
            model.hidden_size % heads,
            f"hidden_size={model.hidden_size}: must be a multiple of num_attention_heads={heads}",
        ),
        (heads % shared, f"num_key_value_heads={shared}: must divide num_attention_heads={heads}"),
        (
            part is None and rope.get("partial_rotary_factor") not in (None, 1),
            f"rope_parameters.partial_rotary_factor={rope.get('partial_rotary_factor')}: all "
            "channels of a head are rotated; leave it out",
        ),
        (
            rotates and (rotated < 2 or rotated % 2),
            (f"head_dim={channels}" if part is None else f"rotary_pct={part}")
            + f": rotates {rotated} of a head's {channels} channels; must be an even number of at "
            "least 2 (position_embedding=none rotates nothing)",
        ),
        (
            rope_type_of(rope) != "default" and not rotates,
            f"rope_parameters.rope_type={rope_type_of(rope)!r} with position_embedding='none': "
            "there are no positions to scale; attention_temperature alone exists for such a model",
        ),
        (
            model.attention_temperature != 1 and magnitude != 1,
            f"attention_temperature={model.attention_temperature} and rope_parameters."
            f"attention_factor={magnitude:.6g} (its default is 0.1 ln(factor) + 1) would apply a "
            "temperature twice; set attention_factor to 1.0 or attention_temperature to 1",
        ),
    )


def _filter_rows(model: Any) -> Rows:
    kind, streams, rank = model.conv_type, model.conv_streams, model.conv_rank
    meets_keys = is_some_of(streams, STREAMS) and set(streams) & {*"qk"}
    filtered = streams.replace("v", "") if mixes_maps(model) else streams
    convolved, width = kind != "none", query_width(model)
    makes_kernel = kind == "head" and {*"qk"} <= {*streams} and not has_long_filters(model)
    is_flash = getattr(model, "attn_implementation", None) == "flash_attention_2"
    return (
        (
            not is_some_of(streams, STREAMS),
            f"conv_streams={short(streams)}: must name some of q, k and v, each once, as in qkv; "
            "for no convolution set conv_type=none",
        ),
        (
            model.conv_mixing == "maps" and (kind != "multihead" or "v" not in streams),
            "conv_mixing=maps: needs conv_type=multihead and the stream v, whose filters mix the "
            f"maps, not conv_type={kind} and conv_streams={streams}",
        ),
        (
            model.conv_activation != "none" and not (convolved and filtered),
            f"conv_activation={model.conv_activation}: no stream is convolved before attention; "
            "leave it out",
        ),
        (
            has_long_filters(model) and model.conv_window != DEFAULT_WINDOW,
            f"conv_window={model.conv_window}: is for taps, and conv_filter={model.conv_filter} "
            "has none; leave it out",
        ),
        (
            model.conv_norm != "none" and not (convolved and model.conv_filter == filters.TAPS),
            f"conv_norm={model.conv_norm}: there are no filters of taps with conv_type={kind} and "
            f"conv_filter={model.conv_filter}; leave it out",
        ),
        (
            model.qk_norm_place == "before"
            and (model.qk_norm == "none" or not (convolved and meets_keys)),
            "qk_norm_place=before: needs qk_norm=l2 or rms, and a convolution of q or k "
            "(conv_type, conv_streams)",
        ),
        (
            rank > 1 and not makes_kernel,
            f"conv_rank={rank}: needs conv_type=head, filters of taps and the streams q and k, "
            f"whose filters make the kernel, not conv_type={kind}, "
            f"conv_filter={model.conv_filter} and conv_streams={streams}",
        ),
        (
            rank > model.conv_window,
            f"conv_rank={rank}: is above conv_window={model.conv_window}; taps make at most rank W",
        ),
        (
            is_flash and rank > 1 and width > WIDEST_FLASH_HEAD,
            f"conv_rank={rank}: makes heads of {width} channels, and attn_implementation="
            f"flash_attention_2 takes at most {WIDEST_FLASH_HEAD}",
        ),
        (
            model.canon != "none" and not is_some_of(model.canon, CANON_PLACES),
            f"canon={short(model.canon)}: must be none or some of A, C and D, each once, as in "
            "ACD; B is conv_type=depthwise with conv_window=4 and conv_init=residual",
        ),
    )


def given_once_problems(rope: Mapping[str, Any] | None, given: Mapping[str, Any]) -> list[str]:
    """Return the numbers that `rope_parameters` and a separate key give with different values."""
    return [
        f"rope_parameters.{key}={stored}: give it as {name}, which is {value}"
        for name, key in _ROPE_NUMBERS.items()
        if (stored := (rope or {}).get(key)) is not None
        and (value := given.get(name)) is not None
        and stored != value
    ]


def scope_problems(scope: str, rotates: bool) -> list[str]:
    """Return a problem if a model without positions has a temperature scope that needs them."""
    if scope == "rotary" and not rotates:
        return [
            "temperature_scope='rotary' with position_embedding='none': nothing is rotated; "
            "use 'logits'"
        ]
    return []


def tap_problems(windows: Mapping[str, int], context_length: int) -> list[str]:
    """Return the filter windows, by key, that are longer than a row."""
    return [
        f"{key}={window}: is beyond data.context_length={context_length}; its last taps would "
        "read nothing"
        for key, window in windows.items()
        if window > context_length
    ]


# Meaning of combined keys


def gated_width(hidden_size: int) -> int:
    """Return the usual width of an MLP of three matrices: 8/3 C, up to a multiple of 256."""
    return -(-8 * hidden_size // (3 * 256)) * 256


def is_some_of(value: Any, letters: str) -> bool:
    """Return True if a value is a word of some of the letters, each at most once."""
    return isinstance(value, str) and 0 < len(value) == len(set(value) & set(letters))


def has_long_filters(model: Any) -> bool:
    """Return True if filters are as long as the text."""
    return model.conv_type != "none" and model.conv_filter != filters.TAPS


def canon_places(model: Any) -> str:
    """Return the places of the Canon layers in order; "" for none."""
    return "" if model.canon == "none" else "".join(p for p in CANON_PLACES if p in model.canon)


def mixes_maps(model: Any) -> bool:
    """Return True if the values' filters mix attention maps."""
    return model.conv_type == "multihead" and model.conv_mixing == "maps"


def chunk_size(model: Any) -> int | None:
    """Return the chunk size in tokens (`attention: chunk`), or None."""
    if model.attention != "chunk":
        return None
    return (model.attention_options or {}).get("size", CHUNK_SIZE)


def key_heads(model: Any) -> int:
    """Return the number of key heads, which query heads may share."""
    return getattr(model, "num_key_value_heads", None) or model.num_attention_heads


def query_width(model: Any) -> int:
    """Return the channels of a head's queries and keys, after filters of all ranks."""
    return model.conv_rank * head_width(model)


def head_width(model: Any) -> int:
    """Count the channels of a head."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
