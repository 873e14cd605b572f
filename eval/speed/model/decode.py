"""`python -m eval.speed decode`: greedy decoding with and without the cache.

With the cache of keys, values and convolution inputs a new token costs one position; without it, a
pass over all tokens so far. Before anything is timed, the tokens decoded with the cache are fed to
the model in one pass without it, which must choose the same token at every place; by induction,
greedy decoding without the cache gives the same text. Where two logits are nearer to each other
than rounding, either may win.

Each length of keys is met again in every repeat, and libraries that plan or compile for a length
have done so in the warm-up. Generation meets every length once. So a prompt of a length near by, of
which no model here has met a length before, is decoded once too: its time stands beside the others'
as cold.

Steps are timed by the wall's clock between synchronisations: decoding at small batches is bound by
the host's launches, and they belong to its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from cat_lm.core.errors import UserError
from eval.speed.choices import models
from eval.speed.model.build import (
    TOLERANCES,
    ModelSize,
    build,
    convolution_of,
    random_ids,
    randomize_filters,
)
from eval.speed.progress import rounds, say
from eval.speed.timing import summary


@dataclass(frozen=True)
class DecodeCase:
    """A prompt's length, and how many tokens are decoded after it with and without the cache."""

    size: ModelSize
    batch_size: int
    prompt_tokens: int
    cached_tokens: int
    uncached_tokens: int


def decode_speed(cases: Sequence[DecodeCase], names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measures every model after every prompt.

    Args:
        cases: of one model size.
        names: of `decoding_models`.

    Returns:
        The record's part. `of_shortest_prompt` of a row says how much of its rate with the cache
        is left of that after its model's shortest prompt, by all pairs of their repeats, which
        did not take turns: 1 is flat in the length.

    Raises:
        UserError: a model cannot be built, or decodes otherwise with its cache than without.
    """
    results: list[dict[str, Any]] = []
    starts = cold_prompts(cases, len(names))
    longest = max(
        case.prompt_tokens + max(case.cached_tokens, case.uncached_tokens) for case in cases
    )
    longest = max(longest, *(start + cases[0].cached_tokens for start in starts))
    for name in names:
        say(f"building {name}")
        model = build(cases[0].size, name, longest).eval()
        randomize_filters(model)
        for case in cases:
            say(f"{name}, prompt of {case.prompt_tokens} tokens")
            measured = measure(case, model, name, repeats, starts.pop(0))
            results.append({"name": name, **measured})
        del model
    for row in results:
        row["of_shortest_prompt"] = None
        if (shortest := shortest_prompt(results, row)) is not row:
            rates = (one["tokens_per_second_cached"]["all"] for one in (row, shortest))
            row["of_shortest_prompt"] = summary([a / b for a, b in product(*rates)])
    return {"results": results}


def shortest_prompt(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the same model after the shortest prompt, the first of equal ones."""
    own = (each for each in rows if each["name"] == row["name"])
    return min(own, key=lambda each: each["case"]["prompt_tokens"])


def cold_prompts(cases: Sequence[DecodeCase], models: int) -> list[int]:
    """Choose lengths of prompts, after each of which every length of keys is met for once.

    Args:
        cases: in the order in which each of the models takes them.

    Returns:
        For each model and case the shortest such prompt that is no shorter than the case's.
    """

    def met(prompt: int, case: DecodeCase) -> range:
        # Without the cache the last pass is over one token less than there are then.
        return range(prompt, prompt + max(case.cached_tokens, case.uncached_tokens))

    taken = {length for case in cases for length in met(case.prompt_tokens, case)}
    starts = []
    for case in list(cases) * models:
        start = case.prompt_tokens
        while taken.intersection(met(start, case)):
            start += 1
        taken.update(met(start, case))
        starts.append(start)
    return starts


@torch.no_grad()
def measure(
    case: DecodeCase, model: nn.Module, name: str, repeats: int, cold_prompt: int
) -> dict[str, Any]:
    """One model after one prompt, and once after `cold_prompt` tokens, whose lengths are new."""
    prompt = random_ids(case.size, case.batch_size, case.prompt_tokens)
    # Also the warm-up of both ways.
    near_ties = check(model, prompt, case, name)
    first = random_ids(case.size, case.batch_size, cold_prompt)
    cold = _rate(decode_cached(model, first, case.cached_tokens))
    prefill, cached, uncached = [], [], []
    for _ in rounds(repeats, f"{name}, {case.prompt_tokens}"):
        result = decode_cached(model, prompt, case.cached_tokens)
        prefill.append(result.prompt_seconds)
        cached.append(_rate(result))
        seconds = decode_uncached(model, prompt, case.uncached_tokens)
        uncached.append(case.batch_size * case.uncached_tokens / seconds)
    with_cache, without = summary(cached), summary(uncached)
    return {
        "case": asdict(case),
        "model": models()[name].label,
        "convolution": convolution_of(model, case.size),
        "near_ties": near_ties,
        "prompt_seconds": summary(prefill),
        "tokens_per_second_cached": with_cache,
        "cold_prompt_tokens": cold_prompt,
        "tokens_per_second_cold": summary([cold]),
        "tokens_per_second_uncached": without,
        "cache_speedup": with_cache["median"] / without["median"],
    }


@dataclass(frozen=True)
class Decoded:
    """Greedy tokens [B, n] and where the time went."""

    tokens: Tensor
    prompt_seconds: float
    step_seconds: float


def _rate(result: Decoded) -> float:
    """Tokens a second of a position at a time, which the first token is not."""
    rows, count = result.tokens.shape
    return rows * (count - 1) / result.step_seconds


def decode_cached(model: nn.Module, prompt: Tensor, count: int) -> Decoded:
    """`count` tokens after `prompt` [B, T]: a pass over the prompt, then a position at a time."""
    tokens = []
    clock = _clock(prompt.device)
    start = clock()
    outputs = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    tokens.append(outputs.logits[:, -1].argmax(dim=-1, keepdim=True))
    prompt_seconds, start = (now := clock()) - start, now
    for _ in range(count - 1):
        outputs = model(
            input_ids=tokens[-1], past_key_values=outputs.past_key_values, use_cache=True
        )
        tokens.append(outputs.logits[:, -1].argmax(dim=-1, keepdim=True))
    return Decoded(torch.cat(tokens, dim=1), prompt_seconds, clock() - start)


def decode_uncached(model: nn.Module, prompt: Tensor, count: int) -> float:
    """Seconds for `count` tokens after `prompt` [B, T], with a pass over everything for each."""
    clock = _clock(prompt.device)
    start, ids = clock(), prompt
    for _ in range(count):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        ids = torch.cat([ids, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return clock() - start


def check(model: nn.Module, prompt: Tensor, case: DecodeCase, name: str) -> int:
    """Check that tokens decoded with the cache are those without it; count the near ties.

    Raises:
        UserError: a token differs whose logit is not within rounding of the other's.
    """
    tokens = decode_cached(model, prompt, case.cached_tokens).tokens
    ids = torch.cat([prompt, tokens[:, :-1]], dim=1)
    count = case.cached_tokens
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=count).logits.float()
    chosen = logits.gather(2, tokens[:, :, None])[:, :, 0]
    behind = (logits.max(dim=-1).values - chosen) / logits.abs().max()
    differ = logits.argmax(dim=-1) != tokens
    # Not `>`: a NaN must not pass.
    wrong = differ & ~(behind <= TOLERANCES[case.size.dtype])
    if wrong.any() or not torch.isfinite(logits).all():
        raise UserError(
            f"{name}: {int(wrong.sum())} of {tokens.numel()} greedy tokens after a prompt of "
            f"{case.prompt_tokens} differ between decoding with and without the cache (largest "
            f"logit difference {float(behind.max()):.2g} of the largest); speeds of wrong decoding "
            "are not reported"
        )
    return int(differ.sum())


def _clock(device: torch.device) -> Callable[[], float]:
    """Reads the wall's clock once the device has nothing left to do."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
