"""R11 through loader and model: with masking, nothing of one document reaches another."""

import numpy as np
import pytest
import torch

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data import TrainLoader
from cat_lm.data.opening import open_corpus
from cat_lm.model import CatConfig, CatForCausalLM
from tests.prepared_data import EOD, random_documents, write_prepared

VOCAB, T = 64, 32
KINDS = {
    "head": {"conv_type": "head", "conv_window": 5},
    "multihead": {"conv_type": "multihead", "conv_window": 3},
    "depthwise": {"conv_type": "depthwise", "conv_window": 5, "conv_activation": "silu"},
    "maps": {"conv_type": "multihead", "conv_window": 3, "conv_mixing": "maps"},
}


def model_of(**options):
    torch.manual_seed(0)
    config = CatConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_init="uniform",
        **options,
    )
    return CatForCausalLM(config).eval()


def batch_of(folder, packing, mask_documents=True):
    documents = [
        [1 + token % (VOCAB - 1) for token in document[:-1]] + [EOD]
        for document in random_documents(60, 24)
    ]
    write_prepared(folder, documents)
    corpus = open_corpus(folder, "train")
    return TrainLoader(corpus, T, 4, 0, mask_documents, packing).batch(0)


def logits_of(model, batch):
    with torch.no_grad():
        document_ids = batch.get("document_ids")
        if document_ids is not None:
            document_ids = torch.from_numpy(document_ids)
        return model(torch.from_numpy(batch["input_ids"]), document_ids=document_ids).logits


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_changing_a_document_leaves_all_others_bit_for_bit(tmp_path, packing, kind):
    batch = batch_of(tmp_path / "data", packing)
    model = model_of(**KINDS[kind])
    before = logits_of(model, batch)
    numbers = batch["document_ids"]
    for document in (0, 1):
        changed = {key: values.copy() for key, values in batch.items()}
        inside = numbers == document
        # Every token of it, its EOD too; the document ids are those of the loader.
        changed["input_ids"][inside] = 1 + (changed["input_ids"][inside] + 7) % (VOCAB - 1)
        after = logits_of(model, changed)
        outside = torch.from_numpy(~inside)
        assert outside.any() and torch.equal(after[outside], before[outside])
        assert not torch.equal(after[~outside], before[~outside])


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_documents_in_a_window_are_scored_as_if_alone(tmp_path, packing):
    """The loss of a packed, masked batch is that of its documents in rows of their own."""
    batch = batch_of(tmp_path / "data", packing)
    model = model_of(**KINDS["head"])
    packed = logits_of(model, batch)
    for row, numbers in enumerate(batch["document_ids"]):
        for number in np.unique(numbers):
            inside = np.flatnonzero(numbers == number)
            alone = logits_of(model, {"input_ids": batch["input_ids"][row : row + 1, inside]})
            torch.testing.assert_close(packed[row, inside], alone[0], rtol=1e-4, atol=1e-5)
        # Labels that would cross a border are left out.
        assert (batch["labels"][row][:-1][np.diff(numbers) > 0] == IGNORE_INDEX).all()


def test_without_masking_a_document_does_reach_the_next(tmp_path):
    """Or the tests above would prove nothing."""
    batch = batch_of(tmp_path / "data", "best_fit", mask_documents=False)
    assert "document_ids" not in batch
    model = model_of(**KINDS["head"])
    changed = {key: values.copy() for key, values in batch.items()}
    changed["input_ids"][:, 0] = 1 + (changed["input_ids"][:, 0] + 7) % (VOCAB - 1)
    before, after = logits_of(model, batch), logits_of(model, changed)
    assert not torch.equal(before[:, -1], after[:, -1])
