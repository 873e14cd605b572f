"""Disk and time of a preparation, told before it starts."""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from cat_lm.core.errors import UserError
from data_prep.encode.encoding import PLACES
from data_prep.encode.job import Job
from data_prep.encode.parts import DOCUMENT
from data_prep.sources.base import task_units

DISK_MARGIN = 1.1
INDEX_BYTES = 20  # of a document in an .idx
FAR_BEYOND = 10  # times the measured tokens: no error of the estimate is as large
READ_BYTES_PER_SECOND = 100e6  # of text: reading, parsing and hashing what is not encoded


@dataclass(frozen=True)
class Estimate:
    """About the tokens, bytes of disk and seconds that a preparation takes in all."""

    train_tokens: float
    held_out_tokens: float
    result_bytes: float
    parts_bytes: float
    seconds_per_byte: float  # of text

    @classmethod
    def of(cls, job: Job) -> Estimate:
        """Estimate it from the plan. Raises UserError for --tokens far beyond what there is."""
        measured = job.plan.measured
        share = _held_out_share(job)
        train, held_out = _result_tokens(job, share)
        encoded = _encoded_share(job, share)
        item, document = np.dtype(job.plan.dtype).itemsize, 1 / max(1.0, measured.document_bytes)
        tokens = train + held_out
        documents = tokens / max(1e-9, measured.tokens_per_byte) * document
        per_byte = measured.tokens_per_byte * item + document * DOCUMENT.itemsize
        return cls(
            train,
            held_out,
            tokens * item + documents * INDEX_BYTES,
            encoded * measured.text_bytes * per_byte,
            encoded / max(1.0, measured.bytes_per_second) + 1 / READ_BYTES_PER_SECOND,
        )


def print_estimate(job: Job, arguments: argparse.Namespace) -> None:
    """Print the work that is left to this process, and the disk that all of them take."""
    found, measured = Estimate.of(job), job.plan.measured
    units = task_units(job.units, arguments.task)
    of = "" if len(units) == len(job.units) else f" of {len(job.units):,}"
    file_bytes = sum(unit.bytes for unit in units)
    share = file_bytes / max(1, sum(unit.bytes for unit in job.units))
    done = sum(record["text_bytes"] for unit in units if (record := job.record(unit)))
    seconds = max(0.0, measured.text_bytes * share - done) * found.seconds_per_byte / job.workers
    print(
        f"input: {len(units):,}{of} units, {_bytes(file_bytes)} in files, about "
        f"{_bytes(measured.text_bytes)} of text in all, about {found.train_tokens:,.0f} training "
        f"tokens and {found.held_out_tokens:,.0f} held-out ones come out"
    )
    print(
        f"disk: about {_bytes(found.result_bytes)} in {arguments.out}, "
        f"{_bytes(found.parts_bytes)} for a time in {job.work}"
    )
    print(
        f"time: about {_duration(seconds)} still to encode with {job.workers} workers "
        f"({measured.bytes_per_second / 1e6:.1f} MB of text a second and core)"
    )


def check_disk(job: Job, shard_tokens: int) -> None:
    """Raise UserError where the shards and the parts would not fit on their disks."""
    found = Estimate.of(job)
    places = [
        ("--out", job.staging, found.result_bytes - _size(job.staging)),
        ("--scratch", job.work, found.parts_bytes - _size(job.work)),
    ]
    out, work = _existing(job.staging), _existing(job.work)
    if out.stat().st_dev == work.stat().st_dev:
        size = found.parts_bytes + _growth(job, found, shard_tokens)
        there = sum(_size(folder) for folder in {job.staging, job.work})
        places = [("--out", job.staging, size - there)]
    for flag, folder, needed in places:
        free = shutil.disk_usage(_existing(folder)).free
        if needed * DISK_MARGIN > free:
            raise UserError(
                f"{flag} {folder}: about {needed * DISK_MARGIN / 1e9:.3f} GB are needed and "
                f"{free / 1e9:.3f} GB are free; choose another folder, or less text with --tokens "
                "or --max-bytes"
            )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*") if file.is_file())


def _growth(job: Job, found: Estimate, shard_tokens: int) -> float:
    # The bytes of shards that are written before the parts make room for others.
    if job.spec.mixture or job.spec.repeat:  # the parts are read more than once
        return found.result_bytes
    shards = (job.workers + 1) * shard_tokens * np.dtype(job.plan.dtype).itemsize
    held_out = found.held_out_tokens / max(1.0, found.train_tokens + found.held_out_tokens)
    return min(found.result_bytes, held_out * found.result_bytes + shards)


def _result_tokens(job: Job, share: float) -> tuple[float, float]:
    spec, measured = job.spec, job.plan.measured
    of_set = {name: measured.text_bytes * rate for name, rate in measured.set_tokens.items()}
    train = {name: (1 - share) * n for name, n in of_set.items() if spec.includes(name)}
    held_out = sum(share * n for name, n in of_set.items() if spec.holds_out(name))
    if spec.tokens is not None:
        there = sum(train.values())
        repeats = 1 if spec.mixture is None else spec.max_repeats
        if train and spec.tokens > FAR_BEYOND * repeats * there:
            raise UserError(
                f"--tokens {spec.tokens}: the input has about {there:,.0f} training tokens of "
                "these sets; ask for fewer"
            )
        return float(spec.tokens), held_out
    if spec.mixture is not None:
        shares = spec.shares()
        sizes = (tokens / float(shares[name]) for name, tokens in train.items())
        return min(sizes, default=0.0), held_out
    repeat = spec.repeat or {}
    return sum(float(Fraction(repeat.get(name, "1"))) * n for name, n in train.items()), held_out


def _held_out_share(job: Job) -> float:
    if job.held_out_below:
        return job.held_out_below / PLACES
    sizes = Counter()
    for unit in job.units:
        sizes[unit.split] += unit.bytes
    share, rules = sizes["validation"] / max(1, sizes.total()), job.encoding.rules
    return min(share, rules.validation_fraction) if rules.is_limited else share


def _encoded_share(job: Job, held_out: float) -> float:
    encoded = 0.0
    rates = job.plan.measured.set_tokens
    for name, rate in rates.items():
        below, with_held_out = job.plan.coverage.of(name)
        train = max(0, below - job.held_out_below) / (PLACES - job.held_out_below)
        encoded += rate * ((1 - held_out) * train + held_out * with_held_out)
    return encoded / max(1e-12, sum(rates.values()))


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    return folder if folder.exists() else _existing(folder.parent)


def _bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number / 1e3:,.1f} kB"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
