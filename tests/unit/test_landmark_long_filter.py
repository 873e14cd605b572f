"""Landmarks by filters as long as the text: the definition, their start, decoding, and learning."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.model.attention.modules.landmark import LandmarkDynamicLayer, train_landmarks
from cat_lm.model.hf.configuration import CatConfig
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import sequence_blocks
from cat_lm.ops.long_filter import filters
from cat_lm.sparsify import Calibration, sparsify
from cat_lm.training.estimate import saved_bytes
from tests.cat_lm.model.test_landmark import CLOSE, chunks, each_family, landmark_model
from tests.runs import run_values, write_config
from tests.tiny_models import SIZES, cat_model, random_ids

KINDS = {"exponential": 3, "ssm": 4}
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("block", [1, 4, 64])
def test_they_start_as_the_fixed_exponential_filter(kind, block):
    long = filters.get(kind)
    for state in (2, 16):
        modes = long.modes_of(long.average(3, state, block).double(), state)
        layout = sequence_blocks(3 * block + 1, block, None, None, torch.device("cpu"))
        key = torch.randn(1, 3, 3 * block + 1, 5, dtype=torch.float64)
        fixed = landmark_keys(key, block_weights("exponential", block), layout, True)
        found = landmark_keys(key, modes, layout)
        torch.testing.assert_close(found, fixed, rtol=1e-5, atol=1e-6)
        assert (modes.rate > 0).all() and modes.rate.isfinite().all()
        if kind == "ssm" and block > 1:  # pair m turns m times within a block
            turns = modes.angle[0] * block / (2 * math.pi)
            assert (turns - torch.arange(state // 2)).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"filter_state": 1}, {"filter": "ssm", "filter_state": 4}])
def test_a_cache_goes_back_and_on(options):
    """Blocks that are taken back and filled anew, of rows that begin with other padding."""
    model = landmark_model(**{"filter": "exponential"} | options)
    ids, mask = random_ids(3, 41), torch.ones(3, 41, dtype=torch.long)
    mask[0, :5] = mask[2, :2] = 0
    _, cache = chunks(model, ids[:, :26], [26], mask=mask)
    cache.activate_past_recording()
    for drafted, kept in ((9, 0), (6, 4), (3, 1)):
        past = cache.get_seq_length()
        draft = random_ids(3, drafted, seed=drafted)
        draft[:, :kept] = ids[:, past : past + kept]
        given = torch.cat([mask[:, :past], torch.ones(3, drafted, dtype=torch.long)], dim=1)
        model(draft, attention_mask=given, past_key_values=cache)
        cache.crop(kept - drafted)
    past = cache.get_seq_length()
    found = model(ids[:, past:], attention_mask=mask, past_key_values=cache).logits
    expected = model(ids, attention_mask=mask, use_cache=False).logits[:, past:]
    torch.testing.assert_close(found, expected, **CLOSE)
    layer = cache.layers[0]
    assert isinstance(layer, LandmarkDynamicLayer)
    assert layer.covered == [(41 - pad) // 4 for pad in (5, 0, 2)]
    numbers = {0: 8, 1: 8, 4: 32}[options.get("filter_state", 0)]
    assert layer.block_state.shape[:2] == (3, 4) and layer.block_state[0, 0].numel() == numbers


@each_family
@each_kind
def test_they_learn_when_guided(kind, family):
    model = landmark_model(family, filter=kind, filter_state=KINDS[kind]).train()
    known, ids = architectures.get(family), random_ids(2, 40)
    fixed = landmark_model(family, filter="exponential").train()
    fixed.load_state_dict(model.state_dict(), strict=False)
    fresh = known.classes().causal_lm(model.config).state_dict()
    cores = {name: x for name, x in fresh.items() if ".core." in name}
    model.load_state_dict(cores, strict=False)
    for one in (model, fixed):
        train_landmarks(one, "guided", rows=99)
    losses = [one(ids, labels=ids).auxiliary_loss for one in (model, fixed)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    with torch.no_grad():  # of coefficients 0 the decays get no gradient
        for name in cores.keys() - {n for n in cores if n.endswith("sharpness")}:
            model.get_parameter(name).add_(0.3 * torch.randn(cores[name].shape))
    output = model(ids, labels=ids)
    assert (output.auxiliary_loss - losses[0]).abs() > 1e-4
    (output.loss + output.auxiliary_loss).backward()
    own = {name: p.grad for name, p in model.named_parameters() if ".core." in name}
    assert len(own) == 4
    for name, gradient in own.items():
        assert gradient.isfinite().all()
        # Pair 0 turns by its coefficient alone: of the others nothing stays without gradient.
        assert (gradient != 0).float().mean() > 0.9, name


WRONG = {
    "filter_state=2.5: must be a whole number": {"filter": "ssm", "filter_state": 2.5},
    "filter_state=-1: must be from 0 to 1,024": {"filter": "ssm", "filter_state": -1},
    "filter_state=4: says nothing with filter=box": {"filter_state": 4},
    "filter_state=4: says nothing with filter=learned": {"filter": "learned", "filter_state": 4},
    "filter=ssm: needs attention_options.filter_state": {"filter": "ssm"},
    "filter_state=3: must be even": {"filter": "ssm", "filter_state": 3},
}


@pytest.mark.parametrize("said", WRONG)
def test_states_that_are_wrong_or_say_nothing(said):
    with pytest.raises(ValueError) as error:
        CatConfig(**SIZES, attention="landmark", attention_options=WRONG[said])
    assert f"attention_options.{said}" in str(error.value)


def test_a_filter_that_nothing_teaches_is_refused(tmp_path):
    values = run_values(tmp_path, tmp_path / "out")
    options = {"filter": "exponential", "filter_state": 2, "block": 4}
    values["model"] |= {"attention": "landmark", "attention_options": options}
    with pytest.raises(UserError, match="landmark_loss=hard: gives the landmarks' parameters no"):
        load_config(write_config(tmp_path, values))
    values["train"]["landmark_loss"] = "guided"
    load_config(write_config(tmp_path, values))


def test_a_dense_model_gets_them_by_calibration(tiny_corpus, tmp_path):
    folder = tmp_path / "dense"
    cat_model(vocab_size=257, max_position_embeddings=32).save_pretrained(folder)
    shutil.copytree(tiny_corpus / "tokenizer", folder, dirs_exist_ok=True)
    options = {"block": 5, "top_k": 1, "local": 1, "filter": "exponential", "filter_state": 2}
    with pytest.raises(UserError, match=r"--filter exponential: model .* has no learned filters"):
        sparsify(folder, tmp_path / "none", options)
    calibration = Calibration(tiny_corpus, 30 * 4 * 32)
    out, difference, (first, last) = sparsify(folder, tmp_path / "sparse", options, calibration)
    assert last < first and difference <= 1e-5
    after = load_file(out / "model.safetensors")
    own = {name: x for name, x in after.items() if name.endswith("core.filter")}
    start = filters.get("exponential").average(4, 2, 5)
    assert len(own) == 2
    assert all(x.shape == start.shape and (x - start).abs().max() > 1e-3 for x in own.values())
    # Kept where only the choice is another; as many numbers of another kind are not taken for them.
    again, _, _ = sparsify(out, tmp_path / "again", options | {"top_k": 2})
    kept = load_file(again / "model.safetensors")
    assert all(torch.equal(kept[name], x) for name, x in own.items())
    taps = options | {"filter": "learned", "filter_state": 0}
    other, _, (first, _) = sparsify(out, tmp_path / "taps", taps, calibration)
    found = load_file(other / "model.safetensors")
    moved = [(found[name] - 0.2).abs().max() for name in own]  # from the box of five
    assert all(found[name].shape == (4, 5) for name in own) and max(moved) < 0.3
    with pytest.raises(UserError, match=r"--calibrate .*: says nothing with --filter exponential"):
        sparsify(folder, tmp_path / "fixed", options | {"filter_state": 0}, calibration)


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_states_of_filters_count_as_fp32_in_any_precision(family):
    kept = {}
    for precision in ("fp32", "bf16"):
        for state in (16, 64):
            own = [f"model.architecture={family}", f"model.conv_state={state}"]
            own += [f"train.precision={precision}", "data.path=data/any"]
            config = load_config("configs/pretrain/cat_ssm_rope.yaml", own)
            kept[precision, state] = saved_bytes(config, 32_000, on_gpu=True).layers
    grown = {name: kept[name, 64] - kept[name, 16] for name in ("fp32", "bf16")}
    # And the filters, where they are cast: a decay and a coefficient in fp32 for each of the state,
    # of 24 layers with three streams of 16 heads.
    cast = 24 * 3 * 16 * 2 * (64 - 16) * 4
    assert grown["bf16"] - grown["fp32"] in (0, cast) and grown["fp32"] > 1000 * cast
