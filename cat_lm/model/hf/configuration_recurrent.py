"""Configurations of models whose layers keep a state: mixers, GLA, DeltaNets and both Mambas.

Wrong values raise a `ValueError` that says what is supported.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.models.mamba.configuration_mamba import MambaConfig
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config

from cat_lm.mixers import mixer_of
from cat_lm.model.hf.sections.linear import DeltaNetSection, GatedDeltaNetSection, GlaSection
from cat_lm.model.hf.sections.mamba import Mamba2Section, MambaSection
from cat_lm.model.hf.sections.mixer import MixerSection
from cat_lm.model.hf.settings import KnownKeys
from cat_lm.model.rules import gated_width


class RecurrentSettings(KnownKeys):
    """Say what holds of configurations whose layers keep a state; before a family's own.

    Attributes:
        attends: whether layers have attention, which takes masks.
        keeps_state: whether it is kept from call to call, so that a text can be continued.
        reads_padding: that the model must be told which tokens are padding.
        takes_gaps: whether padding may stand between the tokens of a row.
        keeps_padding: whether states hold what was read as padding.
        needs_layer_state: whether a cache holds more than keys and values.
    """

    attends: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True
    needs_layer_state: ClassVar[bool] = True
    reads_padding: ClassVar[bool] = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]  # a list to Trainer
    takes_gaps: ClassVar[bool] = False
    keeps_padding: ClassVar[bool] = True

    @property
    def cache_layers(self) -> tuple[type, type]:
        """Import the class of cache layers, which is one of those that grow."""
        from cat_lm.model.cache import RecurrentLayer

        return RecurrentLayer, RecurrentLayer

    @property
    def section(self) -> Any:
        """The section of the model's keys, whatever their values."""
        fields = self.Section.model_fields.items()
        values = {key: getattr(self, key, field.get_default()) for key, field in fields}
        return self.Section.model_construct(**values)

    def shape_problems(self) -> list[str]:
        """Return which combinations of the fields mean nothing, in lines that begin with one."""
        return self.section.shape_problems()


@strict
class OwnConfig(RecurrentSettings, PreTrainedConfig):
    """The fields of configurations that extend no library's."""

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

    mixer (`str`): its name.
    mixer_options (`dict`): what differs from the options' defaults; all of them are stored.
    intermediate_size (`int`): the width of the MLP.
    learned_positions (`int`, *optional*): rows of the table of positions that is added to the
        embeddings, of a mixer that asks for one; the longest sequence.
    max_position_embeddings (`int`): tokens of a training sequence.
    initializer_range (`float`): the standard deviation of linear layers and embeddings. Everything
        else, and mixers that keep their own, start as `cat_lm.mixers` says.
    """

    model_type = "cat_mixer"
    Section = MixerSection

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
        """Return True if the mixer has a decoding state."""
        return "state" in mixer_of(self).kind.supports

    @property
    def cache_layers(self) -> tuple[type, type]:
        """Import the class of the mixer's cache layers, which grow."""
        mixer = mixer_of(self)
        own = mixer.kind.cache_layer(mixer.options)
        return own, own


# flash-linear-attention's

# What flash-linear-attention's classes have beside our fields: the values that mean our model, the
# package's own default first; none where any does.
_SWISH = ("swish", "silu")
_PACKAGE: dict[str, tuple[Any, ...]] = {
    "attn": (None,),
    "attn_mode": (),
    "attnres_block_size": (None,),
    "fuse_cross_entropy": (),
    "fuse_linear_cross_entropy": (),
    "fuse_norm": (True,),
    "fuse_swiglu": (),
    "hidden_act": _SWISH,
    "hidden_ratio": (4, None),
    "use_l2warp": (False,),
}


@strict
class LinearConfig(OwnConfig):
    r"""What the configurations below have in common.

    Every layer is RMSNorm, mixer, RMSNorm, SwiGLU, each pair on the residual stream.

    intermediate_size (`int`, *optional*): the width of the MLP; by default 8/3 of the model's, up
        to a multiple of 256.
    conv_size (`int`): W of the short depthwise convolutions of queries, keys and values.
    max_position_embeddings (`int`): tokens of a training sequence.
    initializer_range (`float`): the standard deviation of linear layers and embeddings at the
        start.
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
        """Return flash-linear-attention's other fields, and the values that mean our model."""
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
    r"""Configuration of a language model of gated linear attention (Yang et al., 2023).

    expand_k, expand_v (`float`): the widths of all keys and of all values over the model's.
    use_short_conv (`bool`): whether queries, keys and values pass short convolutions.
    """

    model_type = "cat_gla"
    Section = GlaSection
    package: ClassVar[dict[str, tuple[Any, ...]]] = {
        "clamp_min": (None,),
        "elementwise_affine": (True,),
        "feature_map": (None,),
        "num_kv_heads": (None,),
        "use_gk": (True,),
        "use_gv": (False,),
        "use_output_gate": (True,),
    }

    expand_k: float = 0.5
    use_short_conv: bool = False


@strict
class CatDeltaNetConfig(LinearConfig):
    r"""Configuration of a language model of the delta rule (Yang et al., 2024).

    expand_k, expand_v (`float`): the widths of all keys and of all values over the model's.
    """

    model_type = "cat_delta_net"
    Section = DeltaNetSection
    package: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allow_neg_eigval": (False,),
        "qk_activation": ("silu",),
        "qk_norm": ("l2",),
        "use_beta": (True,),
        "use_gate": (False,),
        "use_output_norm": (True,),
        "use_short_conv": (True,),
    }

    num_heads: int = 16
    expand_k: float = 1.0


@strict
class CatGatedDeltaNetConfig(LinearConfig):
    r"""Configuration of a language model of the gated delta rule (Yang et al., 2024).

    head_dim (`int`): the channels of a head's keys.
    expand_v (`float`): those of its values over them.
    """

    model_type = "cat_gated_deltanet"
    Section = GatedDeltaNetSection
    package: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allow_neg_eigval": (False,),
        "num_v_heads": (None,),
        "output_gate_activation": _SWISH,
        "use_gate": (True,),
        "use_short_conv": (True,),
    }

    num_hidden_layers: int = 21
    num_heads: int = 6
    head_dim: int = 256
    expand_v: float = 2.0


class _Packaged:
    """Write flash-linear-attention's other fields beside ours, whatever its defaults become."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for key, allowed in self.other_keys().items():
            if allowed:
                setattr(self, key, allowed[0])


class GLAConfig(_Packaged, CatGlaConfig):
    """The configuration as flash-linear-attention reads it."""

    model_type = "gla"


class DeltaNetConfig(_Packaged, CatDeltaNetConfig):
    """The configuration as flash-linear-attention reads it."""

    model_type = "delta_net"


class GatedDeltaNetConfig(_Packaged, CatGatedDeltaNetConfig):
    """The configuration as flash-linear-attention reads it."""

    model_type = "gated_deltanet"


# Mamba


class _StateSpaceSettings(RecurrentSettings):
    """Refuse an activation that the layers do not have."""

    def shape_problems(self) -> list[str]:
        """Return what does not go together, in lines that begin with the key."""
        other = [] if self.hidden_act == "silu" else [f"hidden_act={self.hidden_act!r}: use silu"]
        return [*super().shape_problems(), *other]


@strict
class CatMambaConfig(_StateSpaceSettings, MambaConfig):
    r"""Configuration of a Mamba model of this project; the fields are those of `MambaConfig`.

    max_position_embeddings (`int`): tokens of a training sequence.
    initializer_range (`float`): the standard deviation of embeddings and of the projections that
        have no start of their own; the library's default of 0.1 is not the paper's.
    use_mambapy, use_associative_scan, time_step_scale, time_step_init_scheme: of the library's
        class alone.
    """

    model_type = "cat_mamba"
    Section = MambaSection

    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @classmethod
    def other_keys(cls) -> Collection[str]:
        """Return the attribute that the library's class computes and writes."""
        return ("intermediate_size",)


@strict
class CatMamba2Config(_StateSpaceSettings, Mamba2Config):
    r"""Configuration of a Mamba-2 model of this project; the fields are those of `Mamba2Config`.

    max_position_embeddings (`int`), initializer_range (`float`): as of `CatMambaConfig`.
    chunk_size, time_step_rank: of the library's class alone.
    """

    model_type = "cat_mamba2"
    Section = Mamba2Section

    max_position_embeddings: int = 2048
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.time_step_limit = tuple(self.time_step_limit)
