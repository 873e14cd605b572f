"""Packed documents without a mask: borders that say the same, and attention by them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cat_lm.config import RunConfig, load_config
from cat_lm.model.attention import masks
from cat_lm.model.attention.masks import DocumentAttention, document_attention
from cat_lm.model.attention.modules import landmark
from cat_lm.model.attention.modules.landmark import train_landmarks
from cat_lm.ops.runtime.documents import document_borders, document_positions
from cat_lm.training import building
from cat_lm.training.building import choose_document_attention
from cat_lm.training.engine import Engine
from tests.runs import run_values
from tests.tiny_models import cat_model, each_model, random_ids

REPOSITORY = Path(__file__).parents[3]
IDS = {
    "one": [[0] * 7, [5] * 7],
    "several": [[0, 0, 0, 1, 1, 2, 2], [4, 4, 4, 4, 4, 4, 4]],
    "one comes back": [[0, 0, 1, 1, 0, 0, 0], [3, 2, 1, 0, 1, 2, 3]],
    "single tokens": [[0], [0]],
}


def of_borders(query, key, value, borders, keys, most, _, dropout, causal, debug, *, scale):
    """The kernel's arguments, document by document: [B·T, H, D] to the same."""
    assert keys is borders and borders.dtype == torch.int32 and causal and not debug
    assert dropout == 0 and int(borders.diff().max()) <= most
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        seen = torch.ones(stop - start, stop - start).tril().bool()
        scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs), *[None] * 4


@pytest.fixture
def kernel(monkeypatch):
    """The GPU's choice and a slow form of its kernel; the calls that it got."""
    calls = []

    def called(*given, **named):
        calls.append(given)
        return of_borders(*given, **named)

    monkeypatch.setattr(masks, "document_attention", lambda *_: DocumentAttention("varlen", ""))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", called)
    return calls


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_borders_say_what_the_mask_says(ids):
    ids = torch.tensor(ids)
    batch, time = ids.shape
    inputs = torch.zeros(batch, time, 32)
    context = masks.context_of(cat_model().config, inputs, None, None, ids, None)
    mask = context.mask
    if mask is None:  # nothing that a single token must not see
        mask = torch.ones(batch, 1, time, time).tril().bool()
    borders = document_borders(ids)
    assert borders.dtype == torch.int32 and borders[0] == 0 and borders[-1] == ids.numel()
    number = torch.repeat_interleave(torch.arange(len(borders) - 1), borders.diff())
    seen = (number[:, None] == number) & torch.ones(ids.numel(), ids.numel()).tril().bool()
    joined = torch.block_diag(*mask[:, 0].float()).bool()
    assert torch.equal(seen, joined)
    assert torch.equal(context.document_positions, document_positions(ids).int())


@each_model("maps")
def test_a_model_computes_the_same_by_borders(variant, kernel, monkeypatch):
    """Loss and every gradient; also where the borders are given."""
    ids = random_ids(2, 30)
    document_ids = torch.tensor([[0] * 3 + [1] * 20 + [0] * 7, [2] * 30])
    results = []
    for how in ("mask", "borders", "given"):
        if how == "mask":
            monkeypatch.setattr(masks, "document_attention", document_attention)
        else:
            by = DocumentAttention("varlen", "")
            monkeypatch.setattr(masks, "document_attention", lambda *_, by=by: by)
        given = {"document_borders": document_borders(document_ids)} if how == "given" else {}
        model = cat_model(**variant).train()
        loss = model(input_ids=ids, labels=ids, document_ids=document_ids, **given).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert len(kernel) == 2 * model.config.num_hidden_layers
    for other in results[1:]:
        for expected, computed in zip(results[0], other, strict=True):
            torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-6)


def chosen(monkeypatch, capability=(9, 0), device="cuda", dtype=torch.bfloat16, **fields):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    return document_attention(cat_model(**fields).config, torch.device(device), dtype)


def test_what_keeps_documents_apart_is_chosen_by_name(monkeypatch):
    assert chosen(monkeypatch).name == "varlen"
    for fields, words in (
        ({"device": "cpu"}, "on this cpu"),
        ({"dtype": torch.float32}, "half precision, not float32"),
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"hidden_size": 48, "position_embedding": "none"}, "multiple of 8, up to 256, not 12"),
        ({"hidden_size": 256, "conv_rank": 5}, "multiple of 8, up to 256, not 320"),
        ({"attn_implementation": "eager"}, "attn_implementation=eager takes a mask"),
        ({"attn_implementation": "flex_attention"}, "takes a mask of blocks"),
        ({"conv_type": "multihead", "conv_mixing": "maps"}, "cannot compute mixed attention maps"),
    ):
        name, reason = chosen(monkeypatch, **fields)
        assert name == "mask" and words in reason, (fields, reason)


LANDMARK = {"attention": "landmark", "attention_options": {"block": 4, "top_k": 1}}


@pytest.mark.parametrize("way", ["guided", "hard"])
def test_landmarks_that_are_taught_attend_within_borders(way, kernel, monkeypatch):
    """Where the kernel serves, with the loss and gradients that a mask gives; not otherwise."""
    ids = random_ids(2, 30)
    document_ids = torch.tensor([[0] * 3 + [1] * 20 + [0] * 7, [2] * 30])
    results = []
    for obstacle in ("no kernel", None):
        monkeypatch.setattr(landmark, "why_no_kernel", lambda *_, found=obstacle: found)
        model = cat_model(**LANDMARK).train()
        train_landmarks(model, way, rows=30)
        given = {"document_ids": document_ids, "document_borders": document_borders(document_ids)}
        output = model(input_ids=ids, labels=ids, **given)
        own = output.auxiliary_loss if way == "guided" else 0.0
        (output.loss + own).backward()
        results.append([output.loss.detach(), *(p.grad for p in model.parameters())])
        taken = model.config.num_hidden_layers if way == "guided" and obstacle is None else 0
        assert len(kernel) == taken
    for expected, computed in zip(*results, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-6)


def test_a_run_that_teaches_landmarks_gives_borders(monkeypatch, tmp_path):
    """As one of softmax attention, which it computes; else landmarks keep documents apart."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = {}
    for way in ("guided", "hard"):
        values = run_values(tmp_path, tmp_path, landmark_loss=way, precision="bf16")
        values["model"] |= LANDMARK
        values["data"]["mask_documents"] = True
        config, model = RunConfig.model_validate(values), cat_model(**LANDMARK)
        names[way] = choose_document_attention(config, model, torch.device("cuda")).name
    assert names == {"guided": "varlen", "hard": "mask"}


@pytest.mark.parametrize("name", ["varlen", "flash", "mask"])
def test_an_engine_gives_the_borders_that_it_knows(name, monkeypatch):
    """Of each micro-batch's own rows, on the host's side, where attention takes borders."""
    monkeypatch.setattr(building, "document_attention", lambda *_: DocumentAttention(name, ""))
    sizes = ["train.global_batch_size=2", "train.micro_batch_size=1"]
    config, without = (
        load_config(
            REPOSITORY / "configs/quickstart.yaml", [*sizes, f"data.mask_documents={masked}"]
        )
        for masked in ("true", "false")
    )
    assert choose_document_attention(config, cat_model(), torch.device("cuda")).name == name
    engine = object.__new__(Engine)
    engine.config, engine.ranks = config, SimpleNamespace(device=torch.device("cpu"))
    engine._gives_borders, engine.sequence_group = name != "mask", None
    ids = np.array(IDS["several"])
    parts = engine._micro_batches({"input_ids": ids, "document_ids": ids})
    found = [part["document_borders"].tolist() if name != "mask" else None for part in parts]
    assert found == ([None, None] if name == "mask" else [[0, 3, 5, 7], [0, 7]])
    assert choose_document_attention(without, cat_model(), torch.device("cuda")) is None


def test_flash_attention_gets_the_documents_lengths():
    """Rows are joined end to end; every row and every document starts a sequence."""
    config = cat_model().config
    config._attn_implementation_internal = "flash_attention_2"
    document_ids = torch.tensor([[0, 0, 0, 1, 1], [4, 4, 4, 4, 4]])
    inputs = torch.zeros(2, 5, 32)
    context = masks.context_of(config, inputs, None, None, document_ids, None)
    assert context.arguments["cu_seq_lens_q"].tolist() == [0, 3, 5, 10]
    assert context.arguments["cu_seq_lens_k"].dtype == torch.int32
    assert context.arguments["max_length_k"] == 5
    assert context.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert context.mask is None
