"""`CatConfig` and `CatLlamaConfig`: the library's, and what convolutions add to attention."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.llama.configuration_llama import LlamaConfig

from cat_lm.model.attention.settings import AttentionSettings, refuse
from cat_lm.model.hf.sections.transformer import GPTNeoXSection, LlamaSection
from cat_lm.model.hf.settings import KnownKeys
from cat_lm.model.rope_scaling import check_rope_numbers, check_rope_parameters
from cat_lm.model.rules import given_once_problems


class _CatSettings(AttentionSettings, KnownKeys):
    """Check positions before and after transformers has put them into `rope_parameters`."""

    # Tensor parallelism would have to split the filters along with the heads, and pipeline stages
    # would have to pass documents and padding on.
    base_model_tp_plan = base_model_pp_plan = None

    def __post_init__(self, **kwargs: Any) -> None:
        refuse(given_once_problems(self.rope_parameters, kwargs))
        check_rope_parameters(self.rope_parameters, kwargs.get("rope_scaling"))
        super().__post_init__(**kwargs)
        check_rope_numbers(self.rope_parameters)


@strict
class CatConfig(_CatSettings, GPTNeoXConfig):
    r"""Configuration of a convolution-augmented GPT-NeoX model.

    The fields beside GPT-NeoX's are keys of `GPTNeoXSection`, which says what each is and may be;
    `conv_type` defaults to `"head"` here. More of some:

    conv_type (`str`): `"none"` is plain GPT-NeoX (Pythia); `"head"` convolves each head with one
        causal filter, shared by the channels of the head; `"multihead"` mixes heads, with one
        filter for each pair of them; `"depthwise"` has one filter for each channel, as Primer,
        Mamba and Canon layers at position B (arXiv:2512.17351).
    conv_mixing (`str`): what a multi-head convolution mixes. `"embeddings"`: the queries, keys and
        values of all heads before attention, as in the paper's definition (section 3.1). `"maps"`:
        the attention maps after the softmax, in place of the convolution of the values; see
        `cat_lm.model.attention.modules.map_mixing`.
    conv_activation (`str`): `"silu"` of what a convolution gives, bias included.
    conv_init (`str`): `"identity"` starts as the model without convolutions (but for an
        activation), `"uniform"` draws the taps from ±1/sqrt(W), for multihead ±1/sqrt(W H), of long
        filters ±1/sqrt(N); `"residual"` adds the two, as a Canon layer in the place would start.
    conv_filter (`str`): `"exponential"` or `"ssm"` filters are as long as the text, with O(N)
        numbers for each head, N being `conv_state`; see `cat_lm.ops.long_filter`.
    conv_rank (`int`): R, of the kernel by which filters of queries and keys convolve their scores;
        queries and keys become R times as wide. For `"head"` with both streams.
    rotary_pct, rope_theta (`float`): stored in `rope_parameters`, the first as
        `partial_rotary_factor`.
    attention_temperature (`float`): t of softmax(q·k / (t sqrt(D))); below 1 it sharpens attention.
        YaRN's for a factor s is (0.1 ln s + 1)^-2. See `cat_lm.model.rope_scaling`.
    rope_parameters (`dict`, *optional*): as in transformers, with `rope_type` `"default"`,
        `"linear"` (position interpolation) or `"yarn"`; an unknown key is an error. YaRN without
        `attention_factor` has transformers' own temperature, on the rotated channels.

    `initializer_range` of GPT-NeoX has no effect: see `cat_lm.model.hf.pretrained`.
    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_neox"
    Section = GPTNeoXSection
    library_names: ClassVar[dict[str, str]] = {r"^embed_out\.": "lm_head."}
    # The projection's bias is added after the convolution, and goes back where there is none.
    convolved_names: ClassVar[dict[str, str]] = {r"\.query_key_value\.bias$": ".convolution.bias"}
    plain_names: ClassVar[dict[str, str]] = {r"\.convolution\.bias$": ".query_key_value.bias"}

    @classmethod
    def other_keys(cls) -> Collection[str]:
        """Return the keys that are stored in `rope_parameters`, and those of other families."""
        return ("rotary_emb_base", "rotary_pct", *_SHAPE, *super().other_keys())

    def __post_init__(self, **kwargs: Any) -> None:
        for name, allowed in _SHAPE.items():
            if (value := kwargs.pop(name, None)) not in (None, allowed(self)):
                raise ValueError(f"{name}={value}: GPT-NeoX has {allowed(self)} with these heads")
        refuse(given_once_problems(self.rope_parameters, kwargs))
        for name, theirs in _NEOX_NAMES.items():
            value = kwargs.pop(name, None)
            if value is not None and kwargs.setdefault(theirs, value) != value:
                raise ValueError(f"{name}={value}: {theirs} is {kwargs[theirs]}; give one of them")
        super().__post_init__(**kwargs)

    @property
    def rotary_pct(self) -> float:
        """The part of a head's channels that rotary positions turn."""
        return self.rope_parameters["partial_rotary_factor"]


# GPT-NeoX's own names of what is stored in `rope_parameters`.
_NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
# What other families choose, and rules would read: files of others may have it as it follows.
_SHAPE: dict[str, Callable[[Any], int]] = {
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "num_key_value_heads": lambda config: config.num_attention_heads,
}


@strict
class CatLlamaConfig(_CatSettings, LlamaConfig):
    r"""Configuration of a convolution-augmented Llama model.

    The fields of the convolutions, of positions and of the temperature mean what they mean in
    `CatConfig`. With `num_key_value_heads` below `num_attention_heads` (grouped queries), keys and
    values are convolved by their own heads' filters, and a multi-head convolution mixes the heads
    of its stream; where it mixes attention maps, these are of all heads of queries.

    rope_theta (`float`, defaults to 10,000): stored as `rope_parameters["rope_theta"]`. All
        channels of a head are rotated.

    `initializer_range` of Llama has no effect: see `cat_lm.model.hf.pretrained`.
    Wrong values raise a `ValueError` that says what is supported.
    """

    model_type = "cat_llama"
    Section = LlamaSection
    # The projections' biases are added after the convolution, and go back where there is none.
    convolved_names: ClassVar[dict[str, str]] = {r"\.([qkv])_proj\.bias$": r".convolution.\1_bias"}
    plain_names: ClassVar[dict[str, str]] = {r"\.convolution\.([qkv])_bias$": r".\1_proj.bias"}
