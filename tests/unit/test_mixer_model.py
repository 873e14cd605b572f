"""Language models around a mixer: training, documents, padding, decoding, folders."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, StaticCache

from cat_lm import architectures, mixers
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.counts import count_parameters, meta_model
from cat_lm.model import CatMixerConfig, CatMixerForCausalLM
from cat_lm.model.cache import CatCache
from cat_lm.model.hf.inspection import effective_scaling
from cat_lm.pretrained.conversion import methods_for
from tests.unit.test_mixers import outside  # noqa: F401

VOCABULARY, WIDTH = 50, 16
ENTRY = architectures.get("mixer")
DROPPING = ("attention", "cat", "chunk", "landmark")


def config_of(name: str, **changes) -> CatMixerConfig:
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "mixer": name,
        "mixer_options": {"dropout": 0.0} if name in DROPPING else {},
        "learned_positions": 64 if name == "attention" else None,
        "initializer_range": 0.2,  # so that what a layer does is seen in the logits
        "pad_token_id": 0,
    }
    return CatMixerConfig(**fields | changes)


def model_of(name: str, **changes) -> CatMixerForCausalLM:
    torch.manual_seed(0)
    return CatMixerForCausalLM(config_of(name, **changes)).eval()


def tokens(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randint(1, VOCABULARY, shape)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", mixers.names())
def test_configurations_store_all_options(name, tmp_path):
    """A later version's defaults are not this model's."""
    config = config_of(name)
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["mixer_options"]
    assert stored == config.mixer_options
    assert len(stored) == len(vars(mixers.get(name).Options()))


def test_layers_own_losses_are_the_models():
    """In training alone, and the same where layers are computed again for the backward pass."""
    ids, found = tokens(2, 40), []
    for checkpointed in (False, True):
        model = model_of("landmark", mixer_options={"block": 4, "dropout": 0.0})
        assert model.collects_losses and model(ids, labels=ids).auxiliary_loss is None
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outputs = model.train()(ids, labels=ids)
        (outputs.loss + outputs.auxiliary_loss).backward()
        found.append([outputs.auxiliary_loss, *(p.grad for p in model.parameters())])
    assert found[0][0] > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    plain = model_of("cat").train()
    assert not plain.collects_losses and plain(ids, labels=ids).auxiliary_loss is None


@pytest.mark.parametrize(
    ("mixer", "options", "parameters"),
    [("gla", {}, 374_475_776), ("deltanet", {"heads": 8}, 374_362_112)],
)
def test_published_shapes_have_the_published_parameters(mixer, options, parameters):
    """flash-linear-attention's GLA and DeltaNet of 24 x 1,024 with 32,000 entries."""
    given = {"hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 32000}
    config = CatMixerConfig(mixer=mixer, mixer_options=options, **given)
    assert count_parameters(meta_model(config)) == parameters


def test_a_mixer_from_outside_is_a_language_model(outside):  # noqa: F811
    """It knows neither documents nor padding nor a state: what needs them is refused."""
    model, rows = model_of("running-mean", mixer_options={"gain": 0.5}), tokens(2, 9)
    generated = model.generate(rows, max_new_tokens=3, do_sample=False)
    # Without a state each token is computed from the whole text before it.
    assert torch.equal(model(generated[:, :-1]).logits[:, 8:].argmax(-1), generated[:, 9:])
    right = (torch.arange(9) < torch.tensor([[9], [5]])).long()
    same(model(rows, attention_mask=right).logits[1:, :5], model(rows[1:, :5]).logits)
    with pytest.raises(ValueError, match="the mixer running-mean knows no padding"):
        model(rows, attention_mask=right.flip(1))
    with pytest.raises(ValueError, match="running-mean cannot keep documents apart"):
        model(rows, document_ids=torch.zeros_like(rows))
    with pytest.raises(ValueError, match="running-mean keeps no state"):
        model(rows, past_key_values=CatCache(model.config))


def test_what_a_call_cannot_have():
    model, rows = model_of("gla"), tokens(1, 9)
    fixed = StaticCache(config=model.config, max_cache_len=20)
    with pytest.raises(ValueError, match="a cache of StaticLayer cannot hold states; use CatCache"):
        model(rows, past_key_values=fixed)
    filled = DynamicCache()
    filled.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), layer_idx=0)
    with pytest.raises(ValueError, match="holds keys and values without the states before them"):
        model(rows, past_key_values=filled)
    with pytest.raises(ValueError, match="document_ids cannot be used with a cache"):
        model(rows, document_ids=rows, past_key_values=CatCache(model.config))
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(rows, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(UserError, match=r"a sequence of 65 tokens: .* learned_positions=64 rows"):
        model_of("attention")(tokens(1, 65))


CONFIG = """
model: {architecture: mixer, mixer: gla, hidden_size: 32, num_hidden_layers: 2}
data: {path: data, context_length: 64}
optimizer: {lr: 0.001}
train: {max_steps: 4, global_batch_size: 4, micro_batch_size: 4, output_dir: out}
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.mixer=dog", "model.mixer='dog': must be one of attention, based"),
        ("model.mixer_options={head: 2}", "unknown option 'head'; did you mean heads?"),
        ("model.mixer_options={heads: 3}", "model.mixer_options: mixer gla:heads=3: heads=3 do"),
        ("model.mixer_options={heads: -1}", "model.mixer_options: mixer gla: heads=-1: must be"),
        ("model.mixer=attention", "model.learned_positions: mixer attention needs a table"),
        ("model.learned_positions=64", "learned_positions=64: has no effect with mixer gla"),
        ("model.num_attention_heads=4", "num_attention_heads"),
        (
            "data.mask_documents=true model.mixer=running-mean",
            "cannot keep documents apart (running-mean)",
        ),
    ],
)
def test_wrong_keys_are_one_clear_line(override, said, tmp_path, outside):  # noqa: F811
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    with pytest.raises(UserError) as error:
        load_config(path, override.split(" ") if "{" not in override else [override])
    assert said in str(error.value)


def test_a_table_of_positions_covers_a_training_sequence(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    given = ["model.mixer=attention", "model.learned_positions=32"]
    with pytest.raises(UserError, match=r"learned_positions=32: must be at least data\.context"):
        load_config(path, given)
    config = load_config(path, [given[0], "model.learned_positions=64"])
    assert config.model.learned_positions == 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixer": "dog"}, "mixer='dog': must be one of"),
        ({"mixer_options": {"heads": 5}}, "mixer_options: mixer gla:heads=5"),
        ({"mixer_options": {"window": 5}}, "unknown option 'window'"),
        ({"hidden_size": 0}, "hidden_size=0: must be from 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"pad_token_id": 99}, "pad_token_id=99: must be below vocab_size=50"),
    ],
)
def test_wrong_configurations_are_refused(changes, said, tmp_path):
    with pytest.raises(Exception, match=r"(?s).") as error:
        config_of("gla", **changes)
    assert said in str(error.value)
    settings = config_of("gla").to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(Exception, match=r"(?s).") as error:
        AutoConfig.from_pretrained(tmp_path)
    assert said in str(error.value)
    with pytest.raises(ValueError) as error:
        ENTRY.own_config(settings)
    assert said in str(error.value)


def test_only_the_meaning_of_weights_counts_as_a_difference():
    ours = ENTRY.section_values(config_of("cat"))
    for options, same_weights in (({"dropout": 0.3}, True), ({"window": 5}, False)):
        theirs = ENTRY.section_values(config_of("cat", mixer_options=options))
        assert (ENTRY.differences(theirs, ours) == []) is same_weights


def test_a_sweep_over_lengths_finds_nothing_scaled():
    found = effective_scaling(model_of("gla"))
    assert found["rope_type"] is None and found["attention_temperature"] == 1
    assert methods_for(config_of("gla")) == ("none",)


def test_a_mixer_chooses_its_operators_by_itself():
    config = config_of("gla")
    how = (torch.device("cpu"), torch.float32)
    assert "mixer gla" in ENTRY.describe_backend("conv_backend", config, *how, "auto")
    with pytest.raises(ValueError, match="use auto"):
        ENTRY.describe_backend("conv_backend", config, *how, "triton")
