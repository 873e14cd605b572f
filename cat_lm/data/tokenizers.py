"""Tokenizers: every TokenizerSPEC becomes a folder that `transformers` loads offline.

    PATH/tokenizer.json or a folder     as transformers saves them
    PATH/*.model                        sentencepiece, BPE or unigram
    train:sentencepiece:VOCAB           BPE with byte fallback, trained on the source
    bytes                               256 bytes and an end-of-document token

Text is encoded without any token added: the data preparation puts one end-of-document (EOD) token
after each document, and what looks like a special token inside a document is ordinary text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cat_lm.data.sentencepiece_models import EOD_PIECE, SPACE, SentencePieceModel, train_model
from cat_lm.errors import UserError
from cat_lm.files import sha256, write_json, write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAIN_PREFIX = "train:sentencepiece:"
# What the end of a document is called where a tokenizer's own settings do not say.
COMMON_EOD_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>")
TOKENIZER_SUFFIXES = (".json", ".txt", ".model")
MODEL_FILE = "sentencepiece.model"


@dataclass(frozen=True)
class TokenizerInfo:
    """What the manifest says of a tokenizer; `sha256` is that of its `tokenizer.json`."""

    spec: str
    kind: str
    vocab_size: int
    eod_token: str
    eod_id: int
    sha256: str


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
        kind, tokenizer, settings = "bytes", _bytes_tokenizer(), {"eos_token": EOD_PIECE}
    elif spec.startswith("train:"):
        kind = "sentencepiece"
        model = SentencePieceModel(train_model(training_text(), _vocab_size(spec)), spec)
        tokenizer, settings = _from_sentencepiece(model)
    elif Path(spec).suffix == ".model":
        kind, model = "sentencepiece", SentencePieceModel.read(Path(spec))
        tokenizer, settings = _from_sentencepiece(model)
    else:
        kind = "transformers"
        tokenizer, settings = _from_transformers(Path(spec))
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
        self.tokenizer = _read_tokenizer_json(Path(folder) / "tokenizer.json")
        self.eod_id = eod_id
        self.vocab_size = vocab_size

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text without any token added; EOD cannot be among them."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_documents(
        self, texts: Sequence[str], dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of all documents, each closed by EOD, in one array, and each one's length.

        Raises `UserError` for a tokenizer that produces EOD inside a document or an id that its
        vocabulary does not have.
        """
        ids = self.encode_batch(texts)
        lengths = np.fromiter((len(document) + 1 for document in ids), np.int32, len(ids))
        tokens = np.full(int(lengths.sum()), self.eod_id, dtype=np.int64)
        inside = np.ones(len(tokens), dtype=bool)
        inside[np.cumsum(lengths, dtype=np.int64) - 1] = False
        tokens[inside] = np.fromiter(
            (token for document in ids for token in document), np.int64, int(inside.sum())
        )
        if (tokens[inside] == self.eod_id).any():
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
        """The text of these ids, special tokens shown."""
        return self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def verify_tokenizer(info: TokenizerInfo, folder: Path | str, texts: Sequence[str]) -> None:
    """Compares a folder's fast tokenizer with its reference on `texts`.

    A sentencepiece tokenizer must give sentencepiece's own ids; a trained one and `bytes` must
    give every text back. Raises `UserError` with the first difference.
    """
    folder = Path(folder)
    encoder = DocumentEncoder(folder, info.eod_id, info.vocab_size)
    encoded = encoder.encode_batch(texts)
    model = None
    if (folder / MODEL_FILE).is_file():
        model = SentencePieceModel.read(folder / MODEL_FILE)
        if info.vocab_size != len(model.pieces):
            raise UserError(
                f"--tokenizer {info.spec}: {len(model.pieces)} pieces became {info.vocab_size} ids"
            )
    lossless = info.kind == "bytes" or (model is not None and model.lossless)
    for text, ids in zip(texts, encoded, strict=True):
        # The two differ on a literal U+2581 on purpose: see SentencePieceModel.fast_tokenizer.
        comparable = model is not None and not (model.lossless and SPACE in text)
        if comparable and (reference := model.processor.encode(text)) != ids:
            raise UserError(
                f"--tokenizer {info.spec}: the fast tokenizer and sentencepiece give different ids "
                + _first_difference(reference, ids, text)
            )
        if lossless and encoder.decode(ids) != text:
            raise UserError(f"--tokenizer {info.spec}: does not give back the text {text[:80]!r}")


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
    if int(digits) < 260:
        raise UserError(f"--tokenizer {spec}: VOCAB must be at least 260 (256 of them are bytes)")
    return int(digits)


def _bytes_tokenizer() -> Tokenizer:
    """Ids 0–255 are the bytes of the UTF-8 text, 256 is EOD."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOD_PIECE, special=True, normalized=False)])
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable character by which the byte-level pre-tokenizer stands for each byte.

    Printable Latin-1 bytes stand for themselves, the others follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _from_sentencepiece(model: SentencePieceModel) -> tuple[Tokenizer, dict]:
    names = {"unk_token": model.unk_id, "eos_token": model.eos_id}
    names["bos_token"] = model.processor.bos_id()
    settings = {key: model.pieces[index][0] for key, index in names.items() if index >= 0}
    return model.fast_tokenizer(), settings


def _from_transformers(path: Path) -> tuple[Tokenizer, dict]:
    """The fast tokenizer of a `tokenizer.json` or a folder, and the names of its special tokens."""
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    config = folder / "tokenizer_config.json"
    if file.is_file():
        tokenizer = _read_tokenizer_json(file)
        # The settings beside a lone file are its own only under the name that goes with them.
        named = config.is_file() and file.name == "tokenizer.json"
        settings = _read_settings(config) if named else {}
    else:
        tokenizer, settings = _load_with_transformers(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.encode("a").ids != tokenizer.encode("a", add_special_tokens=False).ids:
        # A template that adds BOS or EOS: models trained on these shards never see it.
        tokenizer.post_processor = _no_template()
    return tokenizer, settings


def _no_template():
    from tokenizers.processors import Sequence as Processors

    return Processors([])


def _read_settings(config: Path) -> dict:
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config}: not JSON ({error})") from None
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    found = {name: values[name] for name in names if values.get(name)}
    return {n: v["content"] if isinstance(v, dict) else v for n, v in found.items()}


def _load_with_transformers(folder: Path) -> tuple[Tokenizer, dict]:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a folder it cannot read
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--tokenizer {folder}: not a tokenizer folder ({reason})") from None
    if not getattr(loaded, "is_fast", False):
        raise UserError(f"--tokenizer {folder}: has no fast tokenizer (tokenizer.json)")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    settings = {name: str(getattr(loaded, name)) for name in names if getattr(loaded, name, None)}
    return loaded.backend_tokenizer, settings


def _read_tokenizer_json(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json`; what looks like a special token in a text is ordinary text."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # the library raises bare exceptions for whatever it cannot parse
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path}: not a tokenizer.json ({reason})") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


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
