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
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.core.files import finite
from cat_lm.core.readers import Versioned
from cat_lm.pretrained.loading import choose_device, load_model
from cat_lm.pretrained.record import read_record
from eval.lab.store import CellStore

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from eval.length_sweep.perplexity import Score
    from eval.length_sweep.token_stream import TokenStream

DOCUMENTS = ("concatenated", "per-document")
PAGES = "pages"  # of WikiText, as the harness reads them; with documents of its own
METHOD_SETS = ("all", "paper")


class Measured(Versioned):
    """Hold a cell's values besides its key; infinities and NaN are null."""

    loss: float | None
    perplexity: float | None
    word_perplexity: float | None
    bits_per_byte: float | None
    standard_error: float | None
    positions: list[dict[str, float | None]]
    document_nlls: list[float] | None
    document_tokens: list[int] | None
    tokens: int
    words: int
    bytes: int
    groups: int
    group_kind: str
    document_count: int
    parameters: int
    rope_type: str | None
    rope_factor: float | None
    original_length: int | None
    attention_factor: float | None
    attention_temperature: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Fix how models are scored, the same for every cell of a sweep.

    Attributes:
        stride: tokens by which windows move on; None for windows that do not overlap. Lengths
            below it have windows that do not overlap.
        documents: `concatenated` (windows cross the ends of documents), `per-document`, or `pages`
            (per document, none of whose ends is scored).
        max_document_tokens: of longer documents only the beginning is among the tokens.
        skip_tokens: at the beginning of prepared data's split that are not among the tokens, nor
            are documents that begin there, where windows do not cross their ends.
        factor: of every scaling; None for test length over training length, at least 1.
        temperature_scope: `logits` or `rotary`, see cat_lm.model.rope_scaling.
        dtype: of weights and activations; softmax is in fp32, sums over tokens in fp64.
    """

    stride: int | None = None
    documents: str = "concatenated"
    factor: float | None = None
    temperature_scope: str = "logits"
    dtype: str = "float32"
    device: str = "auto"
    batch_tokens: int = 8192
    max_document_tokens: int | None = None
    skip_tokens: int = 0

    def describe(self) -> dict[str, str]:
        """For people, beside the numbers."""
        stride = f"moving on by {self.stride} tokens, or by" if self.stride else "moving on by"
        scored = (
            "every token of every page"
            if self.documents == PAGES
            else "every token after the first"
        )
        most = self.max_document_tokens
        cut = f"of each the first {most} tokens" if most else "none is truncated"
        skipped = {"skipped": f"the split's first {self.skip_tokens} tokens"}
        return {
            "scored": f"{scored}, once; the same ones at every length",
            "windows": f"{stride} their whole length; the last one reaches back to be full",
            "documents": f"{self.documents}; {cut}",
            "factor": str(self.factor or "test length over training length, at least 1"),
        } | (skipped if self.skip_tokens else {})


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to be swept: where it is, what it is called, and by which methods it is read."""

    folder: Path
    label: str
    config: PreTrainedConfig
    training_length: int | None
    methods: tuple[str, ...]
    sha256: str


class Cells:
    """Computes or reads the cells of one model, which is loaded when an unfinished one is met."""

    def __init__(
        self, folder: Path, subject: Subject, stream: TokenStream, protocol: Protocol
    ) -> None:
        self.store = CellStore(folder, Measured)
        self.subject, self.stream, self.protocol = subject, stream, protocol
        self._model: PreTrainedModel | None = None
        self._fields: dict[str, Any] | None = None

    def row(self, length: int, method: str) -> dict[str, Any]:
        """The row of a cell, computed if it is not finished yet.

        Raises NotEnoughMemory where the length does not fit.
        """
        subject, protocol = self.subject, self.protocol
        factor = self._factor(length, method)
        fields = self._scaled_fields(method, factor)
        key = {
            "model_sha256": subject.sha256,
            "tokens_sha256": self.stream.sha256,
            "eod_id": self.stream.eod_id,
            "length": length,
            "stride": min(protocol.stride or length, length),
            "documents": protocol.documents,
            "config": fields,
            "dtype": protocol.dtype,
            "device": choose_device(protocol.device).type,
            "skip_tokens": protocol.skip_tokens,
        }
        if used := plugins.describe():  # of which the model may have a part
            key["plugins"] = used
        values = self.store.computed(key, lambda: self._compute(length, method, fields))
        # Names may change between calls without changing any number.
        return values | {
            "byte_perplexity": _byte_perplexity(values["bits_per_byte"]),
            "label": subject.label,
            "method": method,
            "factor": factor,
            "temperature_scope": protocol.temperature_scope,
            "skip_tokens": protocol.skip_tokens,
            "model": str(subject.folder),
            "training_length": subject.training_length,
            **self.stream.counts,
        }

    def _factor(self, length: int, method: str) -> float:
        if method == "none":
            return 1.0
        if self.protocol.factor is not None:
            return float(self.protocol.factor)
        return max(1.0, length / self.subject.training_length)

    def _scaled_fields(self, method: str, factor: float) -> dict[str, Any]:
        from cat_lm.pretrained.conversion import scaled_fields

        subject, scope = self.subject, self.protocol.temperature_scope
        trained = subject.training_length
        if method == "none":
            return {}
        return scaled_fields(subject.config, method, factor, trained, scope)

    def _load(self, fields: dict[str, Any]) -> PreTrainedModel:
        from cat_lm.pretrained.conversion import scaled_config

        if self._model is None or self._fields != fields:
            self._model = None  # there may not be room for two
            gc.collect()
            config = scaled_config(self.subject.config, fields)
            self._model = load_model(
                self.subject.folder,
                dtype=self.protocol.dtype,
                device=self.protocol.device,
                config=config if fields else None,
            )
            self._fields = fields
        return self._model

    def _compute(self, length: int, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        protocol, model = self.protocol, self._load(fields)
        effective = checked_scaling(model, fields)
        begin = time.perf_counter()
        label = f"{self.subject.label}, length {length}, {method}"
        score = score_stream(
            model,
            self.stream,
            length,
            label,
            per_document=protocol.documents == "per-document",
            spans=self.stream.spans,
            stride=protocol.stride,
            batch_tokens=protocol.batch_tokens,
        )
        seconds = time.perf_counter() - begin
        print(
            f"{label}: perplexity {score.perplexity:.4g}; {scaling_text(effective)} "
            f"({seconds:.1f} s)",
            file=sys.stderr,
        )
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
        return finite(values)  # a diverged model's numbers are absent, not invalid


def score_stream(
    model: PreTrainedModel, stream: TokenStream, length: int, label: str, **how: Any
) -> Score:
    """Score a text in windows of `length` tokens, with a progress bar; `how`: of `score_tokens`."""
    from tqdm import tqdm

    from eval.length_sweep.perplexity import score_tokens

    counts = {"num_bytes": stream.num_bytes, "num_words": stream.num_words}
    with tqdm(total=stream.scored, unit="tok", desc=label, disable=None) as bar:
        how |= {"eod_id": stream.eod_id, "progress": bar.update}
        return score_tokens(model, stream.tokens, length, **counts, **how)


def checked_scaling(model: PreTrainedModel, fields: dict[str, Any]) -> dict[str, Any]:
    """Read the loaded model's scaling, see `effective_scaling`.

    Raises RuntimeError where that is not what `fields` asked for: a scaling that was dropped on
    the way would give a plausible, wrong number.
    """
    from cat_lm.model.hf.inspection import effective_scaling

    found = effective_scaling(model)
    rope = fields.get("rope_parameters", {})
    asked = {
        "rope_type": rope.get("rope_type"),
        "rope_factor": rope.get("factor"),
        "original_length": rope.get("original_max_position_embeddings"),
        "attention_factor": rope.get("attention_factor"),
    }
    temperature = fields.get("attention_temperature", 1.0)
    if fields.get("temperature_scope") == "rotary":
        asked["attention_factor"] = temperature**-0.5
    elif fields:
        asked["attention_temperature"] = temperature
    if found["rope_type"] is None:
        asked = {"attention_temperature": temperature} if fields else {}
    for name, value in asked.items():
        is_right = found[name] == value if isinstance(value, str) else _close(found[name], value)
        if value is not None and not is_right:
            raise RuntimeError(f"the loaded model has {name} {found[name]}, not {value}")
    return found


def scaling_text(effective: dict[str, Any]) -> str:
    """A loaded model's scaling in a few words."""
    if effective["rope_type"] is None:
        parts = ["no rotary positions"]  # perhaps others, which a model of the library may have
    elif effective["rope_type"] == "default":
        parts = ["rope default"]
    else:
        parts = [f"rope {effective['rope_type']} factor {effective['rope_factor']:g}"]
        if effective["original_length"]:
            parts[0] += f" of {effective['original_length']}"
        parts.append(f"attention factor {effective['attention_factor']:.4g}")
    return ", ".join([*parts, f"temperature {effective['attention_temperature']:.4g}"])


def resolve_methods(config: PreTrainedConfig, asked: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The methods asked for of one model, `all` and `paper` spelled out.

    Raises UserError for a method that does not exist for it, naming those that do.
    """
    from cat_lm.model.rope_scaling import METHODS
    from cat_lm.pretrained.conversion import methods_for

    known = methods_for(config)
    if asked == ("all",):
        return known
    if asked == ("paper",):
        # Figure 1: PI with YaRN's temperature on rotary models, the temperature alone without.
        return known[:1] + tuple(m for m in known if m in ("pi+temperature", "temperature"))
    for method in asked:
        if method not in METHODS:
            every = ", ".join((*METHODS, *METHOD_SETS))
            raise UserError(f"--methods {method}: unknown; known: {every} (the last two alone)")
        if method not in known:
            raise UserError(
                f"--methods {method}: does not exist for model {name}: it has {', '.join(known)}; "
                "'all' takes what exists for each model"
            )
    return tuple(dict.fromkeys(asked))


def check_scaling(
    config: PreTrainedConfig,
    methods: tuple[str, ...],
    name: str,
    training_length: int | None,
    protocol: Protocol,
) -> None:
    """Raises UserError where a scaling cannot be made, before anything is computed."""
    from cat_lm.pretrained.conversion import scaled_fields

    scaled = [method for method in methods if method != "none"]
    if scaled and training_length is None:
        raise UserError(f"model {name}: its training length is not known; give --training-length")
    try:
        for method in scaled:
            scaled_fields(config, method, 2, training_length, protocol.temperature_scope)
    except ValueError as error:
        raise UserError(f"--methods {method}: model {name}: {error}") from None


def refuse_idle_options(protocol: Protocol, methods: Collection[str]) -> None:
    """Raises UserError where an option of scaling was given that no method uses."""
    if protocol.factor is not None and set(methods) == {"none"}:
        raise UserError(
            f"--factor {protocol.factor:g}: does nothing with --methods none; give a method too"
        )
    if protocol.temperature_scope != "logits" and set(methods) <= {"none", "pi"}:
        raise UserError(
            f"--temperature-scope {protocol.temperature_scope}: does nothing with --methods "
            f"{','.join(sorted(methods))}; give a method with a temperature too"
        )


def trained_length(folder: Path, config: PreTrainedConfig) -> int | None:
    """The context length of the training: what the export knows of it, else the configuration's."""
    length = getattr(read_record(folder), "context_length", None)
    return length if length is not None else getattr(config, "max_position_embeddings", None)


def _byte_perplexity(bits_per_byte: float | None) -> float | None:
    """The same as the harness's byte_perplexity; None where it is larger than any number."""
    known = bits_per_byte is not None and bits_per_byte < sys.float_info.max_exp
    return 2.0**bits_per_byte if known else None


def _close(found: Any, asked: Any) -> bool:
    return asked is None or (found is not None and math.isclose(found, asked, rel_tol=1e-9))
