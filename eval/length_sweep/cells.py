"""The cells of a length sweep: one model at one length under one method, computed once.

A finished cell is a file, named by the hash of everything that decides its numbers. Methods that
are the same model at a length, such as all of them up to the training length, share one cell.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core import plugins
from cat_lm.core.files import replace_nonfinite
from cat_lm.pretrained.loading import choose_device, load_model
from eval.common.result_files import SweepCell
from eval.lab.store import CellStore
from eval.length_sweep.scaling import checked_scaling, scaling_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from eval.length_sweep.options import Options
    from eval.length_sweep.perplexity import Score
    from eval.length_sweep.token_stream import TokenStream


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model of a sweep: its folder, display name and scaling methods."""

    folder: Path
    label: str
    config: PreTrainedConfig
    training_length: int | None
    methods: tuple[str, ...]
    sha256: str


class Cells:
    """Compute or read the cells of one model, which is loaded when an unfinished one is met.

    Args:
        asked: with the dtype that `auto` means.
    """

    def __init__(self, out: Path, subject: Subject, stream: TokenStream, asked: Options) -> None:
        self.store = CellStore(out / "cells", SweepCell)
        self.subject, self.stream, self.asked = subject, stream, asked
        self._model: PreTrainedModel | None = None
        self._fields: dict[str, Any] | None = None

    def row(self, length: int, method: str) -> dict[str, Any]:
        """Return the row of a cell, computed if it is not finished yet.

        Raises:
            NotEnoughMemory: the length does not fit.
        """
        from cat_lm.pretrained.conversion import scaled_fields

        subject, asked = self.subject, self.asked
        trained, scope = subject.training_length, asked.temperature_scope
        factor, fields = 1.0, {}
        if method != "none":
            factor = float(asked.factor or max(1.0, length / trained))
            fields = scaled_fields(subject.config, method, factor, trained, scope)
        key = {
            "model_sha256": subject.sha256,
            "tokens_sha256": self.stream.sha256,
            "eod_id": self.stream.eod_id,
            "length": length,
            "stride": min(asked.stride or length, length),
            "documents": asked.reading,
            "config": fields,
            "dtype": asked.dtype,
            "device": choose_device(asked.device).type,
            "skip_tokens": asked.skip_tokens or 0,
        }
        if used := plugins.describe():  # The model may contain a plugin's part.
            key["plugins"] = used
        values = self.store.computed(key, lambda: self._compute(length, method, fields))
        bits = values["bits_per_byte"]
        is_known = bits is not None and bits < sys.float_info.max_exp
        # Display names may change between calls without changing any number.
        return values | {
            "byte_perplexity": 2.0**bits if is_known else None,  # This is the harness's definition.
            "label": subject.label,
            "method": method,
            "factor": factor,
            "temperature_scope": scope,
            "model": str(subject.folder),
            "training_length": trained,
            **self.stream.counts,
        }

    def _load(self, fields: dict[str, Any]) -> PreTrainedModel:
        from cat_lm.pretrained.conversion import scaled_config

        if self._model is None or self._fields != fields:
            self._model = None  # Memory may not hold two models.
            gc.collect()
            config = scaled_config(self.subject.config, fields) if fields else None
            how = {"dtype": self.asked.dtype, "device": self.asked.device, "config": config}
            self._model = load_model(self.subject.folder, **how)
            self._fields = fields
        return self._model

    def _compute(self, length: int, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        asked, model = self.asked, self._load(fields)
        effective = checked_scaling(model, fields)
        begin = time.perf_counter()
        label = f"{self.subject.label}, length {length}, {method}"
        score = score_stream(
            model,
            self.stream,
            length,
            label,
            per_document=asked.reading == "per-document",
            spans=self.stream.spans,
            stride=asked.stride,
            batch_tokens=asked.batch_tokens,
        )
        seconds = time.perf_counter() - begin
        said = f"{label}: perplexity {score.perplexity:.4g}; {scaling_text(effective)}"
        print(f"{said} ({seconds:.1f} s)", file=sys.stderr)
        values = dataclasses.asdict(score) | {
            "loss": score.loss,
            "perplexity": score.perplexity,
            "word_perplexity": score.word_perplexity,
            "bits_per_byte": score.bits_per_byte,
            "document_count": self.stream.num_documents,
            **effective,
            "parameters": model.num_parameters(),
            "seconds": round(seconds, 3),
        }
        if not math.isfinite(score.nll):
            values["document_nlls"] = None
        return replace_nonfinite(values)  # A diverged model's numbers are absent, not invalid.


def score_stream(
    model: PreTrainedModel, stream: TokenStream, length: int, label: str, **how: Any
) -> Score:
    """Score a text in windows of `length` tokens with a progress bar; `how` is passed to
    `score_tokens`.
    """
    from tqdm import tqdm

    from eval.length_sweep.perplexity import score_tokens

    how |= {"num_bytes": stream.num_bytes, "num_words": stream.num_words, "eod_id": stream.eod_id}
    with tqdm(total=stream.scored, unit="tok", desc=label, disable=None) as bar:
        return score_tokens(model, stream.tokens, length, progress=bar.update, **how)
