"""`CatConfig`: GPT-NeoX's configuration and what convolution-augmented attention adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig

from cat_lm.limits import (
    CONTEXT,
    FRACTION,
    HEADS,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    LAYERS,
    NORM_EPSILON,
    TEMPERATURE,
    VOCABULARY,
    WINDOW,
)
from cat_lm.model.rope_scaling import (
    check_rope_number,
    check_rope_numbers,
    check_rope_parameters,
    check_temperature,
)
from cat_lm.model.rules import (
    STREAMS,
    convolution_problems,
    head_problems,
    rotation_problems,
)
from cat_lm.ops.convolution import kinds

CONV_MIXINGS = ("embeddings", "maps")
CONV_ACTIVATIONS = ("none", "silu")
CONV_INITS = ("identity", "uniform")
POSITION_EMBEDDINGS = ("rope", "none")


@strict
class CatConfig(GPTNeoXConfig):
    r"""Configuration of a convolution-augmented GPT-NeoX model.

    conv_type (`str`, defaults to `"head"`): `"none"` is plain GPT-NeoX (Pythia); `"head"` convolves
        each head with one causal filter, shared by the channels of the head; `"multihead"` mixes
        heads, with one filter for each pair of them; `"depthwise"` has one filter for each channel,
        the short convolution of Primer (on queries, keys and values), of Mamba and DeltaNet, and of
        Canon layers at position B (arXiv:2512.17351).
    conv_window (`int`, defaults to 21): W, the number of taps of a filter; at least 1.
    conv_streams (`str`, defaults to `"qkv"`): which of queries, keys and values are convolved.
    conv_mixing (`str`, defaults to `"embeddings"`): what a multi-head convolution mixes.
        `"embeddings"`: the queries, keys and values of all heads before attention, as in the
        paper's definition (section 3.1). `"maps"`: the attention maps after the softmax, over heads
        and keys, A'_i[t, m] = sum_h sum_j F[j,i,h] A_h[t, m+j], in place of the convolution of the
        values; queries and keys, if `conv_streams` names them, are mixed as embeddings. The paper
        says only that its Table 2 also looks at mixing maps and gives no equation, so this form is
        inferred, and which of the two its MH-CAT rows used is not known.
    conv_activation (`str`, defaults to `"none"`): `"silu"` applies SiLU to what a depthwise
        convolution gives, bias included, as Mamba and DeltaNet do.
    conv_init (`str`, defaults to `"identity"`): `"identity"` starts as the model without
        convolutions (but for an activation), `"uniform"` draws the taps from ±1/sqrt(W), for
        multihead ±1/sqrt(W H).
    position_embedding (`str`, defaults to `"rope"`): rotary positions, or `"none"` for none.
    rotary_pct (`float`, defaults to 0.25): the part of a head's channels that is rotated. Stored as
        `rope_parameters["partial_rotary_factor"]`.
    rope_theta (`float`, defaults to 10,000): the base of the rotary frequencies. Stored as
        `rope_parameters["rope_theta"]`.
    attention_temperature (`float`, defaults to 1): t of softmax(q·k / (t sqrt(D))); below 1 it
        sharpens attention. YaRN's for a factor s is (0.1 ln s + 1)^-2: 0.875, 0.771, 0.685 for
        s = 2, 4, 8. See `cat_lm.model.rope_scaling`.
    temperature_scope (`str`, defaults to `"logits"`): what the temperature acts on: `"logits"`, or
        `"rotary"`, the part of the logits that the rotated channels give.
    rope_parameters (`dict`, *optional*): as in transformers, with `rope_type` `"default"`,
        `"linear"` (position interpolation) or `"yarn"`; an unknown key is an error. YaRN without
        `attention_factor` has transformers' own temperature, on the rotated channels.

    `initializer_range` of GPT-NeoX has no effect: see `cat_lm.model.initialization`.
    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_neox"
    # Tensor parallelism would have to split the filters along with the heads.
    base_model_tp_plan = None

    conv_type: str = "head"
    conv_window: int = 21
    conv_streams: str = "qkv"
    conv_mixing: str = "embeddings"
    conv_activation: str = "none"
    conv_init: str = "identity"
    position_embedding: str = "rope"
    attention_temperature: float | int = 1.0
    temperature_scope: str = "logits"

    def __post_init__(self, **kwargs: Any) -> None:
        check_fields(self)
        _check_rope_names(kwargs)
        _check_given_once(self.rope_parameters, kwargs)
        if "rope_theta" in kwargs:
            kwargs["rotary_emb_base"] = kwargs.pop("rope_theta")  # GPT-NeoX's name for it
        if self.conv_type != "none":
            _check_choice("conv_init", self.conv_init, CONV_INITS)
        _check_choice("conv_type", self.conv_type, ("none", *kinds.names()))
        _check_choice("position_embedding", self.position_embedding, POSITION_EMBEDDINGS)
        _check_choice("conv_mixing", self.conv_mixing, CONV_MIXINGS)
        _check_choice("conv_activation", self.conv_activation, CONV_ACTIVATIONS)
        _refuse(convolution_problems(self))
        check_rope_parameters(self.rope_parameters, kwargs.get("rope_scaling"))
        super().__post_init__(**kwargs)
        check_rope_numbers(self.rope_parameters)
        check_temperature(self)
        _refuse(rotation_problems(self))

    @property
    def rotary_pct(self) -> float:
        """The part of a head's channels that rotary positions turn."""
        return self.rope_parameters["partial_rotary_factor"]

    @property
    def convolved_streams(self) -> str:
        """The streams that have filters, in the order q, k, v; empty without convolutions."""
        if self.conv_type == "none":
            return ""
        return "".join(stream for stream in STREAMS if stream in self.conv_streams)

    @property
    def mixes_maps(self) -> bool:
        """Whether the values' filters mix attention maps."""
        return self.conv_type == "multihead" and self.conv_mixing == "maps"

    @property
    def embedding_streams(self) -> str:
        """The streams that are convolved before attention, and need their past when decoding."""
        streams = self.convolved_streams
        return streams.replace("v", "") if self.mixes_maps else streams


_WHOLE_NUMBERS = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INTERMEDIATE_SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "conv_window": WINDOW,
}
_NUMBERS = {
    "layer_norm_eps": NORM_EPSILON,
    "attention_temperature": TEMPERATURE,
    "hidden_dropout": FRACTION,
    "attention_dropout": FRACTION,
}
_SWITCHES = ("use_parallel_residual", "tie_word_embeddings", "attention_bias", "use_cache")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check what a GPT-NeoX or CAT `config.json` says, before a configuration is made of it.

    Raises:
        ValueError: as `check_fields`.
    """
    check_fields(SimpleNamespace(**CatConfig().to_dict() | dict(settings)))
    _check_rope_names(settings)


def _check_rope_names(values: Mapping[str, Any]) -> None:
    for name in ("rope_theta", "rotary_emb_base", "rotary_pct"):
        if values.get(name) is not None:
            check_rope_number(name, values[name])


def check_fields(config: GPTNeoXConfig | SimpleNamespace) -> None:
    """Check types and ranges of what a GPT-NeoX or CAT model is built from.

    Raises:
        ValueError: naming the field, its value and what would be right.
    """
    for fields, types, what in (
        (_WHOLE_NUMBERS, int, "a whole number"),
        (_NUMBERS, int | float, "a number"),
    ):
        for name, allowed in fields.items():
            value = getattr(config, name)
            if isinstance(value, bool) or not isinstance(value, types):
                raise ValueError(f"{name}={value!r}: must be {what}")
            if problem := allowed.problem(value):
                raise ValueError(f"{name}={value}: {problem}")
    for name in _SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name}={getattr(config, name)!r}: must be true or false")
    _refuse(head_problems(config))
    if not isinstance(config.hidden_act, str):
        raise ValueError(f"hidden_act={config.hidden_act!r}: must be a name such as 'gelu'")
    _check_tokens(config)
    if config.rope_parameters:
        check_rope_numbers(config.rope_parameters)


def _check_tokens(config: GPTNeoXConfig | SimpleNamespace) -> None:
    for name in _TOKENS:
        value = getattr(config, name)
        for token in value if isinstance(value, list) else [value]:
            is_id = isinstance(token, int) and not isinstance(token, bool)
            if token is not None and (not is_id or not -1 <= token < VOCABULARY.high):
                raise ValueError(f"{name}={value!r}: must be the id of a token")
    pad = config.pad_token_id
    if pad is not None and pad >= config.vocab_size:
        raise ValueError(f"pad_token_id={pad}: must be below vocab_size={config.vocab_size}")


def _check_choice(name: str, value: str, supported: tuple[str, ...]) -> None:
    if value not in supported:
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(supported)}")


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError(problems[0])


def _check_given_once(rope: dict | None, kwargs: dict[str, Any]) -> None:
    names = {"rotary_pct": "partial_rotary_factor", "rope_theta": "rope_theta"}
    for name, key in names.items():
        stored, given = (rope or {}).get(key), kwargs.get(name)
        if stored is not None and given is not None and stored != given:
            raise ValueError(f"{name}={given} contradicts rope_parameters[{key!r}]={stored}")
