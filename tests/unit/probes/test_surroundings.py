"""The check of causality whatever surrounds the model, and its arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cat_lm.core.causality import is_same, stir
from cat_lm.core.errors import UserError
from cat_lm.mixers import Mixer, Setting
from tests.unit.probes.test_attention import Open, Weighted, pattern
from tests.unit.probes.test_mixers import Later, Options, Sum, kind
from tests.unit.test_mixers import WIDTH
from tests.unit.tiny_models import cat_model


def surroundings():
    from transformers.initialization import no_init_weights

    return {"meta": torch.device("meta"), "no_init": no_init_weights()}


@pytest.mark.parametrize("around", ["meta", "no_init"])
def test_a_model_without_values_is_checked_with_some(around):
    pattern(Open)
    with pytest.raises(UserError, match="reads later tokens"), surroundings()[around]:
        cat_model(conv_type="none", attention="odd")
    with pytest.raises(UserError, match="reads later tokens"), surroundings()[around]:
        Mixer(kind(Later), Options()).build(Setting(WIDTH))
    with surroundings()[around]:
        Mixer(kind(Sum), Options()).build(Setting(WIDTH))


def test_half_precision_around_it():
    seen = set()

    class Seen(Sum):
        def mixed(self, x):
            seen.update((x.dtype, self.out_proj.weight.dtype))
            return super().mixed(x)

    torch.set_default_dtype(torch.bfloat16)
    try:
        module = Mixer(kind(Seen), Options()).build(Setting(WIDTH))
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == {torch.float32} and module.out_proj.weight.dtype == torch.bfloat16


def test_weights_are_drawn_as_if_nothing_had_been_checked():
    pattern(Weighted)
    odd = kind(Sum)
    for make in (
        lambda: cat_model(conv_type="none", attention="odd"),
        lambda: Mixer(odd, Options()).build(Setting(WIDTH)),
    ):
        drawn = []
        for _ in range(2):  # checked, and not
            torch.manual_seed(3)
            model = make()
            drawn.append([*model.parameters(), torch.rand(3)])
        assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


def test_a_bias_that_masks_is_the_same():
    """Of -inf in both there is no difference, and of one alone there is."""
    wanted = torch.tensor([0.5, -torch.inf])
    assert is_same(wanted.clone(), wanted)
    for other in ([0.5, 1.0], [0.6, -torch.inf], [0.5, torch.nan]):
        assert not is_same(torch.tensor(other), wanted)


def test_what_is_no_number_to_learn_is_left_as_it_is():
    module = nn.Module()
    module.rows = nn.Parameter(torch.arange(3), requires_grad=False)
    module.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
    module.gain = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        stir(module)
    assert module.rows.tolist() == [0, 1, 2] and module.mask[0] == 0
    assert not (module.gain == 1).any()
