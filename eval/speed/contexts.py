"""`python -m eval.speed decode --contexts 16384,131072`: a token after many, with made-up caches.

Keys and values are random numbers, since a pass over a prompt of a million tokens takes longer than
all that is measured; so what is decoded means nothing, and which blocks landmark attention chooses
is random too, which is its worst case for the processor's caches. One layer's attention and the
whole model decode after each context: over all keys by SDPA, which was faster than matrix products
in every record, and with landmark attention, both from the same cache, whose buffers grow without a
copy of what they hold. Times of the dense model are so those of attention only, not of a cache that
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache

from cat_lm.core.errors import UserError
from cat_lm.model import attention
from cat_lm.model.attention.modules.call import AttentionCall
from cat_lm.model.attention.modules.landmark import LandmarkCore, LandmarkDynamicLayer
from cat_lm.model.cache import CatCache
from cat_lm.model.rules import head_width, key_heads
from eval.speed.models import TOLERANCES, ModelSize, build, random_ids, randomize_filters
from eval.speed.timing import say, summary, time_in_turn, times_as_fast

# A cache is filled this many numbers at a time.
_FILLED = 2**26


@dataclass(frozen=True)
class ContextCase:
    """What is decoded: `tokens` of every row after a context, with landmarks' options."""

    size: ModelSize
    batch_size: int
    context: int
    tokens: int
    landmark: Mapping[str, int]


def contexts_speed(
    cases: Sequence[ContextCase], names: Sequence[str], repeats: int
) -> dict[str, Any]:
    """Measure every model, dense and with landmark attention, after every context.

    Args:
        cases: of one model size.
        names: of `decoding_models`, whose attention there is a landmark one of.

    Raises:
        UserError: a model cannot be built, or has no such attention, or landmark attention does not
            compute what it should.
    """
    results = []
    longest = max(case.context + case.tokens for case in cases)
    for name in names:
        changes = {"attention": "landmark", "attention_options": dict(cases[0].landmark)}
        pair = [build(cases[0].size, name, longest, each) for each in ({}, changes)]
        for model in pair:
            randomize_filters(model.eval())
        pair[1].load_state_dict(pair[0].state_dict(), strict=False)
        for case in cases:
            say(f"{name}, {case.context} tokens of random keys and values")
            results.append({"name": name, **measure(case, *pair, repeats)})
    return {"contexts": results, "cache": "random"}


@torch.no_grad()
def measure(case: ContextCase, dense: nn.Module, sparse: nn.Module, repeats: int) -> dict[str, Any]:
    """Time a layer and the whole of two models of the same weights, after one context."""
    cache = random_cache(sparse, case)
    core = next(m for m in sparse.modules() if isinstance(m, LandmarkCore))
    layer = cache.layers[0]
    query, key, value = _draw_token(core, layer, case)
    check(core, layer, (query, key, value), case)
    grouped, ids = _group_heads(query, layer), random_ids(case.size, case.batch_size, 1)

    def attend_densely() -> Tensor:
        return F.scaled_dot_product_attention(grouped, *layer.update(key, value))

    def attend_to_blocks() -> Tensor:
        return _attend(core, layer, query, *layer.update(key, value))

    def decode(model: nn.Module) -> Any:
        return model(input_ids=ids, past_key_values=cache, use_cache=True)

    one = {"dense": attend_densely, "landmark": attend_to_blocks}
    whole = {"dense": partial(decode, dense), "landmark": partial(decode, sparse)}
    return {
        "case": asdict(case),
        "layer_bytes": _bytes_read(case, sparse),
        "layer": _compared(one, [layer], case, repeats),
        "model": _compared(whole, cache.layers, case, repeats),
    }


def _bytes_read(case: ContextCase, model: nn.Module) -> dict[str, int]:
    """Return the bytes of keys, values and landmarks that a token has to read in a layer.

    Each head of keys is read by one choice, and the newest block as if it were full.
    """
    options = attention.PATTERNS.get("landmark").resolved(case.landmark)
    block, chosen = options["block"], options["top_k"]
    read = min(case.context, (chosen + options["local"] + options["sink"]) * block)
    landmarks = case.context // block if chosen else 0
    vector = key_heads(model.config) * head_width(model.config) * case.size.itemsize
    vectors = {"dense": 2 * case.context, "landmark": landmarks + 2 * read}
    return {name: case.batch_size * vector * count for name, count in vectors.items()}


def random_cache(model: nn.Module, case: ContextCase) -> Cache:
    """Make a cache of `case.context` random keys and values, and the landmarks of these."""
    config = model.config
    heads, width = key_heads(config), head_width(config)
    cache = CatCache(config)
    dtype = getattr(torch, case.size.dtype)
    generator = torch.Generator().manual_seed(2)
    cores = [m for m in model.modules() if isinstance(m, LandmarkCore)]
    for layer, core in zip(cache.layers, cores, strict=True):
        shape = (case.batch_size, heads, case.context, width)
        unwritten = torch.empty(shape, dtype=dtype, device=case.size.device)
        for x in layer.update(unwritten, unwritten):
            rows = max(1, _FILLED // (shape[0] * heads * width))
            for part in x.split(rows, dim=2):
                part.copy_(torch.randn(part.shape, generator=generator))
        layer.add_landmarks(case.context, None, core.block, core.summarise)
    # A prompt leaves the newest inputs of convolutions; without them they read zeros, as fast.
    return cache


def check(
    core: LandmarkCore,
    layer: LandmarkDynamicLayer,
    token: tuple[Tensor, Tensor, Tensor],
    case: ContextCase,
) -> None:
    """Check landmark attention of a token against a softmax over what it should read.

    Raises:
        UserError: it is another; speeds of wrong attention are not reported.
    """
    query, key, value = token
    keys, values = layer.update(key, value)
    found = _attend(core, layer, query, keys, values)
    batch, heads, length, width = keys.shape
    count = max(0, (length - 1) // core.block - core.choice.local + 1)
    grouped = _group_heads(query, layer).float()
    chosen = _choose_blocks(core, layer, grouped, count)
    far = chosen[..., None] * core.block + torch.arange(core.block)
    near = torch.arange(count * core.block, length)
    slots = torch.cat([far.flatten(2), near.expand(batch, heads, -1)], dim=2)
    index = slots[..., None].expand(-1, -1, -1, width)
    expected = F.scaled_dot_product_attention(
        grouped, keys.gather(2, index).float(), values.gather(2, index).float()
    )
    rewind([layer], 1)
    difference = float((found.float() - expected.view_as(found)).abs().max())
    if not difference <= TOLERANCES[case.size.dtype] * float(expected.abs().max()):
        raise UserError(
            f"landmark attention after {case.context} tokens differs by {difference:.2g} from a "
            "softmax over the keys that it should read; its speed is not reported"
        )


def _choose_blocks(
    core: LandmarkCore, layer: LandmarkDynamicLayer, query: Tensor, count: int
) -> Tensor:
    """Choose of the first `count` blocks by products; [batch, heads, at most top_k]."""
    if count == 0 or core.choice.top_k == 0:  # the cache has no landmarks
        return torch.empty(*query.shape[:2], 0, dtype=torch.long)
    scores = query @ layer.landmarks[:, :, :count].float().mT
    if scores.shape[2] > 1:  # heads of queries that share keys share a choice
        scores = scores.softmax(dim=-1).sum(dim=2, keepdim=True)
    return scores[:, :, 0].topk(min(core.choice.top_k, count), dim=-1).indices


def rewind(layers: Sequence[LandmarkDynamicLayer], tokens: int) -> None:
    """Take the newest tokens back; the states of convolutions stay those after the newest."""
    for layer in layers:
        states = layer.inputs, layer.recurrent
        layer.inputs, layer.recurrent = {}, {}  # those of older tokens, for a crop, are gone
        layer.crop(-tokens)
        layer.inputs, layer.recurrent = states


def _draw_token(
    core: LandmarkCore, layer: LandmarkDynamicLayer, case: ContextCase
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a query [B, H, 1, D], and a key and a value of fewer heads."""
    generator = torch.Generator().manual_seed(3)
    heads = core.config.num_attention_heads, *2 * (layer.keys.shape[1],)
    shapes = [(case.batch_size, count, 1, layer.keys.shape[3]) for count in heads]
    return tuple(torch.randn(shape, generator=generator).to(layer.keys) for shape in shapes)


def _group_heads(query: Tensor, layer: LandmarkDynamicLayer) -> Tensor:
    """Put the heads that share keys together: [B, H, 1, D] to [B, heads of keys, group, D]."""
    return query.view(query.shape[0], layer.keys.shape[1], -1, query.shape[3])


def _attend(core: LandmarkCore, layer: LandmarkDynamicLayer, *streams: Tensor) -> Tensor:
    call = AttentionCall(scaling=streams[0].shape[3] ** -0.5, continues=True, state=layer)
    return core(*streams, None, call)[0].transpose(1, 2)


def _compared(
    steps: Mapping[str, Callable[[], Any]],
    layers: Sequence[LandmarkDynamicLayer],
    case: ContextCase,
    repeats: int,
) -> dict[str, Any]:
    """Time a token, dense and with landmark attention, in turn."""

    def decode(step: Callable[[], Any]) -> None:
        for _ in range(case.tokens):
            step()
        rewind(layers, case.tokens)

    calls = {name: partial(decode, step) for name, step in steps.items()}
    timings = time_in_turn(
        calls, torch.device("cpu"), repeats, min_seconds=0, warm_ups=1, title=f"{case.context}"
    )
    seconds = {name: [s / case.tokens for s in timings[name].seconds] for name in steps}
    return {
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "times_as_fast": times_as_fast(seconds["landmark"], seconds["dense"]),
    }
