"""What does not go together in a model, in words that begin with the key.

One definition for a run's YAML and for a model's own configuration, whose keys have the same names;
neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cat_lm.core.readers import short
from cat_lm.model.rope_scaling import (
    TEMPERATURE_SCOPES,
    has_rope,
    rope_type_of,
    yarn_magnitude,
)
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.long_filter import filters

DEFAULT_WINDOW = 21
CANON_PLACES = "ACD"
CHUNK_SIZE = 128  # as LaS-chunk's
# Numbers of the rotary positions that have a key of their own, and their keys in rope_parameters.
_ROPE_NUMBERS = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "partial_rotary_factor": "partial_rotary_factor",
}


def gated_width(hidden_size: int) -> int:
    """Return the usual width of an MLP of three matrices: 8/3 C, up to a multiple of 256."""
    return -(-8 * hidden_size // (3 * 256)) * 256


def head_problems(model: Any) -> list[str]:
    """Return whether the width divides among the heads."""
    if model.hidden_size % model.num_attention_heads == 0:
        return []
    return [
        f"hidden_size={model.hidden_size}: must be a multiple of "
        f"num_attention_heads={model.num_attention_heads}"
    ]


def rotation_problems(model: Any) -> list[str]:
    """Return whether rotary positions turn pairs of a head's channels."""
    if model.position_embedding != "rope":
        return []
    channels = model.hidden_size // model.num_attention_heads
    rotated = int(channels * model.rotary_pct)
    if 0 < model.rotary_pct <= 1 and rotated >= 2 and rotated % 2 == 0:
        return []
    return [
        f"rotary_pct={model.rotary_pct}: rotates {rotated} of a head's {channels} channels; "
        "must be an even number of at least 2 (position_embedding=none rotates nothing)"
    ]


def given_once_problems(rope: Mapping[str, Any] | None, given: Mapping[str, Any]) -> list[str]:
    """Return which number of the rotary positions is given twice, as two numbers.

    Args:
        rope: `rope_parameters`.
        given: the keys beside it, where those that are left out may have their defaults.
    """
    return [
        f"rope_parameters.{key}={stored}: give it as {name}, which is {value}"
        for name, key in _ROPE_NUMBERS.items()
        if (stored := (rope or {}).get(key)) is not None
        and (value := given.get(name)) is not None
        and stored != value
    ]


def temperature_problems(model: Any) -> list[str]:
    """Return where temperature, its scope and scaled positions contradict each other."""
    temperature, rotates = model.attention_temperature, has_rope(model)
    problems = scope_problems(model.temperature_scope, rotates)
    rope = model.rope_parameters or {}
    rope_type = rope_type_of(rope)
    if rope_type != "default" and not rotates:
        problems.append(
            f"rope_parameters.rope_type={rope_type!r} with position_embedding='none': there are no "
            "positions to scale; attention_temperature alone exists for such a model"
        )
    if rope_type == "yarn" and temperature != 1:
        magnitude = rope.get("attention_factor") or yarn_magnitude(rope["factor"])
        if magnitude != 1:
            problems.append(
                f"attention_temperature={temperature} and rope_parameters.attention_factor="
                f"{magnitude:.6g} (its default is 0.1 ln(factor) + 1) would apply a temperature "
                "twice; set attention_factor to 1.0 or attention_temperature to 1"
            )
    return problems


def scope_problems(scope: str, rotates: bool) -> list[str]:
    """Return whether a model with or without positions lacks a `temperature_scope`."""
    if scope not in TEMPERATURE_SCOPES:
        known = ", ".join(TEMPERATURE_SCOPES)
        return [f"temperature_scope={scope!r} is not supported; choose one of {known}"]
    if scope == "rotary" and not rotates:
        return [
            "temperature_scope='rotary' with position_embedding='none': nothing is rotated; "
            "use 'logits'"
        ]
    return []


def convolution_problems(model: Any) -> list[str]:
    """Return what the keys of the convolutions contradict in each other."""
    problems, streams = [], model.conv_streams
    if not is_streams(streams):
        return [
            f"conv_streams={short(streams)}: must name some of q, k and v, each once, as in qkv; "
            "for no convolution set conv_type=none"
        ]
    if model.conv_mixing == "maps" and (model.conv_type != "multihead" or "v" not in streams):
        problems.append(
            "conv_mixing=maps: needs conv_type=multihead and the stream v, whose filters mix the "
            f"maps, not conv_type={model.conv_type} and conv_streams={streams}"
        )
    filtered = streams.replace("v", "") if mixes_maps(model) else streams
    if model.conv_activation != "none" and (model.conv_type == "none" or not filtered):
        problems.append(
            f"conv_activation={model.conv_activation}: no stream is convolved before attention; "
            "leave it out"
        )
    return problems


def has_long_filters(model: Any) -> bool:
    """Return True if filters are as long as the text."""
    return model.conv_type != "none" and model.conv_filter != filters.TAPS


def filter_problems(model: Any) -> list[str]:
    """Return what the keys of long filters contradict in the others."""
    name = model.conv_filter
    found = filters.problems(name, model.conv_state, model.conv_type)
    if found or name == filters.TAPS:
        return found
    usual = {"conv_window": DEFAULT_WINDOW, "conv_rank": 1, "conv_norm": "none"}
    return [
        f"{key}={value}: is for taps, and conv_filter={name} has none; leave it out"
        for key, default in usual.items()
        if (value := getattr(model, key)) != default
    ]


def is_streams(value: Any) -> bool:
    """Return True if a value names some of the streams, each once."""
    return is_some_of(value, STREAMS)


def is_some_of(value: Any, letters: str) -> bool:
    """Return True if a value is a word of some of the letters, each at most once."""
    return isinstance(value, str) and 0 < len(value) == len(set(value) & set(letters))


def norm_problems(model: Any) -> list[str]:
    """Return which keys of normalisation say nothing."""
    problems, convolved = [], model.conv_type != "none"
    if model.conv_norm != "none" and not convolved:
        problems.append(f"conv_norm={model.conv_norm}: there are no filters with conv_type=none")
    if model.qk_norm_place == "before" and model.qk_norm == "none":
        problems.append("qk_norm_place=before: says nothing with qk_norm=none; choose l2 or rms")
    elif model.qk_norm_place == "before" and not (convolved and set(model.conv_streams) & {*"qk"}):
        problems.append(
            "qk_norm_place=before: needs a convolution of q or k (conv_type, conv_streams); "
            "without one there is only qk_norm_place=after"
        )
    return problems


WIDEST_FLASH_HEAD = 256  # channels, that flash attention's kernels take


def rank_problems(model: Any) -> list[str]:
    """Return what a kernel of scores of more than rank 1 needs and has not."""
    rank = model.conv_rank
    if rank == 1:
        return []
    named = f"conv_rank={rank}"
    if model.conv_type != "head" or not {*"qk"} <= {*model.conv_streams}:
        return [
            f"{named}: needs conv_type=head and the streams q and k, whose filters make the "
            f"kernel, not conv_type={model.conv_type} and conv_streams={model.conv_streams}"
        ]
    problems = []
    if rank > model.conv_window:
        problems.append(
            f"{named}: is above conv_window={model.conv_window}; a kernel of W x W taps has at "
            "most rank W"
        )
    if model.qk_norm != "none" and model.qk_norm_place == "after":
        problems.append(
            f"{named}: qk_norm={model.qk_norm} after the convolution would make all ranks as "
            "large; use qk_norm_place=before"
        )
    if model.conv_norm != "none":
        problems.append(f"{named}: conv_norm={model.conv_norm} is for rank 1; use conv_norm=none")
    width = query_width(model)
    is_flash = getattr(model, "attn_implementation", None) == "flash_attention_2"
    if is_flash and width > WIDEST_FLASH_HEAD:
        problems.append(
            f"{named}: makes heads of {width} channels, and attn_implementation=flash_attention_2 "
            f"takes at most {WIDEST_FLASH_HEAD}"
        )
    return problems


def canon_problems(model: Any) -> list[str]:
    """Return whether `canon` names places of Canon layers, each once."""
    places = model.canon
    if places == "none" or is_some_of(places, CANON_PLACES):
        return []
    what = f"canon={short(places)}: must be none or some of A, C and D, each once, as in ACD"
    if isinstance(places, str) and is_some_of(places, f"{CANON_PLACES}B"):
        what += "; B is conv_type=depthwise with conv_window=4 and conv_init=residual"
    return [what]


def canon_places(model: Any) -> str:
    """Return the places that have Canon layers, in their order; "" for none."""
    return "" if model.canon == "none" else "".join(p for p in CANON_PLACES if p in model.canon)


def window_problems(model: Any, context_length: int) -> list[str]:
    """Return whether a filter's last taps would read nothing."""
    has_taps = model.conv_type != "none" and not has_long_filters(model)
    used = {"conv_window": has_taps, "canon_window": bool(canon_places(model))}
    windows = {key: getattr(model, key) for key, is_used in used.items() if is_used}
    return tap_problems(windows, context_length)


def tap_problems(windows: Mapping[str, int], context_length: int) -> list[str]:
    """Return, by the key that gives it, which of some filters' windows is longer than a row."""
    return [
        f"{key}={window}: is beyond data.context_length={context_length}; its last taps would "
        "read nothing"
        for key, window in windows.items()
        if window > context_length
    ]


def key_value_problems(model: Any) -> list[str]:
    """Return whether the heads of queries divide among those of keys and values."""
    shared = model.num_key_value_heads
    if shared is None or model.num_attention_heads % shared == 0:
        return []
    return [
        f"num_key_value_heads={shared}: must divide num_attention_heads={model.num_attention_heads}"
    ]


def whole_rotation_problems(model: Any) -> list[str]:
    """Return whether rotary positions can turn all channels of a head, which must be pairs."""
    channels = model.head_dim or model.hidden_size // model.num_attention_heads
    if model.position_embedding != "rope" or channels % 2 == 0:
        return []
    what = "head_dim" if model.head_dim else "hidden_size / num_attention_heads"
    return [
        f"{what}={channels}: must be even, as rotary positions turn pairs of channels "
        "(position_embedding=none rotates nothing)"
    ]


def part_rotation_problems(model: Any) -> list[str]:
    """Return that a part of a head is rotated where all of it must be."""
    part = (model.rope_parameters or {}).get("partial_rotary_factor")
    if part in (None, 1):
        return []
    return [
        f"rope_parameters.partial_rotary_factor={part}: all channels of a head are rotated; "
        "leave it out"
    ]


def unmixed_problems(model: Any) -> list[str]:
    """Return whether attention maps would be mixed with values of another number of heads."""
    if model.conv_mixing != "maps":
        return []
    return [
        "conv_mixing=maps: is for gpt_neox, whose values have as many heads as its queries; use "
        "conv_mixing=embeddings"
    ]


def mixes_maps(model: Any) -> bool:
    """Return True if the values' filters mix attention maps."""
    return model.conv_type == "multihead" and model.conv_mixing == "maps"


def chunk_size(model: Any) -> int | None:
    """Return the tokens of a chunk, out of which no query sees (`attention: chunk`), or None."""
    if model.attention != "chunk":
        return None
    return (model.attention_options or {}).get("size", CHUNK_SIZE)


def key_heads(model: Any) -> int:
    """Count the heads of keys, which are fewer where heads of queries share them."""
    return getattr(model, "num_key_value_heads", None) or model.num_attention_heads


def query_width(model: Any) -> int:
    """Return the channels of a head's queries and keys, after filters of all ranks."""
    return model.conv_rank * head_width(model)


def head_width(model: Any) -> int:
    """Count the channels of a head."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
