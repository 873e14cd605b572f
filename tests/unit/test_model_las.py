"""Logits that decay, values that are smoothed, attention inside chunks: LaS in language models."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.model import attention
from cat_lm.model.attention.masks import document_attention
from cat_lm.model.attention.modules.las import DecayScores
from cat_lm.model.hf.inspection import describe_backend
from cat_lm.upcycle import Convolution, upcycle
from tests.conftest import REPOSITORY
from tests.unit.tiny_models import cat_model, random_ids

DECAY = {"score_transform": "exponential_decay"}
SLOW = DECAY | {"score_options": {"bound": 0.9}}  # some of e^-33 over 37 tokens
STEEP = DECAY | {"score_options": {"spacing": "steep", "bound": 1e-3}}
SMOOTH = {"value_transform": "smoothing", "value_options": {"width": 3}}
CHUNK = {"attention": "chunk", "attention_options": {"size": 7}}
LLAMA = {"family": "llama", "num_key_value_heads": 2, "conv_type": "none"}


def one_layer(case, dtype=torch.float64, **fields):
    """A model whose first layer's attention reads what it is given, with large logits."""
    model = cat_model(**LLAMA | {"position_embedding": "none"} | case | fields).to(dtype)
    model.model.layers = model.model.layers[:1]
    model.model.layers[0].input_layernorm = torch.nn.Identity()
    module = model.model.layers[0].self_attn
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj):
            projection.weight.mul_(4)
    return model, module


def test_factors_serve_within_their_bound_alone():
    scores = DecayScores(4, "slow", 0.5)
    assert scores.separates(121, torch.bfloat16, "sdpa")
    assert not scores.separates(122, torch.bfloat16, "sdpa")
    assert not scores.separates(10, torch.float16, "sdpa")
    assert not scores.separates(1, torch.float32, "sdpa")  # a token's logits are computed
    assert scores.separates(1, torch.float32, "flash_attention_2")
    said = r"attn_implementation=flash_attention_2: logits decay by more than e\^-60 over 122 "
    with pytest.raises(ValueError, match=said):
        scores.separates(122, torch.float32, "flash_attention_2")


def test_flash_attention_gets_exact_factors(monkeypatch):
    """Its kernel's place is taken by what it computes of queries and keys."""
    case = SLOW | {"attn_implementation": "sdpa"}
    expected, _ = one_layer(case)
    model, _ = one_layer(case)
    separates = DecayScores.separates
    monkeypatch.setattr(
        DecayScores, "separates", lambda self, *given: separates(self, *given[:2], "flash")
    )
    x = torch.randn(1, 37, 32, dtype=torch.float64)
    logits = model(inputs_embeds=x, use_cache=False).logits
    cached = model(inputs_embeds=x[:, :36], use_cache=True)
    last = model(inputs_embeds=x[:, 36:], past_key_values=cached.past_key_values).logits
    torch.testing.assert_close(last[:, 0], logits[:, -1], rtol=1e-10, atol=1e-10)
    monkeypatch.undo()
    torch.testing.assert_close(
        logits, expected(inputs_embeds=x, use_cache=False).logits, rtol=1e-10, atol=1e-10
    )


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operator gives."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = function(*args, **kwargs or {})
        for tensor in given if isinstance(given, tuple | list) else [given]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return given


@pytest.mark.parametrize("case", [STEEP | SMOOTH, CHUNK | SLOW | SMOOTH], ids=["steep", "chunk"])
def test_no_map_of_all_pairs_is_held(case):
    time = 640
    for documents in (None, torch.arange(time)[None] // 300):
        model = cat_model(
            **LLAMA | case | {"num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8},
            max_position_embeddings=time,
        )
        ids = torch.randint(1, 97, (1, time))
        saved = []

        def save(tensor, saved=saved):
            saved.append(tensor.numel())
            return tensor

        with Largest() as seen, torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            model(ids, document_ids=documents, labels=ids).loss.backward()
        assert seen.numbers < time * time
        assert sum(saved) < time * time, "what is seen is a number a pair, too"
        control = cat_model(**LLAMA | {"attn_implementation": "eager"})
        with Largest() as seen:
            control(ids, use_cache=False)
        assert seen.numbers >= time * time


def test_documents_need_no_mask_where_rows_are_computed():
    config = cat_model(**STEEP).config
    said = document_attention(config, torch.device("cpu"), torch.float32)
    assert said.name == "rows" and said.reason.endswith("computed for some queries at a time")
    gentle = cat_model(**DECAY | {"score_options": {"bound": 1e-3}}).config
    assert document_attention(gentle, torch.device("cpu"), torch.float32).name == "mask"


WRONG = [
    (
        DECAY | {"score_options": {"spacing": "steep", "bound": 1e-9}},
        "score_options.bound=1e-09: must be a number between 1e-06 and 1",
    ),
    (
        DECAY | {"score_options": {"bound": 1.0}},
        "score_options.bound=1.0: must be a number between",
    ),
    (DECAY | {"score_options": {"bound": True}}, "score_options.bound=true: must be a number betw"),
    (
        DECAY | {"score_options": {"spacing": "fast"}},
        'score_options.spacing="fast": must be one of',
    ),
    (DECAY | {"num_attention_heads": 1}, "needs num_attention_heads of at least 2"),
    (DECAY | {"attention": "landmark"}, "cannot be combined with landmark attention"),
    (SMOOTH | {"value_options": {"width": 1}}, "value_options.width=1: smooths nothing; use"),
    (SMOOTH | {"value_options": {"width": 2.5}}, "value_options.width=2.5: must be a whole number"),
    (SMOOTH | {"value_options": {"mode": "centred"}}, 'mode="centred": must be causal'),
    (
        SMOOTH | {"conv_type": "multihead", "conv_mixing": "maps"},
        "value_transform=smoothing: cannot be combined with",
    ),
    (CHUNK | {"attention_options": {"size": 0}}, "attention_options.size=0: must be from 1"),
    (CHUNK | {"attention_options": {"size": "7"}}, 'attention_options.size="7": must be a whole'),
]


@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_does_not_go_together(fields, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")) as refused:
        cat_model(**fields)
    assert "\n" not in str(refused.value)


def test_the_least_bound_decays_in_fp32():
    scores = DecayScores(8, "steep", 1e-6)
    rates = scores.rates(torch.arange(8), torch.float32)
    assert rates.isfinite().all() and rates[-1].item() == pytest.approx(scores.largest, rel=1e-2)


@pytest.mark.parametrize("fields", [SMOOTH, SMOOTH | CHUNK], ids=["smoothed", "chunk"])
def test_smoothing_is_a_convolution_of_the_backend_asked_for(fields):
    model, ids = cat_model(conv_type="none", **fields), random_ids(1, 9)
    said = describe_backend(model.config, "cpu", torch.float32, "reference")
    assert said.startswith("smoothed values (W=3): reference, asked for by name")
    expected = model(ids).logits
    model.set_conv_backend("reference")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    model.set_conv_backend("triton")
    for use_cache in (False, True):
        with pytest.raises(ValueError, match="backend='triton'"):
            model(ids, use_cache=use_cache)


def test_rows_that_are_too_short_or_too_long():
    def problems(length, **fields):
        return attention.length_problems(cat_model(**fields).config, length)

    assert problems(3, **SMOOTH) == problems(7, **CHUNK) == []
    assert problems(2, **SMOOTH)[0].startswith("value_options.width=3: is beyond data.context_len")
    assert problems(6, **CHUNK)[0].startswith("attention_options.size=7: is beyond data.context_l")


ROWS = {"vanilla": (), "l": ("score",), "s": ("value",), "las": ("score", "value")}


@pytest.mark.parametrize("text", ["text8", "enwik8", "wt103"])
def test_the_papers_rows(text):
    for name, transforms in ROWS.items():
        config = load_config(REPOSITORY / f"configs/las/{text}_{name}.yaml")
        model = config.model
        assert (model.hidden_size, model.num_attention_heads, config.data.context_length) == (
            768,
            8,
            512,
        )
        assert model.num_hidden_layers == (12 if text == "wt103" else 6)
        assert (model.score_transform != "none") == ("score" in transforms)
        assert (model.value_transform != "none") == ("value" in transforms)
        assert config.train.output_dir == f"runs/las/{text}_{name}"
        assert text.replace("wt103", "wikitext-103") in config.data.path


def test_wikitexts_test_split_is_not_validated_on():
    lines = (REPOSITORY / "configs/README.md").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if "wikitext-103-raw-v1/" in line]
    options = [dict(itertools.pairwise(found)) for found in words]
    splits = [
        tuple(
            x[name].strip("'").split("/")[1].split("-")[0]
            for name in ("--path", "--validation-path")
        )
        for x in options
    ]
    assert splits == [("train", "validation"), ("validation", "test")]
    # The test is in training's tokens.
    assert options[1]["--tokenizer"] == f"{options[0]['--out']}/tokenizer"
    assert options[0]["--out"] == load_config(REPOSITORY / "configs/las/wt103_las.yaml").data.path
    assert any(f"--data {options[1]['--out']} " in line for line in lines)


def test_weights_of_a_model_without_it_fit():
    family = architectures.get("gpt_neox")
    plain, las = (
        family.section_values(cat_model(conv_type="none", **fields).config)
        for fields in ({}, SLOW | SMOOTH | CHUNK)
    )
    assert family.differences(plain, las) == family.differences(las, las) == []
    there = "model.score_transform is 'exponential_decay' there and 'none' here"
    assert there in family.differences(las, plain)
    other = las | {"value_options": {"width": 4}}
    assert family.differences(las, other)[0].startswith("model.value_options is")
    marked = plain | {"attention": "landmark"}
    assert family.differences(plain, marked) == []  # softmax finds its blocks before it learns to
    assert family.differences(marked, plain) == [
        "model.attention is 'landmark' there and 'softmax' here"
    ]
    maps = plain | {"attention": "map_mixing"}
    assert family.differences(plain, maps) == [
        "model.attention is 'softmax' there and 'map_mixing' here"
    ]


def test_it_is_exported_loaded_and_upcycled(tmp_path):
    fields = SLOW | SMOOTH | CHUNK | {"conv_type": "none"}
    model = cat_model(**fields)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.randint(1, 97, (1, 40))
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(loaded(ids).logits, expected)
    upcycle(tmp_path / "model", tmp_path / "more", Convolution(window=4))
    more = AutoModelForCausalLM.from_pretrained(tmp_path / "more")
    assert more.config.score_options == model.config.score_options
    with torch.no_grad():
        torch.testing.assert_close(more(ids).logits, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"has attention='chunk'; plain .* has 'softmax'"):
        upcycle(tmp_path / "model", tmp_path / "plain", Convolution(conv_type="none"))
