"""The mixers of long-range tasks: the paper's kinds of attention, and those of the registry.

The paper's (Zimerman and Wolf, ICML 2024) are one kind with options: logits that decay with
distance (`decay`), values that are averaged over neighbours (`values=box`), both, and what they are
compared with. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from cat_lm import mixers
from cat_lm.core import numbers
from cat_lm.core.errors import UserError
from cat_lm.core.fields import build_options, parse_specification
from cat_lm.core.registry import one_of
from cat_lm.mixers import Mixer, MixerKind, Setting
from cat_lm.mixers.parts.base import check_choice, check_counts
from cat_lm.model.attention.scores.exponential_decay import LEAST, SPACINGS

CHOICES = {
    "position": ("none", "sinusoidal", "rope", "alibi", "alibi-scaled"),
    "values": ("none", "box", "learned"),
    "start": ("identity", "box"),
    "place": ("auto", "causal", "centred"),
    "decay": ("none", *SPACINGS),
}


@dataclass(frozen=True)
class Options:
    """Options of attention.

    Attributes:
        heads: H.
        position: none; sinusoidal, a table added to the embeddings; rope; alibi, a bias of −m_h per
            token of distance; alibi-scaled, that divided by √D, as the paper's equation 2 has it.
        decay: none; slow or steep, logits times e^{−α_h |i − j|}: see `ExponentialDecay`.
        bound: B, of the decay.
        values: none; box, averages over `width` neighbours; learned, CAT's filter of the values,
            one a head.
        width: P of the box, W of the filter.
        start: of a learned filter: identity, which changes nothing; or box, 1/W everywhere.
        place: of box and filter: causal, over a position and those before it; centred, over both
            sides, with an odd width; auto, causal in a causal model. The paper has centred boxes in
            causal models: they see (P − 1)/2 later positions.
        chunk: positions of a chunk, inside which all happens; 0: the whole row.
    """

    heads: int = 8
    position: str = "sinusoidal"
    decay: str = "none"
    bound: float = 1e-3
    values: str = "none"
    width: int = 5
    start: str = "identity"
    place: str = "auto"
    chunk: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "heads", "width")
        for name, choices in CHOICES.items():
            check_choice(self, name, choices)
        if not LEAST <= self.bound < 1:
            raise ValueError(f"bound={self.bound}: must be between {LEAST:g} and 1, without 1")
        if self.chunk and (problem := numbers.CONTEXT.problem(self.chunk)):
            raise ValueError(f"chunk={self.chunk}: {problem}; 0 for the whole row")
        if self.decay != "none" and self.heads == 1:
            raise ValueError("heads=1: the first head does not decay; decay needs at least 2")
        if self.decay != "none" and self.position.startswith("alibi"):
            raise ValueError(f"decay={self.decay}: not with position={self.position}")
        has_values, is_learned = self.values != "none", self.values == "learned"
        default = {field.name: field.default for field in fields(self)}
        for name, needed, has_effect in (
            ("bound", "a decay", self.decay != "none"),
            ("start", "values=learned", is_learned),
            ("width", "values", has_values),
            ("place", "values", has_values),
        ):
            if not has_effect and (value := getattr(self, name)) != default[name]:
                raise ValueError(f"{name}={value}: has no effect without {needed}")
        if has_values and self.width == 1:
            raise ValueError("width=1: smooths nothing; use values=none")
        if has_values and self.place != "causal" and self.width % 2 == 0:
            raise ValueError(f"width={self.width}: a centred box is odd; or use place=causal")


class EncoderAttention(MixerKind):
    """Softmax attention of encoders and of causal models, which `model.build_mixer` makes."""

    name = "softmax"
    Options = Options

    def check(self, options: Options, setting: Setting) -> None:
        pairs = 2 if options.position == "rope" else 1
        if setting.d_model % (pairs * options.heads):
            even = "into an even number of channels each" if pairs == 2 else "evenly"
            raise ValueError(f"heads={options.heads}: must divide d_model={setting.d_model} {even}")


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
