"""The room's models: what a position may read, decay and boxes by their definitions, all mixers."""

from __future__ import annotations

import pytest
import torch

from cat_lm import mixers as registry
from cat_lm.core.errors import UserError
from cat_lm.mixers import Setting
from cat_lm.model.context import Context
from eval.long_range.cell import Cell
from eval.long_range.mixers import VARIANTS, make
from eval.long_range.model import LongRangeModel, build_mixer

TIME = 12
SEQUENCES = f"cumsum:seq_len={TIME},train=4,validation=2,test=2"
TEXTS = "listops:min_length=3,max_length=14,train=4,validation=2,test=2"


def cell(task: str, mixer: str, **options) -> Cell:
    fixed = {"d_model": 16, "layers": 2, "lr": 1e-3, "batch_size": 4, "epochs": 1}
    return Cell(task, mixer, **(fixed | options))


def model(task: str, mixer: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return LongRangeModel(cell(task, mixer, **options)).eval()


def layer(mixer: str, is_causal: bool, width: int = 16) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_mixer(make(mixer), Setting(width, 0, 1), is_causal).double().eval()


def reads(mixer: str, is_causal: bool, position: int) -> list[int]:
    """The positions whose change moves what one position becomes, in bits."""
    made = model(SEQUENCES, mixer, is_causal=is_causal, layers=1)
    inputs, lengths = torch.randn(1, TIME, 3), torch.tensor([TIME])
    with torch.no_grad():
        before = made.hidden(inputs, lengths)[0, position]
        found = []
        for changed in range(TIME):
            other = inputs.clone()
            other[0, changed] += 1
            if not torch.equal(made.hidden(other, lengths)[0, position], before):
                found.append(changed)
    return found


@pytest.mark.parametrize("mixer", sorted(VARIANTS))
def test_causal_models_read_what_came_before_alone(mixer):
    assert reads(mixer, True, 5) == [0, 1, 2, 3, 4, 5]


def test_controls_of_what_a_position_reads():
    assert reads("las", False, 5) == list(range(TIME))
    assert reads("none", True, 5) == [5]
    assert reads("las:place=centred", True, 5) == list(range(8))  # the paper's box, of 5
    assert reads("vanilla:chunk=4", True, 5) == [4, 5]
    assert reads("las:chunk=4", False, 5) == [4, 5, 6, 7]
    assert reads("las:chunk=4", True, 10) == [8, 9, 10]


DEFINED = ("las", "las-steep", "l", "s", "vanilla", "alibi", "s-alibi")


@pytest.mark.parametrize(
    ("mixer", "is_causal", "time"),
    [
        *((mixer, is_causal, TIME) for mixer in DEFINED for is_causal in (True, False)),
        # More queries than are computed at once where no scaled queries and keys serve.
        *(("las", False, 150), ("s-alibi", False, 150), ("alibi", True, 150)),
    ],
)
def test_a_layer_is_its_definition(mixer, is_causal, time):
    """softmax_j(q_i k_j/√D · e^{−α_h |i − j|} − m_h |i − j|) (v averaged over P), by query."""
    made, x = layer(mixer, is_causal), torch.randn(2, time, 16, dtype=torch.float64)
    heads, options = 8, make(mixer).options
    q, k, v = made.projection(x).unflatten(-1, (3, heads, 2)).unbind(2)
    if options.values == "box":
        shifts = range(-4, 1) if is_causal else range(-2, 3)
        v = sum(
            torch.stack([v[:, t + s] if 0 <= t + s < time else 0 * v[:, 0] for t in range(time)], 1)
            for s in shifts
        )
        v = v / 5
    bound, wanted = options.bound, torch.zeros(2, time, heads, 2, dtype=torch.float64)
    least = {"slow": torch.exp(torch.tensor(-bound, dtype=torch.float64)), "steep": bound}
    for h in range(heads):
        factor = 1.0
        if options.decay != "none":
            factor = 1 - (1 - least[options.decay]) * h / (heads - 1)
        slope = 2.0 ** -(h + 1) if options.position == "alibi" else 0.0
        for i in range(time):
            keys = torch.arange(i + 1 if is_causal else time)
            distance = (i - keys).abs().double()
            logits = (q[:, i, None, h] * k[:, keys, h]).sum(-1) / 2**0.5
            weights = (logits * factor**distance - slope * distance).softmax(1)
            wanted[:, i, h] = (weights[..., None] * v[:, keys, h]).sum(1)
    wanted = made.out_proj(wanted.flatten(2))
    torch.testing.assert_close(made(x, Context()), wanted, rtol=1e-9, atol=1e-9)


def test_a_filter_that_starts_as_the_identity_or_the_box():
    x = torch.randn(1, TIME, 16, dtype=torch.float64)
    for is_causal in (True, False):
        plain, box, identity, boxed = (
            layer(name, is_causal)(x, Context()) for name in ("vanilla", "s", "cat-v", "cat-v-box")
        )
        torch.testing.assert_close(identity, plain)
        torch.testing.assert_close(boxed, box)
        assert not torch.allclose(plain, box)


@pytest.mark.parametrize("mixer", sorted({*VARIANTS, *registry.names()}))
def test_every_mixer_learns_and_ignores_padding(mixer):
    for is_causal in (True, False):
        made = model(TEXTS, mixer, is_causal=is_causal, layers=1)
        ids, lengths = torch.randint(1, 17, (3, 9)), torch.tensor([9, 4, 1])
        other = ids.masked_fill(torch.arange(9) >= lengths[:, None], 0)
        with torch.no_grad():
            torch.testing.assert_close(made(ids, lengths), made(other, lengths))
        losses = []
        made.train()(ids, lengths, losses).square().sum().backward()
        assert len(losses) == (mixer == "landmark") * (1 if is_causal else 2)
        parts = [p for p in made.parameters() if p.grad is not None and p.grad.any()]
        assert parts and all(p.grad.isfinite().all() for p in parts)


def test_two_towers_and_the_last_position():
    made = model("aan:max_length=8", "las", pool="last", norm="batch", norm_first=True)
    ids, lengths = torch.randint(1, 90, (2, 2, 8)), torch.tensor([[8, 3], [1, 8]])
    answers = made(ids, lengths)
    assert answers.shape == (2, 2)
    ids[0, 1, 3:] = 0
    torch.testing.assert_close(made(ids, lengths), answers)
    ids[0, 1, 2] += 1
    assert not torch.allclose(made(ids, lengths), answers)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ("lass", "--mixer='lass': must be one of softmax, vanilla"),
        ("vanilla:width=3", "width=3: has no effect without values"),
        ("s:bound=0.1", "bound=0.1: has no effect without a decay"),
        ("s:width=4", "width=4: a centred box is odd; or use place=causal"),
        ("s:width=1", "width=1: smooths nothing"),
        ("l:heads=1", "decay needs at least 2"),
        ("l:position=alibi", "decay=slow: not with position=alibi"),
        ("l:bound=1", "must be between 1e-06 and 1"),
        ("las:chunk=-1", "chunk=-1"),
        ("las:heads=3", "must divide d_model=16"),
        ("las:chunk=14", "chunk=14: cuts no row; leave it out (listops has 14 positions"),
        ("s:width=15", "width=15: reaches beyond every row; give fewer (listops has 14"),
    ],
)
def test_what_does_not_fit_is_one_line(mixer, message):
    with pytest.raises(UserError) as error:
        model(TEXTS, mixer)
    assert message in str(error.value) and "\n" not in str(error.value)
