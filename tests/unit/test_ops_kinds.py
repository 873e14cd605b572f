"""A kind of convolution of one's own: a row in the table, and it trains, decodes and is stored."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cat_lm import ops
from cat_lm.model.hf.inspection import describe_backend
from cat_lm.ops.convolution import kinds
from cat_lm.pretrained.loading import load_model
from tests.tiny_models import cat_model, random_ids


@pytest.fixture
def shared(monkeypatch):
    """One filter for all heads and channels, which no backend but the reference knows."""
    monkeypatch.setattr(kinds.KINDS, "_entries", dict(kinds.KINDS._entries))
    kind = kinds.Kind(
        "shared", ("W",), lambda taps, lag, delayed: taps[lag] * delayed, "one filter for all"
    )
    kinds.register(kind)
    return kind


def test_a_model_with_it(shared, tmp_path):
    model = cat_model(conv_type="shared", conv_window=5)
    said = describe_backend(model.config, "cpu", torch.float32)
    assert "shared convolution" in said and "reference, cpu cannot serve" in said
    ids = random_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    taps = model.gpt_neox.layers[0].attention.convolution.k_filter
    assert taps.shape == (5,) and taps.grad.abs().sum() > 0
    with torch.no_grad():
        whole = model(ids).logits
        start = model(ids[:, :7], use_cache=True)
        rest = model(ids[:, 7:], past_key_values=start.past_key_values).logits
        torch.testing.assert_close(rest, whole[:, 7:], rtol=1e-4, atol=1e-5)
        model.save_pretrained(tmp_path)
        assert torch.equal(load_model(tmp_path)(ids).logits, whole)


def test_names_that_are_taken_or_known_nowhere(shared):
    with pytest.raises(ValueError, match="there is one of this name already"):
        kinds.register(shared)
    for axes, said in (
        (("H", "D"), "and W among them"),
        (("W", "X"), "must be a tuple of W, H, I and D"),
        (["H", "W"], "must be a tuple of W, H, I and D"),
        (("H", "H", "W"), "each at most once"),
        (("W", "I"), "without those written to, H"),
    ):
        with pytest.raises(ValueError, match=f"conv_type 'other': filter_axes=.* {said}"):
            kinds.register(kinds.Kind("other", axes, shared.add_lag, "one"))
    with pytest.raises(ValueError, match="conv_type 'other': its class Kind must give meaning"):
        kinds.register(kinds.Kind("other", ("W",), shared.add_lag, ""))
    with pytest.raises(ValueError, match="conv_type 'other': add_lag=None must be a function"):
        kinds.register(kinds.Kind("other", ("W",), None, "one"))
    assert "other" not in kinds.names()
    with pytest.raises(ValueError, match="must be one of none, head, depthwise, multihead, shared"):
        ops.convolve("nowhere", torch.randn(1, 2, 3, 4), torch.randn(2))
    with pytest.raises(ValueError, match="nowhere"):
        cat_model(conv_type="nowhere")


@pytest.mark.parametrize(
    ("axes", "add_lag", "said"),
    [
        # Filters of one shape, read as if they had another.
        (("H", "W"), lambda taps, lag, x: taps[:, :, lag] * x, "cannot compute with filters"),
        (("W",), lambda taps, lag, x: (taps[lag] * x).sum(2), "makes |cannot compute"),
        (("W",), lambda taps, lag, x: taps[lag] * x[:, :, :1], "makes |changes its input"),
        (
            ("W",),
            lambda taps, lag, x: taps[lag] * (x + lag * x.roll(-1, 1)),
            "reads other tokens than the newest W",
        ),
        (("W",), lambda taps, lag, x: taps[lag] * (x + lag * x.roll(1, 1)), "reads other tokens"),
        (("W",), lambda taps, lag, x: taps[-1 - lag] * x, "changes its input with 1 at lag 0"),
        (("W",), lambda taps, lag, x: 2 * taps[lag] * x, "changes its input with 1 at lag 0"),
    ],
)
def test_axes_and_sum_that_do_not_fit_make_no_model(shared, axes, add_lag, said):
    kinds.register(kinds.Kind("odd", axes, add_lag, "odd"))
    with pytest.raises(ValueError, match=f"conv_type 'odd': add_lag.*({said})"):
        cat_model(conv_type="odd", conv_window=5)


def test_the_table_needs_no_torch():
    code = "import sys; from cat_lm.ops.convolution import kinds; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
