"""What every family must do with exports, transformers' Trainer, peft and strange keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import cat_lm  # noqa: F401
from cat_lm import architectures
from cat_lm.export import export_checkpoint
from cat_lm.pretrained.conversion import TOLERANCE
from cat_lm.pretrained.loading import load_model
from cat_lm.training import estimate
from tests.finished_runs import checkpoint

VOCABULARY, CONTEXT = 257, 64
SHARED = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
CASES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_attention_heads": 4, "rotary_pct": 1.0},
    "gpt_neox: cat": {"num_attention_heads": 4, "conv_type": "head", "conv_window": 4},
    "gpt_neox: long filters": {
        "num_attention_heads": 4,
        "rotary_pct": 1.0,
        "conv_type": "head",
        "conv_filter": "ssm",
        "conv_state": 4,
    },
    "gpt_neox: multi-token": {
        "num_attention_heads": 4,
        "attention": "multi_token",
        "attn_implementation": "eager",
    },
    "llama": {"num_attention_heads": 4, "intermediate_size": 48, "num_key_value_heads": 2},
    "llama: parts": {
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "conv_type": "head",
        "conv_window": 4,
        "conv_rank": 2,
        "canon": "ACD",
        "qk_norm": "l2",
        "qk_norm_place": "before",
    },
    "mixer": {"mixer": "gla", "intermediate_size": 48},
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 8, "head_dim": 8, "n_groups": 2},
    "gla": {"num_heads": 2},
    "gla: short convolutions": {"num_heads": 2, "use_short_conv": True},
    "delta_net": {"num_heads": 2},
    "gated_deltanet": {"num_heads": 2},
}
CASES |= {name: {} for name in architectures.ARCHITECTURES.own_names() if name not in CASES}
every_case = pytest.mark.parametrize("case", CASES)
stock_cases = pytest.mark.parametrize(
    "case",
    [name for name in architectures.names() if architectures.has_stock(architectures.get(name))],
)


def family_of(case: str) -> architectures.Architecture:
    return architectures.get(case.partition(":")[0])


def section_of(case: str, **keys: Any) -> Any:
    return family_of(case).Section(**SHARED | CASES[case] | keys)


def model_of(case: str, moved: bool = True, **keys: Any) -> nn.Module:
    """A model whose parameters are away from where they start, so that each shows in the logits."""
    family = family_of(case)
    fields = family.fields(section_of(case, **keys), VOCABULARY, CONTEXT)
    torch.manual_seed(0)
    model = family.classes().causal_lm(family.config_class()(**fields)).eval()
    for parameter in model.parameters() if moved else ():
        parameter.data += 0.15 * torch.randn_like(parameter)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, in parts of the largest number."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@every_case
def test_section_describes_its_model(case):
    family, section, model = family_of(case), section_of(case), model_of(case)
    back = architectures.section_of(model.config)
    fields = family.fields(section, VOCABULARY, CONTEXT)
    assert family.fields(back, VOCABULARY, CONTEXT) == fields
    assert family.differences(*[family.section_values(model.config)] * 2) == []
    assert estimate.lookup_parameters(model) == VOCABULARY * section.hidden_size
    tied = model_of(case, tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert estimate.lookup_parameters(tied) == 0
    said = family.summary(section)
    assert said == family.summary(back) and said.variant in family.variants()
    json.dumps([said.facts, said.sizes])
    how = (torch.device("cpu"), torch.float32, "auto")
    assert family.describe_backend("conv_backend", model.config, *how)
    assert bool(family.describe_backend("mixer_backend", model.config, *how)) == family.recurrent


def refuses(call, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        call()
    assert "\n" not in str(refused.value)


@every_case
@torch.no_grad()
def test_a_cache_goes_on_by_the_mask_that_it_was_read_with(case):
    """generate feeds padding behind the end of a text as tokens, which a later mask denies."""
    model, rows = model_of(case), tokens(3, 6)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    ends = int(model.generate(rows[:1], **how)[0, 7])
    made = model.generate(rows, **how, eos_token_id=ends, return_dict_in_generate=True)
    text, cache = made.sequences, made.past_key_values
    assert cache.get_seq_length() == 10 and (text[0, 8:] == 0).all()
    text = torch.cat([text, tokens(3, 3)], dim=1)
    mask, past = (text != 0).long(), cache.get_seq_length()

    def go_on():
        return model(text[:, past:], attention_mask=mask, past_key_values=cache).logits[:, -3:]

    if model.config.takes_gaps:
        for row, found in enumerate(go_on()):
            same(found, model(text[row, mask[row].bool()][None]).logits[0, -3:])
        return
    refuses(go_on, "read as tokens")
    refuses(lambda: model.generate(text, attention_mask=mask, past_key_values=cache), "read as tok")
    padded = model(text[:, :11], attention_mask=mask[:, :11], use_cache=True).past_key_values
    refuses(lambda: model(text[:, 11:], past_key_values=padded), "the cache holds padding")
    padded.reorder_cache(torch.tensor([2, 1, 0]))
    refuses(
        lambda: model(text[:, 11:], attention_mask=mask, past_key_values=padded), "read as tokens"
    )
    again = model(text[:, 11:].flip(0), attention_mask=mask.flip(0), past_key_values=padded)
    same(again.logits[-1, -3:], model(text[0, mask[0].bool()][None]).logits[0, -3:])


@every_case
@torch.no_grad()
def test_documents_and_caches_that_layers_do_not_see_are_refused(case):
    """As vLLM and continuous batching call models, whose attention alone knows the requests."""
    model, row = model_of(case), tokens(1, 12)
    expected, once = model(row).logits, {"use_cache": False}
    alone = torch.cat([model(part).logits for part in row.split([5, 7], dim=1)], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    borders = {"cu_seq_lens_q": torch.tensor([0, 5, 12]), "cu_seq_lens_k": torch.tensor([0, 5, 12])}
    same(model(row, seq_idx=(torch.arange(12)[None] >= 5).long()).logits, alone)
    same(model(row, position_ids=positions, **borders, **once).logits, alone)
    both = model(row.expand(2, -1), position_ids=positions, **once).logits
    same(both, alone.expand(2, -1, -1))
    whole = {"cu_seq_lens_q": torch.tensor([0, 12]), "max_length_q": 12}
    same(model(row, position_ids=torch.arange(12)[None], **whole).logits, expected)

    same(model(row, position_ids=positions).logits, alone)
    cached = {"position_ids": positions, "use_cache": True}
    refuses(lambda: model(row, **cached), "cannot be used with a cache")
    for how in ({}, once):
        refuses(lambda how=how: model(row, **borders, **how), "cu_seq_lens_q")
    # As many documents with another border are other documents.
    moved = {"cu_seq_lens_q": torch.tensor([0, 4, 12])}
    ids = torch.tensor([[0] * 5 + [1] * 7])
    refuses(lambda: model(row, document_ids=ids, **moved), "cu_seq_lens_q")
    refuses(lambda: model(row, position_ids=7 * positions + 3, **once), "another position than 0")
    cache = model(row, use_cache=True).past_key_values
    for name, value in (
        ("block_table", torch.zeros(1, 4)),
        ("slot_mapping", torch.arange(12)),
        ("attention_instances", {0: nn.Identity()}),
        ("cache_params", cache),
        ("cache", object()),
    ):
        refuses(lambda said={name: value}: model(row, **said, **once), f"{name}: a .* do not read")
    short = {"attention_mask": torch.ones(1, 3), "past_key_values": cache}
    refuses(lambda: model(row[:, :3], **short), "3 tokens are, of 15")
    refuses(lambda: model.generate_batch([[1, 2]]), "continuous batching")
    assert not model.is_backend_compatible() and not model.supports_context_parallel
    if not model.config.takes_gaps:
        refuses(lambda: model(row, past_key_values=object()), "past_key_values: a cache of object")
        model.config._attn_implementation = "paged|sdpa"
        refuses(lambda: model(row, position_ids=positions, **once), "makes no mask for it")


@every_case
@torch.no_grad()
def test_export_is_the_model(case, tiny_corpus, tmp_path):
    family, model = family_of(case), model_of(case)
    checkpoint(tmp_path / "run", model, tiny_corpus / "tokenizer")
    out = export_checkpoint(tmp_path / "run", tmp_path / "out")
    settings = json.loads((out / "config.json").read_text())
    assert settings["model_type"] == family.model_type and architectures.find(settings) is family
    rows = tokens(2, 20)
    for opened in (AutoModelForCausalLM.from_pretrained(out), load_model(out)):
        assert type(opened) is family.classes().causal_lm
        assert torch.equal(opened(rows).logits, model(rows).logits)
        assert family.section_values(opened.config) == family.section_values(model.config)
    card = (out / "README.md").read_text()
    assert family.summary(section_of(case)).words in card


@stock_cases
@torch.no_grad()
def test_export_for_the_library_is_the_librarys(case, tiny_corpus, tmp_path):
    family, model = family_of(case), model_of(case)
    try:
        kind = family.library_classes().causal_lm
    except ImportError as error:
        pytest.skip(f"{family.title}: {error}")
    checkpoint(tmp_path / "run", model, tiny_corpus / "tokenizer")
    out = export_checkpoint(tmp_path / "run", tmp_path / "out", library=True)
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(loaded) is kind and not any(report.values())
    rows = tokens(2, 30)
    assert relative(loaded(rows, use_cache=False).logits, model(rows).logits) <= TOLERANCE
    # Our class goes on from it: the same keys, the same weights.
    theirs, ours = (family.section_values(c) for c in (loaded.config, model.config))
    assert family.differences(theirs, ours) == []
    assert type(family.own_config(loaded.config)) is family.config_class()
    assert "import cat_lm" not in (Path(out) / "README.md").read_text()


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    settings = TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True, **options)
    rows = [{"input_ids": row, "labels": row} for row in tokens(2, 12)]
    return Trainer(
        model,
        settings,
        eval_dataset=rows,
        compute_metrics=lambda found: {"n": len(found.label_ids)},
    )


@every_case
def test_trainer_shifts_labels_and_evaluates(case, tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # of an earlier test's rank
        monkeypatch.delenv(name, raising=False)
    plain, rows = model_of(case), tokens(2, 12)
    adapted = peft.get_peft_model(model_of(case), peft.LoraConfig(task_type="CAUSAL_LM")).eval()
    derived = model_of(case)
    derived.__class__ = type("Renamed", (type(derived),), {})  # as FSDP and parametrizations do
    loss = plain(rows, labels=rows).loss.item()
    for model in (plain, adapted, derived):
        smoothed = trainer(model, tmp_path, label_smoothing_factor=1e-7)
        found = smoothed.compute_loss(model, {"input_ids": rows, "labels": rows})
        assert found.item() == pytest.approx(loss, abs=1e-3)
    found = trainer(plain, tmp_path).evaluate()
    assert found["eval_loss"] == pytest.approx(loss, abs=1e-3) and found["eval_n"] == 2


@every_case
def test_adapters_find_their_modules(case):
    for options in (peft.LoraConfig, peft.IA3Config, peft.OSFConfig):
        adapted = peft.get_peft_model(model_of(case), options(task_type="CAUSAL_LM"))
        adapted(input_ids=tokens(2, 12), labels=tokens(2, 12)).loss.backward()
        own = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        assert own and all(parameter.grad is not None for parameter in own)


@every_case
@torch.no_grad()
def test_offloaded_model_keeps_its_state(case, tmp_path):
    model, rows = model_of(case), tokens(2, 12)
    model.save_pretrained(tmp_path)
    room = sum(4 * parameter.numel() for parameter in model.parameters()) // 2
    how = {"device_map": "auto", "max_memory": {"cpu": room}, "offload_folder": tmp_path / "off"}
    how |= {"attn_implementation": CASES[case].get("attn_implementation")}
    offloaded = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path=tmp_path, **how)
    assert "disk" in offloaded.hf_device_map.values()
    texts = [m.generate(rows, max_new_tokens=4, do_sample=False) for m in (offloaded, model)]
    assert torch.equal(*texts)


# As files of the Hub have them.
THEIRS = {
    **{"torch_dtype": "float16", "max_length": 20, "unsloth_version": "1", "_secret": 1},
    **{"bos_token": "<s>", "unk_token_id": 3, "padded_vocab_size": 384, "_name_or_path": "x"},
    **{"attention_probs_dropout_prob": 0.0, "eos_token_ids": [1], "original_max_position": 64},
    **{"num_layers": 2, "architecture": "x", "use_sliding_window": False, "auto_map": {}},
}


@every_case
def test_configuration_refuses_unknown_keys(case, tmp_path):
    model = model_of(case)
    kind, values = type(model.config), model.config.to_dict()
    said = "hiden_size: unknown key of .*; the nearest known one is hidden_size"
    with pytest.raises(ValueError, match=said):
        kind(hiden_size=32)
    for key in ("to_dict", "from_pretrained", "_hiden", "model_card"):
        with pytest.raises(ValueError, match=f"{key}: unknown key"):
            kind(**{key: 3})
    with pytest.raises(ValueError, match="num_labels=1000000000: must be"):
        kind(num_labels=10**9)
    kind(**values | {"quantization_config": {}, "num_labels": 3, "attn_implementation": None})
    model.save_pretrained(tmp_path)
    for loader in (AutoConfig, AutoModelForCausalLM, type(model), type(model.base_model)):
        with pytest.raises((TypeError, ValueError), match="hiden_size"):
            loader.from_pretrained(tmp_path, hiden_size=32)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | THEIRS))
    opened = AutoConfig.from_pretrained(tmp_path)
    assert opened.unsloth_version == family_of(case).own_config(opened).unsloth_version == "1"
    for key in ("hiden_size", "_hidden_size", "from_dict"):
        file.write_text(json.dumps(stored | {key: 32}))
        with pytest.raises(ValueError, match=f"{key}: unknown key"):
            AutoConfig.from_pretrained(tmp_path)


def test_keys_of_other_programs_mean_the_same_or_are_refused():
    neox, llama = (architectures.get(name).config_class() for name in ("gpt_neox", "llama"))
    assert neox(partial_rotary_factor=0.5).rotary_pct == 0.5
    assert neox.from_dict({"rotary_pct": 0.5, "partial_rotary_factor": 0.5}).rotary_pct == 0.5
    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 4}
    neox.from_dict(shape)
    llama.from_dict(shape | {"partial_rotary_factor": 1.0})
    for kind, values, said in (
        (neox, {"partial_rotary_factor": 0.5, "rotary_pct": 0.25}, "rotary_pct is 0.25"),
        (neox, {"rotary_emb_base": 5.0, "rope_theta": 6.0}, "rotary_emb_base is 5.0"),
        (neox, shape | {"head_dim": 32}, "head_dim=32: GPT-NeoX has 16"),
        (neox, shape | {"num_key_value_heads": 2}, "num_key_value_heads=2: GPT-NeoX has 4"),
        (llama, {"partial_rotary_factor": 0.5}, "all channels of a head are rotated"),
    ):
        with pytest.raises(ValueError, match=said):
            kind.from_dict(values)
