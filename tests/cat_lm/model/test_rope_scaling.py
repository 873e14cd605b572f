"""Scaled positions and temperature: values by hand, transformers' own, saved folders."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import cat_lm  # noqa: F401
from cat_lm.model import CatConfig, CatForCausalLM
from cat_lm.model.hf.inspection import effective_scaling
from cat_lm.model.rope import CatRotaryEmbedding
from cat_lm.model.rope_scaling import yarn_magnitude, yarn_temperature
from cat_lm.pretrained.conversion import methods_for, scaled_config, scaled_fields
from tests.tiny_models import random_ids, stock_model

TRAINED = 32


def pythia_config(**fields):
    """Heads of 64 channels, a quarter of them rotated, as in Pythia."""
    values = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    return CatConfig(**values | {"vocab_size": 50, "intermediate_size": 8} | fields)


def frequencies(config, method, factor, training_length):
    fields = scaled_fields(config, method, factor, training_length)
    return CatRotaryEmbedding(scaled_config(config, fields)).inv_freq.double()


class TestGoldenValues:
    def test_logits_grow_by_the_square_of_m(self):
        found = [1 / yarn_temperature(factor) for factor in (2, 4, 8)]
        assert found == pytest.approx([1.14343, 1.29648, 1.45913], abs=1e-5)
        assert [yarn_magnitude(factor) for factor in (0.5, 1)] == [1, 1]

    def test_pi_divides_every_frequency(self):
        found = frequencies(pythia_config(), "pi", 4, 2048)
        expected = [10000 ** (-pair / 8) / 4 for pair in range(8)]
        assert found.tolist() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(
        ("rotary_pct", "base", "length", "ramp"),
        [
            # dim(32) = 16 ln(2048 / 64 pi) / (2 ln 10000) = 2.02, dim(1) = 5.03: low 2, high 6.
            (0.25, 10000.0, 2048, [0, 0, 0, 1 / 4, 2 / 4, 3 / 4, 1, 1]),
            # D = 8: dim(32) = 2.02, dim(1) = 5.03; high is 6, not D/2 − 1 = 3.
            (0.125, 100.0, 2048, [0, 0, 0, 1 / 4]),
            # D = 16, b = 10: low 8, high 21 clamped to D − 1 = 15; no pair reaches low.
            (0.25, 10.0, 2048, [0] * 8),
            # L = 128: dim(32) = −0.39 clamped to 0, dim(1) = 2.62: high 3.
            (0.25, 10000.0, 128, [0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ],
    )
    def test_yarn_clamps_as_the_published_code(self, rotary_pct, base, length, ramp):
        config = pythia_config(rotary_pct=rotary_pct, rope_parameters={"rope_theta": base})
        found = frequencies(config, "yarn", 4, length)
        pairs = len(ramp)
        expected = [base ** (-i / pairs) * (part / 4 + 1 - part) for i, part in enumerate(ramp)]
        assert found.tolist() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("method", ["pi", "yarn"])
    def test_frequencies_are_transformers_own_bit_for_bit(self, method):
        scaled = scaled_config(
            pythia_config(), scaled_fields(pythia_config(), method, 3, 2048, "rotary")
        )
        stock = GPTNeoXConfig(
            hidden_size=128, num_attention_heads=2, rope_parameters=dict(scaled.rope_parameters)
        )
        expected, magnitude = ROPE_INIT_FUNCTIONS[{"pi": "linear"}.get(method, method)](stock)
        rotary = CatRotaryEmbedding(scaled)
        assert torch.equal(rotary.inv_freq, expected)
        assert rotary.attention_scaling == magnitude
        assert magnitude == pytest.approx({"pi": 1, "yarn": 0.1 * math.log(3) + 1}[method])

    @pytest.mark.parametrize("method", ["none", "pi", "pi+temperature", "yarn"])
    def test_factor_1_is_the_baseline_exactly(self, method):
        """With all 64 channels rotated, transformers' own is off by a rounding error here."""
        plain = pythia_config(rotary_pct=1.0)
        for length in (128, 512, 100_000):
            config = scaled_config(plain, scaled_fields(plain, method, 1, length))
            rotary = CatRotaryEmbedding(config)
            assert torch.equal(rotary.inv_freq, CatRotaryEmbedding(plain).inv_freq)
            assert rotary.attention_scaling == config.attention_temperature == 1


class TestFolders:
    @pytest.mark.parametrize(("method", "scope"), [("pi", "logits"), ("yarn", "rotary")])
    def test_stock_transformers_reads_a_scaled_pythia(self, method, scope):
        stock = stock_model()
        fields = scaled_fields(stock.config, method, 4, TRAINED, scope)
        assert fields.keys() == {"rope_parameters", "max_position_embeddings"}
        scaled_stock = GPTNeoXForCausalLM(
            GPTNeoXConfig(**stock.config.to_dict() | fields, attn_implementation="sdpa")
        )
        model = CatForCausalLM(scaled_config(stock.config, fields)).eval()
        for each in (model, scaled_stock.eval()):
            each.load_state_dict(stock.state_dict())
        ids = random_ids(1, 100)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, scaled_stock(ids).logits)

    def test_effective_scaling_is_read_off_the_modules(self):
        config = scaled_config(pythia_config(), scaled_fields(pythia_config(), "yarn", 8, 2048))
        model = CatForCausalLM(config)
        assert effective_scaling(model) == {
            "rope_type": "yarn",
            "rope_factor": 8.0,
            "original_length": 2048,
            "attention_factor": 1.0,
            "attention_temperature": pytest.approx(1 / 1.45913, rel=1e-5),
        }
        model.base_model.layers[0].attention.scaling = 64**-0.5
        with pytest.raises(RuntimeError, match="attention scales logits"):
            effective_scaling(model)


class TestWhatExists:
    def test_methods_are_decided_by_the_configuration(self):
        from transformers import LlamaConfig, MambaConfig

        rope, nope = pythia_config(), pythia_config(position_embedding="none")
        assert methods_for(rope) == ("none", "pi", "pi+temperature", "yarn")
        assert methods_for(GPTNeoXConfig()) == methods_for(rope)
        assert methods_for(nope) == ("none", "temperature")
        assert methods_for(LlamaConfig()) == methods_for(rope)
        assert methods_for(MambaConfig()) == ("none",)
        assert methods_for(pythia_config(attention_temperature=0.9)) == ("none",)
        linear = {"rope_type": "linear", "factor": 2.0}
        assert methods_for(pythia_config(rope_parameters=linear)) == ("none",)

    def test_what_does_not_exist_is_an_error(self):
        rope, nope = pythia_config(), pythia_config(position_embedding="none")
        with pytest.raises(
            ValueError, match="does not exist for the model; it has none, temperature"
        ):
            scaled_fields(nope, "yarn", 2, 32)
        with pytest.raises(ValueError, match="it has none, pi, pi\\+temperature, yarn"):
            scaled_fields(rope, "temperature", 2, 32)
        with pytest.raises(ValueError, match="nothing is rotated"):
            scaled_fields(nope, "temperature", 2, 32, "rotary")
        with pytest.raises(ValueError, match="must be from 1 to 4,096"):
            scaled_fields(rope, "pi", 0.5, 32)
