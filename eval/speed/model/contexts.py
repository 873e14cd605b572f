"""`python -m eval.speed decode --contexts 16384,131072`: a token after many, with made-up caches.

Keys and values are random numbers, since a pass over a prompt of a million tokens takes longer than
all that is measured; so what is decoded means nothing, and which blocks landmark attention chooses
is random too, which is its worst case for the processor's caches. One layer's attention and the
whole model decode after each context: over all keys by SDPA, and by matrix products, and with
landmark attention, all from the same cache, whose buffers grow without a copy of what they hold.
Times of the dense model are so those of attention alone, not of a cache that copies.

Bytes are those that a token's attention has to read: keys, values and landmarks, by
`_vectors_read`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from eval.common.text_table import aligned
from eval.speed.choices import models
from eval.speed.model.build import TOLERANCES, ModelSize, build, random_ids, randomize_filters
from eval.speed.progress import rounds, say
from eval.speed.timing import summary

DENSE = ("sdpa", "matmul")
WARM_UPS = 3
# A cache is filled this many numbers at a time.
_FILLED = 2**26


@dataclass(frozen=True)
class ContextCase:
    """Say what is decoded: `tokens` of every row after a context, with landmarks' options."""

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
    longest = max(case.context + case.tokens for case in cases) + WARM_UPS
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
    """One pair of models, of the same weights, after one context: a layer, and the whole."""
    cache = random_cache(sparse, case)
    core = next(m for m in sparse.modules() if isinstance(m, LandmarkCore))
    check(core, cache.layers[0], case)
    layer = _timed(_layer_steps(core, cache.layers[0], case), [cache.layers[0]], case, repeats)
    whole = _timed(_model_steps(dense, sparse, cache, case), cache.layers, case, repeats)
    itemsize = getattr(torch, case.size.dtype).itemsize
    of_vectors = case.batch_size * key_heads(sparse.config) * head_width(sparse.config) * itemsize
    read = {name: vectors * of_vectors for name, vectors in _vectors_read(case).items()}
    return {
        "case": asdict(case),
        "layer_bytes": read,
        "layer": compared(layer),
        "model": compared(whole),
    }


def _vectors_read(case: ContextCase) -> dict[str, int]:
    """Count the vectors that a token reads of each head of keys: keys, values and landmarks.

    Each head of keys is read by one choice, and the newest block as if it were full.
    """
    options = attention.PATTERNS.get("landmark").resolved(case.landmark)
    block, chosen = options["block"], options["top_k"]
    read = min(case.context, (chosen + options["local"] + options["sink"]) * block)
    landmarks = case.context // block if chosen else 0
    return {"dense": 2 * case.context, "landmark": landmarks + 2 * read}


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


def check(core: LandmarkCore, layer: LandmarkDynamicLayer, case: ContextCase) -> None:
    """Check landmark attention of a token against a softmax over what it should read.

    Raises:
        UserError: it is another; speeds of wrong attention are not reported.
    """
    query, key, value = _drawn(core, layer, case)
    keys, values = layer.update(key, value)
    found = _attend(core, layer, query, keys, values)
    batch, heads, length, width = keys.shape
    count = max(0, (length - 1) // core.block - core.choice.local + 1)
    grouped = query.float().view(batch, heads, -1, width)
    chosen = _chosen(core, layer, grouped, count)
    far = chosen[..., None] * core.block + torch.arange(core.block, device=chosen.device)
    near = torch.arange(count * core.block, length, device=chosen.device)
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


def _chosen(core: LandmarkCore, layer: LandmarkDynamicLayer, query: Tensor, count: int) -> Tensor:
    """Choose of the first `count` blocks by products; [batch, heads, at most top_k]."""
    if count == 0 or core.choice.top_k == 0:  # the cache has no landmarks
        return torch.empty(*query.shape[:2], 0, dtype=torch.long, device=query.device)
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


def _drawn(
    core: LandmarkCore, layer: LandmarkDynamicLayer, case: ContextCase
) -> tuple[Tensor, Tensor, Tensor]:
    """A token's query [B, H, 1, D], and its key and value of fewer heads."""
    generator = torch.Generator().manual_seed(3)
    heads = core.config.num_attention_heads, *2 * (layer.keys.shape[1],)
    return tuple(
        torch.randn(case.batch_size, count, 1, layer.keys.shape[3], generator=generator).to(
            layer.keys
        )
        for count in heads
    )


def _attend(core: LandmarkCore, layer: LandmarkDynamicLayer, *streams: Tensor) -> Tensor:
    """Attend by the landmark module: [B, H, 1, D]."""
    scaling = streams[0].shape[3] ** -0.5
    call = AttentionCall(scaling=scaling, continues=True, state=layer)
    return core(*streams, None, call)[0].transpose(1, 2)


def _layer_steps(
    core: LandmarkCore, layer: LandmarkDynamicLayer, case: ContextCase
) -> dict[str, Callable[[], Any]]:
    """Return what takes one token into the cache and attends with it, by name."""
    query, key, value = _drawn(core, layer, case)
    batch, shared, _, width = key.shape
    grouped = query.view(batch, shared, -1, width)  # the heads that share keys, together

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(grouped, *layer.update(key, value))

    def matmul() -> Tensor:
        keys, values = layer.update(key, value)
        return (grouped @ keys.mT * width**-0.5).softmax(dim=-1) @ values

    def landmark() -> Tensor:
        return _attend(core, layer, query, *layer.update(key, value))

    return {"sdpa": sdpa, "matmul": matmul, "landmark": landmark}


def _model_steps(
    dense: nn.Module, sparse: nn.Module, cache: Cache, case: ContextCase
) -> dict[str, Callable[[], Any]]:
    """Return what decodes one token by the whole model, by name."""
    ids = random_ids(case.size, case.batch_size, 1)

    def step(model: nn.Module, implementation: str) -> Callable[[], Any]:
        def call() -> Tensor:
            if model.config._attn_implementation != implementation:
                model.set_attn_implementation(implementation)
            return model(input_ids=ids, past_key_values=cache, use_cache=True).logits

        return call

    return {
        "sdpa": step(dense, "sdpa"),
        "matmul": step(dense, "eager"),
        "landmark": step(sparse, "sdpa"),
    }


def _timed(
    steps: Mapping[str, Callable[[], Any]],
    layers: Sequence[LandmarkDynamicLayer],
    case: ContextCase,
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds a token of each, one for each repeat, in turn."""
    for step in steps.values():
        for _ in range(WARM_UPS):
            step()
        rewind(layers, WARM_UPS)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in rounds(repeats, f"{case.context}"):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(case.tokens):
                step()
            found[name].append((time.perf_counter() - start) / case.tokens)
            rewind(layers, case.tokens)
    return found


def compared(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Sum seconds up, and compare landmark attention's with those of the faster dense one.

    Args:
        seconds: a token, one for each round, of `DENSE` and of landmark attention.
    """
    best = min(DENSE, key=lambda name: summary(seconds[name])["median"])
    ratios = [theirs / own for theirs, own in zip(seconds[best], seconds["landmark"], strict=True)]
    return {
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "dense": best,
        "times_as_fast": summary(ratios),
    }


def context_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of a record's table."""
    first = record["contexts"][0]["case"]
    options = ", ".join(f"{name} {value}" for name, value in first["landmark"].items())
    lines = [
        f"keys and values are random; {options}; a layer's dense attention is the faster of "
        f"{' and '.join(DENSE)}"
    ]
    rows = []
    for result in record["contexts"]:
        cells = [models()[result["name"]].label, f"{result['case']['context']:,}"]
        for part in ("layer", "model"):
            seconds, best = result[part]["seconds"], result[part]["dense"]
            ratio = result[part]["times_as_fast"]
            low, high = ratio["range"]
            cells += [
                f"{seconds[best]['median'] * 1e3:.2f} ({best})",
                f"{seconds['landmark']['median'] * 1e3:.2f}",
                f"{ratio['median']:.1f} ({low:.1f}-{high:.1f})",
            ]
            if part == "layer":
                read = result["layer_bytes"]
                cells += [f"{read[n] / 2**20:.1f}" for n in ("dense", "landmark")]
        rows.append(cells)
    timed = ("dense ms", "landmark ms", "times as fast")
    header = ("", "context", *(f"layer {name}" for name in timed))
    header += ("dense MiB", "landmark MiB", *(f"model {name}" for name in timed))
    return [*lines, aligned(header, rows)]
