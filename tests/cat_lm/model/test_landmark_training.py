"""The training of landmark attention: losses, long filters, calibration, and keys that fit."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.counts import meta_model, saved_bytes
from cat_lm.model.attention.modules.landmark import LandmarkDynamicLayer, train_landmarks
from cat_lm.ops.landmark import segments
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import sequence_blocks
from cat_lm.ops.long_filter import filters
from cat_lm.sparsify import Calibration, sparsify
from cat_lm.training.building import build_model
from tests.cat_lm.model.test_landmark import CLOSE, chunks, each_family, landmark_model
from tests.runs import run_values, write_config
from tests.tiny_models import cat_model, random_ids

LONG = {"exponential": 3, "ssm": 4}
LEARNED = {"filter": "learned"}


def naive_guided_loss(model, ids, documents):
    """Of the first layer, by loops: dense weights of blocks against the softmax of landmarks."""
    module, seen = model.gpt_neox.layers[0].attention, {}

    def keep(module, given):
        seen.update(query=given[0], key=given[1], scaling=given[4].scaling)

    handle = module.core.register_forward_pre_hook(keep)
    model(ids, document_ids=documents)
    handle.remove()
    query, key = seen["query"], seen["key"]
    losses = []
    for row in range(2):
        for head in range(4):
            weighted = total = 0.0
            for t in range(ids.shape[1]):
                start = int((documents[row] == documents[row, t]).nonzero()[0])
                logits = key[row, head, start : t + 1] @ query[row, head, t] * seen["scaling"]
                mass = logits.softmax(0)[: max(0, (t - start) // 4 - 1) * 4].view(-1, 4).sum(1)
                if len(mass) == 0:
                    continue
                marks = key[row, head, start : start + 4 * len(mass)].view(-1, 4, 8).mean(1)
                guess = (marks @ query[row, head, t] * seen["scaling"] * 8**0.5).log_softmax(0)
                aim = (mass / mass.sum()).detach()
                weight = mass.sum().detach()
                weighted = weighted + weight * (aim * (aim.log() - guess)).sum()
                total = total + weight
            losses.append(weighted / total)
    return torch.stack(losses).mean()


def test_guided_training_is_dense_and_teaches_the_landmarks():
    ids = random_ids(2, 37)
    documents = (torch.arange(37) // torch.tensor([[30], [25]])).expand(2, -1)
    model = landmark_model(num_hidden_layers=1).train()
    train_landmarks(model, "guided", rows=99)
    dense = cat_model(num_hidden_layers=1, conv_window=3).train()
    dense.load_state_dict(model.state_dict())
    output = model(ids, labels=ids, document_ids=documents)
    expected = dense(ids, labels=ids, document_ids=documents).loss
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    theirs = naive_guided_loss(model, ids, documents)
    torch.testing.assert_close(output.auxiliary_loss, theirs, rtol=1e-4, atol=1e-6)
    weights = [p for n, p in model.named_parameters() if "query_key_value" in n or "q_filter" in n]
    ours, wanted = (torch.autograd.grad(x, weights) for x in (output.auxiliary_loss, theirs))
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-6)
    assert all(x.abs().max() > 1e-4 for x in wanted)
    # Without labels, in evaluation and by another way there is no such loss.
    assert model.eval()(ids, labels=ids).auxiliary_loss is None
    train_landmarks(model.train(), "dense", rows=99)
    plain = model(ids, labels=ids, document_ids=documents)
    assert plain.auxiliary_loss is None
    torch.testing.assert_close(plain.loss, expected, rtol=1e-5, atol=1e-6)
    train_landmarks(model, "hard", rows=99)
    assert not model(ids, labels=ids, document_ids=documents).loss.isclose(expected, rtol=1e-4)


@each_family
def test_calibration_has_the_guided_loss_and_teaches_landmarks_alone(family):
    """With gradient checkpointing the gradients are the same bits."""
    ids, found = random_ids(2, 40), []
    for way, checkpoints in (("guided", False), ("guided", True), ("calibrate", False)):
        model = landmark_model(family, **LEARNED).train()
        train_landmarks(model, way, rows=99)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        output = model(ids, labels=ids)
        output.auxiliary_loss.backward()
        moved = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((output.loss, output.auxiliary_loss, moved))
    (*losses, guided), (*_, again), (*others, calibrated) = found
    torch.testing.assert_close(others, losses)
    assert all(torch.equal(gradient, again[name]) for name, gradient in guided.items())
    cores = {name for name in guided if ".core." in name}
    assert set(calibrated) == cores < set(guided) and len(cores) == 4
    for name, gradient in calibrated.items():
        assert gradient.abs().min() > 0
        torch.testing.assert_close(gradient, guided[name])


def test_rows_without_a_block_to_choose_give_no_loss():
    model = landmark_model(**LEARNED).train()
    train_landmarks(model, "guided", rows=16)
    for time in (1, 3, 11):
        ids = random_ids(2, time)
        output = model(ids, labels=ids)
        assert output.auxiliary_loss == 0
        (output.loss + output.auxiliary_loss).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("block", [1, 4, 64])
def test_long_filters_start_as_the_fixed_exponential_filter(kind, block):
    long = filters.get(kind)
    for state in (2, 16):
        modes = long.modes_of(long.average(3, state, block).double(), state)
        layout = sequence_blocks(3 * block + 1, block, None, None, torch.device("cpu"))
        key = torch.randn(1, 3, 3 * block + 1, 5, dtype=torch.float64)
        fixed = landmark_keys(key, block_weights("exponential", block), layout, True)
        torch.testing.assert_close(landmark_keys(key, modes, layout), fixed, rtol=1e-5, atol=1e-6)
        assert (modes.rate > 0).all() and modes.rate.isfinite().all()
        if kind == "ssm" and block > 1:  # pair m turns m times within a block
            turns = modes.angle[0] * block / (2 * math.pi)
            assert (turns - torch.arange(state // 2)).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"filter_state": 1}, {"filter": "ssm", "filter_state": 4}])
def test_cache_goes_back_and_on(options):
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


@each_family
@pytest.mark.parametrize("kind", LONG)
def test_long_filters_learn_when_guided(kind, family):
    model = landmark_model(family, filter=kind, filter_state=LONG[kind]).train()
    known, ids = architectures.get(family), random_ids(2, 40)
    fresh = known.classes().causal_lm(model.config).state_dict()
    cores = {name: x for name, x in fresh.items() if ".core." in name}
    model.load_state_dict(cores, strict=False)
    train_landmarks(model, "guided", rows=99)
    start = model(ids, labels=ids).auxiliary_loss
    with torch.no_grad():  # of coefficients 0 the decays get no gradient
        for name in cores.keys() - {n for n in cores if n.endswith("sharpness")}:
            model.get_parameter(name).add_(0.3 * torch.randn(cores[name].shape))
    output = model(ids, labels=ids)
    assert (output.auxiliary_loss - start).abs() > 1e-4
    (output.loss + output.auxiliary_loss).backward()
    own = {name: p.grad for name, p in model.named_parameters() if ".core." in name}
    assert len(own) == 4
    for name, gradient in own.items():
        # Pair 0 turns by its coefficient alone: of the others nothing stays without gradient.
        assert gradient.isfinite().all() and (gradient != 0).float().mean() > 0.9, name


def test_dense_model_gets_long_filters_by_calibration(tiny_corpus, tmp_path):
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
    # Kept where only the choice is another.
    again, _, _ = sparsify(out, tmp_path / "again", options | {"top_k": 2})
    kept = load_file(again / "model.safetensors")
    assert all(torch.equal(kept[name], x) for name, x in own.items())
    with pytest.raises(UserError, match=r"--calibrate .*: says nothing with --filter exponential"):
        sparsify(folder, tmp_path / "fixed", options | {"filter_state": 0}, calibration)


def values_of(tmp_path, train, options, weight_decay=0.0):
    values = run_values(tmp_path, tmp_path / "out", **train)
    values["optimizer"]["weight_decay"] = weight_decay
    if options is not None:
        own = {"block": 4} | options
        values["model"] |= {"attention": "landmark", "attention_options": own}
    return values


GUIDED, CALIBRATE = {"landmark_loss": "guided"}, {"landmark_loss": "calibrate"}
SSM = {"filter": "ssm"}
# Changes of `train:`, the options of attention (None for softmax attention), and what is wrong.
WRONG = [
    (GUIDED, None, "train.landmark_loss=guided: needs model.attention=landmark"),
    ({"landmark_rows": 8}, {}, "train.landmark_rows=8: says nothing with train.landmark_loss=hard"),
    ({"landmark_weight": 0.1}, None, "train.landmark_weight=0.1: says nothing"),
    ({}, LEARNED, "landmark_loss=hard: gives the landmarks' parameters no gradient"),
    ({"landmark_loss": "dense"}, LEARNED, "landmark_loss=dense: gives the landmarks' parameters"),
    (GUIDED, {"top_k": 0}, "landmark_loss=guided: says nothing with"),
    (CALIBRATE, None, "landmark_loss=calibrate: needs model.attention"),
    (CALIBRATE | {"init_from": "m"}, {}, "landmark_loss=calibrate: a fixed filter learns nothing"),
    (CALIBRATE, LEARNED, "landmark_loss=calibrate: changes nothing but"),
    (
        CALIBRATE | {"landmark_weight": 0.1, "init_from": "m"},
        LEARNED,
        "landmark_weight=0.1: says nothing with train.landmark_loss=calibrate; only with guided",
    ),
    (GUIDED, SSM | {"filter_state": 2.5}, "filter_state=2.5: must be a whole number"),
    (GUIDED, SSM | {"filter_state": 3}, "filter_state=3: must be even"),
    (GUIDED, SSM, "filter=ssm: needs attention_options.filter_state"),
    (GUIDED, LEARNED | {"filter_state": 4}, "filter_state=4: says nothing with filter=learned"),
]


@pytest.mark.parametrize(("train", "options", "said"), WRONG)
def test_keys_that_do_not_fit_or_teach_nothing_are_refused(train, options, said, tmp_path):
    with pytest.raises(UserError) as error:
        load_config(write_config(tmp_path, values_of(tmp_path, train, options)))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_calibration_refuses_what_would_shrink_the_other_weights(tmp_path):
    values = values_of(tmp_path, CALIBRATE | {"init_from": "m"}, LEARNED, weight_decay=0.1)
    with pytest.raises(UserError, match=r"optimizer.weight_decay=0.1 would change the other"):
        load_config(write_config(tmp_path, values))


@pytest.mark.parametrize(
    ("way", "options", "length"),
    [
        ("guided", {"block": 8, "local": 1}, 16),
        ("guided", {"block": 64}, 192),
        ("calibrate", {"block": 5} | LEARNED, 15),
    ],
)
def test_rows_must_have_blocks_to_choose(way, options, length, tmp_path):
    """With one token more the last query has enough of them, and the landmarks learn from it."""
    values = values_of(tmp_path, {"landmark_loss": way, "init_from": "m"}, options)
    values["data"]["context_length"] = length
    with pytest.raises(UserError, match=f"train.landmark_loss={way}: no query"):
        load_config(write_config(tmp_path, values))
    values["data"]["context_length"] = length + 1
    model = build_model(load_config(write_config(tmp_path, values)), 97).train()
    train_landmarks(model, way, rows=length + 1)
    for tokens in (length, length + 1):
        ids = random_ids(2, tokens)
        output = model(ids, shift_labels=ids)
        assert bool(output.auxiliary_loss) == (tokens > length)


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(("block", "dtype"), [(32, torch.bfloat16), (256, torch.float32)])
def test_kernel_keeps_no_masks(is_there, block, dtype, monkeypatch):
    """Maps of [T, T] that a GPU's layer keeps more than one of softmax attention, of 4 heads."""
    monkeypatch.setattr(segments.triton_launch, "INSTALLED", is_there)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 2048}
    options = {"block": block, "local": 2, "top_k": 4}
    kept = []
    for fields in ({"attention": "landmark", "attention_options": options}, {}):
        model = meta_model(cat_model(num_hidden_layers=1, **sizes, **fields).config)
        kept.append(saved_bytes(model, 1, 2048, dtype=dtype, on_gpu=True).layers)
    maps = (kept[0] - kept[1]) / 2048**2 / dtype.itemsize
    # The kernel keeps weights, logarithms and places of 6 blocks; it serves no such long ones.
    assert 0 < maps < 0.5 if is_there and block == 32 else 4 <= maps < 4.5
