"""Tries entries that are not this project's, see `cat_lm.probing`: each alone in a small layer.

It is a layer of the model's family, whose core gets the masks, positions and caches that it gets
there. Looked at is what comes out of the core, of 7 tokens: what an entry does beyond a chunk or a
block of more tokens is not seen.
"""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from cat_lm.errors import UserError
from cat_lm.model import attention
from cat_lm.model.attention import Entry, Pattern, ScoreTransform, ValueTransform
from cat_lm.model.attention.scores import ScoreModule
from cat_lm.parameters import start
from cat_lm.probing import (
    CUT,
    ROWS,
    TIME,
    Wrong,
    apart,
    check_output,
    check_same,
    documents,
    is_apart,
    padded,
    stir,
)
from cat_lm.registering import is_own, mishap

# What of a configuration is left out, so that an entry stands alone.
_PLAIN = {"attention": "softmax", "attention_options": None}
_PLAIN |= {"score_transform": "none", "score_options": None}
_PLAIN |= {"value_transform": "none", "value_options": None}
_PLAIN |= {"conv_type": "none", "conv_rank": 1, "canon": "none", "qk_norm": "none"}
_PLAIN |= {"position_embedding": "none"}
_SMALL = {"num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 8}
_SMALL |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
# The attribute of an attention module that holds what an entry builds.
_ATTRIBUTES = {
    Pattern: "core",
    ScoreTransform: "score_transform",
    ValueTransform: "value_transform",
}

_TRIED: set[tuple[Any, ...]] = set()


def try_entries(body: nn.Module) -> None:
    """Try the pattern and the transforms of a transformer, each once with its options.

    Args:
        body: the transformer without its head; another, small one is made of its class.

    Raises:
        UserError: naming the entry and what its module does wrong.
    """
    if is_apart():
        return
    for kind, entry in attention.chosen_entries(body.config).items():
        if is_own(entry) or not entry.computes_on_cpu:
            continue
        if kind is Pattern and entry.length_problems(body.config, TIME):
            continue
        implementation = _on_cpu(entry, body.config)
        if implementation is None:
            continue
        named = attention.described(kind, body.config)
        options = str(attention.given_options(kind, body.config))
        shares = body.config.stream_heads("k") < body.config.num_attention_heads
        tried = type(body), entry, options, implementation, shares
        if tried not in _TRIED:
            _try(named, type(body), kind, body.config, implementation)
            _TRIED.add(tried)


def _on_cpu(entry: Entry, config: Any) -> str | None:
    """Choose what computes it here: what computes the model, if that needs no GPU."""
    able = entry.implementations
    choices = (config._attn_implementation, "sdpa", "eager")
    fit = (c for c in choices if c in ("sdpa", "eager") and (able is None or c in able))
    return next(fit, None)


def _try(
    named: str, body: type[nn.Module], kind: type[Entry], config: Any, implementation: str
) -> None:
    with apart():
        try:
            _made(body, kind, config, implementation).check()
        except Wrong as error:
            raise UserError(f"{named}: its module {error}") from error
        except UserError:
            raise
        except Exception as error:  # whatever a stranger's module raises
            raise UserError(f"{named}: cannot attend to {TIME} tokens: {mishap(error)}") from error


def _made(body: type[nn.Module], kind: type[Entry], config: Any, implementation: str) -> Trial:
    """Make the smallest layer that an entry lets attend."""
    configs = _small_configs(kind, config, implementation)
    for small in configs:
        try:
            return Trial(body, kind, small)
        except Wrong:
            raise
        except Exception:
            # Heads may have to be as many or as wide as they are in the model.
            if small is configs[-1]:
                raise
    raise AssertionError


def _small_configs(kind: type[Entry], config: Any, implementation: str) -> list[Any]:
    """Give configurations of one layer, the smaller first, in which an entry stands alone."""
    heads, shared = config.num_attention_heads, config.stream_heads("k")
    own = {name: getattr(config, name) for name in attention.keys_of(kind)}
    small = _SMALL | {"_attn_implementation": implementation}
    found = []
    for shape in ((2, 1 if shared < heads else 2, 8), (heads, shared, config.head_width)):
        sizes = {"num_attention_heads": shape[0], "num_key_value_heads": shape[1]}
        sizes |= {"head_dim": shape[2], "hidden_size": shape[0] * shape[2]}
        plain = _changed(config, _PLAIN | own | small | sizes)
        if not attention.problems(plain, implementation):
            found.append(plain)
    return found or [_changed(config, small)]


def _changed(config: Any, values: dict[str, Any]) -> Any:
    """Give a copy with other values of what the configuration has."""
    changed = copy.deepcopy(config)
    for name, value in values.items():
        if hasattr(config, name):
            setattr(changed, name, value)
    return changed


class Trial:
    """One layer with an entry, its inputs [B, T, C], and what comes out of its core for them."""

    def __init__(self, body: type[nn.Module], kind: type[Entry], config: Any) -> None:
        # Values come below, when it is known that they can.
        with mock.patch.object(body, "init_weights", lambda _: None):
            self.body = body(config).eval()
        layer = next(module for module in self.body.modules() if hasattr(module, "core"))
        module = getattr(layer, _ATTRIBUTES[kind])
        self.body.apply(self.body._init_weights)
        self.body.apply(start)
        stir(self.body)
        layer.core.register_forward_hook(self._keep)
        if kind is ScoreTransform:
            form = attention.score_transform(config).form
            _check_score(module, form, config.num_attention_heads)
        elif kind is ValueTransform:
            module.register_forward_hook(_check_values)
        self.x = torch.randn(ROWS, TIME, config.hidden_size)
        self.y = self.attend(self.x)

    def attend(self, x: Tensor, **how: Any) -> Tensor:
        """Give [B, T, H, D] of inputs [B, T, C]."""
        self.cache = self.body(inputs_embeds=x, **{"use_cache": False} | how).past_key_values
        return self.seen

    def _keep(self, core: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        """Check what the core gives for query [B, H, T, D] and its values, and keep it."""
        if not isinstance(output, tuple) or len(output) != 2:
            raise Wrong(f"gives a {type(output).__name__}; must give ([B, T, H, D], maps or None)")
        batch, heads, time, _ = given[0].shape
        check_output(output[0], (batch, time, heads, given[2].shape[-1]), "[B, T, H, D]")
        self.seen = output[0]

    def check(self) -> None:
        """Check that no token reads what it must not. Raises Wrong.

        A module may refuse documents, padding or a cache, in an error of its own.
        """
        x, y = self.x, self.y
        check_same(self.attend(x[:, :CUT]), y[:, :CUT], "reads later tokens")
        check_same(self.attend(x[1:]), y[1:], "reads other rows")
        for check in (self._documents, self._padding, self._cache, self._cache_after_padding):
            with contextlib.suppress(ValueError, NotImplementedError, UserError):
                check()

    def _documents(self) -> None:
        alone = torch.cat([self.attend(part) for part in self.x.split(CUT, dim=1)], dim=1)
        packed = self.attend(self.x, document_ids=documents())
        check_same(packed, alone, "reads other documents")

    def _padding(self) -> None:
        real = padded()
        found = self.attend(self.x, attention_mask=real.long())
        for row in range(ROWS):
            alone = self.attend(self.x[row : row + 1, real[row]])[0]
            check_same(found[row, real[row]], alone, "reads padding")

    def _cache(self) -> None:
        parts, how = [], {"use_cache": True}
        for part in self.x.split([1, CUT, TIME - CUT - 1], dim=1):
            parts.append(self.attend(part, **how))
            how["past_key_values"] = self.cache
        said = "gives other outputs in parts, with a cache, than of the whole row"
        check_same(torch.cat(parts, dim=1), self.y, said)

    def _cache_after_padding(self) -> None:
        mask = torch.ones(ROWS, TIME, dtype=torch.long)
        mask[0, :2] = 0
        self.attend(self.x[:, :CUT], attention_mask=mask[:, :CUT], use_cache=True)
        found = self.attend(self.x[:, CUT:], attention_mask=mask, past_key_values=self.cache)
        alone = self.attend(self.x[:1, 2:])
        check_same(found[:1], alone[:, CUT - 2 :], "reads padding in a cache")


def _check_values(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
    check_output(output, tuple(given[0].shape), "values as it gets them")


def _check_score(module: nn.Module, form: str, heads: int) -> None:
    """Check that scores are made of logits as the transform's form says. Raises Wrong."""
    if not isinstance(module, ScoreModule):
        raise Wrong("is no ScoreModule")
    needed = ("factors", "separated") if form == "separable" else ("score",)
    if not any(map(partial(_defines, module), needed)):
        raise Wrong(f"defines no {needed[0]}, by which form={form!r} is computed")
    if _defines(module, "score"):
        _check_form(module, form, heads)


def _defines(module: ScoreModule, name: str) -> bool:
    return getattr(type(module), name) is not getattr(ScoreModule, name)


def _check_form(module: ScoreModule, form: str, heads: int) -> None:
    logits = torch.randn(ROWS, heads, TIME, TIME)
    head, time = module.heads_of(logits)[:, None, None], torch.arange(TIME)
    where = time[None, None, :, None], time[None, None, None], head
    score = module.score(logits, *where, *module())
    if score.shape != logits.shape:
        raise Wrong(f"makes scores {list(score.shape)} of logits {list(logits.shape)}")
    wanted = score
    if form == "additive":
        wanted = logits + module.score(torch.zeros(1, 1, 1, 1), *where, *module())
    elif form == "separable":
        at = time[None, None]
        of_query, of_key = module.separated(at, at, head[..., 0], logits.dtype, *module())
        wanted = logits * of_query[..., None] * of_key[..., None, :]
    # Later keys are masked: what is made of their logits is nothing.
    said = f"makes other scores of logits than form={form!r} says"
    check_same(score.tril(), wanted.tril(), said)
