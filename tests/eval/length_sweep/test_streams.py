"""Texts and splits as streams of tokens: which are scored, and that all others are counted."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_verified
from cat_lm.pretrained.loading import load_model, load_tokenizer
from eval.length_sweep.perplexity import score_tokens
from eval.length_sweep.token_stream import (
    Documents,
    first_document,
    split_documents,
    split_stream,
    text_stream,
)
from tests.eval.length_sweep.calls import DOCUMENTS, TEXT

END = 256  # of the tokenizer `bytes`
WITH_FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
CHOICES = st.builds(Documents, st.integers(1, 90), st.none() | st.integers(1, 120))


@pytest.fixture(scope="module")
def tokenizer(models):
    return load_tokenizer(models["cat"])


@pytest.fixture(scope="module")
def split(tiny_corpus) -> list[int]:
    corpus = open_verified(tiny_corpus, "validation")
    return corpus.tokens(0, corpus.num_tokens).tolist()


def parts_of(tokens: list[int]) -> list[list[int]]:
    """Return documents with their ends, of which the last may have none."""
    parts, part = [], []
    for token in tokens:
        part.append(token)
        if token == END:
            parts.append(part)
            part = []
    return [*parts, part] if part else parts


def chosen_of(tokens: list[int], choice: Documents, budget: int | None) -> list[int] | None:
    """Return what is scored of the documents that a choice takes, in a few lines."""
    parts = [part for part in parts_of(tokens) if part != [END] and len(part) >= choice.at_least]
    parts = [part[: choice.at_most] for part in parts]
    kept, size = [], 0
    for part in parts:
        size += len(part)
        if budget and size > budget:
            break
        kept.append(part)
    kept = kept or [part[:budget] for part in parts[:1]]
    return [token for part in kept for token in part] if kept else None


def check(stream, scored: list[int], total: int, first: int = 0) -> None:
    """Check what a stream scores, and that it counts all other tokens of the text.

    Args:
        first: bytes of a first token that is in no score.
    """
    spans = stream.spans or [(0, len(stream.tokens) - 1)]
    tokens = stream.tokens.tolist()
    assert [token for a, b in spans for token in tokens[a + 1 : b + 1]] == scored
    assert stream.scored == len(scored)
    assert stream.num_bytes == sum(token != END for token in scored) + first
    counts = stream.counts
    assert counts.pop("text_tokens") == total == stream.scored + sum(counts.values())
    assert f"{len(scored):,} of {total:,} tokens are scored" in stream.account


def test_text_is_tokens_after_an_end(tokenizer):
    stream = text_stream([TEXT], tokenizer, "text")
    assert stream.tokens.tolist() == [END, *TEXT.encode()]
    assert stream.num_bytes == len(TEXT.encode())
    assert stream.num_words == len(re.split(r"\s+", TEXT))
    # What looks like a special token is text.
    stream = text_stream(["a<|endoftext|>b"], tokenizer, "text")
    assert stream.tokens[1:].tolist() == list(b"a<|endoftext|>b")


@pytest.mark.parametrize("separator", [r"\n=+\n", r"(\n)(=)+(\n)", r"\n=+\n|(x)"])
def test_documents_of_a_text_are_what_the_separator_parts(tokenizer, separator):
    parts = split_documents("\n===\n".join(DOCUMENTS), separator)
    assert parts == list(DOCUMENTS)
    stream = text_stream(parts, tokenizer, "text")
    assert stream.num_documents == 4 and stream.texts() == parts
    assert stream.num_words == sum(len(re.split(r"\s+", part)) for part in DOCUMENTS)


@WITH_FIXTURES
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    choice=CHOICES,
    budget=st.none() | st.integers(1, 300),
    multiple=st.integers(1, 40),
)
def test_parts_of_a_text_score_and_count_all_tokens(tokenizer, sizes, choice, budget, multiple):
    documents = [chr(97 + number) * size for number, size in enumerate(sizes)]
    stream = text_stream(documents, tokenizer, "text")
    tokens = stream.tokens[1:].tolist()
    check(stream, tokens, len(tokens))
    limit = budget or len(tokens)
    cut = min(limit, len(tokens)) // multiple * multiple
    check(stream.cut(limit, multiple), tokens[:cut], len(tokens))
    expected = chosen_of(tokens, choice, budget)
    if expected is None:
        with pytest.raises(UserError, match=f"no document has {choice.at_least} tokens"):
            stream.whole_documents(choice, budget)
    else:
        check(stream.whole_documents(choice, budget), expected, len(tokens))


@WITH_FIXTURES
@given(
    skip=st.integers(0, 500),
    most=st.none() | st.integers(1, 400),
    choice=st.none() | CHOICES,
)
def test_parts_of_a_split_score_and_count_all_tokens(
    tiny_corpus, tokenizer, split, skip, most, choice
):
    stream = split_stream(tiny_corpus, tokenizer, most, choice, skip_tokens=skip)
    if choice is None:
        scored = split[skip + 1 :][:most]
    else:
        # Documents that begin among the skipped tokens are not scored.
        begins = np.cumsum([0] + [len(part) for part in parts_of(split)])
        scored = chosen_of(split[begins[begins >= skip][0] :], choice, most)
    # Of the whole split the bytes are the manifest's.
    is_whole = choice is None and len(scored) == len(split) - 1
    check(stream, scored, len(split), first=int(is_whole))
    assert stream.counts["left_out_skip_tokens"] >= skip


def test_document_that_begins_behind_the_skipped_tokens_is_first(split):
    ends = [number for number, token in enumerate(split) if token == END]
    for skip, begin in ((0, 0), (1, ends[0] + 1), (ends[0], ends[0] + 1), (ends[0] + 1,) * 2):
        assert first_document(np.array(split), END, skip) == begin
    assert first_document(np.array(split), END, ends[0] + 2) == ends[1] + 1


def test_whole_documents_are_scored_as_a_text_of_their_own(tokenizer):
    stream = text_stream(list(DOCUMENTS), tokenizer, "text")
    long = stream.whole_documents(Documents(120), None)
    same = stream.whole_documents(Documents(120, 10_000), None)
    assert same.spans is None and same.sha256 == long.sha256
    assert long.texts() == [DOCUMENTS[0], DOCUMENTS[2]]


def test_words_of_documents_that_are_cut_stay_apart(tokenizer):
    stream = text_stream(["ab cd", "ef gh", "ij kl"], tokenizer, "text")
    cut = stream.whole_documents(Documents(1, 5), None)
    assert cut.spans is not None and cut.texts() == ["ab cd", "ef gh", "ij kl"]
    assert (cut.num_words, cut.num_bytes) == (6, 15)


def test_skipping_everything_is_refused(tiny_corpus, tokenizer, split):
    total = len(split)
    for choice in (None, Documents(1)):
        with pytest.raises(UserError, match=rf"^--skip-tokens {total}: .* has {total:,} tokens"):
            split_stream(tiny_corpus, tokenizer, choice=choice, skip_tokens=total)
    with pytest.raises(UserError, match=r"no document of .* begins after so many tokens"):
        split_stream(tiny_corpus, tokenizer, choice=Documents(1), skip_tokens=total - 1)


def test_harness_rolling_perplexity_agrees(models, tokenizer):
    """On one document longer than the context, whose length is no multiple of it."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = load_model(models["cat"], device="cpu")
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
