"""What a model is scored on: a text file, or the validation split of prepared data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cat_lm.errors import UserError
from cat_lm.pretrained import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenStream:
    """Tokens with what is needed to score them and to say what was scored.

    Attributes:
        tokens: int64 [N]; the first is context only.
        num_bytes: UTF-8 bytes of the text of tokens[1:].
        num_words: words of that text, counted in every document as the harness counts WikiText's:
            the parts between white space.
        eod_id: the token after every document but the last.
        source: what the tokens came from, for people.
        sha256: of the tokens, so that equal streams are known to be equal.
    """

    tokens: np.ndarray
    num_bytes: int
    num_words: int
    eod_id: int
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.tokens, dtype="<i8").tobytes()).hexdigest()

    @property
    def num_documents(self) -> int:
        return 1 + int((self.tokens[1:-1] == self.eod_id).sum())

    def cut(self, scored: int, tokenizer: PreTrainedTokenizerBase) -> TokenStream:
        """The stream's first `scored` predicted tokens (itself where it has no more)."""
        if scored >= len(self.tokens) - 1:
            return self
        return _stream(self.tokens[: scored + 1], tokenizer, self.eod_id, self.source)

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The documents' texts, as `tokenizer`, which made the tokens, spells them."""
        return _texts(self.tokens[1:], tokenizer, self.eod_id)

    def whole_documents(
        self, at_least: int, budget: int | None, tokenizer: PreTrainedTokenizerBase
    ) -> TokenStream:
        """The documents of `at_least` tokens or more, each after an end-of-document token.

        Args:
            budget: tokens; documents are taken in their order as long as they fit. A first one
                that does not fit is cut.

        Raises:
            UserError: no document is that long.
        """
        tokens = _long_documents(self.tokens, self.eod_id, at_least, budget, self.source)
        return _stream(tokens, tokenizer, self.eod_id, self.source)


def read_text(path: Path | str) -> str:
    """A UTF-8 text file. Raises UserError where it cannot be read or holds nothing."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"--text {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: cannot be read as UTF-8 text: {error}") from None
    if not text.strip():
        raise UserError(f"--text {path}: is empty")
    return text


def split_documents(text: str, separator: str | None) -> list[str]:
    """The parts of `text` between matches of a regular expression; without one, `text` itself."""
    if separator is None:
        return [text]
    try:
        # Not re.split, which returns what groups match among the parts.
        spans = [match.span() for match in re.finditer(separator, text)]
    except re.error as error:
        raise UserError(
            f"--document-separator {separator!r}: no regular expression: {error}"
        ) from None
    starts = [0, *(stop for _, stop in spans)]
    stops = [*(start for start, _ in spans), len(text)]
    parts = [text[start:stop] for start, stop in zip(starts, stops, strict=True)]
    return [part for part in parts if part.strip()]


def text_stream(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, source: str
) -> TokenStream:
    """All tokens of the documents are scored, the first one after an end-of-document token.

    Training text has one before every document, and so it is between documents here; those are
    scored too. Raises UserError for a tokenizer without one.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError("tokenizer: has no end-of-document (eos) token to start the text with")
    tokens: list[int] = []
    for document in documents:
        # As in data preparation: what looks like a special token in a text is ordinary text.
        ids = tokenizer(document, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        tokens += [end, *ids]
    num_bytes = sum(len(document.encode()) for document in documents)
    array = np.array(tokens, dtype=np.int64)
    return TokenStream(array, num_bytes, count_words(documents), end, source)


def split_stream(
    folder: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    document_tokens: int | None = None,
) -> TokenStream:
    """The validation split of a folder written by data_prep.prepare, as it was stored.

    As in training's validation, all tokens after the first are scored, end-of-document tokens
    too. With `max_tokens`, only that many; with `document_tokens`, only whole documents of so many
    tokens or more (see `TokenStream.whole_documents`).

    Raises:
        UserError: the folder is no prepared data, is damaged, was made with another tokenizer, or
            has no document that is long enough.
    """
    from cat_lm.data.verified import open_verified

    corpus = open_verified(folder, "validation")
    data_tokenizer = load_tokenizer(Path(folder) / "tokenizer")
    if data_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"--data {folder}: was prepared with another tokenizer than the model's; use --text"
        )
    source = f"{folder} (validation split)"
    if document_tokens is not None:
        tokens = corpus.tokens(0, corpus.num_tokens)
        tokens = _long_documents(tokens, corpus.eod_id, document_tokens, max_tokens, source)
        return _stream(tokens, tokenizer, corpus.eod_id, source)
    count = min(corpus.num_tokens, max_tokens + 1) if max_tokens else corpus.num_tokens
    tokens = corpus.tokens(0, count)
    stream = _stream(tokens, tokenizer, corpus.eod_id, source)
    if count < corpus.num_tokens:
        return stream
    return TokenStream(tokens, corpus.num_bytes, stream.num_words, corpus.eod_id, source)


def count_words(documents: Sequence[str]) -> int:
    """Words of all documents, by the harness' definition for WikiText."""
    return sum(len(re.split(r"\s+", document)) for document in documents)


def _stream(
    tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase, eod_id: int, source: str
) -> TokenStream:
    """Bytes and words are exact but for a character or word that is cut at either end."""
    texts = _texts(tokens[1:], tokenizer, eod_id)
    num_bytes = sum(len(text.encode()) for text in texts)
    return TokenStream(tokens, num_bytes, count_words(texts), eod_id, source)


def _texts(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase, eod_id: int) -> list[str]:
    """The documents that `tokens` spell; end-of-document tokens spell nothing."""
    parts = np.split(tokens, np.flatnonzero(tokens == eod_id))
    documents = [part[part != eod_id] for part in parts]
    return [
        tokenizer.decode(document, clean_up_tokenization_spaces=False)
        for document in documents
        if len(document)
    ]


def _long_documents(
    tokens: np.ndarray, eod_id: int, at_least: int, budget: int | None, source: str
) -> np.ndarray:
    ends = np.flatnonzero(tokens == eod_id) + 1
    documents = [part for part in np.split(tokens, ends) if (part != eod_id).any()]
    long = [part for part in documents if len(part) >= at_least]
    if not long:
        longest = max(len(part) for part in documents)
        raise UserError(
            f"{source}: too short: no document has {at_least} tokens, the longest has {longest}; "
            f"use shorter --lengths or --min-document-tokens {longest}"
        )
    totals = np.cumsum([len(part) for part in long])
    count = int((totals <= (budget or totals[-1])).sum())
    kept = long[:count] or [long[0][:budget]]
    return np.concatenate([[eod_id], *kept])
