"""The length sweep's methods: which there are for a model, and their factors."""

from __future__ import annotations

import math

import pytest

from cat_lm.pretrained.loading import load_model
from eval.length_sweep.scaling import checked_scaling
from eval.length_sweep.sweep import sweep
from tests.finished_runs import CONTEXT


class TestScaling:
    def test_factor_is_the_length_s_and_1_is_the_baseline(self, models, text, tmp_path):
        out = tmp_path / "out"
        rows = sweep([models["cat"]], [32, 128], out, text=text, methods=["all"])
        by_cell = {(row["method"], row["length"]): row for row in rows}
        for method in ("pi", "pi+temperature", "yarn"):
            assert [by_cell[method, n]["factor"] for n in (32, 128)] == [1, 4]
            assert by_cell[method, 32]["loss"] == by_cell["none", 32]["loss"]
        assert len(list((out / "cells").iterdir())) == 2 + 3, "a baseline is computed once"
        assert by_cell["yarn", 128]["original_length"] == CONTEXT
        assert by_cell["yarn", 128]["rope_factor"] == 4
        logits = (0.1 * math.log(4) + 1) ** 2
        assert 1 / by_cell["yarn", 128]["attention_temperature"] == pytest.approx(logits)

    def test_fixed_factor_and_training_length(self, models, text, tmp_path):
        options = {"text": text, "methods": ["pi"]}
        fixed = sweep([models["cat"]], [16, 64], tmp_path / "a", factor=2, **options)
        assert [row["rope_factor"] for row in fixed] == [2, 2]
        told = sweep([models["cat"]], [16, 64], tmp_path / "b", training_length=8, **options)
        assert [row["rope_factor"] for row in told] == [2, 8]
        assert fixed[0]["loss"] == told[0]["loss"]

    def test_sets_of_methods_take_what_exists_for_each_model(self, models, text, tmp_path):
        folders, out = [models["cat"], models["nope"]], tmp_path / "out"
        rows = sweep(folders, [64], out, text=text, methods=["all"])
        found = [(row["label"], row["method"]) for row in rows]
        assert found == [
            *(("cat", method) for method in ("none", "pi", "pi+temperature", "yarn")),
            *(("nope", method) for method in ("none", "temperature")),
        ]
        assert rows[-1]["rope_type"] is None
        assert rows[-1]["loss"] != rows[-2]["loss"]
        rows = sweep(folders, [64], out, text=text, methods=["paper"])
        assert [row["method"] for row in rows] == ["none", "pi+temperature", "none", "temperature"]

    def test_scaling_that_is_lost_on_the_way_is_an_error(self, models):
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
        fields = {"rope_parameters": yarn | {"attention_factor": 1.0}}
        with pytest.raises(RuntimeError, match="has rope_type default, not yarn"):
            checked_scaling(load_model(models["cat"]), fields)
        with pytest.raises(RuntimeError, match=r"attention_temperature 1\.0, not 0\.8"):
            checked_scaling(load_model(models["nope"]), {"attention_temperature": 0.8})
