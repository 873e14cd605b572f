"""Counts of a model's parameters, FLOPs, training memory and decoding state.

Nothing is counted by hand. A model of fake tensors, which have shapes and no memory, computes one
row or micro-batch, with one or two layers of each kind; the numbers of the others are multiples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from cat_lm import architectures
from cat_lm.model.sequence import SequenceGroup
from cat_lm.ops.runtime.fake import computing_device, standing_for_gpu
from cat_lm.ops.runtime.flops import FlopCounter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# The decoding state is linear in the tokens: beyond this length it is extrapolated from two
# lengths.
_MEASURED = 4096
_SDPA = F.scaled_dot_product_attention


def count_parameters(model: nn.Module) -> int:
    """Count each parameter once, at its full size even where ZeRO-3 has partitioned it."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a configuration's model on the meta device, without memory, in milliseconds.

    The package of the configuration's attention implementation need not be installed.
    """
    family = architectures.of_config(config)
    section = architectures.section_of(config).with_portable_attention()
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
        """Sum a quantity over the whole model: the part outside of layers, plus the distinct
        layers.
        """
        return rest + sum(n * each for n, each in zip(self.times, layers, strict=True))


class FakeGroup(SequenceGroup):
    """A sequence group without other ranks, which counts the bytes that this rank would send."""

    sent = 0.0  # The bytes sent so far.

    def _swap(self, x: Tensor) -> Tensor:
        self._count(x.numel() * (self.size - 1) / self.size * x.itemsize)
        return x.clone()

    def _before(self, last: Tensor) -> Tensor:
        self._count(last.numel() * last.itemsize)
        return last.clone()

    def _count(self, sent: float) -> None:
        object.__setattr__(self, "sent", self.sent + sent)  # The base class is a frozen dataclass.


@contextmanager
def fake_model(meta: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Iterator[FakeModel]:
    """Enter torch's fake tensor mode, on a pretended CPU, with a model that was built on the meta
    device.

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
    with FakeTensorMode(), mock.patch.object(F, _SDPA.__name__, _attend):
        _give_fakes(meta, dtype)
        yield FakeModel(meta, kept, times)


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
    """Call torch's fused attention kernel, which torch itself does not choose for fake tensors."""
    drops = dropout_p > 0 and computing_device(query).type == "cpu"
    is_learned = attn_mask is not None and attn_mask.requires_grad
    # No fused kernel takes dropout, a learned mask or values of another width.
    if drops or is_learned or query.shape[-1] != value.shape[-1]:
        how = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return _SDPA(query, key, value, attn_mask, dropout_p, **how)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype)
    output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return output


def _give_fakes(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace parameters and buffers on the meta device by fake ones; floats get `dtype`."""
    made: dict[Tensor, Tensor] = {}  # Tied parameters stay tied.

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
    """Return a key that is equal for layers of the same type and shapes."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple((name, p.shape) for name, p in layer.named_parameters())


def flops_per_token(meta: PreTrainedModel, length: int) -> float:
    """Return a token's FLOPs, forward and backward, in training with rows of `length` tokens.

    The model FLOPs utilisation (MFU) is a share of them. They are three times those of the forward
    pass, in which a product and a sum are two: the backward pass takes twice as many, and what is
    computed again counts once (Chowdhery et al., 2022, appendix B). Attention counts over the full
    square of queries and keys. Operators say what they count beside their definitions
    (`cat_lm.ops.runtime.flops`); what else is computed element by element counts nothing.

    Args:
        meta: the model on the meta device, which is used up.
    """
    # Selected blocks count by their number, and unlike the CPU's, a GPU's kernel has no loop over
    # them.
    with fake_model(meta) as fake, standing_for_gpu(), FlopCounter() as counter, torch.no_grad():
        found: list[float] = []
        for layer in fake.layers:
            layer.register_forward_pre_hook(lambda *_: found.append(-counter.total))
            layer.register_forward_hook(lambda *_: found.append(found.pop() + counter.total))
        fake.model.train()
        fake.model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
        return 3 * fake.whole(counter.total - sum(found), found) / length


@dataclass(frozen=True)
class Saved:
    """The bytes that the backward pass of a micro-batch needs, and those that its forward pass
    sends.

    Attributes:
        rest: outside of the layers: embedding, head, loss, and what layers share.
        layers: bytes of all layers.
        largest: bytes of the layer that keeps most.
        streams: bytes of the tensors that all layers read.
        sent: to the ranks that share the sequences.
    """

    rest: float
    layers: float
    largest: float
    streams: float
    sent: float


class _Kept:
    """Counts the bytes that autograd saves in each layer; every storage counts once."""

    def __init__(self, fake: FakeModel) -> None:
        self.running: int | None = None
        self.bytes: dict[int | None, float] = defaultdict(float)
        self.streams = [0.0] * len(fake.layers)
        # Keep the storages alive, since otherwise a later storage could reuse an address.
        self._alive: list[Tensor] = []
        self._seen = {x.untyped_storage()._cdata for x in fake.model.parameters()}
        for number, layer in enumerate(fake.layers):
            layer.register_forward_pre_hook(partial(self._enter, number))
            layer.register_forward_hook(self._leave)

    def _enter(self, number: int, _: Any, inputs: tuple[Any, ...]) -> None:
        self.running = number
        self.streams[number] = _size(inputs[0])

    def _leave(self, *_: Any) -> None:
        self.running = None

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(x)
            self.bytes[self.running] += storage.nbytes()
        return x


def saved_bytes(
    meta: PreTrainedModel,
    rows: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    documents: bool = False,
    parts: int = 1,
    on_gpu: bool = False,
) -> Saved:
    """Return the bytes that autograd saves in one training forward pass, including the loss.

    Recurrences keep what this project's own operators do, and multi-token attention's documents are
    counted as one a row.

    Args:
        meta: the model on the meta device, which is used up.
        dtype: the dtype of the parameters.
        autocast: whether layers compute in bf16 under autocast.
        documents: whether masks are made for packed documents.
        parts: how many ranks share a sequence.
        on_gpu: whether a GPU's kernels compute landmark attention.
    """
    with fake_model(meta, dtype) as fake, standing_for_gpu(on_gpu):
        group = None if parts == 1 else FakeGroup(parts, 1, None)
        if group is not None:
            fake.model.set_sequence_group(group)
        kept = _Kept(fake)
        ids = torch.zeros(rows, length, dtype=torch.long)
        packed = {"document_ids": ids} if documents else {}
        own = ids[:, : length // parts]
        fake.model.train()
        hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = fake.model(
                input_ids=own, shift_labels=own, skip_logits=True, use_cache=False, **packed
            )
        del outputs
        layers = [kept.bytes[number] for number in range(len(fake.layers))]
        return Saved(
            rest=kept.bytes[None],
            layers=fake.whole(0, layers),
            largest=max(layers, default=0),
            streams=fake.whole(0, kept.streams),
            sent=0 if group is None else group.sent / len(layers) * sum(fake.times),
        )


def state_bytes(meta: PreTrainedModel, length: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the bytes of the decoding state of one sequence after `length` tokens.

    Of a model without state, of which the whole sequence is computed anew for each token, it is
    what its layers hand over.

    Args:
        meta: the model on the meta device, which is used up.
        dtype: the dtype of the parameters.
    """
    if not (meta.keeps_state and getattr(meta.config, "keeps_state", True)):
        width = meta.config.num_hidden_layers * meta.config.hidden_size
        return width * length * dtype.itemsize
    with fake_model(meta, dtype) as fake, torch.no_grad():
        fake.model.eval()
        if length <= _MEASURED:
            return _state(fake, length)
        half, whole = _state(fake, _MEASURED // 2), _state(fake, _MEASURED)
        return whole + (whole - half) / (_MEASURED // 2) * (length - _MEASURED)


def _state(fake: FakeModel, length: int) -> float:
    ids = torch.zeros(1, length, dtype=torch.long)
    cache = fake.model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    found = []
    for layer in cache.layers:
        # Leave out buffers, which have room for later tokens.
        held = tree_leaves({n: value for n, value in vars(layer).items() if not n.startswith("_")})
        are_numbers = [x for x in held if isinstance(x, Tensor) and x.is_floating_point()]
        found.append(sum(map(_size, are_numbers)))
    return fake.whole(0, found) if fake.layers else sum(found)


def _size(x: Tensor) -> int:
    return x.numel() * x.itemsize
