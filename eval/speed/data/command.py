"""`python -m eval.speed data`: tokenization, preparation, loader, and opening of large corpora.

What is measured, and the target that the table sets beside each figure:

    tokenize   documents to arrays of ids, on one core, beside the raw libraries: at least 0.85
    prepare    `data_prep.prepare` as a whole: two workers at least 1.8 times as fast as one
    load       batches of the loader; a consumer of 1M tokens a second waits less than 1% of it
    open       15B and 600B tokens (simulated): opened and resumed at the middle in less than 2 s
               and 200 MB

Importing this costs nothing: `--help` is quick.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from cat_lm import limits
from cat_lm.cli import output_path, whole, whole_numbers
from cat_lm.errors import UserError
from cat_lm.io.folders import check_scratch
from eval.speed.arguments import names
from eval.speed.data.tables import short

PARTS = ("tokenize", "prepare", "load", "open")
DEFAULT_TOKENIZERS = ("train:sentencepiece:8000", "bytes")
LIBRARIES = ("tokenizers", "sentencepiece", "transformers", "numpy")
MEGABYTE = 10**6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m eval.speed data`."""
    add = parser.add_argument
    add(
        "--parts",
        type=names(PARTS),
        default=PARTS,
        metavar="LIST",
        help=f"of {', '.join(PARTS)} (default: all)",
    )
    add(
        "--tokenizer",
        action="append",
        metavar="SPEC",
        help="as for data_prep.prepare; may be given several times, the first is the one of "
        f"`prepare` (default: {' and '.join(DEFAULT_TOKENIZERS)})",
    )
    add(
        "--text",
        metavar="PATH",
        help="a file, folder or glob of documents (default: Python's standard library)",
    )
    add(
        "--text-mb",
        type=whole(limits.MEGABYTES),
        default=16,
        metavar="N",
        help="MB of text to tokenize in each round, at most (default: 16)",
    )
    add("--repeats", type=whole(limits.REPEATS), default=5, metavar="N", help="rounds (default: 5)")
    add(
        "--workers",
        type=whole_numbers(limits.WORKERS, "1,2"),
        default=(1, 2),
        metavar="LIST",
        help="of the preparation (default: 1,2)",
    )
    add(
        "--prepare-mb",
        type=whole(limits.MEGABYTES),
        default=64,
        metavar="N",
        help="MB of text to prepare, the text repeated where there is less (default: 64)",
    )
    _add_corpora(parser)
    add(
        "--scratch",
        type=output_path,
        metavar="DIR",
        help="for temporary files (default: the system's)",
    )
    # The libraries are compared on one core, and nothing here uses an accelerator.
    parser.set_defaults(device="cpu", threads=1)


def _add_corpora(parser: argparse.ArgumentParser) -> None:
    """The sizes of the corpora that are loaded and opened."""
    add = parser.add_argument
    add(
        "--loader-tokens",
        type=whole(limits.TOKENS.at_least(1)),
        default=100_000_000,
        metavar="N",
        help="in the corpora that are loaded (default: 1e8)",
    )
    add("--batch-size", type=whole(limits.BATCH), default=256, metavar="G", help="default: 256")
    add(
        "--context-length",
        type=whole(limits.CONTEXT),
        default=2048,
        metavar="T",
        help="default: 2048",
    )
    add(
        "--open-tokens",
        type=whole_numbers(limits.TOKENS.at_least(1), "1_000_000"),
        default=(15 * 10**9, 600 * 10**9),
        metavar="LIST",
        help="of the corpora that are opened (default: 15B and 600B); their files are sparse",
    )


def run(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Measures the parts asked for; `targets` of the result says what is met."""
    check_scratch(options.scratch)
    if options.loader_tokens <= options.batch_size * options.context_length:
        raise UserError(
            f"--loader-tokens {options.loader_tokens}: must be more than a batch of "
            f"{options.batch_size} x {options.context_length}"
        )
    from cat_lm.data.tokenizers import check_spec

    for spec in options.tokenizer or ():
        check_spec(spec)
    # Before tokenizers loads: what is compared is one core against one core.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cat-lm-speed-", dir=options.scratch) as scratch:
        for name in options.parts:
            parts[name] = _measure(name, options, Path(scratch))
    refused = [
        {"tokenizer": row["spec"], "reason": row["refused"]}
        for row in parts.get("tokenize", {}).get("tokenizers", [])
        if row["refused"]
    ]
    return {
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        **parts,
        "targets": targets(parts),
        "refused": refused,
    }


def _measure(name: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from eval.speed.data import load, opening, prepare, tokenization

    specs = options.tokenizer or list(DEFAULT_TOKENIZERS)
    if name == "tokenize":
        limit = options.text_mb * MEGABYTE
        return tokenization.tokenize_speed(options.text, limit, specs, options.repeats, scratch)
    if name == "prepare":
        limit = options.prepare_mb * MEGABYTE
        return prepare.prepare_speed(options.text, limit, specs[0], options.workers, scratch)
    batch = (options.batch_size, options.context_length)
    if name == "load":
        return load.load_speed(options.loader_tokens, *batch, options.repeats, scratch)
    return opening.open_speed(options.open_tokens, *batch, scratch)


def targets(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with what was measured for it, and whether that meets it."""
    rows: list[dict[str, Any]] = []

    def at_least(name: str, least: float, measured: float) -> None:
        met = measured >= least
        rows.append({"name": name, "at_least": least, "measured": measured, "met": met})

    def below(name: str, limit: float, measured: float) -> None:
        rows.append({"name": name, "below": limit, "measured": measured, "met": measured < limit})

    for row in parts.get("tokenize", {}).get("tokenizers", []):
        for rival, ratio in row["times_as_fast_as"].items():
            at_least(f"{short(row['spec'])}: speed relative to {rival}", 0.85, ratio)
    for row in parts.get("prepare", {}).get("runs", [])[1:]:
        name = f"prepare: {row['workers']} workers relative to {parts['prepare']['one']}"
        at_least(name, 0.9 * row["workers"] / parts["prepare"]["one"], row["times_as_fast"])
    for row in parts.get("load", {}).get("cases", []):
        below(f"loader, {row['case']}: share of time waiting", 0.01, row["waiting_share"])
    for row in parts.get("open", {}).get("corpora", []):
        what = f"{row['tokens'] / 1e9:.3g}B tokens"
        below(f"{what}: seconds to open", 2.0, row["open_seconds"])
        below(f"{what}: seconds to open and resume", 2.0, row["resume_seconds"])
        below(f"{what}: MB of memory in all", 200.0, row["peak_bytes"] / MEGABYTE)
    return rows
