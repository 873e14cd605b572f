"""The names that the command offers. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from typing import NamedTuple

from cat_lm import architectures, mixers
from cat_lm.ops.convolution import kinds

DTYPES = ("float32", "bfloat16")
PYTHIA = "pythia"  # the model that the training speed of all models is compared with
# The whole step from the packed projection to attention's inputs, and what it convolves by.
QKV, QKV_KIND = "qkv", kinds.HEAD.name
# This project's backends, and what else convolves: `eval.speed.kernels`.
KERNELS = ("reference", "cpu", "triton", "conv1d", "fla")
# [B, T, H, D] of the 370M and of the 1.4B model; on a GPU, tensors larger than its cache.
SHAPES = {
    "cpu": ((2, 2048, 16, 64), (2, 2048, 16, 128)),
    "cuda": ((32, 2048, 16, 64), (16, 2048, 16, 128)),
}
SIZES = {
    "small": {"layers": 8, "hidden_size": 512, "heads": 8, "context_length": 1024},
    "370m": {"layers": 24, "hidden_size": 1024, "heads": 16, "context_length": 2048},
    "1.4b": {"layers": 24, "hidden_size": 2048, "heads": 16, "context_length": 2048},
}
VOCAB_SIZE = 32_000  # the vocabulary of the paper's tokenizer


class Model(NamedTuple):
    """A model to be timed.

    Attributes:
        label: its name in a table.
        architecture: its family's name.
        variant: the variant of its family; see `Architecture.variants`.
        plain: the model that its speed is relative to, or None.
        stock: the library's own of its family, which it must agree with, or None.
    """

    label: str
    architecture: str
    variant: str
    plain: str | None = None
    stock: str | None = None


def models() -> dict[str, Model]:
    """Return every variant of every family by name, and the library's own class of a family."""
    found = {}
    for family in map(architectures.get, architectures.names()):
        prefix = "" if family.name == architectures.DEFAULT else f"{family.name}-"
        names = {v: family.short_names.get(v, f"{prefix}{v}") for v in family.variants()}
        first, stock = next(iter(names)), f"{prefix}stock"
        rivals = (names[first], stock) if architectures.has_stock(family) else (None, None)
        for variant, words in family.variants().items():
            label = f"{family.title}, {words}" if variant else family.title
            found[names[variant]] = Model(label, family.name, variant, *rivals)
        if architectures.has_stock(family):
            label = f"{family.title}, transformers' own class"
            found[stock] = Model(label, family.name, first, *rivals)
    return found


def decoding_models() -> tuple[str, ...]:
    """Return those of `models` that are this project's and decode from a state."""
    return tuple(
        name for name, model in models().items() if name != model.stock and _decodes(model)
    )


def _decodes(model: Model) -> bool:
    """Return False for a mixer without a state; all of this project's mixers have one."""
    family, name = architectures.get(model.architecture), model.variant
    is_mixer = "mixer" in family.Section.model_fields and name not in mixers.MIXERS.own_names()
    return not is_mixer or "state" in mixers.get(name).supports


def default_models(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the names that are of the default family."""
    known = models()
    return tuple(name for name in names if known[name].architecture == architectures.DEFAULT)


def conv_types() -> tuple[str, ...]:
    """Return what `conv` times: every kind of convolution, and the step from the projection."""
    return (*kinds.names(), QKV)
