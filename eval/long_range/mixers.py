"""The mixers of the room: the paper's kinds of attention by their names, and those of the registry.

The paper's (Zimerman and Wolf, ICML 2024) are one kind with options: logits that decay with
distance (`decay`), values that are averaged over neighbours (`values=box`), both, and what they are
compared with. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cat_lm import mixers
from cat_lm.core.errors import UserError
from cat_lm.core.fields import build_options, parse_specification
from cat_lm.core.registry import one_of
from cat_lm.mixers import Mixer, MixerKind, Setting
from eval.long_range.options import Options

if TYPE_CHECKING:
    from torch import nn


class EncoderAttention(MixerKind):
    """Softmax attention of encoders and of causal models.

    `build` takes a causal model's setting; `build_encoder` says which one it is.
    """

    name = "softmax"
    Options = Options

    def check(self, options: Options, setting: Setting) -> None:
        pairs = 2 if options.position == "rope" else 1
        if setting.d_model % (pairs * options.heads):
            even = "into an even number of channels each" if pairs == 2 else "evenly"
            raise ValueError(f"heads={options.heads}: must divide d_model={setting.d_model} {even}")

    def build(self, options: Options, setting: Setting) -> nn.Module:
        return self.build_encoder(options, setting, is_causal=True)

    def build_encoder(self, options: Options, setting: Setting, is_causal: bool) -> nn.Module:
        """Make the module of one layer; imports torch."""
        from eval.long_range.attention import Attention

        self.check(options, setting)
        return Attention(options, setting, is_causal)


KIND: EncoderAttention = EncoderAttention()
_LAS: dict[str, Any] = {"decay": "slow", "values": "box"}
# name -> options of `softmax`, which further ones may change.
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "vanilla": {},
    "nope": {"position": "none"},
    "rope": {"position": "rope"},
    "alibi": {"position": "alibi"},
    "l": {"decay": "slow"},
    "l-steep": {"decay": "steep"},
    "s": {"values": "box"},
    "s-alibi": {"values": "box", "position": "alibi"},
    "las": _LAS,
    "las-steep": _LAS | {"decay": "steep"},
    "cat-v": {"values": "learned"},
    "cat-v-box": {"values": "learned", "start": "box"},
    "l-cat-v": {"values": "learned", "decay": "slow"},
}


def make(specification: str, what: str = "--mixer") -> Mixer:
    """Make a mixer of text such as `las:chunk=128` or `mamba`.

    Args:
        what: names the option in messages.

    Raises:
        UserError: an unknown name or option, or options that do not fit together.
    """
    name, options = parse_specification(specification)
    if name in VARIANTS:
        return Mixer(KIND, build_options(Options, f"mixer {name}", options, VARIANTS[name]))
    if name not in mixers.MIXERS:
        raise UserError(f"{what}={name!r}: {one_of(name, (*VARIANTS, *mixers.names()))}")
    return mixers.make(name, options, what)
