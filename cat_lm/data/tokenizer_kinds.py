"""The kinds of tokenizers: each becomes a `tokenizers.Tokenizer` and its special tokens' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.data.sentencepiece_models import EOD_PIECE, SentencePieceModel
from cat_lm.errors import UserError
from cat_lm.io.readers import read_object
from cat_lm.model_files import asks_for_code, reason

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


def _read_settings(config: Path) -> dict:
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config}: not JSON ({error})") from None
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    found = {name: values[name] for name in names if values.get(name)}
    return {n: v["content"] if isinstance(v, dict) else v for n, v in found.items()}


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
    """What `transformers` makes of a folder, whose code is not run; raises whatever it raises."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_tokenizer_json(path: Path) -> Tokenizer:
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
