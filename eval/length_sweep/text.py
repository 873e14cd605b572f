"""The tokens that a length sweep scores: of the same text for every model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError
from cat_lm.pretrained.loading import check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eval.length_sweep.cells import Subject
    from eval.length_sweep.token_stream import Documents, TokenStream

WIKITEXT = "wikitext"  # in the place of a file: WikiText-2 raw, see wikitext.py


def sweep_streams(
    subjects: Sequence[Subject],
    largest: int,
    text: Path | str | None,
    data: Path | str | None,
    separator: str | None,
    max_tokens: int | None,
    choice: Documents | None,
    split: str = "validation",
    skip_tokens: int = 0,
) -> list[TokenStream]:
    """Each model's tokens of the same text; the range is fixed by the first and `largest`.

    Args:
        skip_tokens: of `data`, see `split_stream`.

    Raises UserError where the text has no window of `largest` tokens in a model's own tokens.
    """
    from eval.length_sweep.token_stream import read_text, split_documents, split_stream, text_stream

    tokenizers = [load_tokenizer(subject.folder) for subject in subjects]
    for subject, tokenizer in zip(subjects, tokenizers, strict=True):
        check_vocabulary(tokenizer, subject.config)
    first = tokenizers[0]
    if data is not None:
        # Every tokenizer is compared with the data's own.
        chosen = (max_tokens, choice, split, skip_tokens)
        streams = [split_stream(data, tokenizer, *chosen) for tokenizer in tokenizers]
        if choice is not None:
            return [long_enough(stream, largest) for stream in streams]
        return [_whole_windows(stream, largest, max_tokens, first) for stream in streams]
    stream = text_stream(split_documents(read_text(text), separator), first, str(text))
    if choice is None:
        stream = _whole_windows(stream, largest, max_tokens, first)
    else:
        stream = long_enough(stream.whole_documents(choice, max_tokens, first), largest)
    scored = None
    streams = []
    for subject, tokenizer in zip(subjects, tokenizers, strict=True):
        if tokenizer.get_vocab() == first.get_vocab():
            streams.append(stream)
            continue
        scored = scored or stream.texts(first)
        # The same text can be fewer tokens than the first model's.
        other = text_stream(scored, tokenizer, f"model {subject.label}: {text}")
        if stream.spans is not None:
            other = other.ended_as(stream)
        if choice is None:
            _whole_windows(other, largest, None, tokenizer)
        streams.append(other if choice is None else long_enough(other, largest))
    return streams


def _whole_windows(
    stream: TokenStream,
    largest: int,
    max_tokens: int | None,
    tokenizer: PreTrainedTokenizerBase,
) -> TokenStream:
    available = len(stream.tokens) - 1
    limit = min(available, max_tokens or available)
    if limit < largest:
        why = f"--max-tokens is {limit}" if limit < available else f"it has {available} tokens"
        raise UserError(
            f"{stream.source}: too short for length {largest} ({why}); "
            f"use lengths up to {limit} or a longer text"
        )
    return stream.cut(limit, tokenizer, multiple_of=largest)


def long_enough(stream: TokenStream, largest: int) -> TokenStream:
    """Raises UserError where no document fills a window of the largest length."""
    from eval.length_sweep.perplexity import document_spans

    spans = stream.spans or document_spans(stream.tokens, stream.eod_id)
    longest = max(stop - start for start, stop in spans)
    if longest < largest:
        raise UserError(
            f"{stream.source}: too short for length {largest}: the longest document has "
            f"{longest} tokens"
        )
    return stream
