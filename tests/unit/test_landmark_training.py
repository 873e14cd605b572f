"""The training of landmark attention: what is computed, what learns, and what says nothing."""

import pytest
import torch

from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.counts import meta_model, saved_bytes
from cat_lm.model.attention.modules.landmark import train_landmarks
from cat_lm.ops.landmark import segments
from cat_lm.training.building import build_model
from tests.cat_lm.model.test_landmark import each_family, landmark_model
from tests.runs import run_values, write_config
from tests.tiny_models import cat_model, random_ids


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
    for ours, wanted in zip(
        torch.autograd.grad(output.auxiliary_loss, weights),
        torch.autograd.grad(theirs, weights),
        strict=True,
    ):
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-6)
    # Without labels, in evaluation and by another way there is no such loss.
    assert model.eval()(ids, labels=ids).auxiliary_loss is None
    train_landmarks(model.train(), "dense", rows=99)
    plain = model(ids, labels=ids, document_ids=documents)
    assert plain.auxiliary_loss is None
    torch.testing.assert_close(plain.loss, expected, rtol=1e-5, atol=1e-6)
    train_landmarks(model, "hard", rows=99)
    assert not model(ids, labels=ids, document_ids=documents).loss.isclose(expected, rtol=1e-4)


@each_family
def test_learned_filters_learn_when_guided_and_checkpointed(family):
    ids, found = random_ids(2, 40), []
    for checkpoints in (False, True):
        model = landmark_model(family, filter="learned").train()
        train_landmarks(model, "guided", rows=16)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        output = model(ids, labels=ids)
        (output.loss + output.auxiliary_loss).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name
        if ".core." in name:
            assert gradient.abs().min() > 0
    assert sum(".core." in name for name in found[0]) == 4


def test_rows_without_a_block_to_choose_give_no_loss():
    model = landmark_model(filter="learned").train()
    train_landmarks(model, "guided", rows=16)
    for time in (1, 3, 11):
        ids = random_ids(2, time)
        output = model(ids, labels=ids)
        assert output.auxiliary_loss == 0
        (output.loss + output.auxiliary_loss).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


@each_family
def test_calibration_has_the_guided_loss_and_teaches_landmarks_alone(family):
    ids, found = random_ids(2, 40), []
    model = landmark_model(family, filter="learned").train()
    for way in ("guided", "calibrate"):
        train_landmarks(model, way, rows=99)
        model.zero_grad()
        output = model(ids, labels=ids)
        output.auxiliary_loss.backward()
        moved = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((output.loss, output.auxiliary_loss, moved))
    (*losses, guided), (*again, calibrated) = found
    torch.testing.assert_close(again, losses)
    cores = {name for name, _ in model.named_parameters() if ".core." in name}
    assert set(calibrated) == cores < set(guided)
    for name, gradient in calibrated.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, guided[name])


LEARNED = {"filter": "learned"}
# Changes of `train:`, the options of attention (None for softmax attention), and what is said.
SAID = [
    ({"landmark_loss": "guided"}, None, "landmark_loss=guided: needs model.attention=landmark"),
    ({"landmark_rows": 8}, {}, "landmark_rows=8: says nothing with train.landmark_loss=hard"),
    ({"landmark_weight": 0.1}, None, "landmark_weight=0.1: says nothing"),
    ({}, LEARNED, "landmark_loss=hard: gives the landmarks' parameters no gradient"),
    ({"landmark_loss": "dense"}, LEARNED, "landmark_loss=dense: gives the landmarks' parameters"),
    ({"landmark_loss": "guided"}, {"top_k": 0}, "landmark_loss=guided: says nothing with"),
    ({"landmark_loss": "calibrate"}, None, "landmark_loss=calibrate: needs model.attention"),
    (
        {"landmark_loss": "calibrate", "init_from": "m"},
        {},
        "landmark_loss=calibrate: a fixed filter learns nothing",
    ),
    ({"landmark_loss": "calibrate"}, LEARNED, "landmark_loss=calibrate: changes nothing but"),
    (
        {"landmark_loss": "calibrate", "landmark_weight": 0.1, "init_from": "m"},
        LEARNED,
        "landmark_weight=0.1: says nothing with train.landmark_loss=calibrate; only with guided",
    ),
]


@pytest.mark.parametrize(("train", "options", "said"), SAID)
def test_keys_that_say_nothing_or_teach_nothing(train, options, said, tmp_path):
    values = run_values(tmp_path, tmp_path / "out", **train)
    values["optimizer"]["weight_decay"] = 0.0
    if options is not None:
        values["model"] |= {"attention": "landmark", "attention_options": options}
    with pytest.raises(UserError) as error:
        load_config(write_config(tmp_path, values))
    assert f"train.{said}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("train", "options"),
    [
        ({}, {"top_k": 0}),
        ({"landmark_loss": "guided", "landmark_weight": 1.0}, LEARNED),
        ({"landmark_loss": "calibrate", "landmark_rows": 9, "init_from": "m"}, LEARNED),
    ],
)
def test_keys_that_go_together(train, options, tmp_path):
    values = run_values(tmp_path, tmp_path / "out", **train)
    values["optimizer"]["weight_decay"] = 0.0
    values["model"] |= {"attention": "landmark", "attention_options": {"block": 4, **options}}
    load_config(write_config(tmp_path, values))


@pytest.mark.parametrize(
    ("way", "options", "length", "said"),
    [
        ("guided", {"block": 8, "local": 1}, 16, "two blocks to choose from with model.attention_"),
        ("guided", {}, 192, "data.context_length=192 tokens has two blocks"),
        ("calibrate", {"block": 5} | LEARNED, 15, "options.block=5 and local=2; 3 x block must"),
    ],
)
def test_rows_must_have_blocks_to_choose(way, options, length, said, tmp_path):
    """With one token more the last query has enough of them, and the landmarks learn from it."""
    values = run_values(tmp_path, tmp_path / "out", landmark_loss=way, init_from="m")
    values["optimizer"]["weight_decay"] = 0.0
    values["model"] |= {"attention": "landmark", "attention_options": options}
    values["data"]["context_length"] = length
    with pytest.raises(UserError) as error:
        load_config(write_config(tmp_path, values))
    assert f"train.landmark_loss={way}: no query" in str(error.value) and said in str(error.value)
    assert "\n" not in str(error.value)
    values["data"]["context_length"] = length + 1
    model = build_model(load_config(write_config(tmp_path, values)), 97).train()
    train_landmarks(model, way, rows=length + 1)
    for tokens in (length, length + 1):
        ids = random_ids(2, tokens)
        output = model(ids, shift_labels=ids)
        assert bool(output.auxiliary_loss) == (tokens > length)


def test_calibration_refuses_what_would_shrink_the_other_weights(tmp_path):
    values = run_values(tmp_path, tmp_path / "out", landmark_loss="calibrate", init_from="m")
    values["model"] |= {"attention": "landmark", "attention_options": LEARNED}
    with pytest.raises(UserError, match=r"optimizer.weight_decay=0.1 would change the other"):
        load_config(write_config(tmp_path, values))


def masks_kept(block: int, dtype: torch.dtype) -> float:
    """Count the maps of [T, T] that a GPU's layer keeps more than one of softmax attention."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 2048}
    options = {"block": block, "local": 2, "top_k": 4}
    landmarks = {"attention": "landmark", "attention_options": options, "num_hidden_layers": 1}
    layers = []
    for fields in (landmarks, {"num_hidden_layers": 1}):
        model = meta_model(cat_model(**sizes | fields).config)
        layers.append(saved_bytes(model, 1, 2048, dtype=dtype, on_gpu=True).layers)
    return (layers[0] - layers[1]) / 2048**2 / dtype.itemsize


def test_the_kernel_keeps_no_masks(monkeypatch):
    """Of 6 blocks read: weights, logarithms and places."""
    for block, dtype in ((32, torch.bfloat16), (32, torch.float32), (256, torch.float32)):
        for is_there in (True, False):
            monkeypatch.setattr(segments.triton_launch, "INSTALLED", is_there)
            # What the kernel does not serve has its masks, one for each of 4 heads.
            if is_there and block == 32:
                assert 0 < masks_kept(block, dtype) < 0.5
            else:
                assert 4 <= masks_kept(block, dtype) < 4.5
