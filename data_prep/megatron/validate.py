"""Check a `.bin/.idx` pair of another tool, and count the bytes of text of its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.data.shards import MAX_DOCUMENT_TOKENS, Shard
from cat_lm.data.tokenizers import DocumentEncoder, TokenizerInfo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK_TOKENS = 1 << 22
SAMPLE_DOCUMENTS = 64
SAMPLE_TOKENS = 1 << 14
SPACE = "\u2581"


@dataclass(frozen=True)
class Tokens:
    """The result of a pass over a `.bin`: counts of ids, SHA-256, ends of documents."""

    counts: np.ndarray
    bin_sha256: str
    eod_ends: np.ndarray | None


def scan_tokens(
    shard: Shard, info: TokenizerInfo, with_ends: bool, report: Callable[[int], None]
) -> Tokens:
    """Read all tokens of a shard once, and return the findings.

    Args:
        with_ends: also return the positions after each EOD, int64.
        report: called with the size of each block in bytes.

    Raises:
        UserError: an id is not in the vocabulary, no token is EOD, or the shard is empty.
    """
    if not shard.num_sequences or not shard.num_tokens:
        raise UserError(f"{shard.idx_path}: empty, there is no token in it")
    counts = np.zeros(info.vocab_size, dtype=np.int64)
    digest = hashlib.sha256()
    ends = []
    for start in range(0, shard.num_tokens, BLOCK_TOKENS):
        block = shard.read(start, min(start + BLOCK_TOKENS, shard.num_tokens))
        lowest, highest = int(block.min()), int(block.max())
        if lowest < 0 or highest >= info.vocab_size:
            raise UserError(
                f"{shard.bin_path}: id {lowest if lowest < 0 else highest} is not in the "
                f"vocabulary of {info.spec} ({info.vocab_size} ids); name the tokenizer that made "
                "the data"
            )
        counts += np.bincount(block, minlength=info.vocab_size)
        digest.update(block.data)
        if with_ends:
            ends.append(np.flatnonzero(block == info.eod_id) + (start + 1))
        report(block.nbytes)
    if not counts[info.eod_id]:
        raise UserError(
            f"{shard.bin_path}: no token is {info.eod_token} (id {info.eod_id}), the end of a "
            "document: its documents would run into each other. Data made without --append-eod are "
            "so, Pythia's Pile among them; prepare them again with it (or mend --eod-token)"
        )
    return Tokens(counts, digest.hexdigest(), np.concatenate(ends) if with_ends else None)


def count_tokens(shard: Shard, start: int, vocab_size: int) -> np.ndarray:
    """Return the number of each id among the tokens from `start` on, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(start, shard.num_tokens, BLOCK_TOKENS):
        block = shard.read(first, min(first + BLOCK_TOKENS, shard.num_tokens))
        counts += np.bincount(block, minlength=vocab_size)
    return counts


def document_lengths(
    shard: Shard, tokens: Tokens, info: TokenizerInfo, documents: str
) -> np.ndarray:
    """Return the number of tokens of each document, EOD included, int32.

    Args:
        documents: the definition of a document (marks, sequences or eod).

    Raises:
        UserError: the index does not cover the `.bin` completely and in order, or a document does
            not end with EOD or has another EOD.
    """
    sequence_ends = _sequence_ends(shard)
    if documents == "eod":
        ends = tokens.eod_ends
    elif documents == "sequences":
        ends = sequence_ends
    else:
        ends = _marked_ends(shard, sequence_ends)
    lengths = np.diff(ends, prepend=0)
    if (lengths < 1).any():
        raise UserError(f"{shard.idx_path}: document {int(np.argmin(lengths))} is empty")
    _check_ends(shard, ends, int(tokens.counts[info.eod_id]), info)
    if lengths.max() > MAX_DOCUMENT_TOKENS:
        raise UserError(f"{shard.idx_path}: a document of {lengths.max()} tokens is too long")
    return lengths.astype(np.int32)


def _sequence_ends(shard: Shard) -> np.ndarray:
    lengths = np.asarray(shard.lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    gaps = shard.pointers != (ends - lengths) * shard.dtype.itemsize
    if gaps.any() or (lengths < 0).any():
        raise UserError(
            f"{shard.idx_path}: sequence {int(np.argmax(gaps))} does not lie behind the one before "
            "it; only indices that list the whole .bin in order can be adopted"
        )
    if ends[-1] != shard.num_tokens:
        raise UserError(
            f"{shard.idx_path}: lists {ends[-1]} tokens, {shard.bin_path.name} has "
            f"{shard.num_tokens}; one of the two is cut short or another's"
        )
    return ends


def _marked_ends(shard: Shard, sequence_ends: np.ndarray) -> np.ndarray:
    marks = shard.document_marks if shard.num_documents > 0 else np.zeros(1, dtype=np.int64)
    if len(marks) < 2:
        raise UserError(
            f"{shard.idx_path}: marks no documents, as files merged by GPT-NeoX; give "
            "--documents sequences (each sequence is one) or eod (what ends with EOD is one)"
        )
    if marks[0] != 0 or marks[-1] != shard.num_sequences or (np.diff(marks) < 1).any():
        raise UserError(
            f"{shard.idx_path}: its document marks do not lead from 0 to {shard.num_sequences} in "
            "steps; give --documents sequences or eod to go without them"
        )
    return sequence_ends[marks[1:] - 1]


def _check_ends(shard: Shard, ends: np.ndarray, eods: int, info: TokenizerInfo) -> None:
    if ends[-1] != shard.num_tokens:
        raise UserError(
            f"{shard.bin_path}: {shard.num_tokens - ends[-1]} tokens follow the last "
            f"{info.eod_token}; the data are cut short, or --eod-token is another"
        )
    ended = int((shard.tokens[ends - 1] == info.eod_id).sum())
    if ended != len(ends):
        raise UserError(
            f"{shard.bin_path}: {len(ends) - ended} of {len(ends)} documents do not end with "
            f"{info.eod_token} (id {info.eod_id}); is the tokenizer another, or what a document "
            "is (--documents)?"
        )
    if eods != len(ends):
        raise UserError(
            f"{shard.bin_path}: {eods} tokens {info.eod_token} for {len(ends)} documents, some lie "
            "inside of documents; --documents eod ends a document at each"
        )


class TextBytes:
    """Count the UTF-8 bytes of the text of shards, with a table of each token's bytes.

    The table is checked on decoded documents. It may differ by a constant per document
    (sentencepiece's leading space); if it differs otherwise, all documents are decoded.
    """

    def __init__(self, tokenizer_folder: Path, info: TokenizerInfo) -> None:
        self._info = info
        self._encoder = DocumentEncoder(tokenizer_folder, info.eod_id, info.vocab_size)
        self._table = bytes_per_token(self._encoder.tokenizer, info)
        self._extra: int | None = None

    def check(self, shard: Shard, lengths: np.ndarray) -> None:
        """Check the tokenizer and the table by decoding and encoding a sample of documents.

        Raises:
            UserError: most documents are encoded to other tokens, so another tokenizer made them.
        """
        documents = list(_sample_documents(shard, lengths))
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
        """Return the bytes of text of documents with these lengths, the first at token `start`.

        Args:
            counts: the number of each token in the documents, int64 [vocab_size].
        """
        if self._extra is not None:
            with_text = int((lengths > 1).sum())
            return int(counts @ self._table) - self._extra * with_text
        print(f"{shard.bin_path}: decoding all documents to count their bytes", flush=True)
        total, ends = 0, start + np.cumsum(lengths, dtype=np.int64)
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
            total += len(self._encoder.decode(shard.tokens[end - length : end - 1]).encode())
        return total


def bytes_per_token(tokenizer: Tokenizer, info: TokenizerInfo) -> np.ndarray:
    """Return the number of bytes of text of each token, int64 [vocab_size]; 0 for EOD.

    In a byte-level vocabulary every character is a byte. In sentencepiece's, U+2581 is a space and
    <0xNN> a byte. Added tokens of both are their own text.
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


def _sample_documents(shard: Shard, lengths: np.ndarray) -> Iterator[np.ndarray]:
    candidates = np.flatnonzero(lengths > 1)
    places = np.linspace(0, len(candidates) - 1, min(len(candidates), SAMPLE_DOCUMENTS), dtype=int)
    ends = np.cumsum(lengths, dtype=np.int64)
    for index in candidates[places]:
        if lengths[index] <= SAMPLE_TOKENS:
            end = int(ends[index])
            yield np.asarray(shard.tokens[end - int(lengths[index]) : end - 1])
