"""What stands in a model's own file for parts of the library that it does without.

The file has no kernels, no checks of configurations, no plugins, and nothing for several ranks. It
computes by torch's operators, and reads configurations that were checked when they were exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.kinds import reference
from cat_lm.ops.long_filter import chunks
from cat_lm.ops.recurrence import EVERY, decaying_scan_torch
from cat_lm.ops.runtime.precision import without_autocast

NOT_CARRIED = "needs cat_lm: this file has neither its kernels nor its other operators"


class Registry:
    """Entries by name."""

    def __init__(
        self,
        key: str,
        base: type,
        *,
        others: tuple[str, ...] = (),
        entries: Iterable[Any] = (),
        **_: Any,
    ) -> None:
        self.key, self.others = key, others
        self._entries = {entry.name: entry for entry in entries}

    def register(self, entry: Any) -> None:
        self._entries[entry.name] = entry

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    own_names = names

    def get(self, name: str, what: str = "") -> Any:
        if name not in self._entries:
            raise ValueError(f"{self.key}={name!r}: {NOT_CARRIED}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def problem(self, name: object) -> str | None:
        return None if name in self or name in self.others else f"must be one of {self.names()}"


class ReferenceBackend:
    """The convolution by torch's operators."""

    name = "reference"
    rotates = ()
    convolve = staticmethod(reference.convolve)


BACKENDS = Registry("backend", ReferenceBackend, others=("auto",), entries=(ReferenceBackend,))


def serving_backend(conv_type: str, x: Tensor, window: int, backend: str) -> str:
    return "reference"


def chosen_kind(model: Any) -> kinds.Kind:
    return kinds.get(model.conv_type)


def reference_backend(*_: Any, **__: Any) -> type[ReferenceBackend]:
    return ReferenceBackend


def long_conv_forward(
    x: Tensor,
    taps: Tensor,
    read: Tensor,
    write: Tensor,
    carry: Tensor,
    positions: Tensor | None,
    initial: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return chunks.forward(x, chunks.Chunk(taps, read, write, carry), positions, initial)


class TorchBackend:
    """Recurrences by torch's operators."""

    name = "torch"


def torch_backend(*_: Any, **__: Any) -> type[TorchBackend]:
    return TorchBackend


class DecayingScan(torch.autograd.Function):
    """The scan by torch's operators, with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with without_autocast(inputs[0]):
            found = decaying_scan_torch.forward(EVERY, *inputs)
        ctx.mark_non_differentiable(found[2])
        ctx.save_for_backward(*inputs[:5], found[2])
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor, _: Any) -> tuple[Tensor, ...]:
        *inputs, kept = ctx.saved_tensors
        return decaying_scan_torch.backward(EVERY, kept, grad, grad_last, *inputs)


def decaying_scan_forward(backend: str, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return DecayingScan.apply(*inputs)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    return NOT_CARRIED


def never(*_: Any) -> bool:
    return False


def add_branches(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return first + second + third


def two_norms(x: Tensor, first: nn.Module, second: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    return x, first(x), second(x)


def no_kernel(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(NOT_CARRIED)


def flops(formula: Callable[..., float]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda operator: operator


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy of labels [...] for hidden states [..., C]."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def activate(linear: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    return activation(linear(x))


class KnownKeys:
    """A configuration's keys were checked when it was exported."""

    Section = None

    @classmethod
    def other_keys(cls) -> tuple[str, ...]:
        return ()

    @classmethod
    def refuse_keys(cls, keys: Iterable[str]) -> None:
        if unknown := list(keys):
            raise ValueError(f"{unknown[0]}: unknown key of {cls.__name__}")


class NoFilter:
    """A base class that no object has, in place of filters that the model does not use."""


SECTION = None
FUSIONS = ()


def check_nothing(*_: Any, **__: Any) -> None:
    """Check nothing: there are no plugins."""


def no_problems(*_: Any, **__: Any) -> list[str]:
    return []


class SequenceGroup:
    """Ranks do not share sequences."""


def own_heads(group: SequenceGroup | None, x: Tensor, dim: int = 0) -> Tensor:
    return x


def to_tokens(group: SequenceGroup | None, x: Tensor) -> Tensor:
    return x
