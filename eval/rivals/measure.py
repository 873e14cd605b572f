"""Score runs on what they can recall: a cell in each run's folder, made once."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cat_lm.core.files import finite
from cat_lm.core.readers import Record, Versioned
from eval.common.models import folder_sha256
from eval.lab.store import CellStore, key_hash
from eval.length_sweep.perplexity import Window, document_spans, span_windows, token_nlls
from eval.length_sweep.token_stream import Documents, split_stream
from eval.rivals.text_recall import SLICES, Counts, count_pairs, overlapping, slices

if TYPE_CHECKING:
    from eval.length_sweep.token_stream import TokenStream

BATCH_TOKENS = 8192


class _Slice(Record):
    """What a model predicts of one slice in windows of one length; None where it is not finite."""

    length: int
    slice: str
    loss: float | None
    tokens: int
    document_nlls: list[float] | None
    document_tokens: list[int]


class _Cell(Versioned):
    """One run's."""

    model_sha256: str
    tokens_sha256: str
    slices: list[_Slice]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The text that all runs are scored on.

    Attributes:
        stream: the same documents as those of the length sweep.
        counts: of its pairs in the training split.
        lengths: windows, in tokens.
        fingerprint: of the training split.
    """

    stream: TokenStream
    counts: Counts
    lengths: tuple[int, ...]
    fingerprint: str

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The documents, see `document_spans`."""
        return list(self.stream.spans or document_spans(self.stream.tokens, self.stream.eod_id))

    def windows(self, length: int) -> list[Window]:
        """Windows of a length, each half before the next: none crosses a document's end."""
        stride = max(1, length // 2)
        return [w for span in self.spans for w in span_windows(*span, length, stride)]

    def rows(self, length: int, nlls: np.ndarray) -> list[dict[str, Any]]:
        """The loss of every slice of `text_recall.SLICES`.

        Args:
            nlls: [N] nats of each prediction; those that no window scores are not looked at.
        """
        tokens = self.stream.tokens
        parts = slices(tokens, self.windows(length), self.counts.pairs, self.counts.vocabulary)
        return [self._row(length, name, nlls, parts[name]) for name in SLICES]

    def _row(self, length: int, name: str, nlls: np.ndarray, part: np.ndarray) -> dict[str, Any]:
        values = np.where(part, nlls, 0.0).astype(np.float64)
        sums = [float(values[start:stop].sum()) for start, stop in self.spans]
        sizes = [int(part[start:stop].sum()) for start, stop in self.spans]
        whole = all(map(math.isfinite, sums)) and sum(sizes) > 0
        return {
            "length": length,
            "slice": name,
            "loss": math.fsum(sums) / sum(sizes) if whole else None,
            "tokens": sum(sizes),
            "document_nlls": sums if whole else None,
            "document_tokens": sizes,
        }


def held_out(
    data: Path, documents: int, longest: int, lengths: Sequence[int], skip_tokens: int
) -> HeldOut:
    """Read the text, and count its pairs in the training split.

    Args:
        data: prepared; the validation split is scored.
        documents, longest: how many of at least so many tokens, up to which each is scored.
        lengths: windows, in tokens.
        skip_tokens: at the beginning of the split; no document that begins there is scored.

    Raises:
        UserError: the data cannot be read, or have no document that is long enough.
    """
    from cat_lm.data.opening import open_verified
    from cat_lm.pretrained.loading import load_tokenizer

    tokenizer = load_tokenizer(data / "tokenizer")
    choice = Documents(at_least=longest, at_most=longest)
    budget = documents * longest
    stream = split_stream(data, tokenizer, budget, choice, skip_tokens=skip_tokens)
    train = open_verified(data, "train")
    counts = count_pairs(stream.tokens, overlapping(train), train.vocab_size)
    return HeldOut(stream, counts, tuple(lengths), train.fingerprint)


def measured(folder: Path, text: HeldOut, dtype: str) -> list[dict[str, Any]]:
    """The slices of a finished run, from its cell where they are measured already.

    Args:
        folder: of the run, with its export in `model`.
        dtype: that the model computes in.

    Raises:
        UserError: the export cannot be read, or the cell is damaged.
    """
    key = {
        "model_sha256": folder_sha256(folder / "model"),
        "tokens_sha256": text.stream.sha256,
        "train_fingerprint": text.fingerprint,
        "lengths": list(text.lengths),
        "dtype": dtype,
    }
    store, name = CellStore(folder / "recall", _Cell), key_hash(key)
    values = store.read(name, lambda values: key.items() <= values.items())
    if values is None:
        values = key | {"slices": _scored(folder / "model", text, dtype)}
        store.write(name, values)
    return values["slices"]


def _scored(model_folder: Path, text: HeldOut, dtype: str) -> list[dict[str, Any]]:
    from cat_lm.pretrained.loading import load_model

    print(f"recall of {model_folder.parent.name}", file=sys.stderr)
    model = load_model(model_folder, dtype=dtype)
    rows = []
    for length in text.lengths:
        windows = text.windows(length)
        nlls = token_nlls(model, text.stream.tokens, windows, batch_tokens=BATCH_TOKENS)
        rows += text.rows(length, nlls)
    return finite(rows)
