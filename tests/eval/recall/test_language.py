"""The small language model of the study of streams, and its filters at initialization."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data.opening import open_corpus
from cat_lm.mixers import Setting, make_mixer
from cat_lm.model.context import Context
from cat_lm.model.streams.pipeline import StreamPipeline
from eval.recall.language import LanguageCell, _rate, held_out
from eval.studies import streams


@pytest.fixture(scope="module")
def cell(tiny_corpus: Path) -> LanguageCell:
    fingerprint = open_corpus(tiny_corpus, "train").fingerprint
    documents = open_corpus(tiny_corpus, "validation").num_documents
    return LanguageCell(
        *(str(tiny_corpus), fingerprint, "cat", 32, 32, 1, 60, 1e-2),
        batch_size=8,
        documents=documents,
        document_tokens=100,
    )


def test_a_small_language_model_learns_and_is_repeatable(cell, tiny_corpus):
    record = cell.run("cpu", quiet=True)
    unigram = open_corpus(tiny_corpus, "train").manifest["unigram_loss"]
    assert record["loss"] < unigram - 0.3
    assert record == {**cell.run("cpu", quiet=True), "seconds": record["seconds"]}
    split = open_corpus(tiny_corpus, "validation")
    sizes = [split.document(i)[1] - split.document(i)[0] for i in range(split.num_documents)]
    assert record["documents"]["tokens"] == [min(n - 1, 100) for n in sizes]
    assert record["tokens_scored"] == sum(record["documents"]["tokens"])
    assert math.isclose(
        sum(record["documents"]["nats"]) / record["tokens_scored"], record["loss"], rel_tol=1e-4
    )
    assert 0 < record["standard_error"] < 0.5
    other = dataclasses.replace(cell, seed=1).run("cpu", quiet=True)
    assert other["loss"] != record["loss"]
    with pytest.raises(UserError, match="changed since"):
        dataclasses.replace(cell, fingerprint="0" * 64).run("cpu")


def test_a_rate_is_chosen_by_documents_that_are_not_scored(cell, tiny_corpus):
    corpus = open_corpus(tiny_corpus, "validation")
    kept = dataclasses.replace(cell, documents=corpus.num_documents - 3, choosing_documents=3)
    sizes = [corpus.document(i)[1] - corpus.document(i)[0] for i in range(corpus.num_documents)]
    predicted = [min(n - 1, 100) for n in sizes]
    record = dataclasses.replace(kept, steps=2).run("cpu", quiet=True)
    assert record["documents"]["tokens"] == predicted[3:]  # of all there are but the first
    assert record["validation"]["tokens_scored"] == sum(predicted[:3])
    # What is reported decides nothing.
    assert kept.score(record) == -record["validation"]["loss"] != -record["loss"]
    assert kept.score(record | {"loss": 0.0}) == kept.score(record)
    assert kept.tested_rows == 4 * corpus.num_documents and kept.timed().choosing_documents == 0
    assert "validation" not in dataclasses.replace(cell, steps=2).run("cpu", quiet=True)
    assert kept.key() == {**cell.key(), "documents": kept.documents, "choosing_documents": 3}
    more = dataclasses.replace(kept, documents=corpus.num_documents - 2)
    with pytest.raises(UserError, match=r"are to be scored and 3 others choose rates; prepare it"):
        more.run("cpu")


def test_the_rate_rises_over_a_tenth_and_falls_to_a_tenth():
    rates = [_rate(step, 100) for step in range(1, 101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and math.isclose(rates[-1], 0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_held_out_rows_are_the_starts_of_documents(tiny_corpus):
    corpus = open_corpus(tiny_corpus, "validation")
    found = held_out(corpus, 3, 10, 4)
    for number in range(3):
        start, stop = corpus.document((2 * number + 1) * corpus.num_documents // 6)
        text = corpus.tokens(start, min(stop, start + 11)).tolist()
        rows = found.documents == number
        labels = found.labels[rows].flatten()
        assert labels[labels != IGNORE_INDEX].tolist() == text[1:]
        inputs = found.inputs[rows].flatten()
        assert inputs[labels != IGNORE_INDEX].tolist() == text[:-1]
    with pytest.raises(UserError, match=r"has \d+ documents, 9,999 are to be scored; .*--valid"):
        held_out(corpus, 9_999, 10, 4)


def test_a_short_document_ends_with_its_eod_and_one_without_text_counts_nothing():
    tokens = np.array([5, 9, 9, 6, 7, 8, 9])  # documents 5 EOD; EOD; 6 7 8 EOD
    ends = [(0, 2), (2, 3), (3, 7)]
    corpus = SimpleNamespace(
        name="small",
        num_documents=3,
        eod_id=9,
        document=lambda i: ends[i],
        tokens=lambda start, stop: tokens[start:stop],
    )
    found = held_out(corpus, 3, 8, 2)
    assert found.inputs.tolist() == [[5, 9], [9, 9], [6, 7], [8, 9]]
    ignored = IGNORE_INDEX
    assert found.labels.tolist() == [[9, ignored], [ignored, ignored], [7, 8], [9, ignored]]
    assert found.documents.tolist() == [0, 1, 2, 2]
    first, rest = (
        held_out(corpus, n, 8, 2, among) for n, among in ((1, range(1)), (2, range(1, 3)))
    )
    assert first.inputs.tolist() + rest.inputs.tolist() == found.inputs.tolist()
    assert rest.documents.tolist() == [0, 1, 1]
    with pytest.raises(UserError, match=r"small: 1 documents .* have no token to predict; prepare"):
        held_out(corpus, 1, 8, 2, range(1, 2))


def tiny(scale: str) -> streams.Scale:
    return dataclasses.replace(streams.SCALES[scale], documents=4, choosing=2)


def test_every_model_of_the_grid_starts_as_the_one_without_filters():
    x = torch.randn(2, 9, 16)
    for mixer in streams.MIXERS.values():
        for kind in streams.CONV_TYPES:
            for line in streams.LINES:
                base = streams.Streams("none", shared_kv=line.shared_kv)
                found = []
                for each in (line, base):
                    torch.manual_seed(0)
                    mixed = make_mixer(streams.specification(mixer, kind, each))
                    found.append(mixed.build(Setting(16)).train())
                filtered, plain = found
                state = {k: v for k, v in filtered.state_dict().items() if "filter" not in k}
                plain.load_state_dict(state)
                outputs = filtered(x, Context()), plain(x, Context())
                torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("line", streams.LINES, ids=lambda line: line.name)
@pytest.mark.parametrize("name", ["softmax attention", "linear attention"])
def test_what_holds_by_algebra(name, line):
    """Exchanging two keys' values changes no answer where neither k nor v has a filter."""
    torch.manual_seed(0)
    specification = streams.specification(streams.MIXERS[name], "depthwise", line)
    layer = make_mixer(specification).build(Setting(16)).eval()
    for module in layer.modules():  # trained filters are no identity
        if isinstance(module, StreamPipeline):
            for filters in module.filters().values():
                torch.nn.init.normal_(filters)
    tokens = torch.randn(1, 12, 16)  # four keys with their values, three others, a query
    swapped = tokens[:, [0, 3, 2, 1, *range(4, 12)]]
    answers = [layer(row, Context())[:, -1] for row in (tokens, swapped)]
    equal = torch.allclose(*answers, rtol=1e-4, atol=1e-6)
    assert equal == (line.streams in ("none", "q"))
