"""Canon layers, norms, ranks, LaS and long filters: initialization, upcycling, what is left out."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cat_lm import architectures
from cat_lm.core.errors import UserError
from cat_lm.mixers import Setting, make_mixer
from cat_lm.model import attention
from cat_lm.model.attention.masks import document_attention
from cat_lm.model.attention.modules.las import DecayScores
from cat_lm.model.context import Context
from cat_lm.pretrained.loading import load_model
from tests.tiny_models import cat_model, random_ids

TOKENS = {"attention": "multi_token", "attn_implementation": "eager", "conv_type": "none"}
SSM = {"conv_type": "head", "conv_filter": "ssm", "conv_state": 6}


def test_canon_layers_start_drawn_or_at_zero():
    fields = {"conv_type": "none", "canon_window": 16}
    kinds, plain = architectures.get("gpt_neox").classes(), cat_model(**fields)
    logits = []
    for places, start in (("ACD", "uniform"), ("ACD", "zero"), ("none", "uniform")):
        torch.manual_seed(0)
        changes = {"canon": places, "canon_init": start}
        model = kinds.causal_lm(kinds.config(**plain.config.to_dict() | changes)).eval()
        logits.append(model(random_ids(2, 9)).logits)
        for layer in model.gpt_neox.layers if places == "ACD" else ():
            for place in "ACD":
                largest = layer.canon[place].canon_filter.detach().abs().max()
                assert largest == 0 if start == "zero" else 0.2 < largest <= 1 / 4
    torch.testing.assert_close(logits[1], logits[2], rtol=1e-5, atol=1e-6)


def test_filters_of_zeros_are_not_divided_by_their_norm():
    model = cat_model(conv_type="multihead", conv_norm="l1", conv_window=4)
    convolution = model.gpt_neox.layers[0].attention.convolution
    with torch.no_grad():
        convolution.k_filter.zero_()
        assert not convolution.taps("k").any() and model(random_ids(1, 9)).logits.isfinite().all()


def test_multi_token_model_is_loaded_by_what_can_compute_it(tmp_path):
    model = cat_model(**TOKENS)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu")  # config.json does not name what computes it.
    assert loaded.config._attn_implementation == "eager"
    ids = random_ids(1, 9)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_multi_token_rows_beyond_512_are_one_line():
    model = cat_model(**TOKENS, max_position_embeddings=1024)
    with pytest.raises(UserError, match="rows of at most 512 tokens, not of 513"):
        model(random_ids(1, 513))
    family, section = architectures.get("gpt_neox"), architectures.section_of(model.config)
    assert family.problems(section, 512) == []
    said = "attention=multi_token: reads rows of at most 512 tokens, not of 513"
    assert family.problems(section, 513) == [said]
    with pytest.raises(UserError, match=said):
        make_mixer("multi-token").build(Setting(4))(torch.zeros(1, 513, 4), Context())


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


def test_rows_that_are_too_short_or_too_long():
    def problems(length, **fields):
        return attention.length_problems(cat_model(**fields).config, length)

    assert problems(3, **SMOOTH) == problems(7, **CHUNK) == []
    assert problems(2, **SMOOTH)[0].startswith("value_options.width=3: is beyond data.context_len")
    assert problems(6, **CHUNK)[0].startswith("attention_options.size=7: is beyond data.context_l")


def test_drafting_is_refused_before_a_token_is_made():
    """By a model that drafts, one that checks drafts, and one that drafts off its own text."""
    long, taps, ids = cat_model(**SSM), cat_model(), random_ids(1, 9)
    made = []
    long.register_forward_pre_hook(lambda *_: made.append(1))
    for model, how, words in (
        (long, {"assistant_model": taps}, "not supported with stateful models"),
        (long, {"prompt_lookup_num_tokens": 3}, "not supported with stateful models"),
        (taps, {"assistant_model": long}, "cannot draft tokens for another model"),
    ):
        with pytest.raises(ValueError, match=words):
            model.generate(ids, max_new_tokens=9, do_sample=False, **how)
    assert not made
