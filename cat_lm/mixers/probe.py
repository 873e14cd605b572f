"""Tries a mixer that is not this project's: what `base.py` asks of a module, in a small one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cat_lm.errors import UserError
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
from cat_lm.registering import mishap

if TYPE_CHECKING:
    from cat_lm.mixers.base import Mixer, Setting

_WIDTHS = (64, 128, 256, 512, 1024)

_TRIED: set[tuple[Any, ...]] = set()  # by a kind's id: its class may say that none is another


def try_mixer(mixer: Mixer, setting: Setting) -> None:
    """Try a mixer with its options, once; a layer is all that those of a model may differ by.

    Raises:
        UserError: naming the mixer and what its module does wrong.
    """
    kind = mixer.kind
    too_short = kind.longest is not None and kind.longest < 2 * TIME
    if kind.computes_on_cpu and not too_short and not is_apart():
        setting = replace(setting, layer=min(setting.layer, 1))
        if (tried := (id(kind), mixer.options, setting)) not in _TRIED:
            _try(mixer, setting)
            _TRIED.add(tried)


def _try(mixer: Mixer, setting: Setting) -> None:
    with apart():
        try:
            module, x, y = _smallest(mixer, setting)
            _check(module, x, y, mixer.kind.supports)
        except Wrong as error:
            raise UserError(f"mixer {mixer.label}: its module {error}") from error
        except Exception as error:  # whatever a stranger's module raises
            raise UserError(
                f"mixer {mixer.label}: cannot mix {TIME} tokens: {mishap(error)}"
            ) from error


def _smallest(mixer: Mixer, setting: Setting) -> tuple[nn.Module, Tensor, Tensor]:
    """Make the narrowest module that the options let mix; with inputs [B, T, C] and its outputs."""
    narrow = [width for width in _WIDTHS if width < setting.d_model]
    for width in (*narrow, setting.d_model):
        try:
            return _made(mixer, replace(setting, d_model=width))
        except Wrong:
            raise
        except Exception:
            # Heads may be too many for it, or as wide as they are in the model.
            if width == setting.d_model:
                raise
    raise AssertionError


def _made(mixer: Mixer, setting: Setting) -> tuple[nn.Module, Tensor, Tensor]:
    mixer.kind.check(mixer.options, setting)
    module = mixer.kind.build(mixer.options, setting).eval()
    module.apply(start)
    stir(module)
    x = torch.randn(ROWS, TIME, setting.d_model)
    return module, x, module(x)


def _check(module: nn.Module, x: Tensor, y: Tensor, supports: frozenset[str]) -> None:
    """Check outputs y of x [B, T, C], and what the kind says it supports. Raises Wrong."""
    check_output(y, tuple(x.shape), "[B, T, C]")
    check_same(module(x[:, :CUT]), y[:, :CUT], "reads later tokens")
    check_same(module(x[1:]), y[1:], "reads other rows")
    if "documents" in supports:
        alone = torch.cat([module(part) for part in x.split(CUT, dim=1)], dim=1)
        packed = module(x, document_ids=documents())
        check_same(packed, alone, "supports documents, and reads other documents")
    if "padding" in supports:
        real = padded()
        found = module(x, padding_mask=real)
        check_output(found, tuple(x.shape), "[B, T, C], at padding too")
        for row in range(ROWS):
            alone = module(x[row : row + 1, real[row]])[0]
            check_same(found[row, real[row]], alone, "supports padding, and reads it")
    if "state" in supports:
        _check_state(module, x, y, "padding" in supports)


def _check_state(module: nn.Module, x: Tensor, y: Tensor, pads: bool) -> None:
    state: dict[str, Tensor] = {}
    parts = [module(part, state=state) for part in x.split([1, CUT, TIME - CUT - 1], dim=1)]
    said = "supports state, and gives other outputs in parts than of the whole"
    check_same(torch.cat(parts, dim=1), y, said)
    for name, held in state.items():
        if not isinstance(held, Tensor) or held.dim() == 0 or len(held) != ROWS:
            raise Wrong(f"supports state, and holds {name!r} that is no tensor with rows first")
    if not pads:
        return
    state, real = {}, padded()
    module(x, padding_mask=real, state=state)
    found = module(x, state=state)
    for row in range(ROWS):
        whole = torch.cat([x[row, real[row]], x[row]])[None]
        said = "supports padding and state, and goes on otherwise after padding"
        check_same(found[row], module(whole)[0, -TIME:], said)
