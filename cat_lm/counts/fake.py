"""Models of fake tensors, with as few layers as tell what all of them need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cat_lm import architectures
from cat_lm.model.sequence import SequenceGroup
from cat_lm.ops.runtime.fake import computing_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def count_parameters(model: nn.Module) -> int:
    """Count each parameter once, whole even where ZeRO-3 has partitioned it."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Make a configuration's model on the meta device, without memory, in milliseconds.

    It need not be installed what the configuration asks to compute attention by.
    """
    family = architectures.of_config(config)
    section = family.portable(family.section(config))
    fields = family.fields(section, config.vocab_size, config.max_position_embeddings)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return family.classes().causal_lm(family.config_class()(**fields))


@dataclass(frozen=True)
class FakeModel:
    """A model whose tensors are fake, while its mode is entered.

    Attributes:
        model: with the first two layers of each kind.
        layers: those layers, in their order.
        times: how many layers of the whole model each of them stands for.
    """

    model: PreTrainedModel
    layers: list[nn.Module]
    times: list[int]

    def whole(self, rest: float, layers: list[float]) -> float:
        """Sum a number of the whole model: that outside of layers, and of the layers here."""
        return rest + sum(n * each for n, each in zip(self.times, layers, strict=True))

    def divide(self, parts: int) -> FakeGroup | None:
        """Have the model compute a part of every sequence, as one of so many ranks."""
        if parts == 1:
            return None
        group = FakeGroup(parts, 1, None)
        self.model.set_sequence_group(group)
        return group


class FakeGroup(SequenceGroup):
    """Ranks that share sequences, none of whom is there; counts what this one sends."""

    sent = 0.0  # bytes

    def _swap(self, x: Tensor) -> Tensor:
        self._count(x.numel() * (self.size - 1) / self.size * x.itemsize)
        return x.clone()

    def _before(self, last: Tensor) -> Tensor:
        self._count(last.numel() * last.itemsize)
        return last.clone()

    def _count(self, sent: float) -> None:
        object.__setattr__(self, "sent", self.sent + sent)  # the base is frozen


@contextmanager
def fake_model(meta: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Iterator[FakeModel]:
    """Enter a mode of fake tensors, as on a CPU, with a model that was made on the meta device.

    Layers are of one kind if their modules have the same classes and their parameters the same
    shapes. The model is used up.
    """
    body = meta.base_model
    layers = list(getattr(body, "layers", ()))
    kept, times = [], []
    places: dict[Any, list[int]] = {}
    for layer in layers:
        own = places.setdefault(_kind(layer), [])
        if len(own) < 2:
            own.append(len(kept))
            kept.append(layer)
            times.append(1)
        else:
            times[own[1]] += 1
    if layers:
        body.layers = nn.ModuleList(kept)
        meta.config.num_hidden_layers = len(kept)
    with FakeTensorMode(), _FusedAttention():
        _give_fakes(meta, dtype)
        yield FakeModel(meta, kept, times)


class _FusedAttention(TorchFunctionMode):
    """Computes attention by torch's fused kernel, which it does not choose for fake tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    drops = dropout_p > 0 and computing_device(query).type == "cpu"
    is_learned = attn_mask is not None and attn_mask.requires_grad
    # What no kernel of this device takes.
    if drops or is_learned or query.shape[-1] != value.shape[-1]:
        how = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        with torch._C.DisableTorchFunction():
            return F.scaled_dot_product_attention(
                query, key, value, **how, scale=scale, enable_gqa=enable_gqa
            )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype)
    output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return output


def _give_fakes(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace parameters and buffers on the meta device; floating ones get a dtype."""
    made: dict[Tensor, Tensor] = {}  # tied ones stay one

    def fake(x: Tensor) -> Tensor:
        if x not in made:
            like = torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype)
            is_learned = isinstance(x, nn.Parameter)
            made[x] = nn.Parameter(like, requires_grad=x.requires_grad) if is_learned else like
        return made[x]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(x) for name, x in tensors.items() if x is not None})


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return what layers of one kind have in common."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple((name, p.shape) for name, p in layer.named_parameters())
