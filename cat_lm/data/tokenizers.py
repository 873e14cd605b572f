"""Tokenizers: every TokenizerSPEC becomes a folder that `transformers` loads offline.

    PATH/tokenizer.json or a folder     as transformers saves them
    PATH/*.model                        sentencepiece, BPE or unigram
    train:sentencepiece:VOCAB           BPE with byte fallback, trained on the source
    bytes                               256 bytes and an end-of-document token

`CONVENTION` holds for every kind, and the manifest says so: text is encoded without any token
added, exactly one end-of-document (EOD) token follows each document, and none begins one. What
looks like a special token inside a document ("</s>", "<|endoftext|>") is ordinary text. So it is to
sentencepiece; transformers and `tokenizers` take such text for the token, unless they are told to
split special tokens (`split_special_tokens=True`, `encode_special_tokens`), as they are here.

A literal U+2581, sentencepiece's sign for a space, is a space to a `*.model`, as sentencepiece has
it. A tokenizer trained here keeps it what it is, so that every text comes back from its ids.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256, write_json, write_text
from cat_lm.core.numbers import VOCABULARY
from cat_lm.core.readers import short
from cat_lm.data.sentencepiece_models import EOD_PIECE, SPACE, SentencePieceModel, train_model
from cat_lm.data.tokenizer_kinds import (
    auto_tokenizer,
    bytes_tokenizer,
    from_sentencepiece,
    from_transformers,
    read_tokenizer_json,
)
from cat_lm.data.unigram_ids import UnigramIds
from cat_lm.data.word_cache import WordCache
from cat_lm.pretrained.files import reason

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAIN_PREFIX = "train:sentencepiece:"
# What the end of a document is called where a tokenizer's own settings do not say.
COMMON_EOD_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>")
TOKENIZER_SUFFIXES = (".json", ".txt", ".model")
MODEL_FILE = "sentencepiece.model"
CONVENTION = "one EOD after each document, no BOS; special tokens within a document are text"


@dataclass(frozen=True)
class TokenizerInfo:
    """The manifest's entry of a tokenizer; `sha256` is that of its `tokenizer.json`."""

    spec: str
    kind: str
    vocab_size: int
    eod_token: str
    eod_id: int
    sha256: str
    convention: str = CONVENTION


def check_spec(spec: str) -> None:
    """Raises `UserError` where `spec` is no TokenizerSPEC or names a file that is not there."""
    if spec == "bytes":
        return
    if spec.startswith("train:"):
        _vocab_size(spec)
    elif not Path(spec).exists():
        raise UserError(
            f"--tokenizer {spec}: no such file or folder; give a tokenizer.json, a folder, "
            f"a sentencepiece *.model, {TRAIN_PREFIX}VOCAB or bytes"
        )


def spec_sha256(spec: str) -> str | None:
    """The SHA-256 of the files that a path SPEC names; None for the other kinds."""
    path = Path(spec)
    if spec == "bytes" or spec.startswith("train:"):
        return None
    files = [path]
    if path.is_dir():  # of a model's folder only what a tokenizer may consist of
        files = [file for file in sorted(path.iterdir()) if file.suffix in TOKENIZER_SUFFIXES]
    digests = "".join(f"{file.name} {sha256(file)}\n" for file in files)
    return hashlib.sha256(digests.encode()).hexdigest()


def build_tokenizer(
    spec: str,
    folder: Path | str,
    training_text: Callable[[], Iterable[str]],
    eod_token: str | None = None,
) -> TokenizerInfo:
    """Makes the tokenizer of `spec` and writes it to `folder`.

    `training_text` gives the texts that `train:` learns from and is called for nothing else;
    `eod_token` overrides the tokenizer's own end of document. Raises `UserError` where the spec
    cannot be served.
    """
    check_spec(spec)
    folder = Path(folder)
    model: SentencePieceModel | None = None
    if spec == "bytes":
        kind, tokenizer, settings = "bytes", bytes_tokenizer(), {"eos_token": EOD_PIECE}
    elif spec.startswith("train:"):
        kind = "sentencepiece"
        model = SentencePieceModel(train_model(training_text(), _vocab_size(spec)), spec)
        tokenizer, settings = from_sentencepiece(model, verbatim=True)
    elif Path(spec).suffix == ".model":
        kind, model = "sentencepiece", SentencePieceModel.read(Path(spec))
        tokenizer, settings = from_sentencepiece(model, verbatim=False)
    else:
        kind = "transformers"
        tokenizer, settings = from_transformers(Path(spec))
    eod = _eod_token(spec, tokenizer, eod_token or settings.get("eos_token"))
    _save(folder, tokenizer, {**settings, "eos_token": eod})
    if model is not None:
        (folder / MODEL_FILE).write_bytes(model.serialized)
    return TokenizerInfo(
        spec=spec,
        kind=kind,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        eod_token=eod,
        eod_id=tokenizer.token_to_id(eod),
        sha256=sha256(folder / "tokenizer.json"),
    )


class DocumentEncoder:
    """Encodes documents with the tokenizer of a prepared folder, as they are stored in shards."""

    def __init__(self, folder: Path | str, eod_id: int, vocab_size: int) -> None:
        self.tokenizer = read_tokenizer_json(Path(folder) / "tokenizer.json")
        self.eod_id = eod_id
        self.vocab_size = vocab_size
        self._words = WordCache.of(self.tokenizer, eod_id)
        self._unigram = UnigramIds.of(Path(folder) / MODEL_FILE, self.tokenizer, eod_id)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text without any token added."""
        tokens, lengths = self._encode(texts)
        ends = np.cumsum(lengths, dtype=np.int64)
        bounds = zip((ends - lengths).tolist(), (ends - 1).tolist(), strict=True)
        return [tokens[start:stop].tolist() for start, stop in bounds]

    def encode_documents(
        self, texts: Sequence[str], dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of all documents, each closed by EOD, in one array, and each one's length.

        Raises `UserError` for a tokenizer that produces EOD inside a document or an id that its
        vocabulary does not have.
        """
        tokens, lengths = self._encode(texts)
        if np.count_nonzero(tokens == self.eod_id) != len(texts):
            raise UserError(
                f"the tokenizer gives its end-of-document id {self.eod_id} for ordinary text; "
                "name another token with --eod-token"
            )
        if len(tokens) and tokens.max() >= self.vocab_size:
            raise UserError(
                f"the tokenizer gives id {tokens.max()}, its vocabulary has {self.vocab_size}"
            )
        return tokens.astype(dtype), lengths

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, each closed by EOD, uint32; and how many each has, int32."""
        tokens, lengths = self._fast_ids(texts)
        if self._unigram is not None:
            return self._unigram.corrected(texts, tokens, lengths)
        return tokens, lengths

    def _fast_ids(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._words is not None:
            return self._words.encode(texts)
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        buffer = array("I")  # takes a list of ids several times faster than NumPy does
        lengths = np.empty(len(texts), np.int32)
        for document, encoding in enumerate(encodings):
            start = len(buffer)
            buffer.fromlist(encoding.ids)
            buffer.append(self.eod_id)
            lengths[document] = len(buffer) - start
        return np.frombuffer(buffer, np.uint32), lengths

    def forget(self) -> None:
        """Drops what makes texts like earlier ones faster; for measuring."""
        if self._words is not None:
            self._words.clear()

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of these ids, special tokens shown."""
        return self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def verify_tokenizer(info: TokenizerInfo, folder: Path | str, texts: Sequence[str]) -> None:
    """Compares a folder's fast tokenizer with its reference on `texts`.

    A sentencepiece tokenizer must give sentencepiece's own ids, one of transformers those of its
    own loader (`_transformers_ids`); a trained one and `bytes` must give every text back. Raises
    `UserError` with the first difference.
    """
    folder = Path(folder)
    encoder = DocumentEncoder(folder, info.eod_id, info.vocab_size)
    encoded = encoder.encode_batch(texts)
    if (folder / MODEL_FILE).is_file():
        _verify_sentencepiece(info, SentencePieceModel.read(folder / MODEL_FILE), texts, encoded)
    elif info.kind == "transformers":
        name, references = _transformers_ids(Path(info.spec), texts)
        for text, ids, reference in zip(texts, encoded, references, strict=True):
            _compare(info, name, reference, ids, text)
    if info.kind == "bytes" or info.spec.startswith(TRAIN_PREFIX):
        for text, ids in zip(texts, encoded, strict=True):
            if encoder.decode(ids) != text:
                raise UserError(
                    f"--tokenizer {info.spec}: does not give back the text {text[:80]!r}"
                )


def _verify_sentencepiece(
    info: TokenizerInfo,
    model: SentencePieceModel,
    texts: Sequence[str],
    encoded: Sequence[Sequence[int]],
) -> None:
    if info.vocab_size != len(model.pieces):
        raise UserError(
            f"--tokenizer {info.spec}: {len(model.pieces)} pieces became {info.vocab_size} ids"
        )
    verbatim = info.spec.startswith(TRAIN_PREFIX)
    for text, ids in zip(texts, encoded, strict=True):
        # The two differ there on purpose: see the module's text.
        if not (verbatim and SPACE in text):
            _compare(info, "sentencepiece", model.processor.encode(text), ids, text)


def _transformers_ids(path: Path, texts: Sequence[str]) -> tuple[str, Iterable[Sequence[int]]]:
    """The reference of a transformers tokenizer, by name, and its ids.

    For a folder with its settings it is `AutoTokenizer`, which may build something else than
    `tokenizer.json` says. A lone file has none but the file as it is, and so has a folder that
    transformers cannot load (one whose class is code of its own).
    """
    if path.is_dir() and (path / "tokenizer_config.json").is_file():
        try:
            options = {"add_special_tokens": False, "split_special_tokens": True}
            # Settings of other types show only when it is used.
            return "transformers", auto_tokenizer(path)(list(texts), **options)["input_ids"]
        except Exception as error:
            if not (path / "tokenizer.json").is_file():
                raise UserError(
                    f"--tokenizer {path}: cannot be loaded again ({reason(error)})"
                ) from None
    tokenizer = read_tokenizer_json(path / "tokenizer.json" if path.is_dir() else path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return "its own file", (encoding.ids for encoding in encodings)


def _compare(
    info: TokenizerInfo, name: str, reference: Sequence[int], ids: Sequence[int], text: str
) -> None:
    if list(reference) != list(ids):
        raise UserError(
            f"--tokenizer {info.spec}: the fast tokenizer and {name} give different ids "
            + _first_difference(reference, ids, text)
        )


def _first_difference(reference: Sequence[int], ids: Sequence[int], text: str) -> str:
    pairs = enumerate(zip(reference, ids, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(reference), len(ids)))
    return (
        f"at token {at} ({list(reference[at : at + 4])} against {list(ids[at : at + 4])}) "
        f"of the text that begins {text[:60]!r}"
    )


def _vocab_size(spec: str) -> int:
    digits = spec.removeprefix(TRAIN_PREFIX)
    if not spec.startswith(TRAIN_PREFIX) or not digits.isdecimal():
        raise UserError(f"--tokenizer {spec}: a trained tokenizer is {TRAIN_PREFIX}VOCAB")
    if len(digits) > 9 or not 260 <= int(digits) <= VOCABULARY.high:
        raise UserError(
            f"--tokenizer {short(spec)}: VOCAB must be at least 260 (256 of them are bytes) and at "
            f"most {VOCABULARY.high:,}"
        )
    return int(digits)


def _eod_token(spec: str, tokenizer: Tokenizer, named: str | None) -> str:
    candidates = [named] if named else COMMON_EOD_TOKENS
    for token in candidates:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise UserError(
        f"--tokenizer {spec}: no end-of-document token ({', '.join(candidates)} not in its "
        "vocabulary); name one with --eod-token"
    )


def _save(folder: Path, tokenizer: Tokenizer, settings: dict) -> None:
    """Writes the two files that `AutoTokenizer` needs, with nothing that would change the ids."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **settings,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(1e30),
        },
    )
