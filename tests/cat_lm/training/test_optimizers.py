"""Which parameters an optimizer steps, at which rate, and keys that do not fit."""

from __future__ import annotations

import pytest

from cat_lm import optimizers
from cat_lm.config import RunConfig, load_config
from cat_lm.core.errors import UserError
from cat_lm.training import muon
from cat_lm.training.building import describe_groups, optimizer_groups
from cat_lm.training.estimate import memory_per_rank, meta_model, num_parameters, state_tensors
from tests.conftest import REPOSITORY

QUICKSTART = REPOSITORY / "configs/quickstart.yaml"
BASE = ("data.path=unused", "train.output_dir=unused")


def config_of(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, [*BASE, *overrides]).with_precision("fp32")


def groups_of(config: RunConfig) -> list[dict]:
    kind, options = optimizers.chosen(config.optimizer)
    return optimizer_groups(meta_model(config, 257), kind, config.optimizer, options)


@pytest.mark.parametrize("conv_type", ["head", "multihead", "depthwise", "none"])
def test_muon_steps_the_matrices_of_layers_alone(conv_type):
    """A filter never gets Newton-Schulz, whatever its number of axes."""
    config = config_of(f"model.conv_type={conv_type}", "optimizer.name=muon")
    model = meta_model(config, 257)
    kinds = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    expected = {
        name
        for name, _ in model.named_parameters()
        if name.endswith(".weight") and name.split(".")[-2] in kinds
    }
    assert len(expected) == 4 * model.config.num_hidden_layers
    assert muon.matrices(model).keys() == expected
    stepped = [n for g in groups_of(config) if g["kinds"] == ("momentum",) for n in g["names"]]
    assert set(stepped) == expected and len(stepped) == len(expected)


def test_log_names_groups_of_state_and_rate():
    config = config_of("optimizer.name=muon", "optimizer.muon_lr=0.02", "optimizer.lr=0.01")
    line = describe_groups("muon", groups_of(config))
    # Four matrices in each of six layers, and one part for all else, decayed or not.
    assert "24 parameters with momentum at 2 x lr" in line
    assert line.count("exp_avg and exp_avg_sq at 1 x lr") == 1


def test_muon_does_not_orthogonalise_a_class_that_says_so(monkeypatch):
    model = meta_model(config_of(), 257)
    linear = next(iter(muon.matrices(model).values()))
    name = next(iter(muon.matrices(model)))
    linear.muon = ()
    assert name not in muon.matrices(model)


def test_rates_by_group():
    config = config_of("optimizer.lr_groups={'*embed_in*': 0.5, '*_filter': 2}", "optimizer.lr=1")
    factors = {name: g["lr_factor"] for g in groups_of(config) for name in g["names"]}
    assert {f for n, f in factors.items() if "embed_in" in n} == {0.5}
    assert {f for n, f in factors.items() if "embed_out" in n or ".dense." in n} == {1.0}
    config = config_of("optimizer.name=muon", "optimizer.muon_lr=0.02", "optimizer.lr=0.01")
    assert {(g["kinds"], g["lr_factor"]) for g in groups_of(config)} == {
        (("momentum",), 2.0),
        (("exp_avg", "exp_avg_sq"), 1.0),
    }


def test_a_pattern_without_a_parameter_is_an_error():
    config = config_of("optimizer.lr_groups={'*embd*': 0.5}")
    with pytest.raises(UserError, match=r"optimizer.lr_groups: '\*embd\*' matches no parameter"):
        groups_of(config)


WRONG = [
    (("optimizer.name=moun",), "optimizer.name='moun': must be one of adamw, muon; did you mean"),
    (("optimizer.momentum=0.9",), "optimizer.momentum: has no effect with optimizer.name=adamw"),
    (("optimizer.name=muon", "optimizer.momentum=1"), "must be less than 1"),
    (("optimizer.name=muon", "optimizer.ns_steps=0"), "optimizer.ns_steps=0: must be from 1 to 20"),
    (("optimizer.name=muon", "optimizer.scale=half"), "optimizer.scale='half'"),
    (
        ("optimizer.name=muon", "train.zero_stage=3"),
        "train.zero_stage=3: does not go with optimizer.name=muon; set it to 0 or 1",
    ),
    (("optimizer.options={a: 1}",), "optimizer.options: are of a plugin's optimizer"),
]


@pytest.mark.parametrize(("overrides", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_keys_that_do_not_fit_raise_user_error(overrides, said):
    with pytest.raises(UserError) as error:
        config_of(*overrides)
    assert said in str(error.value) and "\n" not in str(error.value).strip()


def test_memory_counts_the_state_of_muon():
    parameters = num_parameters(config_of(), 257)
    matrices = sum(m.weight.numel() for m in muon.matrices(meta_model(config_of(), 257)).values())
    for stage, master in ((0, 0), (1, 4)):
        key = f"train.zero_stage={stage}"
        found = [
            memory_per_rank(config_of(key, f"optimizer.name={name}"), parameters, 1, 257).optimizer
            for name in ("adamw", "muon")
        ]
        assert found[0] == (8 + master) * parameters
        assert found[1] == pytest.approx((8 + master) * parameters - 4 * matrices)
    assert state_tensors(config_of(), 257) == 2
