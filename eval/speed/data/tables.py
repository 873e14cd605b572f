"""The record of `eval.speed.data` as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eval.common.text_table import aligned


def short(spec: str) -> str:
    """The name of a tokenizer's file or folder, or the kind that it is."""
    return spec.rstrip("/").rpartition("/")[2]


def data_lines(record: dict[str, Any]) -> Iterator[str]:
    """A table for each part that was measured, and the targets."""
    for name, lines in (
        ("tokenize", _tokenize),
        ("prepare", _prepare),
        ("load", _load),
        ("open", _open),
    ):
        if name in record:
            yield ""
            yield from lines(record[name])
    yield ""
    yield _targets(record["targets"])


def _tokenize(part: dict[str, Any]) -> Iterator[str]:
    yield (
        f"tokenization on one core: {part['bytes'] / 1e6:.1f} MB, {part['documents']:,} documents "
        f"of {part['text']}, the largest {part['largest_document_bytes'] / 1e6:.2f} MB"
    )
    rows = []
    for tokenizer in part["tokenizers"]:
        if tokenizer["refused"]:
            yield f"refused: {short(tokenizer['spec'])}: {tokenizer['refused']}"
        for name, found in tokenizer["contenders"].items():
            ratio = tokenizer["times_as_fast_as"].get(name)
            slow, fast = (part["bytes"] / s / 1e6 for s in found["seconds"]["quartiles"][::-1])
            rows.append(
                (
                    f"{short(tokenizer['spec'])}, {name}",
                    f"{found['bytes_per_second'] / 1e6:.2f}",
                    f"{slow:.2f}-{fast:.2f}",
                    f"{found['tokens_per_second'] / 1e6:.3f}",
                    "" if ratio is None else f"{ratio:.3f}",
                )
            )
    if rows:
        yield aligned(("", "MB/s", "quartiles", "M tokens/s", "cat_lm relative to it"), rows)


def _prepare(part: dict[str, Any]) -> Iterator[str]:
    yield (
        f"data_prep.prepare: {part['bytes'] / 1e6:.1f} MB in {part['files']} files, "
        f"{short(part['tokenizer'])}"
    )
    yield aligned(
        ("workers", "MB/s", "MB/s a worker", "times as fast", "cores used", "start s", "whole s"),
        [
            (
                str(run["workers"]),
                f"{run['bytes_per_second'] / 1e6:.2f}",
                f"{run['bytes_per_second_and_worker'] / 1e6:.2f}",
                f"{run['times_as_fast']:.2f}",
                f"{run['cores_used']:.2f}",
                f"{run['tiny_run']['seconds']:.1f}",
                f"{run['whole_run']['seconds']:.1f}",
            )
            for run in part["runs"]
        ],
    )


def _load(part: dict[str, Any]) -> Iterator[str]:
    yield (
        f"loader: batches of {part['global_batch_size']} x {part['context_length']}, "
        f"{part['tokens'] / 1e6:.0f}M tokens; waiting at "
        f"{part['consumed_tokens_per_second'] / 1e6:.0f}M tokens/s"
    )
    yield aligned(
        ("", "batch ms", "M tokens/s", "waiting", "first batch ms", "made in s"),
        [
            (
                row["case"],
                f"{row['batch_seconds']['median'] * 1e3:.1f}",
                f"{row['tokens_per_second'] / 1e6:.1f}",
                f"{row['waiting_share']:.3%}",
                f"{row['first_batch_seconds'] * 1e3:.1f}",
                f"{row['made_in_seconds']:.3f}",
            )
            for row in part["cases"]
        ],
    )


def _open(part: dict[str, Any]) -> Iterator[str]:
    yield "opening, in a fresh process (memory with Python and NumPy)"
    yield aligned(
        ("tokens", "shards", "open s", "open and resume s", "memory MB", "of it for the data MB"),
        [
            (
                f"{row['tokens'] / 1e9:.3g}B",
                f"{row['shards']:,}",
                f"{row['open_seconds']:.3f}",
                f"{row['resume_seconds']:.3f}",
                f"{row['peak_bytes'] / 1e6:.0f}",
                f"{row['added_bytes'] / 1e6:.0f}",
            )
            for row in part["corpora"]
        ],
    )


def _targets(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no target: nothing was measured that has one"
    cells = [
        (
            row["name"],
            f"at least {row['at_least']:g}" if "at_least" in row else f"below {row['below']:g}",
            f"{row['measured']:.3g}",
            "met" if row["met"] else "not met",
        )
        for row in rows
    ]
    return aligned(("", "target", "measured", ""), cells)
