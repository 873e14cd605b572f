"""`python -m eval.speed decode`: greedy decoding with and without the cache.

With the cache of keys, values and convolution inputs a new token costs one position; without it, a
pass over all tokens so far. Before anything is timed, the tokens decoded with the cache are fed to
the model in one pass without it, which must choose the same token at every place; by induction,
greedy decoding without the cache gives the same text. Where two logits are nearer to each other
than rounding, either may win.

Each length of keys is met again in every repeat, and libraries that plan or compile for a length
have done so in the warm-up. Generation meets every length once. So a prompt of a length near by, of
which no model here has met a length before, is decoded once too: its rate is recorded as cold.

Steps are timed by the wall's clock between synchronisations: decoding at small batches is bound by
the host's launches, and they belong to its time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from cat_lm.core.errors import UserError
from eval.speed.choices import models
from eval.speed.models import (
    TOLERANCES,
    ModelSize,
    build,
    convolution_of,
    random_ids,
    randomize_filters,
)
from eval.speed.timing import log, rounds, summary


@dataclass(frozen=True)
class DecodeCase:
    """A prompt's length, and how many tokens are decoded after it with and without the cache."""

    size: ModelSize
    batch_size: int
    prompt_tokens: int
    cached_tokens: int
    uncached_tokens: int

    def lengths_after(self, prompt: int) -> range:
        """Return the numbers of keys in the steps of decoding after this number of tokens."""
        # Without the cache the last pass is over one token less than there are then.
        return range(prompt, prompt + max(self.cached_tokens, self.uncached_tokens))


def decode_speed(cases: Sequence[DecodeCase], names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measure every model after every prompt.

    Args:
        cases: the cases of one model size.
        names: the names of `decoding_models`.

    Returns:
        The record's part. `of_shortest_prompt` of a row is the ratio of its rate with the cache
        to that after its model's shortest prompt, by all pairs of their repeats, which did not
        take turns: 1 is flat in the length.

    Raises:
        UserError: a model cannot be built, or decodes otherwise with its cache than without.
    """
    results: list[dict[str, Any]] = []
    starts = cold_prompts(cases, len(names))
    longest = cases[0].lengths_after(max(starts)).stop
    for name in names:
        log(f"building {name}")
        model = build(cases[0].size, name, longest).eval()
        randomize_filters(model)
        rows = []
        for case in cases:
            log(f"{name}, prompt of {case.prompt_tokens} tokens")
            rows.append({"name": name, **measure(case, model, name, repeats, starts.pop(0))})
        del model
        shortest = min(rows, key=lambda row: row["case"]["prompt_tokens"])
        for row in rows:
            rates = (one["tokens_per_second_cached"]["all"] for one in (row, shortest))
            ratios = summary([own / rival for own, rival in product(*rates)])
            row["of_shortest_prompt"] = None if row is shortest else ratios
        results += rows
    return {"results": results}


def cold_prompts(cases: Sequence[DecodeCase], models: int) -> list[int]:
    """Return lengths of prompts, after each of which every length of keys is met for once.

    Args:
        cases: in the order in which each of the models takes them.

    Returns:
        For each model and case the shortest such prompt that is no shorter than the case's.
    """
    taken = {length for case in cases for length in case.lengths_after(case.prompt_tokens)}
    starts = []
    for case in list(cases) * models:
        start = case.prompt_tokens
        while taken.intersection(case.lengths_after(start)):
            start += 1
        taken.update(case.lengths_after(start))
        starts.append(start)
    return starts


@torch.no_grad()
def measure(
    case: DecodeCase, model: nn.Module, name: str, repeats: int, cold_prompt: int
) -> dict[str, Any]:
    """Time a model after a prompt, and once after `cold_prompt` tokens, whose lengths are new."""
    prompt = random_ids(case.size, case.batch_size, case.prompt_tokens)
    # Also the warm-up of both ways.
    near_ties = check(model, prompt, case, name)
    first = random_ids(case.size, case.batch_size, cold_prompt)
    *_, cold = decode_cached(model, first, case.cached_tokens)
    prefill, cached, uncached = [], [], []
    for _ in rounds(repeats, f"{name}, {case.prompt_tokens}"):
        _, prompt_seconds, rate = decode_cached(model, prompt, case.cached_tokens)
        prefill.append(prompt_seconds)
        cached.append(rate)
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


def decode_cached(model: nn.Module, prompt: Tensor, count: int) -> tuple[Tensor, float, float]:
    """Decode `count` tokens after `prompt` [B, T]: its pass, then a position at a time.

    Returns:
        Greedy tokens [B, count], the seconds of the prompt's pass, and tokens a second of a
        position at a time, which the first token is not.
    """
    start = _read_clock(prompt.device)
    outputs = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    tokens = [outputs.logits[:, -1].argmax(dim=-1, keepdim=True)]
    middle = _read_clock(prompt.device)
    for _ in range(count - 1):
        outputs = model(
            input_ids=tokens[-1], past_key_values=outputs.past_key_values, use_cache=True
        )
        tokens.append(outputs.logits[:, -1].argmax(dim=-1, keepdim=True))
    seconds = _read_clock(prompt.device) - middle
    return torch.cat(tokens, dim=1), middle - start, len(prompt) * (count - 1) / seconds


def decode_uncached(model: nn.Module, prompt: Tensor, count: int) -> float:
    """Return the seconds for `count` tokens after `prompt` [B, T], each by a pass over all."""
    start, ids = _read_clock(prompt.device), prompt
    for _ in range(count):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        ids = torch.cat([ids, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return _read_clock(prompt.device) - start


def _read_clock(device: torch.device) -> float:
    """Read the wall's clock once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def check(model: nn.Module, prompt: Tensor, case: DecodeCase, name: str) -> int:
    """Check that tokens decoded with the cache are those without it; return the near ties.

    Raises:
        UserError: a token differs whose logit is not within rounding of the other's.
    """
    count = case.cached_tokens
    tokens, *_ = decode_cached(model, prompt, count)
    ids = torch.cat([prompt, tokens[:, :-1]], dim=1)
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
