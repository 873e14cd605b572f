"""Configurations of GLA, DeltaNet and Gated DeltaNet, in flash-linear-attention's fields."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from cat_lm.model.hf.sections.linear import DeltaNetSection, GatedDeltaNetSection, GlaSection
from cat_lm.model.hf.settings import RecurrentSettings
from cat_lm.model.rules import gated_width

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
class LinearConfig(RecurrentSettings, PreTrainedConfig):
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
    anyway. Wrong values raise a `ValueError` that says what is supported.
    """

    # As _PACKAGE, of one family.
    package: ClassVar[dict[str, tuple[Any, ...]]] = {}

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_heads: int = 4
    expand_v: float = 1.0
    conv_size: int = 4
    intermediate_size: int | None = None
    max_position_embeddings: int = 2048
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    conv_init: str = "normal"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

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
