"""The plan of a preparation: tokenizer, validation fraction, and the documents to encode.

It is made from samples of the input, and shared by all processes of a preparation.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256
from cat_lm.data.tokenizers import (
    DocumentEncoder,
    TokenizerInfo,
    build_tokenizer,
    verify_tokenizer,
)
from data_prep.common.amounts import SelectionSpec
from data_prep.encode.encoding import PLACES, Coverage, Rules, hash_place
from data_prep.encode.parts import load_record, write_record
from data_prep.sources.base import Part, Source, counted_with, in_hash_order
from data_prep.sources.documents import Document, Malformed

TOKENIZER = "tokenizer"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "sentencepiece.model")
TRAINING_SAMPLE = 8_000_000  # bytes of text that train:sentencepiece learns from
CHECK_SAMPLE = 1_000_000  # bytes of text that a tokenizer is verified on
SAMPLED_PARTS = 64
# Sizes are estimated from a sample: number of files, bytes to read per file, bytes to
# encode.
MEASURED_PARTS, READ_BYTES, ENCODED_BYTES = 16, 4_000_000, 1_000_000
# Sources up to this size are read first, so that no split is empty by chance.
FEW_DOCUMENTS, FEW_CHARACTERS = 500, 100_000_000
ALL_MALFORMED = 100  # malformed records at the beginning after which the input is refused
PLAN = "plan.json"
MARGIN = Fraction(5, 4)  # factor of estimates of what must be encoded
ALMOST_ALL = Fraction(4, 5)  # From this fraction on all is encoded, as encoding twice costs more.


@dataclass(frozen=True)
class Measured:
    """Estimates of the whole input from a sample."""

    text_bytes: int
    bytes_per_second: float  # text that one core encodes
    tokens_per_byte: float
    document_bytes: float
    set_tokens: dict[str, float]  # tokens of each set per byte of text of all sets

    def tokens(self, spec: SelectionSpec) -> float:
        """Return the estimated number of tokens in the wanted training sets."""
        rates = (rate for name, rate in self.set_tokens.items() if spec.includes(name))
        return self.text_bytes * sum(rates)


@dataclass(frozen=True)
class Plan:
    """The plan of a preparation, which its first process makes and all others read."""

    tokenizer: TokenizerInfo
    validation_fraction: float
    coverage: Coverage
    measured: Measured

    def save(self, work: Path) -> None:
        """Write the plan into the work folder."""
        write_record(work / PLAN, self)

    @classmethod
    def load(cls, work: Path, tokenizer_folder: Path) -> Plan | None:
        """Return the plan of a work folder; None if it is missing or its tokenizer is damaged."""
        plan, file = load_record(work / PLAN, cls), tokenizer_folder / "tokenizer.json"
        is_whole = plan and file.is_file() and sha256(file) == plan.tokenizer.sha256
        return plan if is_whole else None


def held_out_fraction(source: Source, rules: Rules, spec: SelectionSpec) -> float:
    """Return --validation-fraction, or for few documents one with which no split is empty.

    With few documents, all hash places are often on one side of the fraction. It then moves to
    between the two places that are nearest to it.

    Raises:
        UserError: the input begins with malformed records only.
    """
    fraction, size = rules.validation_fraction, 0
    places: set[float] = set()
    for document in _first_documents(source, rules, spec):
        size += len(document.text)
        if document.split or len(places) >= FEW_DOCUMENTS or size > FEW_CHARACTERS:
            return fraction
        if spec.holds_out(document.set):
            places.add(rules.place_of(document))
    ordered = sorted(places)
    if len(ordered) < 2 or ordered[0] < fraction <= ordered[-1]:
        return fraction
    neighbours = ordered[:2] if fraction <= ordered[0] else ordered[-2:]
    return sum(neighbours) / 2


def _first_documents(source: Source, rules: Rules, spec: SelectionSpec) -> Iterator[Document]:
    # Limits count only the documents of wanted sets, as in the encoding.
    counts: dict[str, Counter] = {}
    first, good, malformed = None, False, 0
    for part in source.parts:
        seen = counts.setdefault(counted_with(part.split), Counter())
        for item in source.read(part):
            if rules.limit_reached(part.split, seen["documents"], seen["bytes"]):
                break
            if isinstance(item, Malformed):
                first, malformed = first or item, malformed + 1
                if malformed >= ALL_MALFORMED and not good:
                    raise UserError(f"{first.where}: {first.reason}")
                continue
            good = True
            if item.text:
                yield item
                if spec.holds_out(item.set):
                    seen.update(documents=1, bytes=len(item.text.encode()))
    if malformed and not good:
        raise UserError(f"{first.where}: {first.reason}")


def sample_documents(
    source: Source, rules: Rules, parts: int, share: int
) -> Iterator[tuple[Part, list[Document]]]:
    """Yield (part, its first training documents) for parts that a hash of the seed selects.

    Args:
        parts: maximum number of parts.
        share: number of characters per part; the last document is not cut.
    """
    for part in in_hash_order(source.parts, rules.seed)[:parts]:
        documents, taken = [], 0
        for item in source.read(part):
            if taken >= share:
                break
            if isinstance(item, Document) and item.text and rules.split_of(item) == "train":
                documents.append(item)
                taken += len(item.text)
        yield part, documents


def sample_texts(source: Source, rules: Rules, characters: int) -> Iterator[str]:
    """Yield about this number of characters of training text, spread over files."""
    number = sum(part.split != "validation" for part in source.parts)
    share = max(1, characters // min(number, SAMPLED_PARTS))
    total, longest = 0, max(share, characters // 16)
    for _, documents in sample_documents(source, rules, number, share):
        for document in documents:
            if total >= characters:
                return
            yield document.text[:longest]
            total += min(len(document.text), longest)


def measure_source(source: Source, rules: Rules, folder: Path, info: TokenizerInfo) -> Measured:
    """Estimate sizes and speed by reading and encoding a small sample, in a second or two.

    Args:
        folder: the folder of the tokenizer.
    """
    documents: list[Document] = []
    expected = actual = 0  # bytes of text in files that are read completely
    for part, found in sample_documents(source, rules, MEASURED_PARTS, READ_BYTES):
        documents += found
        size = sum(len(document.text.encode()) for document in found)
        if size < READ_BYTES:
            expected += part.text_bytes
            actual += size
    bytes_of, encoded_of, tokens_of = Counter(), Counter(), Counter()
    for document in documents:
        bytes_of[document.set] += len(document.text.encode())
    chosen = _spread_sample(documents, rules.seed)
    texts = [document.text[: ENCODED_BYTES // 8] for document in chosen]
    encoder = DocumentEncoder(folder, info.eod_id, info.vocab_size)
    encoder.encode_batch(texts[:4])  # Do not measure_source the library's initialization.
    start = time.perf_counter()
    encoded = encoder.encode_batch(texts)
    seconds = time.perf_counter() - start
    for document, text, ids in zip(chosen, texts, encoded, strict=True):
        encoded_of[document.set] += len(text.encode())
        tokens_of[document.set] += len(ids) + 1
    overall = tokens_of.total() / max(1, encoded_of.total())
    rates = {n: tokens_of[n] / encoded_of[n] if encoded_of[n] else overall for n in bytes_of}
    mean = bytes_of.total() / max(1, len(documents))
    total = sum(part.text_bytes for part in source.parts) * (actual / expected if actual else 1)
    limits = (rules.max_bytes, rules.max_documents and int(rules.max_documents * mean * 2))
    return Measured(
        text_bytes=min(int(total), *(limit for limit in limits if limit is not None), 2**63),
        bytes_per_second=encoded_of.total() / max(seconds, 1e-9),
        tokens_per_byte=overall,
        document_bytes=mean,
        set_tokens={n: bytes_of[n] / bytes_of.total() * rates[n] for n in sorted(bytes_of)},
    )


def _spread_sample(documents: list[Document], seed: int) -> list[Document]:
    order = sorted(documents, key=lambda document: hash_place(document.text.encode(), seed + 1))
    chosen, size = [], 0
    for document in order:
        if size >= ENCODED_BYTES:
            break
        chosen.append(document)
        size += min(len(document.text), ENCODED_BYTES // 8)
    return chosen


def make_tokenizer(
    spec: str, eod_token: str | None, folder: Path, source: Source, rules: Rules
) -> TokenizerInfo:
    """Build the tokenizer in `folder`, verify it on a sample, and return its description."""
    texts = functools.partial(sample_texts, source, rules, TRAINING_SAMPLE)
    info = build_tokenizer(spec, folder, texts, eod_token)
    verify_tokenizer(info, folder, list(sample_texts(source, rules, CHECK_SAMPLE)))
    return info


def coverage_for(spec: SelectionSpec, measured: Measured, held_out: int) -> Coverage:
    """Return the documents to encode: all wanted ones, or those that a token budget should need.

    Args:
        held_out: the hash place below which all documents are validation documents.
    """
    places = dict.fromkeys((name for _, name in spec.named), PLACES)
    rest, total = PLACES, measured.tokens(spec)
    if spec.tokens is not None and total and spec.mixture is None:
        rest = place_for(Fraction(spec.tokens / total) * MARGIN, held_out)
        places = dict.fromkeys(places, rest)
    elif spec.tokens is not None and total:
        for name, share in spec.shares().items():
            tokens = measured.text_bytes * measured.set_tokens.get(name, 0.0)
            if tokens:
                rate = spec.tokens * share / Fraction(tokens) * MARGIN
                places[name] = place_for(rate, held_out)
    wants_others = spec.sets is None
    sets = {n: (p if spec.includes(n) else 0, spec.holds_out(n)) for n, p in places.items()}
    other = (rest if wants_others and spec.mixture is None else 0, wants_others)
    return Coverage(sets, other).join(Coverage({}, (0, False)))


def place_for(rate: Fraction, held_out: int) -> int:
    """Return the place below which a fraction of the training documents lies, or `PLACES`."""
    if rate >= ALMOST_ALL:
        return PLACES
    return held_out + ceil(rate * (PLACES - held_out))
