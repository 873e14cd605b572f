"""Time documents becoming ids on one core, beside the raw libraries on the same text.

Contenders take turns in one process with one thread: what a worker of the preparation does
(`DocumentEncoder.encode_documents`: ids of a chunk of documents with their EODs in one array), the
`tokenizers` library's plain batch encode, and sentencepiece where the tokenizer is its. First,
every document's ids must be the same.

The encoder's table of words is empty at the beginning of each round, as at a worker's start; it has
seen the text of the round alone. The libraries keep whatever they cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cat_lm.data.sentencepiece_models import SPACE
from cat_lm.data.shards import token_dtype
from cat_lm.data.tokenizers import (
    MODEL_FILE,
    TRAIN_PREFIX,
    DocumentEncoder,
    TokenizerInfo,
    build_tokenizer,
)
from eval.speed.data.text import chunks, documents
from eval.speed.machine import without_home
from eval.speed.progress import say
from eval.speed.timing import summary, time_in_turn, times_as_fast

OURS = "cat_lm"
Encode = Callable[[list[str]], Iterable[list[int]]]


def tokenize_speed(
    path: str | None, limit: int, specs: list[str], repeats: int, scratch: Path
) -> dict[str, Any]:
    """Measures each tokenizer of `specs` on the documents of `path`, at most `limit` bytes."""
    texts = documents(path, limit)
    sizes = [len(text.encode()) for text in texts]
    rows = [
        _measure(spec, texts, sum(sizes), repeats, scratch / f"tokenizer-{number}")
        for number, spec in enumerate(specs)
    ]
    return {
        "text": "python-stdlib" if path is None else without_home(path),
        "documents": len(texts),
        "bytes": sum(sizes),
        "largest_document_bytes": max(sizes),
        "tokenizers": rows,
    }


def _measure(spec: str, texts: list[str], size: int, repeats: int, folder: Path) -> dict[str, Any]:
    say(f"{spec}: its ids, then {repeats} rounds over {size / 1e6:.1f} MB")
    info = build_tokenizer(spec, folder, lambda: texts)
    encoder = DocumentEncoder(folder, info.eod_id, info.vocab_size)
    libraries = _libraries(folder)
    tokens, lengths = encoder.encode_documents(texts, np.dtype(np.int64))
    unlike = _unlike(info, texts, np.split(tokens, np.cumsum(lengths)[:-1]), libraries)
    row = {
        "spec": without_home(spec),
        "kind": info.kind,
        "vocab_size": info.vocab_size,
        "tokens": int(lengths.sum()),
        "documents_with_other_ids": unlike,
        "refused": None,
        "contenders": {},
        "times_as_fast_as": {},
    }
    if any(unlike.values()):
        row["refused"] = f"other ids than the library's in so many documents: {unlike}"
        return row
    work, dtype = chunks(texts), token_dtype(info.vocab_size)

    def ours() -> None:
        encoder.forget()
        _encode_all(work, partial(encoder.encode_documents, dtype=dtype))

    calls: dict[str, Callable[[], None]] = {OURS: ours}
    calls |= {name: partial(_encode_all, work, call) for name, call in libraries.items()}
    timings = time_in_turn(
        calls, torch.device("cpu"), repeats, min_seconds=0, warm_ups=1, title=spec
    )
    for name, timing in timings.items():
        row["contenders"][name] = {
            "seconds": summary(timing.seconds),
            "bytes_per_second": size / timing.median,
            "tokens_per_second": row["tokens"] / timing.median,
        }
        if name != OURS:
            ratio = times_as_fast(timings[OURS].seconds, timing.seconds)
            row["times_as_fast_as"][name] = ratio["median"]
    return row


def _libraries(folder: Path) -> dict[str, Encode]:
    """The raw libraries' batch encode of the same tokenizer, by name."""
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.encode_special_tokens = True  # the same work: look-alikes of special tokens are text

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in raw.encode_batch(texts, add_special_tokens=False)]

    found: dict[str, Encode] = {"tokenizers": encode}
    if (folder / MODEL_FILE).is_file():
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_FILE))
        found["sentencepiece"] = partial(processor.encode, num_threads=1)
    return found


def _encode_all(work: list[list[str]], encode: Callable[[list[str]], Any]) -> None:
    for chunk in work:
        encode(chunk)


def _unlike(
    info: TokenizerInfo, texts: list[str], ours: list[np.ndarray], libraries: dict[str, Encode]
) -> dict[str, int]:
    """For each library, how many documents it gives other ids.

    A literal U+2581 counts for nothing with a tokenizer trained here, which keeps it: see
    `cat_lm.data.tokenizers`.
    """
    trained = info.spec.startswith(TRAIN_PREFIX)
    found = {}
    for name, encode in libraries.items():
        excepted = [trained and name == "sentencepiece" and SPACE in text for text in texts]
        pairs = zip(ours, encode(texts), excepted, strict=True)
        found[name] = sum(not skip and a[:-1].tolist() != b for a, b, skip in pairs)
    return found
