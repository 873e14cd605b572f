"""How many graphs torch.compile makes of an engine's steps: one, whatever the batches hold."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from cat_lm.config import load_config
from cat_lm.model.attention import core, masks
from cat_lm.model.attention.masks import DocumentAttention
from cat_lm.training.engine import Engine
from tests.conftest import REPOSITORY
from tests.tiny_models import cat_model, random_ids


def graphs(rows: list[list[int]], borders: bool = True, scored: type = torch.tensor) -> int:
    """How many are made of passes over rows of documents of these lengths."""
    torch._dynamo.reset()
    overrides = ["train.micro_batch_size=1", "train.compile=true", "data.mask_documents=true"]
    engine, counter = object.__new__(Engine), CompileCounterWithBackend("eager")
    engine.config = load_config(REPOSITORY / "configs/quickstart.yaml", overrides)
    engine.ranks = SimpleNamespace(device=torch.device("cpu"))
    engine._gives_borders, engine.sequence_group = borders, None
    engine.deepspeed = cat_model(num_hidden_layers=1, conv_window=4).train()
    engine.deepspeed.compile(backend=counter, fullgraph=True)
    for number, lengths in enumerate(rows):
        ids = random_ids(1, sum(lengths), seed=number).numpy()
        documents = np.repeat(np.arange(len(lengths)), lengths)[None]
        batch = {"input_ids": ids, "labels": ids, "document_ids": documents}
        for micro_batch in engine._micro_batches(batch):
            engine._forward(micro_batch, scored(7.0 + number)).loss.backward()
    return counter.frame_count


@pytest.fixture
def by_borders(monkeypatch):
    """Attention by borders, in operators that a CPU has."""

    def attend(query, key, value, borders, scaling, dropout):
        place = torch.arange(query.shape[2])
        number = torch.searchsorted(borders, place, right=True)
        seen = (number[:, None] == number) & (place[:, None] >= place)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
        return output.transpose(1, 2)

    monkeypatch.setattr(masks, "document_attention", lambda *_: DocumentAttention("varlen", ""))
    monkeypatch.setattr(core, "attend_within_borders", attend)


ROWS = [[20], [6, 14], [5, 5, 10]]


def test_numbers_of_tokens_and_documents_share_a_graph(by_borders):
    assert graphs(ROWS) == 1


@pytest.mark.long  # three engines are compiled
def test_plain_numbers_and_borders_of_fixed_lengths_would_not(by_borders, monkeypatch):
    """Negative controls: what an engine does about each."""
    assert graphs(ROWS, scored=float) > 1
    assert graphs(ROWS, borders=False) == 1  # a graph cannot find borders: it makes a mask
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda *_: None)
    assert graphs(ROWS) > 1
