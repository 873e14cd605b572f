"""Read the tokens that a model is scored on: a text file, or a split of data."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cat_lm.core import readers
from cat_lm.core.errors import UserError
from cat_lm.pretrained.loading import load_tokenizer

# Reason why tokens are not scored -> its description for people.
REASONS = {
    "first": "the first one, which has nothing before it",
    "skip_tokens": "by --skip-tokens",
    "max_tokens": "by --max-tokens",
    "end": "at the end, too few for a window of the largest length",
    "short_documents": "in documents that are too short",
    "document_rests": "by --max-document-tokens",
}

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Documents:
    """Choose documents by their tokens, their ends included.

    Attributes:
        at_least: shorter ones are left out.
        at_most: longer documents are cut to this number of tokens; None: no limit.
    """

    at_least: int
    at_most: int | None = None


@dataclass(frozen=True)
class TokenStream:
    """Tokens with what is needed to score them and to say what was scored.

    Attributes:
        tokens: int64 [N]; the first is context only.
        tokenizer: tokenizer that made the tokens.
        num_bytes: UTF-8 bytes of the text of tokens[1:].
        num_words: words of that text, counted in every document as the harness counts WikiText's:
            the parts between white space.
        eod_id: the token after every document but the last.
        source: description of the tokens' source.
        left_out: a name in REASONS -> tokens of the text that are not among the scored ones.
        spans: (start, stop) of each document whose inputs tokens[start:stop] predict it, where only
            these are scored; None: all tokens after the first.
    """

    tokens: np.ndarray
    tokenizer: PreTrainedTokenizerBase
    num_bytes: int
    num_words: int
    eod_id: int
    source: str
    left_out: Mapping[str, int] = field(default_factory=dict)
    spans: tuple[tuple[int, int], ...] | None = None

    @property
    def scored(self) -> int:
        """Return the number of scored tokens."""
        if self.spans is not None:
            return sum(stop - start for start, stop in self.spans)
        return len(self.tokens) - 1

    @property
    def counts(self) -> dict[str, int]:
        """Return the tokens scored and those omitted by reason; their sum is `text_tokens`."""
        parts = {f"left_out_{reason}": self.left_out.get(reason, 0) for reason in REASONS}
        return {"text_tokens": self.scored + sum(self.left_out.values()), **parts}

    @property
    def account(self) -> str:
        """Return one line that describes `counts`."""
        total = self.counts["text_tokens"]
        parts = [f"{n:,} {REASONS[reason]}" for reason, n in self.left_out.items() if n]
        left_out = f"; left out: {', '.join(parts)}" if parts else ""
        return f"{self.source}: {self.scored:,} of {total:,} tokens are scored{left_out}"

    @property
    def sha256(self) -> str:
        """Return the hash of the scored tokens."""
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens, dtype="<i8").tobytes())
        if self.spans is not None:  # Words and bytes are not those of these tokens.
            digest.update(repr((self.spans, self.num_words, self.num_bytes)).encode())
        return digest.hexdigest()

    @property
    def num_documents(self) -> int:
        """Count the documents, of which the last may have no end."""
        if self.spans is not None:
            return len(self.spans)
        return 1 + int((self.tokens[1:-1] == self.eod_id).sum())

    def texts(self) -> list[str]:
        """Return the texts of the documents; end-of-document tokens spell nothing."""
        parts = np.split(self.tokens[1:], np.flatnonzero(self.tokens[1:] == self.eod_id))
        documents = [part[part != self.eod_id] for part in parts]
        return [
            self.tokenizer.decode(document, clean_up_tokenization_spaces=False)
            for document in documents
            if len(document)
        ]

    def part(self, tokens: np.ndarray, left_out: Mapping[str, int]) -> TokenStream:
        """Return a stream of other tokens of the text, with further omitted tokens counted.

        Bytes and words are exact but for a character or word that is cut at either end.
        """
        counts = Counter(self.left_out) + Counter(left_out)
        made = replace(self, tokens=tokens, left_out=counts, spans=None)
        texts = made.texts()
        num_bytes = sum(len(text.encode()) for text in texts)
        return replace(made, num_bytes=num_bytes, num_words=count_words(texts))

    def cut(self, limit: int, multiple_of: int = 1) -> TokenStream:
        """Return the first `limit` predicted tokens, less what is over a multiple of a number."""
        limit = min(limit, self.scored)
        scored = limit // multiple_of * multiple_of
        if scored == self.scored:
            return self
        left_out = {"max_tokens": self.scored - limit, "end": limit - scored}
        return self.part(self.tokens[: scored + 1], left_out)

    def ended_as(self, other: TokenStream) -> TokenStream:
        """Return this stream of whole texts, scored as `other` with spans of the same documents.

        A text that is cut is followed by no end; of those that are not, the end is scored.
        """
        parts = np.split(self.tokens, np.flatnonzero(self.tokens == self.eod_id))[1:]
        ended = [other.tokens[stop] == other.eod_id for _, stop in other.spans]
        parts = [np.append(p[1:], p[: int(end)]) for p, end in zip(parts, ended, strict=True)]
        return self._join_separately(parts)

    def whole_documents(self, choice: Documents, budget: int | None) -> TokenStream:
        """Return the documents that are chosen, each after an end-of-document token.

        Args:
            budget: tokens; documents are taken in their order as long as they fit. A first one
                that does not fit is cut.

        Raises:
            UserError: no document is long enough.
        """
        tokens = self.tokens[1:]
        ends = np.flatnonzero(tokens == self.eod_id) + 1
        documents = [part for part in np.split(tokens, ends) if (part != self.eod_id).any()]
        long = [part for part in documents if len(part) >= choice.at_least]
        if not long:
            longest = max(len(part) for part in documents)
            raise UserError(
                f"{self.source}: too short: no document has {choice.at_least} tokens, the longest "
                f"has {longest}; use shorter --lengths or --min-document-tokens {longest}"
            )
        parts = [part[: choice.at_most] for part in long]
        totals = np.cumsum([len(part) for part in parts])
        kept = parts[: int((totals <= (budget or totals[-1])).sum())] or [parts[0][:budget]]
        of_parts, of_long = int(totals[-1]), sum(map(len, long))
        left_out = {
            "max_tokens": of_parts - sum(map(len, kept)),
            "short_documents": len(tokens) - of_long,
            "document_rests": of_long - of_parts,
        }
        if of_long == of_parts:
            return self.part(np.concatenate([[self.eod_id], *kept]), left_out)
        # Documents that are cut lack an end, without which their words would be joined.
        cut = self._join_separately(kept)
        return replace(self.part(cut.tokens, left_out), spans=cut.spans)

    def _join_separately(self, parts: Sequence[np.ndarray]) -> TokenStream:
        """Return a stream of documents that may lack an end; the one before each is not scored."""
        starts = np.cumsum([0] + [len(part) + 1 for part in parts[:-1]]).tolist()
        spans = tuple((start, start + len(part)) for start, part in zip(starts, parts, strict=True))
        tokens = np.concatenate([each for part in parts for each in ([self.eod_id], part)])
        return replace(self, tokens=tokens, spans=spans)


def read_text(path: Path | str) -> str:
    """Read a UTF-8 text file. Raises UserError if it cannot be read or holds nothing."""
    text = readers.read_text(path, "--text")
    if not text.strip():
        raise UserError(f"--text {path}: is empty")
    return text


def split_documents(text: str, separator: str | None) -> list[str]:
    """Return the parts of `text` between matches of a regular expression; without one, `text`."""
    if separator is None:
        return [text]
    try:
        # re.split would return what groups match among the parts.
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
    """Return all tokens of the documents, the first one after an end-of-document token.

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
    num_bytes, num_words = sum(len(each.encode()) for each in documents), count_words(documents)
    array = np.array(tokens, dtype=np.int64)
    return TokenStream(array, tokenizer, num_bytes, num_words, end, source)


def split_stream(
    folder: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    choice: Documents | None = None,
    split: str = "validation",
    skip_tokens: int = 0,
) -> TokenStream:
    """Return a split of a folder written by data_prep.prepare, as it was stored.

    As in training's validation, all tokens after the first are scored, end-of-document tokens
    too. With `max_tokens`, only that many; with `choice`, only the documents that it chooses (see
    `TokenStream.whole_documents`).

    Args:
        skip_tokens: tokens at the split's beginning that are as if they were not there; with
            `choice`, documents that begin among them are not, either.

    Raises:
        UserError: the folder is no prepared data, lacks the split, is damaged, was made with
            another tokenizer, has no document that is long enough, or nothing that is not skipped.
    """
    from cat_lm.data.opening import open_verified

    corpus = open_verified(folder, split)
    data_tokenizer = load_tokenizer(Path(folder) / "tokenizer")
    if data_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"--data {folder}: was prepared with another tokenizer than the model's; use --text"
        )
    source = f"{folder} ({split} split)"
    if skip_tokens >= corpus.num_tokens:
        raise UserError(
            f"--skip-tokens {skip_tokens}: {source} has {corpus.num_tokens:,} tokens; skip fewer"
        )
    empty = TokenStream(np.array([], dtype=np.int64), tokenizer, 0, 0, corpus.eod_id, source)
    if choice is not None:
        tokens = corpus.tokens(0, corpus.num_tokens)
        begin = first_document(tokens, corpus.eod_id, skip_tokens)
        if begin == len(tokens):
            raise UserError(
                f"--skip-tokens {skip_tokens}: no document of {source} begins after so many tokens"
            )
        rest = np.concatenate([[corpus.eod_id], tokens[begin:]])
        whole = replace(empty, tokens=rest, left_out={"skip_tokens": begin})
        return whole.whole_documents(choice, max_tokens)
    rest = corpus.num_tokens - skip_tokens
    count = min(rest, max_tokens + 1) if max_tokens else rest
    tokens = corpus.tokens(skip_tokens, skip_tokens + count)
    left_out = {"first": 1, "max_tokens": rest - count, "skip_tokens": skip_tokens}
    stream = empty.part(tokens, left_out)
    if count < corpus.num_tokens:
        return stream
    return replace(stream, num_bytes=corpus.num_bytes)


def first_document(tokens: np.ndarray, eod_id: int, skip: int) -> int:
    """Find where the first document begins that does not begin among the first `skip` tokens.

    Args:
        tokens: [N], the first of which begins a document.

    Returns:
        Its place; N where there is none.
    """
    if not skip:
        return 0
    ends = np.flatnonzero(tokens[skip - 1 :] == eod_id)
    return skip + int(ends[0]) if len(ends) else len(tokens)


def count_words(documents: Sequence[str]) -> int:
    """Count the words of all documents, by the harness' definition for WikiText."""
    return sum(len(re.split(r"\s+", document)) for document in documents)
