"""Texts and splits as streams of tokens, and their scores against the harness's."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_verified
from cat_lm.pretrained.loading import load_model, load_tokenizer
from eval.length_sweep.token_stream import (
    Documents,
    split_documents,
    split_stream,
    text_stream,
)
from tests.eval.length_sweep.calls import DOCUMENTS, TEXT


class TestStreams:
    def test_every_byte_of_a_text_is_scored(self, models):
        stream = text_stream([TEXT], load_tokenizer(models["cat"]), "text")
        assert stream.tokens[0] == 256
        assert stream.tokens[1:].tolist() == list(TEXT.encode())
        assert stream.num_bytes == len(TEXT.encode())
        assert stream.num_words == len(re.split(r"\s+", TEXT))

    def test_special_tokens_in_a_text_are_text(self, models):
        stream = text_stream(["a<|endoftext|>b"], load_tokenizer(models["cat"]), "text")
        assert stream.tokens[1:].tolist() == list(b"a<|endoftext|>b")

    @pytest.mark.parametrize("separator", [r"(\n)(=)+(\n)", r"\n=+\n|(x)"])
    def test_groups_of_a_separator_are_no_documents(self, separator):
        parts = split_documents("\n===\n".join(DOCUMENTS), separator)
        assert parts == list(DOCUMENTS)

    def test_documents_of_a_text(self, models):
        parts = split_documents("\n===\n".join(DOCUMENTS), r"\n=+\n")
        assert parts == list(DOCUMENTS)
        tokenizer = load_tokenizer(models["cat"])
        stream = text_stream(parts, tokenizer, "text")
        assert stream.num_documents == 4
        assert stream.texts() == parts
        assert stream.num_bytes == sum(map(len, DOCUMENTS))
        assert stream.num_words == sum(len(re.split(r"\s+", part)) for part in DOCUMENTS)
        long = stream.whole_documents(Documents(120), None)
        assert long.texts() == [DOCUMENTS[0], DOCUMENTS[2]]
        assert long.tokens[0] == 256
        assert stream.whole_documents(Documents(120), 200).texts() == [DOCUMENTS[0]]
        assert stream.whole_documents(Documents(120), 130).texts() == [DOCUMENTS[0][:130]]

    def test_beginnings_of_documents(self, models):
        tokenizer = load_tokenizer(models["cat"])
        stream = text_stream(list(DOCUMENTS), tokenizer, "text")
        begun = stream.whole_documents(Documents(120, 125), None)
        texts = [DOCUMENTS[0][:125], DOCUMENTS[2][:125]]
        assert begun.texts() == texts and begun.num_documents == 2
        assert (begun.scored, begun.num_bytes) == (250, 250)
        assert begun.counts["text_tokens"] == stream.scored
        assert begun.counts["left_out_document_rests"] > 0
        for (start, stop), text in zip(begun.spans, texts, strict=True):
            assert begun.tokens[start] == stream.eod_id
            assert bytes(begun.tokens[start + 1 : stop + 1].tolist()).decode() == text
        one = stream.whole_documents(Documents(120, 125), 249)
        assert one.texts() == texts[:1]
        # As long as they are: the documents themselves, whose ends are scored too.
        long = stream.whole_documents(Documents(120), None)
        same = stream.whole_documents(Documents(120, 10_000), None)
        assert same.spans is None and same.sha256 == long.sha256

    def test_split_has_the_manifest_s_bytes_and_a_part_of_it_its_own(self, tiny_corpus, models):
        tokenizer = load_tokenizer(models["cat"])
        whole = split_stream(tiny_corpus, tokenizer)
        assert whole.num_bytes == (whole.tokens != whole.eod_id).sum()
        part = split_stream(tiny_corpus, tokenizer, 500)
        assert len(part.tokens) == 501
        assert part.num_bytes == (part.tokens[1:] != part.eod_id).sum()
        assert part.tokens.tolist() == whole.tokens[:501].tolist()
        assert whole.cut(300).num_bytes == (whole.tokens[1:301] != 256).sum()

    def test_scored_and_left_out_are_all_tokens_of_a_split(self, tiny_corpus, models):
        tokenizer = load_tokenizer(models["cat"])
        whole = split_stream(tiny_corpus, tokenizer)
        total = len(whole.tokens)
        lengths = [len(text) + 1 for text in whole.texts()]
        lengths[0] += 1  # the first token is no part of what is scored
        assert total == sum(lengths)  # every document and its end
        longer = sum(length for length in lengths if length >= 200)
        for stream, left_out in (
            (whole, {"first": 1}),
            (split_stream(tiny_corpus, tokenizer, 500), {"first": 1, "max_tokens": total - 501}),
            (
                split_stream(tiny_corpus, tokenizer, 500).cut(490, multiple_of=64),
                {"first": 1, "max_tokens": total - 491, "end": 490 - 448},
            ),
            (
                split_stream(tiny_corpus, tokenizer, choice=Documents(200)),
                {"short_documents": total - longer},
            ),
            (
                split_stream(tiny_corpus, tokenizer, 300, choice=Documents(200)),
                {"short_documents": total - longer, "max_tokens": None},
            ),
        ):
            counts = stream.counts
            assert counts.pop("text_tokens") == total == stream.scored + sum(counts.values())
            for reason, count in counts.items():
                expected = left_out.get(reason.removeprefix("left_out_"), 0)
                assert count == expected or expected is None, reason
            assert f"{stream.scored:,} of {total:,} tokens are scored; left out: " in stream.account

    @pytest.mark.parametrize("end", [-1, 0, 1])
    def test_documents_that_begin_among_the_skipped_tokens_are_not_scored(
        self, tiny_corpus, models, end
    ):
        tokenizer = load_tokenizer(models["cat"])
        corpus = open_verified(tiny_corpus, "validation")
        documents = [corpus.document(number) for number in range(corpus.num_documents)]
        # The third document begins at, before, and behind the first token that is not skipped.
        skip = documents[2][0] + end
        stream = split_stream(tiny_corpus, tokenizer, choice=Documents(1), skip_tokens=skip)
        kept = [corpus.tokens(*where) for where in documents if where[0] >= skip]
        assert len(kept) == len(documents) - (3 if end > 0 else 2)
        assert stream.tokens[1:].tolist() == np.concatenate(kept).tolist()
        counts = stream.counts
        skipped = corpus.num_tokens - sum(map(len, kept))
        assert counts["left_out_skip_tokens"] == skipped >= skip
        assert counts["text_tokens"] == corpus.num_tokens == stream.scored + skipped
        assert f"{skipped:,} by --skip-tokens" in stream.account
        # What is left is chosen among as a text of its own.
        chosen = split_stream(tiny_corpus, tokenizer, 300, Documents(100, 120), skip_tokens=skip)
        assert chosen.counts["text_tokens"] == corpus.num_tokens
        first = next(part for part in kept if len(part) >= 100)
        assert chosen.tokens[1:101].tolist() == first[:100].tolist()

    def test_skipped_tokens_are_not_read_across_documents_either(self, tiny_corpus, models):
        tokenizer = load_tokenizer(models["cat"])
        whole = split_stream(tiny_corpus, tokenizer)
        total = len(whole.tokens)
        rest = split_stream(tiny_corpus, tokenizer, skip_tokens=101)
        assert rest.tokens.tolist() == whole.tokens[101:].tolist()
        assert rest.num_bytes == (rest.tokens[1:] != rest.eod_id).sum()
        part = split_stream(tiny_corpus, tokenizer, 50, skip_tokens=101)
        assert part.tokens.tolist() == whole.tokens[101:152].tolist()
        left_out = {"first": 1, "skip_tokens": 101, "max_tokens": total - 101 - 51}
        for reason, count in left_out.items():
            assert part.counts[f"left_out_{reason}"] == count
        assert part.counts["text_tokens"] == total
        assert len(split_stream(tiny_corpus, tokenizer, skip_tokens=total - 1).tokens) == 1
        same = split_stream(tiny_corpus, tokenizer, skip_tokens=0)
        assert (same.sha256, same.counts) == (whole.sha256, whole.counts)

    def test_skipping_everything_is_refused(self, tiny_corpus, models):
        tokenizer = load_tokenizer(models["cat"])
        total = len(split_stream(tiny_corpus, tokenizer).tokens)
        for choice in (None, Documents(1)):
            for skip in (total, total + 1):
                with pytest.raises(UserError, match=rf"^--skip-tokens {skip}: .* has {total:,} to"):
                    split_stream(tiny_corpus, tokenizer, choice=choice, skip_tokens=skip)
        with pytest.raises(UserError, match=r"no document of .* begins after so many tokens"):
            split_stream(tiny_corpus, tokenizer, choice=Documents(1), skip_tokens=total - 1)

    def test_scored_and_left_out_are_all_tokens_of_a_text(self, models):
        tokenizer = load_tokenizer(models["cat"])
        stream = text_stream(DOCUMENTS, tokenizer, "text")
        # The ends of documents are scored, but for the last one's, which a text does not have.
        total = sum(map(len, DOCUMENTS)) + len(DOCUMENTS) - 1
        assert stream.counts["text_tokens"] == stream.scored == total
        assert stream.account == f"text: {total} of {total} tokens are scored"
        for cut in (
            stream.cut(300, multiple_of=64),
            stream.whole_documents(Documents(120), None),
            stream.whole_documents(Documents(120), 130),
        ):
            counts = cut.counts
            assert counts.pop("text_tokens") == total == cut.scored + sum(counts.values())

    def test_long_documents_of_a_split(self, tiny_corpus, models):
        tokenizer = load_tokenizer(models["cat"])
        texts = [t for t in split_stream(tiny_corpus, tokenizer).texts() if len(t) >= 199]
        stream = split_stream(tiny_corpus, tokenizer, choice=Documents(200))
        assert stream.texts()[1:] == texts[-stream.num_documents + 1 :]
        assert stream.tokens[0] == stream.tokens[-1] == 256
        with pytest.raises(UserError, match="no document has 100000 tokens, the longest has"):
            split_stream(tiny_corpus, tokenizer, choice=Documents(100_000))


def test_harness_rolling_perplexity_agrees(models):
    """On one document longer than the context, whose length is no multiple of it."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from eval.length_sweep.perplexity import score_tokens

    model, tokenizer = load_model(models["cat"], device="cpu"), load_tokenizer(models["cat"])
    stream = text_stream([TEXT], tokenizer, "text")
    for length in (32, 100, 1000):
        harness = HFLM(
            pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=1, backend="causal"
        )
        request = Instance("loglikelihood_rolling", {}, (TEXT,), 0)
        (theirs,) = harness.loglikelihood_rolling([request], disable_tqdm=True)
        units = {"num_bytes": stream.num_bytes, "num_words": stream.num_words}
        ours = score_tokens(model, stream.tokens, length, **units)
        assert ours.nll == pytest.approx(-float(theirs), rel=1e-5)
        words = len(re.split(r"\s+", TEXT))
        assert ours.word_perplexity == pytest.approx(math.exp(-float(theirs) / words), rel=1e-4)
