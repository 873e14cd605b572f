"""Estimate the disk space and the time of a preparation before it starts."""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from cat_lm.core.errors import UserError
from data_prep.common.amounts import SelectionSpec
from data_prep.encode.encoding import PLACES
from data_prep.encode.job import Job
from data_prep.encode.parts import DOCUMENT
from data_prep.sources.base import task_units

DISK_MARGIN = 1.1
INDEX_BYTES = 20  # bytes per document in an .idx
FAR_BEYOND = 10  # a multiple of the estimated tokens that no estimate is wrong by
READ_BYTES_PER_SECOND = 100e6  # bytes of text that a core reads, parses and hashes


@dataclass(frozen=True)
class Estimate:
    """The estimated tokens, bytes on disk and seconds of a whole preparation."""

    train_tokens: float
    held_out_tokens: float
    result_bytes: float
    parts_bytes: float
    seconds_per_byte: float  # per byte of text and core


def estimate_job(job: Job) -> Estimate:
    """Estimate a preparation from its plan.

    Raises:
        UserError: --tokens is much more than the input has.
    """
    spec, measured, share = job.spec, job.plan.measured, _held_out_share(job)
    train, held_out, encoded = {}, 0.0, 0.0
    for name, rate in measured.set_tokens.items():
        tokens = measured.text_bytes * rate
        below, with_held_out = job.plan.coverage.of(name)
        covered = max(0, below - job.held_out_below) / (PLACES - job.held_out_below)
        encoded += tokens * ((1 - share) * covered + share * with_held_out)
        if spec.includes(name):
            train[name] = (1 - share) * tokens
        if spec.holds_out(name):
            held_out += share * tokens
    wanted = _train_tokens(spec, train)
    item, tokens_per_byte = job.encoding.dtype.itemsize, max(1e-9, measured.tokens_per_byte)
    tokens_per_document = max(1.0, tokens_per_byte * measured.document_bytes)
    seconds = encoded / tokens_per_byte / max(1.0, measured.bytes_per_second)
    return Estimate(
        wanted,
        held_out,
        (wanted + held_out) * (item + INDEX_BYTES / tokens_per_document),
        encoded * (item + DOCUMENT.itemsize / tokens_per_document),
        seconds / max(1, measured.text_bytes) + 1 / READ_BYTES_PER_SECOND,
    )


def print_estimate(job: Job, arguments: argparse.Namespace) -> None:
    """Print the remaining work of this process, and the disk space of the whole preparation."""
    found, measured = estimate_job(job), job.plan.measured
    units = task_units(job.units, arguments.task)
    of = "" if len(units) == len(job.units) else f" of {len(job.units):,}"
    file_bytes = sum(unit.bytes for unit in units)
    share = file_bytes / max(1, sum(unit.bytes for unit in job.units))
    left = max(0.0, measured.text_bytes * share - job.encoded_bytes(units))
    minutes = left * found.seconds_per_byte / job.workers / 60
    print(
        f"input: {len(units):,}{of} units, {_format_bytes(file_bytes)} in files, about "
        f"{_format_bytes(measured.text_bytes)} of text in all, about {found.train_tokens:,.0f} "
        f"training tokens and {found.held_out_tokens:,.0f} held-out ones come out"
    )
    print(
        f"disk: about {_format_bytes(found.result_bytes)} in {arguments.out}, "
        f"{_format_bytes(found.parts_bytes)} temporarily in {job.work}"
    )
    print(
        f"time: about {minutes:,.1f} minutes still to encode with {job.workers} workers "
        f"({measured.bytes_per_second / 1e6:.1f} MB of text a second and core)"
    )


def check_disk(job: Job) -> None:
    """Raise UserError if the shards or the parts do not fit on their disks."""
    found = estimate_job(job)
    for flag, folder, size in (
        ("--out", job.staging, found.result_bytes),
        ("--scratch", job.work, found.parts_bytes),
    ):
        there = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
        place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        needed, free = (size - there) * DISK_MARGIN, shutil.disk_usage(place).free
        if needed > free:
            raise UserError(
                f"{flag} {folder}: about {needed / 1e9:.3f} GB are needed and {free / 1e9:.3f} GB "
                "are free; choose another folder, or less text with --tokens or --max-bytes"
            )


def _train_tokens(spec: SelectionSpec, there: dict[str, float]) -> float:
    """Return the training tokens of the result; `there` has the input's tokens of wanted sets."""
    if spec.tokens is not None:
        repeats = 1 if spec.mixture is None else spec.max_repeats
        if there and spec.tokens > FAR_BEYOND * repeats * sum(there.values()):
            raise UserError(
                f"--tokens {spec.tokens}: the input has about {sum(there.values()):,.0f} training "
                "tokens of these sets; ask for fewer"
            )
        return float(spec.tokens)
    if spec.mixture is not None:
        shares = spec.shares()
        return min((n / float(shares[name]) for name, n in there.items()), default=0.0)
    repeat = spec.repeat or {}
    return sum(float(Fraction(repeat.get(name, "1"))) * n for name, n in there.items())


def _held_out_share(job: Job) -> float:
    if job.held_out_below:
        return job.held_out_below / PLACES
    sizes = Counter()
    for unit in job.units:
        sizes[unit.split] += unit.bytes
    share, rules = sizes["validation"] / max(1, sizes.total()), job.encoding.rules
    return min(share, rules.validation_fraction) if rules.is_limited else share


def _format_bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number / 1e3:,.1f} kB"
