"""The configurations of all families: transformers' own fields, and what is new in our models.

Fields beside a library's are keys of the family's section in `cat_lm.model.hf.sections`, which says
what each is and may be. Wrong values raise a `ValueError` that says what is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mamba.configuration_mamba import MambaConfig
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config

from cat_lm.mixers import mixer_of
from cat_lm.model.attention.settings import AttentionSettings, refuse
from cat_lm.model.hf.sections import recurrent
from cat_lm.model.hf.sections.base import KnownKeys
from cat_lm.model.hf.sections.transformer import GPTNeoXSection, LlamaSection
from cat_lm.model.rope_scaling import check_rope_numbers, check_rope_parameters
from cat_lm.model.rules import gated_width, given_once_problems

# Models that attend


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

    `conv_type` defaults to `"head"`. `GPTNeoXSection` has all keys; more of some:

    conv_options (`dict`, *optional*): of a plugin's `conv_type`; what is left out has its default.
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
        queries and keys become R times as wide.
    attention_temperature (`float`): t of softmax(q·k / (t sqrt(D))); below 1 it sharpens attention.
        YaRN's for a factor s is (0.1 ln s + 1)^-2. See `cat_lm.model.rope_scaling`.
    rope_parameters (`dict`, *optional*): as in transformers, with `rope_type` `"default"`,
        `"linear"` (position interpolation) or `"yarn"`; an unknown key is an error. YaRN without
        `attention_factor` has transformers' own temperature, on the rotated channels.

    `initializer_range` of GPT-NeoX has no effect: see `cat_lm.model.hf.modeling`.
    """

    model_type = "cat_neox"
    Section = GPTNeoXSection
    library_names: ClassVar[dict[str, str]] = {r"^embed_out\.": "lm_head."}
    # The projection's bias is added after the convolution, and goes back where there is none.
    convolved_names: ClassVar[dict[str, str]] = {r"\.query_key_value\.bias$": ".convolution.bias"}
    plain_names: ClassVar[dict[str, str]] = {r"\.convolution\.bias$": ".query_key_value.bias"}

    @classmethod
    def other_keys(cls) -> Collection[str]:
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
        """Return the fraction of a head's channels that RoPE rotates."""
        return self.rope_parameters["partial_rotary_factor"]


# GPT-NeoX's names for the values that are stored in `rope_parameters`.
_NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
# Other families let the user choose these values, which rules read here; files may state them if
# they agree.
_SHAPE: dict[str, Callable[[Any], int]] = {
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "num_key_value_heads": lambda config: config.num_attention_heads,
}


@strict
class CatLlamaConfig(_CatSettings, LlamaConfig):
    r"""Configuration of a convolution-augmented Llama model.

    The fields mean what they mean in `CatConfig`. With `num_key_value_heads` below
    `num_attention_heads`, keys and values are convolved by their own heads' filters; mixed
    attention maps are of all heads of queries. All channels of a head are rotated.

    `initializer_range` of Llama has no effect: see `cat_lm.model.hf.modeling`.
    """

    model_type = "cat_llama"
    Section = LlamaSection
    # The projections' biases are added after the convolution, and go back where there is none.
    convolved_names: ClassVar[dict[str, str]] = {r"\.([qkv])_proj\.bias$": r".convolution.\1_bias"}
    plain_names: ClassVar[dict[str, str]] = {r"\.convolution\.([qkv])_bias$": r".\1_proj.bias"}


# Models whose layers keep a state


class RecurrentSettings(KnownKeys):
    """A mixin for configurations whose layers keep a recurrent state.

    Attributes:
        attends: whether layers have attention, which takes masks.
        keeps_state: whether it is kept from call to call, so that a text can be continued.
        reads_padding: whether the model needs a padding mask.
        takes_gaps: whether padding may stand between the tokens of a row.
        keeps_padding: whether states hold what was read as padding.
        needs_layer_state: whether a cache holds more than keys and values.
    """

    attends: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True
    needs_layer_state: ClassVar[bool] = True
    reads_padding: ClassVar[bool] = True
    # Trainer requires a list here.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    takes_gaps: ClassVar[bool] = False
    keeps_padding: ClassVar[bool] = True

    @property
    def cache_layers(self) -> tuple[type, type]:
        from cat_lm.model.cache import RecurrentLayer

        return RecurrentLayer, RecurrentLayer

    @property
    def section(self) -> Any:
        """Build the section of the model's keys without validating their values."""
        fields = self.Section.model_fields.items()
        values = {key: getattr(self, key, field.get_default()) for key, field in fields}
        return self.Section.model_construct(**values)

    def shape_problems(self) -> list[str]:
        return self.section.shape_problems()


@strict
class OwnConfig(RecurrentSettings, PreTrainedConfig):
    """The fields of configurations that do not extend one of the library's."""

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False


@strict
class CatMixerConfig(OwnConfig):
    r"""Configuration of a language model around one of the mixers of `cat_lm.mixers`.

    Every layer is RMSNorm, mixer, RMSNorm, SwiGLU, each pair on the residual stream.

    mixer_options (`dict`): what differs from the options' defaults; all of them are stored.
    learned_positions (`int`, *optional*): rows of the table of positions that is added to the
        embeddings, of a mixer that asks for one; the longest sequence.
    initializer_range (`float`): the standard deviation of linear layers and embeddings. Everything
        else, and mixers that keep their own, start as `cat_lm.mixers` says.
    """

    model_type = "cat_mixer"
    Section = recurrent.MixerSection

    hidden_size: int = 1024
    mixer: str = "gla"
    mixer_options: dict[str, Any] | None = None
    intermediate_size: int = 2816
    learned_positions: int | None = None
    rms_norm_eps: float = 1e-6

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.mixer_options = asdict(mixer_of(self).options)

    @property
    def keeps_state(self) -> bool:
        return "state" in mixer_of(self).kind.supports

    @property
    def cache_layers(self) -> tuple[type, type]:
        mixer = mixer_of(self)
        own = mixer.kind.cache_layer(mixer.options)
        return own, own


# flash-linear-attention's


def _fixed(value: Any, *keys: str) -> dict[str, tuple[Any, ...]]:
    """Return the keys of flash-linear-attention's classes that always have this value in our
    models.
    """
    return dict.fromkeys(keys, (value,))


# What flash-linear-attention's classes have beside our fields: the values that mean our model, the
# package's own default first; none where any does.
_SWISH = ("swish", "silu")
_PACKAGE: dict[str, tuple[Any, ...]] = {
    "hidden_act": _SWISH,
    "hidden_ratio": (4, None),
    **_fixed(None, "attn", "attnres_block_size"),
    **_fixed(True, "fuse_norm"),
    **_fixed(False, "use_l2warp"),
    **dict.fromkeys(
        ("attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_swiglu"), ()
    ),
}


@strict
class LinearConfig(OwnConfig):
    r"""The fields that configurations of flash-linear-attention's families share.

    Every layer is RMSNorm, mixer, RMSNorm, SwiGLU, each pair on the residual stream.

    conv_init (`str`, defaults to `"normal"`): what the filters of short convolutions start from:
        `"normal"`, with initializer_range, as flash-linear-attention's models do, or `"uniform"`,
        ±1/sqrt(W) as torch draws a convolution and Mamba's filters start. Of the start alone, so
        that it is no part of a trained model.

    flash-linear-attention's other fields are read and left out where they say what the model is
    anyway.
    """

    # As _PACKAGE, of one family.
    package: ClassVar[dict[str, tuple[Any, ...]]] = {}

    num_heads: int = 4
    expand_v: float = 1.0
    conv_size: int = 4
    intermediate_size: int | None = None
    norm_eps: float = 1e-6
    conv_init: str = "normal"

    @classmethod
    def other_keys(cls) -> dict[str, tuple[Any, ...]]:
        return _PACKAGE | cls.package

    def __post_init__(self, **kwargs: Any) -> None:
        known = self.other_keys()
        for key, allowed in known.items():
            if allowed and kwargs.get(key, allowed[0]) not in allowed:
                raise ValueError(
                    f"{key}={kwargs[key]!r}: models of this kind here have {allowed[0]!r}"
                )
        self.intermediate_size = self.intermediate_size or gated_width(self.hidden_size)
        super().__post_init__(**{key: v for key, v in kwargs.items() if key not in known})


@strict
class CatGlaConfig(LinearConfig):
    r"""Configuration of a language model of gated linear attention (Yang et al., 2023)."""

    model_type = "cat_gla"
    Section = recurrent.GlaSection
    package: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_fixed(None, "clamp_min", "feature_map", "num_kv_heads"),
        **_fixed(True, "elementwise_affine", "use_gk", "use_output_gate"),
        **_fixed(False, "use_gv"),
    }

    expand_k: float = 0.5
    use_short_conv: bool = False


@strict
class CatDeltaNetConfig(LinearConfig):
    r"""Configuration of a language model of the delta rule (Yang et al., 2024)."""

    model_type = "cat_delta_net"
    Section = recurrent.DeltaNetSection
    package: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_fixed(True, "use_beta", "use_output_norm", "use_short_conv"),
        **_fixed(False, "allow_neg_eigval", "use_gate"),
        **_fixed("silu", "qk_activation"),
        **_fixed("l2", "qk_norm"),
    }

    num_heads: int = 16
    expand_k: float = 1.0


@strict
class CatGatedDeltaNetConfig(LinearConfig):
    r"""Configuration of a language model of the gated delta rule (Yang et al., 2024)."""

    model_type = "cat_gated_deltanet"
    Section = recurrent.GatedDeltaNetSection
    package: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_fixed(True, "use_gate", "use_short_conv"),
        **_fixed(False, "allow_neg_eigval"),
        **_fixed(None, "num_v_heads"),
        "output_gate_activation": _SWISH,
    }

    num_hidden_layers: int = 21
    num_heads: int = 6
    head_dim: int = 256
    expand_v: float = 2.0


class _Packaged:
    """Writes flash-linear-attention's other fields explicitly, independent of its defaults."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for key, allowed in self.other_keys().items():
            if allowed:
                setattr(self, key, allowed[0])


class GLAConfig(_Packaged, CatGlaConfig):
    model_type = "gla"


class DeltaNetConfig(_Packaged, CatDeltaNetConfig):
    model_type = "delta_net"


class GatedDeltaNetConfig(_Packaged, CatGatedDeltaNetConfig):
    model_type = "gated_deltanet"


# Mamba


class _StateSpaceSettings(RecurrentSettings):
    """Refuses an activation that the layers do not support."""

    def shape_problems(self) -> list[str]:
        other = [] if self.hidden_act == "silu" else [f"hidden_act={self.hidden_act!r}: use silu"]
        return [*super().shape_problems(), *other]


@strict
class CatMambaConfig(_StateSpaceSettings, MambaConfig):
    r"""Configuration of a Mamba model of this project; the fields are those of `MambaConfig`.

    initializer_range (`float`): the standard deviation of embeddings and of the projections that
        have no start of their own; the library's default of 0.1 is not the paper's.
    use_mambapy, use_associative_scan, time_step_scale, time_step_init_scheme: of the library's
        class alone.
    """

    model_type = "cat_mamba"
    Section = recurrent.MambaSection

    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @classmethod
    def other_keys(cls) -> Collection[str]:
        return ("intermediate_size",)


@strict
class CatMamba2Config(_StateSpaceSettings, Mamba2Config):
    r"""Configuration of a Mamba-2 model of this project; the fields are those of `Mamba2Config`.

    initializer_range (`float`): as of `CatMambaConfig`.
    chunk_size, time_step_rank: of the library's class alone.
    """

    model_type = "cat_mamba2"
    Section = recurrent.Mamba2Section

    max_position_embeddings: int = 2048
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.time_step_limit = tuple(self.time_step_limit)
