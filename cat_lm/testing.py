"""Checks for authors of plugins: whether an entry does what it says of itself, on a CPU."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cat_lm.architectures import Architecture, check_model
from cat_lm.callbacks import CallbackKind
from cat_lm.config.sections import OptimizerSection
from cat_lm.core.causality import (
    CUT,
    ROWS,
    TIME,
    copy_with,
    is_same,
    isolated_check,
    perturb_parameters,
)
from cat_lm.core.errors import UserError
from cat_lm.core.fields import build_options
from cat_lm.core.parameters import apply_initial_values
from cat_lm.core.registry import describe_plugin_error
from cat_lm.mixers import CAPABILITIES
from cat_lm.mixers.parts.base import Mixer, MixerKind, Setting
from cat_lm.model import CatForCausalLM, CatModel, attention
from cat_lm.model.attention import Entry, Pattern, ScoreTransform, ValueTransform
from cat_lm.model.attention.core import layer_of
from cat_lm.model.attention.modules.scores import ScoreModule
from cat_lm.model.context import Context
from cat_lm.model.hf.configuration import CatConfig
from cat_lm.ops.convolution.kinds import Kind, with_options
from cat_lm.ops.convolution.kinds.reference import check_kind, sum_of_lags
from cat_lm.ops.runtime.documents import document_positions
from cat_lm.optimizers import OptimizerKind
from cat_lm.training.building import optimizer_groups
from cat_lm.training.callback_check import Broken, check_callback
from cat_lm.training.checkpoint.optimizer_state import persistent_buffers
from cat_lm.training.distributed import Ranks

__all__ = ["check_entry"]

_SIZES = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 8}
_SIZES |= {"num_hidden_layers": 1, "conv_type": "none", "position_embedding": "none"}


class _Wrong(AssertionError):
    """An entry is wrong; the message follows the entry's name."""


def check_entry(
    entry: MixerKind | Entry | Architecture | Kind | CallbackKind | OptimizerKind,
    options: Mapping[str, Any] | None = None,
    *,
    width: int = 64,
    body: nn.Module | None = None,
) -> None:
    """Check a mixer, an attention entry, a family, a convolution, a callback or an optimizer.

    In a small layer or model with rows of 7 tokens: shapes; that no token reads later ones, other
    rows, documents or padding; that parts with a state or a cache give what the whole row gives;
    that scores are of their form; that its counts are numbers, and that a checkpoint can hold its
    buffers. What is wrong only beyond a chunk or a block of more tokens is not seen. Of an
    optimizer: the state that it declares, a step that it skips, and going on from a saved state.

    A callback, which must be registered, gets the events of a pretended run of six steps: it leaves
    weights and generators as they are, and after a restart its state is that of a straight run.

    Args:
        entry: registered, if it is one of attention.
        options: those that differ from the defaults; of a family, keys of its section; of a
            callback of this project, dotted keys of the configuration.
        width: C of the inputs of a mixer or of a family's model.
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
    if isinstance(entry, CallbackKind):
        with isolated_check():
            try:
                check_callback(entry, options or {})
            except Broken as error:
                raise AssertionError(f"callback {entry.name!r}: {error}") from error
        return
    if isinstance(entry, OptimizerKind):
        built = build_options(entry.Options, f"optimizer.name={entry.name}", options or {})
        _run(f"optimizer {entry.name!r}", partial(_check_optimizer, entry, built))
        return
    if isinstance(entry, Kind):
        kind = with_options(entry, options or {})
        _run(f"conv_type {entry.name!r}", partial(_check_convolution, kind))
        return
    if isinstance(entry, Architecture):
        keys = {"hidden_size": width, "num_hidden_layers": 2, "vocab_size": 8} | dict(options or {})
        _run(f"architecture {entry.name!r}", partial(_check_family, entry, keys))
        return
    kind = next(
        kind for kind in (Pattern, ScoreTransform, ValueTransform) if isinstance(entry, kind)
    )
    family, configs = type(body), []
    if body is not None:
        configs.append(copy_with(body.config, {"num_hidden_layers": 1}))
    else:
        family = CatModel
        chosen = {kind.key: entry.name, kind.options_key: options}
        able = entry.implementations or ("eager", "sdpa")
        for name in {"eager", "sdpa"} & set(able):
            configs.append(CatConfig(**_SIZES | chosen, attn_implementation=name))
    for config in configs:
        named = attention.describe_entry(kind, config)
        _run(named, partial(_check_attention, entry, kind, family, config))


def _run(named: str, check: Callable[[], None]) -> None:
    with isolated_check():
        try:
            check()
        except _Wrong as error:
            raise AssertionError(f"{named}: {error}") from None
        except UserError:
            raise
        except Exception as error:  # A plugin's module may raise anything.
            problem = f"{named}: cannot compute {TIME} tokens: {describe_plugin_error(error)}"
            raise AssertionError(problem) from error


def _check_convolution(kind: Kind) -> None:
    try:
        check_kind(kind)
    except ValueError as error:
        raise _Wrong(str(error).partition(": ")[2]) from error
    heads, width, window = 4, 3, 3
    taps = torch.randn(kind.filter_shape(heads, width, window), requires_grad=True)

    def compute(x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x.unflatten(-1, (heads, width))
        positions = None if documents is None else document_positions(documents)
        return sum_of_lags(kind, x, taps, positions=positions)

    _check_reading(compute, heads * width, ("documents",), dict)
    with torch.enable_grad():
        compute(torch.randn(ROWS, TIME, heads * width)).square().sum().backward()
    if not taps.grad.isfinite().all() or not taps.grad.any():
        raise _Wrong("its sum gives filters no gradient that is a number")


class _Optimized:
    """A small model with an optimizer on one rank, which steps whole parameters as ZeRO-0 does."""

    def __init__(self, kind: OptimizerKind, options: Any) -> None:
        fields = _SIZES | {"conv_type": "head", "num_hidden_layers": 2}
        self.model = CatForCausalLM(CatConfig(**fields)).train()
        section = OptimizerSection(lr=0.01, weight_decay=0.1)
        groups = optimizer_groups(self.model, kind, section, options)
        self.optimizer = kind.build(groups, section, options)
        self.config = SimpleNamespace(train=SimpleNamespace(zero_stage=0))
        self.ranks = Ranks(0, 0, 1, torch.device("cpu"))
        kind.attach(self.optimizer, self)
        self.weights = dict(self.model.named_parameters())

    def step(self, found_inf: float = 0.0) -> None:
        """Take a step with the gradients of the same few tokens."""
        ids = torch.arange(2 * TIME).view(2, TIME) % 8
        with torch.enable_grad():
            self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if found_inf:
            for weight in self.weights.values():
                weight.grad.fill_(torch.nan)
        self.optimizer.found_inf = torch.tensor(found_inf)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def copied(self) -> dict[str, dict[str, Tensor]]:
        """Copy each parameter, as `weight`, and its state, by the parameter's name."""
        state = self.optimizer.state
        return {
            name: copy.deepcopy({"weight": weight.detach()} | state[weight])
            for name, weight in self.weights.items()
        }


def _check_optimizer(kind: OptimizerKind, options: Any) -> None:
    trained, other = (_Optimized(kind, options) for _ in range(2))
    kinds, weights = kind.state_kinds(trained.model), trained.weights
    if wrong := kinds.keys() ^ weights.keys():
        raise _Wrong(f"state_kinds must name each parameter; it differs in {min(wrong)}")
    started = {name: weight.detach().clone() for name, weight in weights.items()}
    trained.step()
    held = trained.copied()
    for name, state in held.items():
        wanted = {"weight", "step", *kinds[name]}
        if state.keys() != wanted or float(state["step"]) != 1:
            raise _Wrong(f"its state of {name} must hold {sorted(wanted - {'weight'})}, step at 1")
        for key in kinds[name]:
            if state[key].shape != weights[name].shape or state[key].dtype != torch.float32:
                raise _Wrong(f"{key} of {name} must have the parameter's shape, in fp32")
    if all(state["weight"].equal(started[name]) for name, state in held.items()):
        raise _Wrong("its step changes no parameter")
    trained.step(found_inf=1.0)
    if (place := _difference(trained.copied(), held)) is not None:
        raise _Wrong(f"a step with found_inf=1 changes {place}")
    for name, state in held.items():
        other.weights[name].data.copy_(state.pop("weight"))
        other.optimizer.state[other.weights[name]].update(state)
    trained.step()
    other.step()
    if (place := _difference(trained.copied(), other.copied())) is not None:
        raise _Wrong(f"resumes with another {place} from a saved state")


def _difference(
    found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]
) -> str | None:
    """Return the name of a tensor that differs, or None if all are equal."""
    places = ((name, key) for name, state in wanted.items() for key in state)
    unequal = (f"{k} of {n}" for n, k in places if not found[n][k].equal(wanted[n][k]))
    return next(unequal, None)


def _check_family(family: Architecture, keys: dict[str, Any]) -> None:
    section = family.Section(**keys)
    fields = family.fields(section, section.vocab_size, 4 * TIME)
    model = family.classes().causal_lm(family.config_class()(**fields)).eval()
    try:
        check_model(family, section, model)
    except ValueError as error:
        raise _Wrong(str(error)) from error
    perturb_parameters(model)
    _check_buffers(model)

    def compute(x: Tensor, state: dict[str, Any] | None = None, **layout: Any) -> Tensor:
        how = {"document_ids": layout.get("documents"), "use_cache": state is not None}
        if state is not None:
            how["past_key_values"] = state.get("cache")
        if (padding := _all_padding(x, layout.get("padding"), state)) is not None:
            how["attention_mask"] = padding.long()
        outputs = model(inputs_embeds=x, **how)
        if state is not None:
            state["cache"] = outputs.past_key_values
        return outputs.logits

    if section.isolates_documents:  # A family must not refuse what it claims.
        _check_reading(compute, section.hidden_size, ("documents",), dict)
    supports = {"padding"}
    if "past_key_values" in inspect.signature(type(model.base_model).forward).parameters:
        supports.add("state")
    _check_reading(compute, section.hidden_size, supports, dict, _REFUSALS)


def _check_mixer(mixer: Mixer, setting: Setting) -> None:
    kind, options = mixer.kind, mixer.options
    module = kind.build(options, setting).eval()
    module.apply(apply_initial_values)
    perturb_parameters(module)
    _check_buffers(module)

    def compute(x: Tensor, **context: Any) -> Tensor:
        y = module(x, Context(**context))
        _check_output(y, tuple(x.shape), "[B, T, C]")
        if (state := context.get("state")) is not None:
            for name, held in (state.inputs | state.recurrent).items():
                if not isinstance(held, Tensor) or held.dim() == 0 or len(held) != len(x):
                    raise _Wrong(f"its module holds {name!r} that is no tensor with rows first")
        return y

    _check_reading(compute, setting.d_model, kind.supports, kind.cache_layer(options))


def _check_attention(entry: Entry, kind: type[Entry], family: type[nn.Module], config: Any) -> None:
    body, attend, width = layer_of(family, config)
    perturb_parameters(body)
    _check_buffers(body)
    layer = next(module for module in body.modules() if hasattr(module, "core"))
    layer.core.register_forward_hook(_check_core, prepend=True)
    if kind is ScoreTransform:
        _check_score(layer.score_transform, entry.form, config.num_attention_heads)

    def compute(
        x: Tensor,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
        state: dict[str, Any] | None = None,
    ) -> Tensor:
        how: dict[str, Any] = {} if documents is None else {"document_ids": documents}
        if state is not None:
            how |= {"use_cache": True, "past_key_values": state.get("cache")}
        if (real := _all_padding(x, padding, state)) is not None:
            how["attention_mask"] = real.long()
        y = attend(x, **how)
        if state is not None:
            state["cache"] = attend.cache
        return y

    _check_reading(compute, width, CAPABILITIES, dict, _REFUSALS)


# A module may refuse documents, padding or a cache, in an error of its own.
_REFUSALS = (ValueError, NotImplementedError, UserError)


def _all_padding(x: Tensor, padding: Tensor | None, state: dict[str, Any] | None) -> Tensor | None:
    """Return which tokens so far are real, [B, S] bool; None if all are."""
    if state is not None:
        padding = torch.ones(x.shape[:2], dtype=torch.bool) if padding is None else padding
        padding = state["real"] = torch.cat([state.get("real", padding[:, :0]), padding], dim=1)
    return None if padding is None or padding.all() else padding


def _check_reading(
    compute: Callable[..., Tensor],
    width: int,
    supports: Iterable[str],
    new_state: Callable[[], Any],
    refusals: tuple[type[Exception], ...] = (),
) -> None:
    """Check that outputs [B, T, ...] are of what they may read alone.

    Args:
        compute: takes inputs [B, T, C], and `documents`, `padding` (True for tokens) and `state`.
        supports: the capabilities to test.
        refusals: the exceptions that it may raise for unsupported ones.
    """
    x = torch.randn(ROWS, TIME, width)
    y = compute(x)
    _check_same(compute(x[:, :CUT]), y[:, :CUT], "reads later tokens")
    _check_same(compute(x[1:]), y[1:], "reads other rows")
    # Masks with padding before the tokens, and after them.
    before, after = torch.ones(2, ROWS, TIME, dtype=torch.bool)
    before[0, :2] = after[1, 2:CUT] = False
    ended = before.clone()
    ended[1, CUT + 1 :] = False
    if "documents" in supports:
        with contextlib.suppress(*refusals):
            documents = (torch.arange(TIME) >= CUT).long().expand(ROWS, -1)
            alone = torch.cat([compute(part) for part in x.split(CUT, dim=1)], dim=1)
            _check_same(compute(x, documents=documents), alone, "reads other documents")
    if "padding" in supports:
        with contextlib.suppress(*refusals):
            found = compute(x, padding=ended)
            for row, real in enumerate(ended):
                alone = compute(x[row : row + 1, real])[0]
                _check_same(found[row, real], alone, "reads padding")
    if "state" in supports:
        with contextlib.suppress(*refusals):
            state = new_state()
            parts = [compute(part, state=state) for part in x.split([1, CUT, TIME - CUT - 1], 1)]
            problem = "gives other outputs in parts, with a state, than of the whole"
            _check_same(torch.cat(parts, dim=1), y, problem)
    for real in (before, after) if {"padding", "state"} <= set(supports) else ():
        # A pattern of attention may refuse tokens after padding, in an error of its own.
        with contextlib.suppress(ValueError, *refusals):
            state = new_state()
            compute(x[:, :CUT], padding=real[:, :CUT], state=state)
            found = compute(x[:, CUT:], state=state)
            for row in range(ROWS):
                whole = compute(x[row : row + 1, real[row]])[0]
                _check_same(found[row], whole[CUT - TIME :], "goes on otherwise after padding")


def _check_core(core: nn.Module, given: tuple[Any, ...], output: Any) -> None:
    if not isinstance(output, tuple) or len(output) != 2:
        raise _Wrong(
            f"its module gives a {type(output).__name__}; must give ([B, T, H, D], maps or None)"
        )
    batch, heads, time, _ = given[0].shape
    _check_output(output[0], (batch, time, heads, given[2].shape[-1]), "[B, T, H, D]")


def _check_score(module: ScoreModule, form: str, heads: int) -> None:
    if form == "separable" and type(module).score is ScoreModule.score:
        return  # It is computed by its factors alone.
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
    # Compare no later keys: attention masks them, whatever their scores are.
    _check_same(
        score.tril(), wanted.tril(), f"makes other scores of logits than form={form!r} says"
    )


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
    if not isinstance(found, Tensor):
        raise _Wrong(f"its module gives a {type(found).__name__}; must give a tensor {of}")
    if found.shape != shape:
        raise _Wrong(f"its module gives {list(found.shape)}; must give {of}, here {list(shape)}")
    if not found.isfinite().all():
        raise _Wrong("its module gives numbers that are not finite")
