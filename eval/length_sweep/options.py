"""Declare the options of a length sweep; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cat_lm.core import numbers
from cat_lm.core.cli import comma_separated, path
from cat_lm.core.errors import UserError
from eval.common.options import Option
from eval.common.precision import HELP, Dtype

WIKITEXT = "wikitext"  # Stands for a file: WikiText-2 raw, see wikitext.py.
PAGES = "pages"  # A method for WikiText: every token of each page is scored, without an end token.
# Options that choose among a text's tokens.
_OTHER_TEXT = ("documents", "document_separator", "min_document_tokens", "max_document_tokens")


def _count(what: str, allowed: numbers.Range = numbers.SCORED_TOKENS) -> Option:
    return Option(what, allowed, metavar="N")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a sweep: what is scored and how, for all models alike.

    Attributes:
        text, data: a text file (or `WIKITEXT`), or prepared data; exactly one of them.
        dtype: the dtype of weights and activations; softmax is in fp32, sums over tokens in fp64.
    """

    text: Path | str | None = None
    data: Path | str | None = None
    split: Annotated[
        Literal["validation", "test"] | None,
        Option("split of --data (default: validation; raw bytes have test)"),
    ] = None
    lengths: Annotated[
        tuple[int, ...],
        Option(
            "lengths of windows, in tokens",
            numbers.CONTEXT,
            metavar="256,512,...",
            example="256,512",
        ),
    ]
    methods: Annotated[
        tuple[str, ...],
        Option(
            "none,pi,pi+temperature,yarn (rotary positions) or none,temperature (without); "
            "all: those that exist for each model; paper: those of the paper's figure",
            kind=comma_separated(str.strip, "none,yarn"),
        ),
    ] = ("none",)
    max_tokens: Annotated[int | None, _count("score at most N tokens")] = None
    skip_tokens: Annotated[
        int | None,
        _count(
            "of --data: leave out the first N tokens of the split, on which training validates; "
            "per-document: all documents that begin there (default: none)"
        ),
    ] = None
    stride: Annotated[
        int | None, _count("move windows on by N tokens (default: the length)", numbers.CONTEXT)
    ] = None
    data_dir: Annotated[
        Path | None,
        Option(
            "folder with wikitext.jsonl for --text wikitext, without network",
            kind=path,
            metavar="DIR",
        ),
    ] = None
    documents: Annotated[
        Literal["concatenated", "per-document"] | None,
        Option("whether windows cross the ends of documents (default: they do)"),
    ] = None
    document_separator: Annotated[
        str | None,
        Option("regular expression that separates the documents of --text", metavar="REGEX"),
    ] = None
    min_document_tokens: Annotated[
        int | None,
        _count("per-document: leave shorter documents out (default: the largest length)"),
    ] = None
    max_document_tokens: Annotated[
        int | None,
        _count("per-document: of longer documents score the first N tokens (default: all)"),
    ] = None
    factor: Annotated[
        float | None,
        _count(
            "one scaling factor for all lengths (default: test length / training length, >= 1)",
            numbers.SCALING_FACTOR,
        ),
    ] = None
    temperature_scope: Annotated[
        Literal["logits", "rotary"],
        Option("what the temperature acts on; rotary: the rotated channels, as in transformers"),
    ] = "logits"
    training_length: Annotated[
        int | None, _count("default: what the model's folder says", numbers.CONTEXT)
    ] = None
    dtype: Annotated[Dtype, Option(HELP)] = "auto"
    device: Annotated[str, Option("device: auto, cpu, cuda, cuda:1, …")] = "auto"
    batch_tokens: Annotated[int, _count("tokens per forward pass", numbers.BATCH_TOKENS)] = 8192

    @property
    def largest(self) -> int:
        """Return the largest length."""
        return max(self.lengths)

    @property
    def reading(self) -> str:
        """Return the reading mode: concatenated, per-document, or `PAGES` for WikiText."""
        return PAGES if self.text == WIKITEXT else self.documents or "concatenated"

    def check(self) -> None:
        """Raise UserError for options that contradict each other."""
        largest, per_document = self.largest, self.documents == "per-document"
        if self.text == WIKITEXT:
            for name in (*_OTHER_TEXT, "max_tokens"):
                if (value := getattr(self, name)) is not None:
                    raise UserError(
                        f"{_flag(name)} {value}: not with --text {WIKITEXT}, all of whose pages "
                        "are scored, one by one"
                    )
        for name, is_used, needed in (
            ("data_dir", self.text == WIKITEXT, f"--text {WIKITEXT}"),
            ("split", self.data is not None, "--data"),
            ("skip_tokens", self.data is not None, "--data"),
            ("min_document_tokens", per_document, "--documents per-document"),
            ("max_document_tokens", per_document, "--documents per-document"),
            ("document_separator", self.text is not None, "--text"),
        ):
            if (value := getattr(self, name)) is not None and not is_used:
                raise UserError(f"{_flag(name)} {value}: only with {needed}")
        if self.stride is not None and self.stride > largest:
            raise UserError(
                f"--stride {self.stride}: does nothing, the largest of --lengths is {largest}"
            )
        least = max(largest, self.min_document_tokens or 0)
        for name, bound, whose in (
            ("max_tokens", largest, "the largest of --lengths"),
            ("max_document_tokens", least, "the largest of --lengths and --min-document-tokens"),
        ):
            if (value := getattr(self, name)) is not None and value < bound:
                raise UserError(f"{_flag(name)} {value}: must be at least {bound}, {whose}")

    def describe(self) -> dict[str, str]:
        """Describe the protocol for people, beside the numbers."""
        moves = f"moving on by {self.stride} tokens, or by" if self.stride else "moving on by"
        is_paged, most = self.reading == PAGES, self.max_document_tokens
        scored = "every token of every page" if is_paged else "every token after the first"
        cut = f"of each the first {most} tokens" if most else "none is truncated"
        skipped = {"skipped": f"the split's first {self.skip_tokens} tokens"}
        return {
            "scored": f"{scored}, once; the same ones at every length",
            "windows": f"{moves} their whole length; the last one reaches back to be full",
            "documents": f"{self.reading}; {cut}",
            "factor": str(self.factor or "test length over training length, at least 1"),
        } | (skipped if self.skip_tokens else {})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
