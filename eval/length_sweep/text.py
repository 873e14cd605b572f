"""The tokens that a length sweep scores: of the same text for every model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError
from cat_lm.pretrained.loading import check_vocabulary, load_tokenizer
from eval.length_sweep.token_stream import (
    Documents,
    read_text,
    split_documents,
    split_stream,
    text_stream,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eval.length_sweep.cells import Subject
    from eval.length_sweep.options import Options
    from eval.length_sweep.token_stream import TokenStream


def load_tokenizers(subjects: Sequence[Subject]) -> list[PreTrainedTokenizerBase]:
    """Load each model's tokenizer. Raises UserError for one that does not fit its model."""
    tokenizers = [load_tokenizer(subject.folder) for subject in subjects]
    for subject, tokenizer in zip(subjects, tokenizers, strict=True):
        check_vocabulary(tokenizer, subject.config)
    return tokenizers


def sweep_streams(subjects: Sequence[Subject], asked: Options) -> list[TokenStream]:
    """Return each model's tokens of the same text; the first model and `largest` fix its range.

    Raises:
        UserError: the text has no window of the largest length in a model's own tokens.
    """
    largest, most = asked.largest, asked.max_tokens
    choice = None
    if asked.documents == "per-document":
        choice = Documents(asked.min_document_tokens or largest, asked.max_document_tokens)

    def fitting(stream: TokenStream, most: int | None = None) -> TokenStream:
        return long_enough(stream, largest) if choice else _whole_windows(stream, largest, most)

    tokenizers = load_tokenizers(subjects)
    if asked.data is not None:
        # Every tokenizer is compared with the data's own.
        how = (most, choice, asked.split or "validation", asked.skip_tokens or 0)
        return [fitting(split_stream(asked.data, each, *how), most) for each in tokenizers]
    first = tokenizers[0]
    documents = split_documents(read_text(asked.text), asked.document_separator)
    stream = text_stream(documents, first, str(asked.text))
    stream = fitting(stream.whole_documents(choice, most) if choice else stream, most)
    streams = []
    for subject, tokenizer in zip(subjects, tokenizers, strict=True):
        if tokenizer.get_vocab() == first.get_vocab():
            streams.append(stream)
            continue
        # The same text can be fewer tokens than the first model's.
        other = text_stream(stream.texts(), tokenizer, f"model {subject.label}: {asked.text}")
        if stream.spans is not None:
            other = other.ended_as(stream)
        fitting(other)
        streams.append(other)
    return streams


def _whole_windows(stream: TokenStream, largest: int, max_tokens: int | None) -> TokenStream:
    available = len(stream.tokens) - 1
    limit = min(available, max_tokens or available)
    if limit < largest:
        why = f"--max-tokens is {limit}" if limit < available else f"it has {available} tokens"
        raise UserError(
            f"{stream.source}: too short for length {largest} ({why}); "
            f"use lengths up to {limit} or a longer text"
        )
    return stream.cut(limit, multiple_of=largest)


def long_enough(stream: TokenStream, largest: int) -> TokenStream:
    """Return the stream. Raises UserError if no document fills a window of the largest length."""
    from eval.length_sweep.perplexity import document_spans

    spans = stream.spans or document_spans(stream.tokens, stream.eod_id)
    longest = max(stop - start for start, stop in spans)
    if longest < largest:
        raise UserError(
            f"{stream.source}: too short for length {largest}: the longest document has "
            f"{longest} tokens"
        )
    return stream
