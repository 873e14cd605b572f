"""The plan of a preparation: tokenizer, held-out share, and which documents each round encodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

from cat_lm.core.files import sha256, sync_directory
from cat_lm.core.folders import make_temporary, remove_temporary
from cat_lm.data.shards import token_dtype
from cat_lm.data.tokenizers import TokenizerInfo, build_tokenizer, verify_tokenizer
from data_prep.common.selection_spec import SelectionSpec
from data_prep.common.unfinished import TOKENIZER_FILES
from data_prep.encode.encoding import PLACES, Encoding, Range, Ranges, split_of
from data_prep.encode.parts import read_record, write_record
from data_prep.encode.sample import Measured
from data_prep.sources import Source, sample_texts
from data_prep.sources.documents import Document

TRAINING_SAMPLE = 8_000_000  # bytes of text that train:sentencepiece learns from
CHECK_SAMPLE = 1_000_000  # bytes of text that a tokenizer is verified on
PLAN = "plan.json"
EVERYTHING = Range(0, PLACES, True)
NOTHING = Range(0, 0, False)
MARGIN = Fraction(5, 4)  # how much more is encoded than an estimate says is needed
ALMOST_ALL = Fraction(4, 5)  # from this share on all is encoded: a second round costs more


class Shortage(Exception):
    """More has to be encoded first: the places below `sets[name]`, below `other` in other sets."""

    def __init__(self, sets: dict[str, int], other: int) -> None:
        self.sets = sets
        self.other = other


@dataclass
class Plan:
    """The plan that all processes of a preparation share; the first one makes it."""

    tokenizer: TokenizerInfo
    dtype: str
    validation_fraction: float
    rounds: list[Ranges]
    measured: Measured

    def save(self, work: Path) -> None:
        """Writes the plan into the work folder."""
        value = {**asdict(self), "rounds": [ranges.to_json() for ranges in self.rounds]}
        write_record(work / PLAN, value)

    @classmethod
    def load(cls, work: Path, tokenizer_folder: Path) -> Plan | None:
        """The plan in the work folder; None where there is none, or its tokenizer is damaged."""
        value = read_record(work / PLAN, cls.__dataclass_fields__)
        file = tokenizer_folder / "tokenizer.json"
        if value is None or not file.is_file() or sha256(file) != value["tokenizer"]["sha256"]:
            return None
        return cls(
            TokenizerInfo(**value["tokenizer"]),
            value["dtype"],
            value["validation_fraction"],
            [Ranges.from_json(ranges) for ranges in value["rounds"]],
            Measured(**value["measured"]),
        )

    def covered(self, name: str) -> int:
        """The place below which the training documents of a set are encoded."""
        return max(ranges.of(name).high for ranges in self.rounds)

    def further_round(self, names: Iterable[str], spec: SelectionSpec) -> Ranges | None:
        """Return what the sets that occur lack altogether after a change of arguments, or None."""
        lacking = {}
        for name in names:
            train = spec.includes(name) and self.covered(name) == 0
            held_out = spec.holds_out(name) and not any(
                ranges.of(name).held_out for ranges in self.rounds
            )
            if train or held_out:
                low = self.covered(name)
                lacking[name] = Range(low, PLACES if train else low, held_out)
        return Ranges(lacking, NOTHING) if lacking else None

    def round_for(self, names: Iterable[str], spec: SelectionSpec, shortage: Shortage) -> Ranges:
        """Return the further round that a shortage asks for."""
        sets = {}
        for name in names:
            low = self.covered(name)
            high = max(low, shortage.sets.get(name, shortage.other))
            if spec.includes(name) and high > low:
                sets[name] = Range(low, high, False)
        return Ranges(sets, NOTHING)


def first_round(spec: SelectionSpec, measured: Measured, held_out: int) -> Ranges:
    """Return the first round: all that is wanted, or what a budget is estimated to need.

    `held_out` is the place below which all documents are held out.
    """
    sets = {name: _wanted(spec, name, PLACES) for _, name in spec.named}
    wants_others = spec.sets is None
    rest_in_training = wants_others and spec.mixture is None
    other = Range(0, PLACES if rest_in_training else 0, wants_others)
    total = measured.tokens(spec)
    if spec.tokens is None or not total:
        return Ranges(sets, other)
    if spec.mixture is None:
        high = place_for(Fraction(spec.tokens / total) * MARGIN, held_out)
        sets = {name: _wanted(spec, name, high) for name in sets}
        return Ranges(sets, Range(0, min(other.high, high), other.held_out))
    for name, share in spec.shares().items():
        tokens = measured.text_bytes * measured.set_tokens.get(name, 0.0)
        need = spec.tokens * share
        high = place_for(need / Fraction(tokens) * MARGIN, held_out) if tokens else PLACES
        sets[name] = _wanted(spec, name, high)
    return Ranges(sets, other)


def place_for(rate: Fraction, held_out: int) -> int:
    """The place below which this share of the training documents lies; `PLACES` for almost all."""
    if rate >= ALMOST_ALL:
        return PLACES
    return held_out + ceil(rate * (PLACES - held_out))


def _wanted(spec: SelectionSpec, name: str, high: int) -> Range:
    return Range(0, high if spec.includes(name) else 0, spec.holds_out(name))


def make_tokenizer(
    spec: str, eod_token: str | None, folder: Path, source: Source, encoding: Encoding
) -> TokenizerInfo:
    """Makes the tokenizer of the prepared data, verifies it on a sample and puts it in `folder`.

    Several processes may do so at once: what they make is the same, and each file comes whole.
    """
    sampling = _sampling(source, encoding)
    making = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    make_temporary(making)
    try:
        made = making / folder.name
        info = build_tokenizer(spec, made, lambda: sampling(TRAINING_SAMPLE), eod_token)
        verify_tokenizer(info, made, list(sampling(CHECK_SAMPLE)))
        folder.mkdir(exist_ok=True)
        # tokenizer.json goes last: the plan knows its checksum.
        for name in reversed(TOKENIZER_FILES):
            if (made / name).is_file():
                os.replace(made / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        sync_directory(folder)
    finally:
        remove_temporary(making)
    return info


def dtype_name(info: TokenizerInfo) -> str:
    """The name of the dtype of the tokens on disk."""
    return token_dtype(info.vocab_size).name


def _sampling(source: Source, encoding: Encoding) -> Callable[[int], Iterator[str]]:
    """A function from a number of bytes to a sample of training texts of that size."""

    def is_training(document: Document) -> bool:
        return split_of(document, encoding.seed, encoding.validation_fraction) == "train"

    return lambda max_bytes: sample_texts(source, encoding.seed, max_bytes, is_training)
