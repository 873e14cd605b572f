"""Tokenizers: `build_tokenizer` turns a SPEC into a folder that `transformers` loads offline.

    PATH/tokenizer.json or a folder     as transformers saves them
    PATH/*.model                        sentencepiece, BPE or unigram
    OWNER/NAME[@REVISION]               either of these, from the Hub
    train:sentencepiece:VOCAB           BPE with byte fallback, trained on the source
    bytes                               256 bytes and an end-of-document token

`CONVENTION` applies to every kind, and is recorded in the manifest: texts are encoded without added
tokens, exactly one end-of-document (EOD) token follows each document, and no token begins one. Text
that looks like a special token ("</s>", "<|endoftext|>") is ordinary text, as in sentencepiece;
transformers and `tokenizers` are configured accordingly (`split_special_tokens=True`,
`encode_special_tokens`).

A literal U+2581 in a text, which sentencepiece uses for spaces, becomes a space with a `*.model`. A
tokenizer trained here keeps it, so that decoding restores every text.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256, write_json, write_text
from cat_lm.core.numbers import VOCABULARY
from cat_lm.core.readers import Record, clipped, read_json, read_text, short
from cat_lm.data.hub_tokenizers import hub_files, is_hub_name
from cat_lm.data.sentencepiece_models import (
    EOD_PIECE,
    NORMAL,
    SPACE,
    UNIGRAM,
    SentencePieceModel,
    train_model,
)
from cat_lm.pretrained.loading import reason

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAIN_PREFIX = "train:sentencepiece:"
# Names of the EOD token that are tried if the tokenizer's settings have none.
COMMON_EOD_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>")
TOKENIZER_SUFFIXES = (".json", ".txt", ".model")
MODEL_FILE = "sentencepiece.model"
CONVENTION = "one EOD after each document, no BOS; special tokens within a document are text"


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer's entry in the manifest; `sha256` is that of its `tokenizer.json`."""

    spec: str
    kind: str
    vocab_size: int
    eod_token: str
    eod_id: int
    sha256: str
    convention: str = CONVENTION


def _token_text(token: Any) -> Any:
    return token.get("content", token) if isinstance(token, dict) else token


_Name = Annotated[str | None, BeforeValidator(_token_text)]


class _Settings(Record):
    """The special tokens of a `tokenizer_config.json`, as text or as objects."""

    bos_token: _Name = None
    eos_token: _Name = None
    unk_token: _Name = None
    pad_token: _Name = None


def check_spec(spec: str) -> None:
    """Raise UserError if `spec` is not valid or names a missing file."""
    if spec == "bytes":
        return
    if spec.startswith("train:"):
        _vocab_size(spec)
    elif not is_hub_name(spec) and not Path(spec).exists():
        raise UserError(
            f"--tokenizer {spec}: no such file or folder; give a tokenizer.json, a folder, "
            f"a sentencepiece *.model, OWNER/NAME on the Hub, {TRAIN_PREFIX}VOCAB or bytes"
        )


def _path_of(spec: str) -> Path:
    """Return the file or folder of a SPEC; for a Hub name, the one in the Hub's cache."""
    if not is_hub_name(spec):
        return Path(spec)
    first, *_ = hub_files(spec)
    return first if first.suffix == ".model" else first.parent


def spec_sha256(spec: str) -> str | None:
    """Return the SHA-256 of the files of a SPEC; None for `bytes` and trained tokenizers."""
    if spec == "bytes" or spec.startswith("train:"):
        return None
    path, files = Path(spec), [Path(spec)]
    if is_hub_name(spec):
        files = hub_files(spec)
    elif path.is_dir():  # A model's folder may hold other files, too.
        files = [file for file in sorted(path.iterdir()) if file.suffix in TOKENIZER_SUFFIXES]
    digests = "".join(f"{file.name} {sha256(file)}\n" for file in files)
    return hashlib.sha256(digests.encode()).hexdigest()


def build_tokenizer(
    spec: str,
    folder: Path | str,
    training_text: Callable[[], Iterable[str]],
    eod_token: str | None = None,
) -> TokenizerInfo:
    """Build the tokenizer of `spec` and write it to `folder`.

    Args:
        training_text: returns the texts to train on; called for `train:` SPECs only.
        eod_token: replaces the tokenizer's own end-of-document token.

    Raises:
        UserError: the tokenizer cannot be read, trained or converted, or has no EOD token.
    """
    check_spec(spec)
    folder = Path(folder)
    model: SentencePieceModel | None = None
    if spec == "bytes":
        kind, tokenizer, settings = "bytes", build_bytes_tokenizer(), {"eos_token": EOD_PIECE}
    elif spec.startswith("train:"):
        kind = "sentencepiece"
        model = SentencePieceModel(train_model(training_text(), _vocab_size(spec)), spec)
        tokenizer, settings = model.fast_tokenizer(verbatim=True), model.settings()
    elif (path := _path_of(spec)).suffix == ".model":
        kind, model = "sentencepiece", SentencePieceModel.read(path)
        tokenizer, settings = model.fast_tokenizer(), model.settings()
    else:
        kind = "transformers"
        tokenizer, settings = read_transformers_tokenizer(path)
    eod = _eod_token(spec, tokenizer, eod_token or settings.get("eos_token"))
    _save_tokenizer(folder, tokenizer, {**settings, "eos_token": eod})
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
    """Encode documents with the tokenizer of a prepared folder, as they are stored in shards.

    Unigram models of sentencepiece are run by sentencepiece itself, because `tokenizers` would
    encode a literal "</s>" or "<0x0A>" in a text as the piece of that name.
    """

    def __init__(self, folder: Path | str, eod_id: int, vocab_size: int) -> None:
        self.tokenizer = read_tokenizer_json(Path(folder) / "tokenizer.json")
        self.eod_id = eod_id
        self.vocab_size = vocab_size
        self._processor = None
        model = Path(folder) / MODEL_FILE
        if type(self.tokenizer.model).__name__ == "Unigram" and model.is_file():
            self._processor = SentencePieceModel.read(model).processor

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without added tokens."""
        if self._processor is not None:
            return self._processor.encode(list(texts), num_threads=1)
        return self.fast_ids(texts)

    def fast_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text by the folder's `tokenizer.json`."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_documents(
        self, texts: Sequence[str], dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all documents in one array, an EOD after each, and their lengths.

        Raises `UserError` if the tokenizer returns EOD inside of a document, or an id outside of
        its vocabulary.
        """
        buffer = array("I")  # It copies a list of ids several times faster than NumPy.
        lengths = np.empty(len(texts), np.int32)
        for document, ids in enumerate(self.encode_batch(texts)):
            start = len(buffer)
            buffer.fromlist(ids)
            buffer.append(self.eod_id)
            lengths[document] = len(buffer) - start
        tokens = np.frombuffer(buffer, np.uint32)
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

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of these ids, including special tokens."""
        return self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def verify_tokenizer(info: TokenizerInfo, folder: Path | str, texts: Sequence[str]) -> None:
    """Compare a folder's fast tokenizer with its reference implementation on `texts`.

    A sentencepiece tokenizer must return the ids of sentencepiece, and one of transformers those of
    `AutoTokenizer`. For trained tokenizers and `bytes`, decoding must restore every text. Raises
    `UserError` with the first difference.
    """
    encoder = DocumentEncoder(folder, info.eod_id, info.vocab_size)
    encoded = encoder.fast_ids(texts)
    name, references = "itself", encoded
    if (Path(folder) / MODEL_FILE).is_file():
        model = SentencePieceModel.read(Path(folder) / MODEL_FILE)
        name, references = "sentencepiece", _sentencepiece_ids(info, model, texts, encoded)
    elif info.kind == "transformers":
        name, references = _transformers_ids(_path_of(info.spec), texts)
    gives_back = info.kind == "bytes" or info.spec.startswith(TRAIN_PREFIX)
    for text, ids, reference in zip(texts, encoded, references, strict=True):
        if list(reference) != ids:
            same = [one == other for one, other in zip(reference, ids, strict=False)]
            at = [*same, False].index(False)
            raise UserError(
                f"--tokenizer {info.spec}: the fast tokenizer and {name} give different ids at "
                f"token {at} ({list(reference[at : at + 4])} against {ids[at : at + 4]}) of the "
                f"text that begins {text[:60]!r}"
            )
        if gives_back and encoder.decode(ids) != text:
            raise UserError(f"--tokenizer {info.spec}: does not give back the text {text[:80]!r}")


def _sentencepiece_ids(
    info: TokenizerInfo,
    model: SentencePieceModel,
    texts: Sequence[str],
    encoded: Sequence[Sequence[int]],
) -> Iterator[Sequence[int]]:
    """Yield sentencepiece's ids of each text, or the ids in `encoded` if they differ on purpose.

    The docstrings of the module and of `DocumentEncoder` describe these cases.
    """
    normal = {index for index, (*_, kind) in enumerate(model.pieces) if kind == NORMAL}
    for text, ids in zip(texts, encoded, strict=True):
        differs = info.spec.startswith(TRAIN_PREFIX) and SPACE in text
        if model.model_type == UNIGRAM:
            differs = not normal.issuperset(ids)
        yield ids if differs else model.processor.encode(text)


def _transformers_ids(path: Path, texts: Sequence[str]) -> tuple[str, Sequence[Sequence[int]]]:
    """Return the name and the ids of the reference of a transformers tokenizer.

    For a folder with settings it is `AutoTokenizer`, which may change what `tokenizer.json`
    describes. For a single file, and for a folder that transformers cannot load (because its class
    is custom code), it is `tokenizer.json` itself.
    """
    if path.is_dir() and (path / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        with contextlib.suppress(Exception):
            safe = {"local_files_only": True, "trust_remote_code": False}
            options = {"add_special_tokens": False, "split_special_tokens": True}
            loaded = AutoTokenizer.from_pretrained(path, **safe)
            return "transformers", loaded(list(texts), **options)["input_ids"]
    tokenizer = read_tokenizer_json(path / "tokenizer.json" if path.is_dir() else path)
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return "its own file", [encoding.ids for encoding in encodings]


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


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, settings: dict) -> None:
    """Write the two files that `AutoTokenizer` needs, without settings that change the ids."""
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


# The types of tokenizers


def build_bytes_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids 0–255 are the bytes of UTF-8 text; id 256 is EOD."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOD_PIECE, special=True, normalized=False)])
    return tokenizer


def _byte_characters() -> list[str]:
    """Return the character that represents each byte in a byte-level tokenizer.

    Printable Latin-1 bytes represent themselves; the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def read_transformers_tokenizer(path: Path) -> tuple[Tokenizer, dict]:
    """Return the fast tokenizer of a file or a folder, and its special tokens by key."""
    from tokenizers.processors import Sequence as Processors

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"--tokenizer {path}: not a tokenizer folder (no tokenizer.json; load it by "
            "transformers' AutoTokenizer and save it)"
        )
    tokenizer = read_tokenizer_json(file)
    # Settings beside a single file belong to it only if it is named tokenizer.json.
    config = file.with_name("tokenizer_config.json")
    named = config.is_file() and file.name == "tokenizer.json"
    settings = {key: name for key, name in read_json(config, _Settings) if name} if named else {}
    if tokenizer.encode("a").ids != tokenizer.encode("a", add_special_tokens=False).ids:
        # Drop a template that adds BOS or EOS, which models trained on these shards never see.
        tokenizer.post_processor = Processors([])
    return tokenizer, settings


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`; text that looks like a special token is encoded as ordinary text."""
    from tokenizers import Tokenizer

    text = read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except BaseException as error:
        # The library raises Exception for invalid files, and PanicException, a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path}: not a tokenizer.json ({reason(error)})") from None
    # Saving the tokenizer takes memory for every id up to the largest.
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    if problem := VOCABULARY.at_least(0).problem(largest):
        raise UserError(f"{path}: token {clipped(repr(token))} has the id {largest}, {problem}")
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
