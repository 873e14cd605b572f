"""The models that eval.speed times: every variant of every family, against the stock class."""

from __future__ import annotations

import pytest
import torch

from cat_lm import architectures
from cat_lm.ops.convolution import kinds as kinds_table
from cat_lm.training.estimate import count_parameters
from eval.speed import choices, models
from tests.unit.speed.calls import conv_arguments

MODELS = choices.models()


def test_models_are_all_variants_of_all_families():
    assert tuple(MODELS)[:5] == ("pythia", "cat", "depthwise", "mh_cat", "cat_exp")
    assert tuple(MODELS)[5:7] == ("cat_ssm", "stock")
    for family in map(architectures.get, architectures.names()):
        own = [m for name, m in MODELS.items() if (m.architecture, name) != (family.name, m.stock)]
        own = [model for model in own if not model.compiled_rotation]
        of_it = [model.variant for model in own if model.architecture == family.name]
        assert of_it == list(family.variants())
        stocks = {m.stock for m in MODELS.values() if m.architecture == family.name}
        assert (stocks == {None}) == (not architectures.has_stock(family)) and len(stocks) == 1
    assert len({model.label for model in MODELS.values()}) == len(MODELS)


@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if m.stock not in (None, n)])
def test_every_model_is_stock_with_identity_filters_and_another_with_drawn_ones(name):
    size = models.ModelSize(1, 32, 2, 61, 3, "float32", "cpu")
    stock = MODELS[name].stock
    pair = {each: models.build(size, each, 16) for each in (name, stock)}
    assert type(pair[stock]).__module__.startswith("transformers.models.")
    ids = models.random_ids(size, 2, 16)
    assert models.check_logits(pair, ids, "float32")[name] < 1e-5
    models.randomize_filters(pair[name])
    logits, expected = (pair[each](input_ids=ids).logits for each in (name, stock))
    same = (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert same == (name == MODELS[name].plain or MODELS[name].compiled_rotation)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.stock is None])
def test_models_without_stock_are_built_and_counted(name):
    size = models.ModelSize(2, 32, 2, 61, 3, "float32", "cpu")
    model = models.build(size, name, 200).eval()
    assert size.num_parameters(name, 200) == count_parameters(model)
    assert models.check_logits({name: model}, models.random_ids(size, 1, 9), "float32") == {}
    assert torch.isfinite(model(input_ids=models.random_ids(size, 2, 200)).logits).all()


def test_a_kind_and_a_family_of_ones_own_are_rows(speed, monkeypatch):
    """The kind has a kernel nowhere, so that the reference alone is timed, and checked."""
    monkeypatch.setattr(kinds_table.KINDS, "_entries", dict(kinds_table.KINDS._entries))
    families = architectures.ARCHITECTURES
    monkeypatch.setattr(families, "_entries", dict(families._entries))
    backwards = kinds_table.Kind(
        "backwards", ("H", "W"), lambda taps, lag, x: -taps[:, lag, None] * x, "minus one"
    )
    kinds_table.register(backwards)
    code, record, _, err = speed(*conv_arguments(conv_type="backwards"))
    assert code == 0, err
    (result,) = record["cases"]
    assert [row["kernel"] for row in result["kernels"]] == ["reference"]
    assert (
        result["kernels"][0]["refused"] is None and "own kinds only" in result["absent"]["conv1d"]
    )
    assert choices.models()["llama-backwards"].label == "Llama, minus one"
    assert "backwards" in choices.decoding_models()
