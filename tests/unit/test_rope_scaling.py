"""Scaled positions and temperature: values worked out by hand, transformers' own, saved folders."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cat_lm.model import CatConfig, CatForCausalLM
from cat_lm.model.hf.inspection import effective_scaling
from cat_lm.model.rope import CatRotaryEmbedding
from cat_lm.model.rope_scaling import yarn_magnitude, yarn_temperature
from cat_lm.pretrained.conversion import methods_for, scaled_config, scaled_fields
from tests.unit.tiny_models import cat_model, random_ids, stock_model

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

    def test_yarn_of_pythia_turns_from_pair_2_to_pair_6(self):
        """dim(32) = 16 ln(2048 / 64 pi) / (2 ln 10000) = 2.02, dim(1) = 5.03: low 2, high 6."""
        ramp = [0, 0, 0, 1 / 4, 2 / 4, 3 / 4, 1, 1]
        for factor in (2, 4, 8):
            found = frequencies(pythia_config(), "yarn", factor, 2048)
            expected = [
                10000 ** (-pair / 8) * (part / factor + 1 - part) for pair, part in enumerate(ramp)
            ]
            assert found.tolist() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(
        ("rotary_pct", "base", "length", "ramp"),
        [
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


class TestLogits:
    """What the attention function is given, on a model of one layer."""

    @staticmethod
    def logits(model, ids):
        """q·k times the scale: [H, T, T]."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        seen = []

        def attend(module, query, key, value, mask, scaling, **_):
            seen.append(query @ key.transpose(-1, -2) * scaling)
            return value.transpose(1, 2), None

        ALL_ATTENTION_FUNCTIONS.register("seen_logits", attend)
        model.set_attn_implementation("seen_logits")
        with torch.no_grad():
            model(ids)
        return seen[0][0]

    def scaled(self, method, scope="logits", factor=4, **fields):
        plain = cat_model(**{"num_hidden_layers": 1, "rotary_pct": 0.5} | fields)
        found = scaled_fields(plain.config, method, factor, TRAINED, scope)
        model = CatForCausalLM(scaled_config(plain.config, found)).eval()
        model.load_state_dict(plain.state_dict())
        ids = random_ids(1, 20)
        return self.logits(plain, ids), self.logits(model, ids)

    def test_temperature_reaches_all_channels(self):
        _, pi = self.scaled("pi")
        _, tempered = self.scaled("pi+temperature")
        torch.testing.assert_close(tempered, 1.296475 * pi, rtol=1e-5, atol=1e-6)

    def test_temperature_without_positions(self):
        plain, tempered = self.scaled("temperature", position_embedding="none")
        torch.testing.assert_close(tempered, 1.296475 * plain, rtol=1e-5, atol=1e-6)

    def test_rotary_scope_leaves_the_other_channels(self):
        """The rotated and the other half of the channels each give a part of the logits."""
        _, whole = self.scaled("pi+temperature", "logits")
        _, rotary = self.scaled("pi+temperature", "rotary")
        assert not torch.allclose(whole, rotary, rtol=1e-3)
        _, none_rotated = self.scaled("pi+temperature", "rotary", factor=1)
        assert not torch.allclose(rotary, none_rotated)
        # Where all channels are rotated, both scopes are the same.
        _, whole = self.scaled("yarn", "logits", rotary_pct=1.0)
        _, rotary = self.scaled("yarn", "rotary", rotary_pct=1.0)
        torch.testing.assert_close(whole, rotary, rtol=1e-4, atol=1e-5)
        # Position 0 turns nothing: its own logit is pass + m² rotated.
        plain, rotary = self.scaled("pi+temperature", "rotary")
        pass_part = self.pass_through_part()
        expected = pass_part + 1.296475 * (plain[:, 0, 0] - pass_part)
        torch.testing.assert_close(rotary[:, 0, 0], expected, rtol=1e-4, atol=1e-5)

    def pass_through_part(self):
        """What channels 4 to 7 of the 8 give to the logit of position 0 with itself: [H]."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        model, seen = cat_model(num_hidden_layers=1, rotary_pct=0.5), []

        def attend(module, query, key, value, mask, scaling, **_):
            seen.append((query[0, :, 0, 4:] * key[0, :, 0, 4:]).sum(-1) * scaling)
            return value.transpose(1, 2), None

        ALL_ATTENTION_FUNCTIONS.register("seen_part", attend)
        model.set_attn_implementation("seen_part")
        with torch.no_grad():
            model(random_ids(1, 20))
        return seen[0]

    @pytest.mark.parametrize("method", ["none", "pi", "pi+temperature", "yarn"])
    def test_factor_1_is_the_baseline_exactly(self, method):
        plain, scaled = self.scaled(method, factor=1)
        assert torch.equal(plain, scaled)

    def test_stored_factor_1_is_the_baseline_exactly(self):
        """With all 64 channels rotated, transformers' own is off by a rounding error here."""
        plain = CatRotaryEmbedding(pythia_config(rotary_pct=1.0)).inv_freq
        for length in (128, 512, 100_000):
            yarn = {"factor": 1.0, "original_max_position_embeddings": length}
            yarn |= {"rope_type": "yarn"}
            config = pythia_config(rotary_pct=1.0, rope_parameters=yarn)
            rotary = CatRotaryEmbedding(config)
            assert torch.equal(rotary.inv_freq, plain)
            assert rotary.attention_scaling == 1
            model = CatForCausalLM(config).to(torch.bfloat16)
            assert torch.equal(model.base_model.rotary_emb.inv_freq, plain)

    def test_eager_and_sdpa_both_apply_the_temperature(self):
        model = cat_model(attention_temperature=0.5)
        plain = cat_model()
        ids = random_ids(2, 12)
        with torch.no_grad():
            by_sdpa = model(ids).logits
            model.set_attn_implementation("eager")
            torch.testing.assert_close(model(ids).logits, by_sdpa, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(plain(ids).logits, by_sdpa, rtol=1e-2)


class TestFolders:
    @pytest.mark.parametrize("scope", ["logits", "rotary"])
    @pytest.mark.parametrize("method", ["pi", "pi+temperature", "yarn"])
    def test_saved_model_is_the_scaled_one(self, tmp_path, method, scope):
        plain = cat_model()
        fields = scaled_fields(plain.config, method, 4, TRAINED, scope)
        model = CatForCausalLM(scaled_config(plain.config, fields)).eval()
        model.load_state_dict(plain.state_dict())
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        ids = random_ids(1, 100)
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids).logits)
            assert not torch.allclose(loaded(ids).logits, plain(ids).logits, atol=1e-3)
        assert effective_scaling(loaded) == effective_scaling(model)
        again = loaded.to(torch.bfloat16)
        assert torch.equal(
            again.base_model.rotary_emb.inv_freq, model.base_model.rotary_emb.inv_freq
        )

    @pytest.mark.parametrize(("method", "scope"), [("pi", "logits"), ("yarn", "rotary")])
    def test_stock_transformers_reads_pythia_s(self, method, scope):
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

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"rope_parameters": {"rope_type": "llama3"}}, "'llama3' is not supported"),
            ({"rope_parameters": {"rope_type": "linear"}}, "factor: missing"),
            ({"rope_parameters": {"factor": 2.0}}, "factor: unknown with rope_type default"),
            ({"rope_parameters": {"type": "linear"}}, "factor: missing"),
            (
                {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
                "original_max_position_embeddings: missing",
            ),
            (
                {
                    "rope_parameters": {
                        "rope_type": "yarn",
                        "factor": 2.0,
                        "original_max_position_embeddings": 32,
                        "attn_factor": 1.0,
                    }
                },
                "attn_factor: unknown",
            ),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
                "factor=0.5: must be",
            ),
            ({"rope_parameters": {"rope_type": "linear", "factor": True}}, "must be a number"),
            ({"rope_scaling": {"rope_type": "linear"}}, "factor: missing"),
            (
                {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 1e4}},
                "rope_scaling",
            ),
        ],
    )
    def test_bad_fields_are_named(self, fields, message):
        with pytest.raises(ValueError, match=message):
            pythia_config(**fields)
