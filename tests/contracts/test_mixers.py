"""Contracts of every mixer: its recurrence, documents, padding, states, precision, decay."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cat_lm import mixers
from cat_lm.core.errors import UserError
from cat_lm.core.parameters import parameters_by_decay
from cat_lm.mixers import CAPABILITIES, Mixer, Setting, make
from cat_lm.model.cache import LayerStateMixin
from cat_lm.model.context import Context
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter import filters
from cat_lm.testing import check_entry
from tests.contracts.models import close
from tests.contracts.pairs import pairwise
from tests.reference.mixers import mix

# Landmark and multi-token attention refuse padding between the tokens of a row.
READS_BLOCKS = ("landmark", "multi-token")
LANDMARKS = ("core.filter", "core.sharpness")  # which no gradient reaches
WIDTH, TIME = 16, 70  # more than a chunk of the delta rule
# Options that need each other are one option here, by their names.
FILTERS = {"conv_type": list(kinds.names()), "streams": ["qkv", "k", "qv", None]}
CONVOLVED = FILTERS | {"window": [3, 1, 5], "heads": [2, 1, 4], "activation": ["none", "silu"]}
CONVOLVED |= {"place": ["after", "before"], "shared_kv": [False, True]}
LONG = [(name, 4) for name in filters.names()]
CONVOLVED |= {"filter,filter_state": [("taps", None), *LONG]}
PLAIN = {"dropout": [0.0], "bias": [True, False]}
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "attention": PLAIN | {"heads": [2, 1], "position": ["rope", "learned", "none"]},
    "based": {"features": [4, 8], "window": [3, 1]},
    "cat": CONVOLVED
    | PLAIN
    | {"position": ["none", "rope"], "conv_mixing": ["embeddings", "maps"]},
    "chunk": PLAIN | {"heads": [2, 1], "size": [8, 128], "position": ["rope", "none"]},
    "deltanet": FILTERS
    | {"window": [4, 1], "activation": ["silu", "none"], "heads": [2, 4]}
    | {"shared_kv": [False, True]},
    "gated-deltanet": FILTERS | {"window": [4, 1], "heads": [2, 1], "expand_v": [2.0, 1.0]},
    "gla": {"heads": [4, 2], "expand_k": [0.5, 1.0], "expand_v": [1.0, 2.0]},
    "landmark": PLAIN
    | {"heads": [2, 4], "block": [4, 3], "top_k": [1, 2], "local": [1, 2], "sink": [False, True]}
    | {"landmark_filter": ["box", "exponential", "learned"], "share": ["head", "layer"]}
    | {"position": ["none", "rope"], "streams": ["qkv", None]},
    "lincat": CONVOLVED | {"bias": [True, False]},
    "linear-attention": {"heads": [1, 4], "bias": [True, False]},
    "mamba": {"state": [16, 3], "window": [4, 1], "expand": [2, 1]},
    "multi-token": PLAIN
    | {"heads": [2, 4], "query_window": [3, 1], "key_window": [5, 3]}
    | {"head_mixing": ["both", "before", "after", "none"]},
}


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a row, of which some are several."""
    found = {}
    for names, value in row.items():
        values = value if "," in names else (value,)
        found |= dict(zip(names.split(","), values, strict=True))
    return found


def is_allowed(name: str, row: dict[str, Any]) -> bool:
    try:
        make(name, plain(row)).check(Setting(WIDTH))
    except UserError:
        return False
    return True


def _cases() -> list[tuple[Mixer, int]]:
    """Return mixers with options, and the layer: Based's differ."""
    found = []
    for name in mixers.names():
        rows = [{}]
        if name in OPTIONS:
            rows = pairwise(OPTIONS[name], lambda row, name=name: is_allowed(name, row))
        for options in rows:
            found += [
                (make(name, plain(options)), layer)
                for layer in ((0, 1) if name == "based" else (0,))
            ]
    return found


CASES = _cases()
every_mixer = pytest.mark.parametrize(
    ("mixer", "layer"), CASES, ids=lambda x: getattr(x, "label", x)
)


def built(mixer: Mixer, layer: int) -> nn.Module:
    """Return a module whose parameters are away from their start."""
    torch.manual_seed(0)
    module = mixer.build(Setting(WIDTH, layer, 2)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module


def rows(count: int = 2, time: int = TIME) -> Tensor:
    torch.manual_seed(time)
    return torch.randn(count, time, WIDTH)


def test_every_option_is_in_a_case():
    for name, options in OPTIONS.items():
        found = [vars(mixer.options) for mixer, _ in CASES if mixer.name == name]
        for option, values in options.items():
            for value in values:
                wanted = plain({option: value}).items()
                assert any(wanted <= given.items() for given in found), (name, option, value)


@every_mixer
def test_outputs_and_gradients_equal_the_reference(mixer, layer):
    """In both precisions, which other operators compute; beyond two chunks of the recurrences."""
    is_recurrent = mixer.name in ("gla", "deltanet", "gated-deltanet", "mamba")
    module, x = built(mixer, layer), rows(1, 130 if is_recurrent else 13)
    weights = {n: w.double().requires_grad_() for n, w in module.state_dict().items()}
    other = x.double().requires_grad_()
    expected = mix(mixer.name, other[0], weights, vars(mixer.options))
    shares = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * shares).sum().backward()
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.float64, 1e-5)):
        own = x.clone().to(dtype).requires_grad_()
        module.zero_grad()
        module.to(dtype)
        y = module(own, Context())[0]
        close(y.double(), expected, 2e-5)
        (y * shares.to(dtype)).sum().backward()
        close(own.grad.double(), other.grad, tolerance)
        for name, parameter in module.named_parameters():
            if weights[name].grad is None:
                assert parameter.grad is None or not parameter.grad.any(), name
            else:
                close(parameter.grad.double(), weights[name].grad, tolerance)


@every_mixer
def test_entry_does_what_it_says_of_itself(mixer, layer):
    assert mixer.kind.supports == set(CAPABILITIES)
    changed = {f.name: getattr(mixer.options, f.name) for f in fields(mixer.options)}
    check_entry(mixer.kind, changed, width=WIDTH)


# The last begins with a chunk of the recurrences.
BORDERS = [[1, TIME - 1], [64, TIME - 64], [3, 1, 1, 30, 35]]


@every_mixer
def test_packed_documents_equal_each_alone(mixer, layer):
    """Outputs and gradients; an id that comes back is of another document."""
    module, x = built(mixer, layer), rows().requires_grad_()
    for borders in BORDERS:
        ids = torch.arange(len(borders)) % 3
        ids = torch.repeat_interleave(ids, torch.tensor(borders)).expand(2, -1)
        packed = module(x, Context(documents=ids))
        alone = torch.cat([module(part, Context()) for part in x.split(borders, dim=1)], dim=1)
        close(packed, alone, 2e-5)
        leaves = [x, *(p for n, p in module.named_parameters() if n not in LANDMARKS)]
        shares = torch.linspace(-1, 2, packed.numel()).view_as(packed)
        found, expected = (torch.autograd.grad((y * shares).sum(), leaves) for y in (packed, alone))
        for one, two in zip(found, expected, strict=True):
            close(one, two, 2e-4)
    if mixer.name != "none" and (mixer.name, layer) != ("based", 0):
        assert not torch.allclose(module(x, Context()), packed, atol=1e-3)


# Where rows have real tokens.
SPANS = [slice(9, TIME), slice(0, TIME - 6), slice(2, TIME - 3), slice(66, TIME), slice(5, 6)]


@torch.no_grad()
@every_mixer
def test_padding_is_as_if_it_were_not_there(mixer, layer):
    module, x = built(mixer, layer), rows(len(SPANS))
    mask = torch.zeros(len(SPANS), TIME, dtype=torch.bool)
    for row, real in enumerate(SPANS):
        mask[row, real] = True
    y = module(x, Context(padding=mask))
    assert y.isfinite().all()
    for row, real in enumerate(SPANS):
        close(y[row, real], module(x[row : row + 1, real], Context())[0], 2e-5)
    inside = torch.ones_like(mask)
    inside[0, 30:33] = inside[1, 5] = False
    for given in (mask, inside):
        if given is inside and mixer.name in READS_BLOCKS:
            with pytest.raises(ValueError, match="no padding between"):
                module(x, Context(padding=given))
            continue
        other = torch.where(given[..., None], x, 1e3 * torch.randn_like(x))
        one, two = (module(values, Context(padding=given))[given] for values in (x, other))
        close(one, two, 2e-5)


PARTS = [[*[1] * 12, TIME - 12], [TIME - 1, 1], [3, 1, 2, TIME - 6]]


@torch.no_grad()
@every_mixer
def test_parts_with_a_state_equal_the_whole(mixer, layer):
    module, x = built(mixer, layer), rows()
    whole = module(x, Context())
    for parts in PARTS:
        context = Context(state=empty_state(mixer))
        found = torch.cat([module(part, context) for part in x.split(parts, dim=1)], dim=1)
        close(found, whole, 2e-5)
    chosen, state = torch.tensor([1, 0, 1]), empty_state(mixer)
    module(x[:, :20], Context(state=state))
    state.reorder_cache(chosen)
    close(module(x[chosen, 20:], Context(state=state)), whole[chosen, 20:], 2e-5)


def empty_state(mixer: Mixer) -> LayerStateMixin:
    return mixer.kind.cache_layer(mixer.options)()


@torch.no_grad()
@every_mixer
def test_padded_prompts_go_on_as_if_alone(mixer, layer):
    """In parts, the first of which may end in padding, and then token by token."""
    # Landmark attention refuses tokens after padding at a row's end.
    spans = [s for s in SPANS if s.stop == TIME or mixer.name != "landmark"]
    count, cut = len(spans), 66
    module, x = built(mixer, layer), rows(len(spans), TIME + 4)
    mask = torch.zeros(count, TIME, dtype=torch.bool)
    for row, real in enumerate(spans):
        mask[row, real] = True
    state = empty_state(mixer)
    module(x[:, :cut], Context(padding=mask[:, :cut], state=state))
    module(x[:, cut:TIME], Context(padding=mask[:, cut:], state=state))
    following = [x[:, t : t + 1] for t in range(TIME, TIME + 4)]
    found = torch.cat([module(part, Context(state=state)) for part in following], dim=1)
    for row, real in enumerate(spans):
        alone = torch.cat([x[row, real], x[row, TIME:]])[None]
        close(found[row], module(alone, Context())[0, -4:], 2e-5)


@every_mixer
def test_half_precision_is_near_and_learns(mixer, layer):
    module, x = built(mixer, layer), rows()
    expected = module(x, Context())
    half = module.bfloat16()
    y = half(x.bfloat16().requires_grad_(), Context())
    wrong = (y.float() - expected).norm() / expected.norm()
    # Rounding may make landmarks choose other blocks.
    assert y.dtype == torch.bfloat16 and wrong < (0.3 if mixer.name == "landmark" else 0.05)
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in half.parameters() if p.grad is not None)


@every_mixer
def test_matrices_alone_take_weight_decay(mixer, layer):
    module = built(mixer, layer)
    decayed, exempt = parameters_by_decay(module)
    matrices = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    assert {id(p) for p in decayed} == matrices
    assert len(decayed) + len(exempt) == len(list(module.parameters()))
