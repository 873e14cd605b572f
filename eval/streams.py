"""What a model is scored on: a text file, or the validation split of prepared data."""

from __future__ import annotations

import hashlib
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
        eod_id: the token after every document, where the stream has such.
        source: what the tokens came from, for people.
        sha256: of the tokens, so that equal streams are known to be equal.
    """

    tokens: np.ndarray
    num_bytes: int
    eod_id: int | None
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.tokens, dtype="<i8").tobytes()).hexdigest()

    def cut(self, scored: int, tokenizer: PreTrainedTokenizerBase) -> TokenStream:
        """The stream's first `scored` predicted tokens (itself where it has no more)."""
        if scored >= len(self.tokens) - 1:
            return self
        tokens = self.tokens[: scored + 1]
        num_bytes = count_bytes(tokens[1:], tokenizer, self.eod_id)
        return TokenStream(tokens, num_bytes, self.eod_id, self.source)


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


def text_stream(text: str, tokenizer: PreTrainedTokenizerBase, source: str) -> TokenStream:
    """All tokens of `text` are scored, the first one after an end-of-document token.

    Training text has one before every document. Raises UserError for a tokenizer without one.
    """
    start = tokenizer.eos_token_id
    if start is None:
        raise UserError("tokenizer: has no end-of-document (eos) token to start the text with")
    # As in data preparation: what looks like a special token in a text is ordinary text.
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    tokens = np.array([start, *ids], dtype=np.int64)
    return TokenStream(tokens, len(text.encode()), None, source)


def split_stream(
    folder: Path | str, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> TokenStream:
    """The validation split of a folder written by data_prep.prepare, as it was stored.

    As in training's validation, all tokens after the first are scored, end-of-document tokens
    too. With `max_tokens`, only that many. Raises UserError where the folder is no prepared data
    or was made with another tokenizer.
    """
    from cat_lm.data import TokenCorpus

    corpus = TokenCorpus.open(folder, "validation")
    data_tokenizer = load_tokenizer(Path(folder) / "tokenizer")
    if data_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"--data {folder}: was prepared with another tokenizer than the model's; use --text"
        )
    count = min(corpus.num_tokens, max_tokens + 1) if max_tokens else corpus.num_tokens
    tokens = corpus.tokens(0, count)
    num_bytes = corpus.num_bytes
    if count < corpus.num_tokens:
        num_bytes = count_bytes(tokens[1:], tokenizer, corpus.eod_id)
    return TokenStream(tokens, num_bytes, corpus.eod_id, f"{folder} (validation split)")


def count_bytes(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase, eod_id: int | None) -> int:
    """UTF-8 bytes of the text that `tokens` spell; end-of-document tokens spell nothing.

    Exact but for a character that is cut in two at either end.
    """
    ends = np.flatnonzero(tokens == eod_id) if eod_id is not None else []
    documents = np.split(tokens, ends)
    total = 0
    for document in documents:
        ids = document[document != eod_id] if eod_id is not None else document
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        total += len(text.encode())
    return total
