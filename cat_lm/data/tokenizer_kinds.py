"""The kinds of tokenizers: each becomes a `tokenizers.Tokenizer` and its special tokens' names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import VOCABULARY
from cat_lm.core.readers import Record, clipped, read_json, read_object, read_text
from cat_lm.data.sentencepiece_models import EOD_PIECE, SentencePieceModel
from cat_lm.pretrained.files import asks_for_code, reason

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


def bytes_tokenizer() -> Tokenizer:
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


def from_sentencepiece(model: SentencePieceModel, verbatim: bool) -> tuple[Tokenizer, dict]:
    """The fast tokenizer of a model (`SentencePieceModel.fast_tokenizer`), and its settings."""
    names = {"unk_token": model.unk_id, "eos_token": model.eos_id}
    names["bos_token"] = model.processor.bos_id()
    settings = {key: model.pieces[index][0] for key, index in names.items() if index >= 0}
    return model.fast_tokenizer(verbatim), settings


def from_transformers(path: Path) -> tuple[Tokenizer, dict]:
    """The fast tokenizer of a `tokenizer.json` or a folder, and the names of its special tokens."""
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    config = folder / "tokenizer_config.json"
    if file.is_file():
        tokenizer = read_tokenizer_json(file)
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


class _Token(Record):
    content: str


class _Settings(Record):
    """The special tokens of a `tokenizer_config.json`, as text or as objects."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    pad_token: str | _Token | None = None


def _read_settings(config: Path) -> dict:
    found = {name: value for name, value in read_json(config, _Settings) if value}
    return {n: v.content if isinstance(v, _Token) else v for n, v in found.items()}


def _load_with_transformers(folder: Path) -> tuple[Tokenizer, dict]:
    try:
        loaded = auto_tokenizer(folder)
    except Exception as error:  # transformers raises many kinds for a folder it cannot read
        config = folder / "tokenizer_config.json"
        said = asks_for_code(read_object(config)) if config.is_file() else ""
        raise UserError(
            f"--tokenizer {folder}: not a tokenizer folder ({said or reason(error)})"
        ) from None
    if not getattr(loaded, "is_fast", False):
        raise UserError(f"--tokenizer {folder}: has no fast tokenizer (tokenizer.json)")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    settings = {name: str(getattr(loaded, name)) for name in names if getattr(loaded, name, None)}
    return loaded.backend_tokenizer, settings


def auto_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a folder by `transformers`, without its code; raises whatever that raises."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json`; what looks like a special token in a text is ordinary text."""
    from tokenizers import Tokenizer

    text = read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except BaseException as error:
        # The library raises bare exceptions for what it cannot parse, and "panics", which are none.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path}: not a tokenizer.json ({reason(error)})") from None
    # Writing it takes memory for every id up to the largest.
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    if problem := VOCABULARY.at_least(0).problem(largest):
        raise UserError(f"{path}: token {clipped(repr(token))} has the id {largest}, {problem}")
    tokenizer.encode_special_tokens = True
    return tokenizer
