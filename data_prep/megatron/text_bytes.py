"""Bytes of text that tokens stand for, from their counts, without decoding them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.data.shards import Shard
from cat_lm.data.tokenizers import DocumentEncoder, TokenizerInfo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE_DOCUMENTS = 64
SAMPLE_TOKENS = 1 << 14
SPACE = "\u2581"


class TextBytes:
    """Counts the UTF-8 bytes of the text of shards, by a table of each token's bytes.

    The table is tried on documents that are decoded. It may be off by a fixed number for each
    document (sentencepiece's leading space); where it is off by more, all documents are decoded.
    """

    def __init__(self, tokenizer_folder: Path, info: TokenizerInfo) -> None:
        self._info = info
        self._encoder = DocumentEncoder(tokenizer_folder, info.eod_id, info.vocab_size)
        self._table = bytes_of_tokens(self._encoder.tokenizer, info)
        self._extra: int | None = None

    def check(self, shard: Shard, lengths: np.ndarray) -> None:
        """Decodes a sample of the documents and encodes it again.

        Raises `UserError` where most of it comes out as other tokens: then another tokenizer made
        them.
        """
        documents = list(_sample(shard, lengths))
        texts = [self._encoder.decode(document) for document in documents]
        again = self._encoder.encode_batch(texts)
        pairs = list(zip(documents, again, strict=True))
        same = sum(document.tolist() == ids for document, ids in pairs)
        if 2 * same < len(pairs):
            document, ids = next((d, i) for d, i in pairs if d.tolist() != i)
            raise UserError(
                f"{shard.bin_path}: {len(pairs) - same} of {len(pairs)} documents are encoded "
                f"otherwise by {self._info.spec} (one begins {document[:6].tolist()}, not "
                f"{ids[:6]}); name the tokenizer that made the data"
            )
        differences = {
            int(self._table[document].sum()) - len(text.encode())
            for document, text in zip(documents, texts, strict=True)
        }
        self._extra = next(iter(differences), 0) if len(differences) < 2 else None

    def count(self, shard: Shard, lengths: np.ndarray, counts: np.ndarray, start: int = 0) -> int:
        """The bytes of text of documents of these lengths, the first of which begins at `start`.

        `counts` is how often each token is in them, int64 [vocab_size]. To be called after `check`.
        """
        if self._extra is not None:
            with_text = int((lengths > 1).sum())
            return int(counts @ self._table) - self._extra * with_text
        print(f"{shard.bin_path}: decoding all documents to count their bytes", flush=True)
        total, ends = 0, start + np.cumsum(lengths, dtype=np.int64)
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
            total += len(self._encoder.decode(shard.tokens[end - length : end - 1]).encode())
        return total


def bytes_of_tokens(tokenizer: Tokenizer, info: TokenizerInfo) -> np.ndarray:
    """The bytes of text that each token stands for, int64 [vocab_size]; none for EOD.

    By the tokenizer's kind: in a byte-level vocabulary a character is a byte, in sentencepiece's
    U+2581 is a space and <0xNN> a byte; tokens added to either are their own text.
    """
    byte_level = "ByteLevel" in str(tokenizer.decoder)
    table = np.zeros(info.vocab_size, dtype=np.int64)
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        if byte_level:
            table[index] = len(token)
        else:
            table[index] = 1 if is_byte else len(token.replace(SPACE, " ").encode())
    for index, token in tokenizer.get_added_tokens_decoder().items():
        table[index] = len(token.content.encode())
    table[info.eod_id] = 0
    return table


def _sample(shard: Shard, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Documents with text from all over a shard, without their EOD."""
    candidates = np.flatnonzero(lengths > 1)
    places = np.linspace(0, len(candidates) - 1, min(len(candidates), SAMPLE_DOCUMENTS), dtype=int)
    ends = np.cumsum(lengths, dtype=np.int64)
    for index in candidates[places]:
        if lengths[index] <= SAMPLE_TOKENS:
            end = int(ends[index])
            yield np.asarray(shard.tokens[end - int(lengths[index]) : end - 1])
