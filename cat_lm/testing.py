"""Checks for authors of plugins: whether an entry does what it says of itself, on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cat_lm.core.causality import CUT, ROWS, TIME, apart, changed, is_same, stir
from cat_lm.core.errors import UserError
from cat_lm.core.options import build_options
from cat_lm.core.parameters import start
from cat_lm.core.registry import mishap
from cat_lm.mixers.parts.base import Mixer, MixerKind, Setting
from cat_lm.model import CatModel, attention
from cat_lm.model.attention import Entry, Pattern, ScoreTransform, ValueTransform
from cat_lm.model.attention.causality import layer_of
from cat_lm.model.attention.modules.scores import ScoreModule
from cat_lm.model.context import Context
from cat_lm.model.hf.configuration import CatConfig
from cat_lm.training.checkpoint.fragments import persistent_buffers

__all__ = ["check_entry"]

_SIZES = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 8}
_SIZES |= {"num_hidden_layers": 1, "conv_type": "none", "position_embedding": "none"}


class _Wrong(AssertionError):
    """What is wrong with an entry, after its name."""


def check_entry(
    entry: MixerKind | Entry,
    options: Mapping[str, Any] | None = None,
    *,
    width: int = 64,
    body: nn.Module | None = None,
) -> None:
    """Check that a mixer, a pattern of attention or a transform does what it says of itself.

    In a small layer with rows of 7 tokens: shapes; that no token reads later ones, other rows,
    documents or padding; that parts with a state or a cache give what the whole row gives; that
    scores are of their form; that its counts are numbers, and that a checkpoint can hold its
    buffers. What is wrong only beyond a chunk or a block of more tokens is not seen.

    Args:
        entry: registered, if it is one of attention.
        options: those that differ from the defaults.
        width: C of a mixer's inputs.
        body: a transformer without its head whose attention is the entry, which gives family, heads
            and implementation; by default GPT-NeoX with two heads, by all that computes on a CPU.

    Raises:
        AssertionError: naming the entry and what is wrong.
        UserError: options that the entry refuses.
    """
    if isinstance(entry, MixerKind):
        mixer = Mixer(entry, build_options(entry.Options, f"mixer {entry.name}", options or {}))
        for layer in (0, 1):
            setting = Setting(width, layer, 2)
            mixer.check(setting)
            _run(f"mixer {mixer.label}", partial(_check_mixer, mixer, setting))
        return
    kind = next(
        kind for kind in (Pattern, ScoreTransform, ValueTransform) if isinstance(entry, kind)
    )
    key, options_key = attention.keys_of(kind)
    family, configs = type(body), []
    if body is not None:
        configs.append(changed(body.config, {"num_hidden_layers": 1}))
    else:
        family = CatModel
        chosen = {key: entry.name, options_key: options}
        able = entry.implementations or ("eager", "sdpa")
        for name in {"eager", "sdpa"} & set(able):
            configs.append(CatConfig(**_SIZES | chosen, attn_implementation=name))
    for config in configs:
        named = attention.described(kind, config)
        _run(named, partial(_check_attention, entry, kind, family, config))


def _run(named: str, check: Callable[[], None]) -> None:
    with apart():
        try:
            check()
        except _Wrong as error:
            raise AssertionError(f"{named}: {error}") from None
        except UserError:
            raise
        except Exception as error:  # whatever a plugin's module raises
            said = f"{named}: cannot compute {TIME} tokens: {mishap(error)}"
            raise AssertionError(said) from error


# Mixers


def _check_mixer(mixer: Mixer, setting: Setting) -> None:
    kind, options = mixer.kind, mixer.options
    module = kind.build(options, setting).eval()
    module.apply(start)
    stir(module)
    _check_buffers(module)
    x = torch.randn(ROWS, TIME, setting.d_model)
    y = module(x, Context())
    _check_output(y, tuple(x.shape), "[B, T, C]")
    _check_same(module(x[:, :CUT], Context()), y[:, :CUT], "reads later tokens")
    _check_same(module(x[1:], Context()), y[1:], "reads other rows")
    if "documents" in kind.supports:
        alone = torch.cat([module(part, Context()) for part in x.split(CUT, dim=1)], dim=1)
        packed = module(x, Context(documents=_documents()))
        _check_same(packed, alone, "supports documents, and reads other documents")
    if "padding" in kind.supports:
        real = _padded()
        found = module(x, Context(padding=real))
        _check_output(found, tuple(x.shape), "[B, T, C], at padding too")
        for row in range(ROWS):
            alone = module(x[row : row + 1, real[row]], Context())[0]
            _check_same(found[row, real[row]], alone, "supports padding, and reads it")
    if "state" in kind.supports:
        _check_state(module, kind.cache_layer(options), x, y)
        if "padding" in kind.supports:
            # A pattern of attention may refuse tokens after padding, in an error of its own.
            with contextlib.suppress(ValueError):
                _check_state_after_padding(module, kind.cache_layer(options), x)


def _check_state(module: nn.Module, layer: type, x: Tensor, y: Tensor) -> None:
    context = Context(state=layer())
    parts = [module(part, context) for part in x.split([1, CUT, TIME - CUT - 1], dim=1)]
    said = "supports state, and gives other outputs in parts than of the whole"
    _check_same(torch.cat(parts, dim=1), y, said)
    for name, held in (context.state.inputs | context.state.recurrent).items():
        if not isinstance(held, Tensor) or held.dim() == 0 or len(held) != ROWS:
            raise _Wrong(
                f"its module supports state, and holds {name!r} that is no tensor with rows first"
            )


def _check_state_after_padding(module: nn.Module, layer: type, x: Tensor) -> None:
    state, real = layer(), _padded()
    module(x, Context(padding=real, state=state))
    found = module(x, Context(state=state))
    for row in range(ROWS):
        whole = torch.cat([x[row, real[row]], x[row]])[None]
        said = "supports padding and state, and goes on otherwise after padding"
        _check_same(found[row], module(whole, Context())[0, -TIME:], said)


# Attention


def _check_attention(entry: Entry, kind: type[Entry], family: type[nn.Module], config: Any) -> None:
    body, attend, width = layer_of(family, config)
    stir(body)
    _check_buffers(body)
    layer = next(module for module in body.modules() if hasattr(module, "core"))
    layer.core.register_forward_hook(_check_core, prepend=True)
    if kind is ScoreTransform:
        _check_score(layer.score_transform, entry.form, config.num_attention_heads)
    elif kind is ValueTransform:
        layer.value_transform.register_forward_hook(_check_values)
    x = torch.randn(ROWS, TIME, width)
    y = attend(x)
    _check_same(attend(x[:, :CUT]), y[:, :CUT], "reads later tokens")
    _check_same(attend(x[1:]), y[1:], "reads other rows")
    for check in (_check_documents, _check_padding, _check_cache, _check_cache_after_padding):
        # A module may refuse documents, padding or a cache, in an error of its own.
        with contextlib.suppress(ValueError, NotImplementedError, UserError):
            check(attend, x, y)


def _check_documents(attend: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    alone = torch.cat([attend(part) for part in x.split(CUT, dim=1)], dim=1)
    _check_same(attend(x, document_ids=_documents()), alone, "reads other documents")


def _check_padding(attend: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    real = _padded()
    found = attend(x, attention_mask=real.long())
    for row in range(ROWS):
        alone = attend(x[row : row + 1, real[row]])[0]
        _check_same(found[row, real[row]], alone, "reads padding")


def _check_cache(attend: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    parts, how = [], {"use_cache": True}
    for part in x.split([1, CUT, TIME - CUT - 1], dim=1):
        parts.append(attend(part, **how))
        how["past_key_values"] = attend.cache
    said = "gives other outputs in parts, with a cache, than of the whole row"
    _check_same(torch.cat(parts, dim=1), y, said)


def _check_cache_after_padding(attend: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    mask = torch.ones(ROWS, TIME, dtype=torch.long)
    mask[0, :2] = 0
    attend(x[:, :CUT], attention_mask=mask[:, :CUT], use_cache=True)
    found = attend(x[:, CUT:], attention_mask=mask, past_key_values=attend.cache)
    alone = attend(x[:1, 2:])
    _check_same(found[:1], alone[:, CUT - 2 :], "reads padding in a cache")


def _check_core(core: nn.Module, given: tuple[Any, ...], output: Any) -> None:
    """Check what the core gives for query [B, H, T, D] and its values."""
    if not isinstance(output, tuple) or len(output) != 2:
        raise _Wrong(
            f"its module gives a {type(output).__name__}; must give ([B, T, H, D], maps or None)"
        )
    batch, heads, time, _ = given[0].shape
    _check_output(output[0], (batch, time, heads, given[2].shape[-1]), "[B, T, H, D]")


def _check_values(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
    _check_output(output, tuple(given[0].shape), "values as it gets them")


def _check_score(module: nn.Module, form: str, heads: int) -> None:
    """Check that scores are made of logits as the transform's form says."""
    if not isinstance(module, ScoreModule):
        raise _Wrong("its module is no ScoreModule")
    needed = ("factors", "separated") if form == "separable" else ("score",)
    if not any(map(partial(_defines, module), needed)):
        raise _Wrong(f"its module defines no {needed[0]}, by which form={form!r} is computed")
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
        raise _Wrong(f"its module makes scores {list(score.shape)} of logits {list(logits.shape)}")
    wanted = score
    if form == "additive":
        wanted = logits + module.score(torch.zeros(1, 1, 1, 1), *where, *module())
    elif form == "separable":
        at = time[None, None]
        of_query, of_key = module.separated(at, at, head[..., 0], logits.dtype, *module())
        wanted = logits * of_query[..., None] * of_key[..., None, :]
    # Later keys are masked: what is made of their logits is nothing.
    _check_same(
        score.tril(), wanted.tril(), f"makes other scores of logits than form={form!r} says"
    )


# What all entries share


def _check_buffers(module: nn.Module) -> None:
    for name, buffer in persistent_buffers(module).items():
        if buffer.is_complex():
            raise _Wrong(f"holds a buffer {name} of {buffer.dtype}, which no checkpoint holds")
        if not buffer.isfinite().all():
            raise _Wrong(f"holds a buffer {name} that is not finite, which no checkpoint may be")


def _check_same(found: Tensor, wanted: Tensor, otherwise: str) -> None:
    if not is_same(found, wanted):
        raise _Wrong(f"its module {otherwise}")


def _check_output(found: object, shape: tuple[int, ...], of: str) -> None:
    """Check what a module gives: a tensor of numbers, of this shape."""
    if not isinstance(found, Tensor):
        raise _Wrong(f"its module gives a {type(found).__name__}; must give a tensor {of}")
    if found.shape != shape:
        raise _Wrong(f"its module gives {list(found.shape)}; must give {of}, here {list(shape)}")
    if not found.isfinite().all():
        raise _Wrong("its module gives numbers that are not finite")


def _documents() -> Tensor:
    """Number the documents of rows that are packed, [B, T]."""
    return (torch.arange(TIME) >= CUT).long().expand(ROWS, -1)


def _padded() -> Tensor:
    """Mark the real tokens of rows of which one begins and one ends in padding, [B, T] bool."""
    real = torch.ones(ROWS, TIME, dtype=torch.bool)
    real[0, : TIME - CUT - 1] = real[1, CUT + 1 :] = False
    return real
