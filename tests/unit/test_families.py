"""What every family of models must do, proved on a tiny model of each that is registered.

A family of this project is tested here for being named in `cat_lm.architectures`: what it says of
its models, logits against the library's class, documents, padding, decoding, precision, activation
checkpointing, weight decay, folders and exports. `CASES` has the keys of `model:` that make a tiny
model of it beside `SHARED`; a family that needs none is there without an entry. One whose plain
shape is not all that it has adds entries `name: variant`. What is special to a family (its
definition, its errors, its operators) is tested in a file of its own.
`tests/distributed/test_families.py` trains, interrupts and resumes the same cases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.utils.generic import find_labels

import cat_lm  # noqa: F401
from cat_lm import architectures
from cat_lm.config import RunConfig, load_config
from cat_lm.counts import flops_per_token, meta_model
from cat_lm.export import export_checkpoint
from cat_lm.pretrained.conversion import TOLERANCE
from cat_lm.pretrained.loading import load_model
from cat_lm.training import estimate
from cat_lm.training.building import give_memory
from eval.length_sweep.perplexity import span_windows, token_nlls
from tests.finished_runs import checkpoint
from tests.runs import run_values

ROOT = Path(__file__).resolve().parents[2]
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
CASES |= {name: {} for name in architectures.names() if name not in CASES}
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


def test_every_family_of_the_project_is_here():
    assert {case.partition(":")[0] for case in CASES} >= set(
        architectures.ARCHITECTURES.own_names()
    )


# What a family says of its models


@every_case
def test_what_is_said_of_a_model_is_so(case):
    family, section, model = family_of(case), section_of(case), model_of(case)
    back = architectures.section_of(model.config)
    fields = family.fields(section, VOCABULARY, CONTEXT)
    assert family.fields(back, VOCABULARY, CONTEXT) == fields
    assert family.problems(section, CONTEXT) == []
    assert family.differences(*[family.section_values(model.config)] * 2) == []
    parameters = sum(p.numel() for p in model.parameters())
    assert estimate.lookup_parameters(model) == VOCABULARY * section.hidden_size
    every = flops_per_token(meta_model(model.config), CONTEXT)
    assert 6 * VOCABULARY * section.hidden_size < every < 60 * parameters
    said = family.summary(section)
    assert said.words and said.description and said == family.summary(back)
    json.dumps([said.facts, said.sizes])
    assert said.variant in family.variants()
    how = (torch.device("cpu"), torch.float32, "auto")
    assert family.describe_backend("conv_backend", model.config, *how)
    assert bool(family.describe_backend("mixer_backend", model.config, *how)) == family.recurrent


# Of a row: layers, key and value channels, heads, FLOPs of a number of the state, taps, matrices
# of the values' width, and what else of a layer multiplies its width of 1024.
LINEAR_ROWS = {
    "gla": (24, 512, 1024, 4, 15, 0, 3, 16 * (1 + 512 / 1024)),  # gates of keys, of rank 16
    "delta_net": (24, 1024, 1024, 8, 18, 4, 2, 8),  # a rate a head
    "gated_deltanet": (21, 768, 1536, 3, 21, 4, 3, 2 * 3),  # a rate and a decay a head
}


@pytest.mark.parametrize("row", LINEAR_ROWS)
def test_flops_of_the_linear_rows(row):
    """By hand, of the width C = 1024 with SwiGLU of 2816 channels, and 32,000 tokens.

    Each weight of a matrix counts 6, each number of the state [K / H, V]
    what its recurrence does with it, and each tap 6 on its channel.
    """
    config = load_config(ROOT / f"configs/pretrain/{row}.yaml")
    layers, keys, values, heads, each, taps, wide, narrow = LINEAR_ROWS[row]
    mixing = layers * (each * keys * values // heads + 6 * taps * (2 * keys + values))
    layer = 1024 * (2 * keys + wide * values + narrow + 3 * 2816)
    expected = 6 * (layers * layer + 32_000 * 1024) + mixing
    assert estimate.flops_per_token(config, 32_000) == expected


@every_case
def test_a_tied_model_multiplies_by_its_embedding(case):
    tied = model_of(case, tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert estimate.lookup_parameters(tied) == 0


# What it computes


def library_class(family: architectures.Architecture) -> type[nn.Module]:
    """Import the library's class; skip where the library is not here or has no CPU."""
    try:
        return family.library_classes().causal_lm
    except ImportError as error:
        pytest.skip(f"{family.title}: {error}")


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


# How it is trained


@every_case
@torch.no_grad()
def test_evaluations_score_what_it_predicts(case):
    """Windows of several lengths in one batch, as every perplexity here reads them."""
    model, stream = model_of(case), tokens(41)
    windows = [*span_windows(0, 23, 16, 8), *span_windows(23, 40, 16, 8)]
    found = torch.from_numpy(token_nlls(model, stream.numpy(), windows, batch_tokens=32))
    for window in windows:
        logits = model(stream[None, window.start : window.stop]).logits[0]
        wanted = nn.functional.cross_entropy(
            logits, stream[window.start + 1 : window.stop + 1], reduction="none"
        )
        scored = slice(window.first, window.stop)
        same(found[scored], wanted[window.first - window.start :])


@every_case
@pytest.mark.parametrize(("precision", "stage"), [("fp32", 1), ("bf16", 0), ("bf16", 1)])
def test_what_checkpointing_keeps_of_a_layer_is_estimated(case, precision, stage, tmp_path):
    values = run_values(
        tmp_path, tmp_path, precision=precision, zero_stage=stage, activation_checkpointing=True
    )
    counted = []
    for count in (2, 3):
        values["model"] = {"architecture": family_of(case).name, **SHARED, **CASES[case]}
        values["model"]["num_hidden_layers"] = count
        memory = estimate.memory_per_rank(
            RunConfig.model_validate(values), 1000, 8, VOCABULARY, False
        )
        counted.append(memory.activations)
    model, read = model_of(case).train(), []
    if precision == "bf16" and stage:
        model.to(torch.bfloat16)
    layers(model)[-1].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and not stage):
        model(tokens(2, 32))
    assert counted[1] - counted[0] == read[0].nbytes


def layers(model: nn.Module) -> list[nn.Module]:
    (found,) = (m for m in model.base_model.children() if isinstance(m, nn.ModuleList))
    return list(found)


@every_case
def test_names_and_buffers_are_there_without_weights(case):
    """As a rank has them that gets the first one's."""
    model = model_of(case, moved=False)
    with torch.device("meta"):
        other = model_of(case, moved=False)
    assert all(p.is_meta for p in other.parameters())
    give_memory(other, torch.device("cpu"))
    for own, first in zip(other.buffers(), model.buffers(), strict=True):
        own.data.copy_(first)
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in model.named_parameters()]
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens(1, 9)).logits, model(tokens(1, 9)).logits)
    again = model_of(case, moved=False).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


# Folders


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@every_case
@torch.no_grad()
def test_an_export_is_the_model(case, tied, tiny_corpus, tmp_path):
    model = model_of(case, tie_word_embeddings=tied)
    checkpoint(tmp_path / "run", model, tiny_corpus / "tokenizer")
    out = export_checkpoint(tmp_path / "run", tmp_path / "out")
    settings = json.loads((out / "config.json").read_text())
    assert settings["model_type"] == family_of(case).model_type
    assert architectures.find(settings) is family_of(case)
    family_of(case).Section.check_values(settings)
    again, rows = AutoModelForCausalLM.from_pretrained(out), tokens(2, 20)
    kinds = family_of(case).classes()
    assert type(again) is kinds.causal_lm
    assert type(AutoConfig.from_pretrained(out)) is kinds.config
    for opened in (again, load_model(out)):  # the latter as evaluations do
        assert torch.equal(opened(rows).logits, model(rows).logits)
    if kinds.base_model is not None:
        body = AutoModel.from_pretrained(out)
        assert type(body) is kinds.base_model
        hidden = model.base_model(rows).last_hidden_state
        assert torch.equal(body(rows).last_hidden_state, hidden)
    card = (out / "README.md").read_text()
    assert family_of(case).summary(section_of(case)).words in card
    assert family_of(case).section_values(again.config) == family_of(case).section_values(
        model.config
    )


@stock_cases
@torch.no_grad()
def test_an_export_for_the_library_is_the_librarys(case, tiny_corpus, tmp_path):
    family, model = family_of(case), model_of(case)
    kind = library_class(family)
    checkpoint(tmp_path / "run", model, tiny_corpus / "tokenizer")
    out = export_checkpoint(tmp_path / "run", tmp_path / "out", library=True)
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(loaded) is kind and not any(report.values())
    settings = json.loads((out / "config.json").read_text())
    assert settings["model_type"] == family.library_type
    rows = tokens(2, 30)
    assert relative(loaded(rows, use_cache=False).logits, model(rows).logits) <= TOLERANCE
    # And our class goes on from it: the same keys, the same weights.
    theirs, ours = (family.section_values(c) for c in (loaded.config, model.config))
    assert family.differences(theirs, ours) == []
    assert type(family.own_config(loaded.config)) is family.config_class()
    assert "import cat_lm" not in (Path(out) / "README.md").read_text()


# What transformers, accelerate and peft decide by names and signatures


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


@every_case
def test_class_says_what_is_true_of_it(case):
    model = model_of(case)
    keeps_filters = getattr(model.config, "has_long_filters", None)
    for kind in (model, model.base_model):
        assert type(kind)._is_stateful is (keeps_filters is None)
        assert kind._is_stateful is (keeps_filters is not False)
        assert {*kind._no_split_modules} == {type(x).__name__ for x in model.base_model.layers}
    assert not model.supports_tp_plan and not model.supports_pp_plan
    assert find_labels(type(model)) == ["labels"]


@every_case
def test_arguments_have_transformers_names(case, tmp_path):
    model = model_of(case)
    model.save_pretrained(tmp_path)
    for kind in (type(model), type(model.base_model), type(model.config)):
        kind.from_pretrained(pretrained_model_name_or_path=tmp_path)


# Keys


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
    config = model.config
    kind, values = type(config), config.to_dict()
    said = "hiden_size: unknown key of .*; the nearest known one is hidden_size"
    with pytest.raises(ValueError, match=said):
        kind(hiden_size=32)
    for key in ("to_dict", "from_pretrained", "_hiden", "model_card", "is_composition"):
        with pytest.raises(ValueError, match=f"{key}: unknown key"):
            kind(**{key: 3})
    for labels in (10**9, 1e9, "1000000000"):
        with pytest.raises(ValueError, match=f"num_labels='?{labels}'?: must be"):
            kind(num_labels=labels)
    kind(**values | {"quantization_config": {}, "num_labels": 3, "attn_implementation": None})
    assert kind.from_dict(THEIRS).bos_token == "<s>"
    model.save_pretrained(tmp_path)
    for key in ("hiden_size", "to_dict"):
        with pytest.raises(ValueError, match=f"{key}: unknown key"):
            AutoConfig.from_pretrained(tmp_path, **{key: 32})
        for loader in (AutoModelForCausalLM, type(model), type(model.base_model)):
            with pytest.raises(ValueError, match=f"{key}: unknown key"):
                loader.from_pretrained(tmp_path, **{key: 32})
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | THEIRS))
    opened = AutoConfig.from_pretrained(tmp_path)
    assert opened.unsloth_version == "1"
    assert family_of(case).own_config(opened).unsloth_version == "1"
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
