"""The models that eval.speed times: every variant of every family, against the stock class."""

from __future__ import annotations

import pytest
import torch

from cat_lm import architectures
from cat_lm.ops.convolution import kinds as kinds_table
from cat_lm.training.estimate import count_parameters
from eval.speed import choices, models

MODELS = choices.models()


def test_models_are_all_variants_of_all_families():
    assert tuple(MODELS)[:5] == ("pythia", "cat", "depthwise", "mh_cat", "cat_exp")
    for family in map(architectures.get, architectures.names()):
        of_it = {name: m for name, m in MODELS.items() if m.architecture == family.name}
        own = [model.variant for name, model in of_it.items() if name != model.stock]
        assert own == list(family.variants())
        assert {m.stock is None for m in of_it.values()} == {not architectures.has_stock(family)}
    assert len({model.label for model in MODELS.values()}) == len(MODELS)


@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if m.stock not in (None, n)])
def test_model_is_stock_with_identity_filters_and_another_with_drawn_ones(name):
    size = models.ModelSize(2, 32, 2, 61, 3, "float32", "cpu")
    stock = MODELS[name].stock
    pair = {each: models.build(size, each, 16) for each in (name, stock)}
    assert type(pair[stock]).__module__.startswith("transformers.models.")
    ids = models.random_ids(size, 2, 16)
    assert models.check_logits(pair, ids, "float32")[name] < 1e-5
    models.randomize_filters(pair[name])
    logits, expected = (pair[each](input_ids=ids).logits for each in (name, stock))
    same = (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert same == (name == MODELS[name].plain)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.stock is None])
def test_model_without_stock_is_built_and_counted(name):
    size = models.ModelSize(1, 32, 2, 61, 3, "float32", "cpu")
    model = models.build(size, name, 40).eval()
    assert size.num_parameters(name, 40) == count_parameters(model)
    assert models.check_logits({name: model}, models.random_ids(size, 1, 9), "float32") == {}
    assert torch.isfinite(model(input_ids=models.random_ids(size, 2, 40)).logits).all()


def test_custom_kind_is_timed_by_the_reference_alone_and_is_a_variant(conv, monkeypatch):
    monkeypatch.setattr(kinds_table.KINDS, "_entries", dict(kinds_table.KINDS._entries))
    families = architectures.ARCHITECTURES
    monkeypatch.setattr(families, "_entries", dict(families._entries))
    backwards = kinds_table.Kind(
        "backwards", ("H", "W"), lambda taps, lag, x: -taps[:, lag, None] * x, "minus one"
    )
    kinds_table.register(backwards)
    code, record, _, err = conv(conv_type="backwards")
    assert code == 0, err
    (result,) = record["cases"]
    ((kernel, refused),) = ((row["kernel"], row["refused"]) for row in result["kernels"])
    assert (kernel, refused) == ("reference", None)
    assert "own kinds only" in result["absent"]["conv1d"]
    assert choices.models()["llama-backwards"].label == "Llama, minus one"
    assert "backwards" in choices.decoding_models()
