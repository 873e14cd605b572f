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
from cat_lm.data.manifest import SPLITS
from data_prep.encode.encoding import PLACES
from data_prep.encode.job import Job
from data_prep.encode.parts import DOCUMENT
from data_prep.encode.work_folder import ASSEMBLY
from data_prep.sources.units import task_units

DISK_MARGIN = 1.1
INDEX_BYTES = 20  # of a document in an .idx
FAR_BEYOND = 10  # times the measured tokens: no error of the estimate is as large
READ_BYTES_PER_SECOND = 100e6  # of text: reading, parsing and hashing what is not encoded


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, as far as the input's size is known; `None` otherwise."""

    out: Path
    work: Path
    units: int
    of_units: int
    file_bytes: int
    text_bytes: int | None
    bytes_per_second: float
    workers: int
    train_tokens: float | None
    held_out_tokens: float | None
    result_bytes: int
    parts_bytes: int
    parts_to_come: int
    out_to_come: int  # where the parts make room on the same disk
    all_out_to_come: int
    seconds: float | None

    @classmethod
    def of(cls, job: Job, arguments: argparse.Namespace) -> Estimate:
        """The estimate for what is still to be done by this process, disk for all of them."""
        measured = job.plan.measured
        units = task_units(job.units, arguments.task)
        here = dict(
            out=arguments.out,
            work=job.work,
            units=len(units),
            of_units=len(job.units),
            file_bytes=sum(unit.bytes for unit in units),
            text_bytes=measured.text_bytes,
            bytes_per_second=measured.bytes_per_second,
            workers=job.workers,
        )
        if measured.text_bytes is None:
            unknown = dict.fromkeys(("result_bytes", "parts_bytes"), 0)
            unknown |= dict.fromkeys(("parts_to_come", "out_to_come", "all_out_to_come"), 0)
            unknown |= dict.fromkeys(("train_tokens", "held_out_tokens", "seconds"))
            return cls(**here, **unknown)
        train, held_out = _result_tokens(job)
        tokens = train + held_out
        encoded = _encoded_share(job)
        item, document = np.dtype(job.plan.dtype).itemsize, 1 / max(1.0, measured.document_bytes)
        result = tokens * item
        result += tokens / max(1e-9, measured.tokens_per_byte) * document * INDEX_BYTES
        parts = encoded * measured.text_bytes
        parts *= measured.tokens_per_byte * item + document * DOCUMENT.itemsize
        rounds = range(len(job.plan.rounds))
        records = (job.record(unit, number) for unit in job.units for number in rounds)
        parts_there = sum(sum(record["bytes"].values()) for record in records if record)
        out_there = sum(
            file.stat().st_size for split in SPLITS for file in arguments.out.glob(f"{split}-*")
        )
        own = sum(r["text_bytes"] for unit in units if (r := job.record(unit, 0)))
        share = sum(unit.bytes for unit in units) / max(1, sum(unit.bytes for unit in job.units))
        text = max(0.0, measured.text_bytes * share - own)
        if (job.work / ASSEMBLY).is_file():  # all was encoded, what is gone is in shards
            text, parts_there = 0.0, parts * DISK_MARGIN
        speed = encoded / max(1.0, measured.bytes_per_second) + 1 / READ_BYTES_PER_SECOND
        peak = _peak(job, result, held_out / max(1.0, tokens), arguments)
        return cls(
            **here,
            train_tokens=train,
            held_out_tokens=held_out,
            result_bytes=int(result),
            parts_bytes=int(parts),
            parts_to_come=max(0, int(parts * DISK_MARGIN - parts_there)),
            out_to_come=max(0, int(peak * DISK_MARGIN) - out_there),
            all_out_to_come=max(0, int(result * DISK_MARGIN) - out_there),
            seconds=text * speed / job.workers,
        )

    def lines(self) -> list[str]:
        """Return the lines that are printed before the start."""
        of = "" if self.units == self.of_units else f" of {self.of_units:,}"
        size = f"input: {self.units:,}{of} units, {_bytes(self.file_bytes)} in files"
        if self.text_bytes is None:
            return [f"{size}; how much text that is, and what it takes, is not known beforehand"]
        return [
            f"{size}, about {_bytes(self.text_bytes)} of text in all, "
            f"about {self.train_tokens:,.0f} training tokens and {self.held_out_tokens:,.0f} "
            "held-out ones come out",
            f"disk: about {_bytes(self.result_bytes)} in {self.out}, "
            f"{_bytes(self.parts_bytes)} for a time in {self.work}",
            f"time: about {_duration(self.seconds)} still to encode with {self.workers} workers "
            f"({self.bytes_per_second / 1e6:.1f} MB of text a second and core)",
        ]

    def check_disk(self) -> None:
        """Raises `UserError` for what would not fit, as far as sizes are known."""
        out, work = _existing(self.out), _existing(self.work)
        if out.stat().st_dev == work.stat().st_dev:
            places = [("--out", self.out, out, self.parts_to_come + self.out_to_come)]
        else:
            # Parts go as shards come only where they share the disk.
            places = [
                ("--out", self.out, out, self.all_out_to_come),
                ("--scratch", self.work, work, self.parts_to_come),
            ]
        for flag, folder, existing, size in places:
            free = shutil.disk_usage(existing).free
            if size > free:
                raise UserError(
                    f"{flag} {folder}: about {size / 1e9:.3f} GB are needed and {free / 1e9:.3f} "
                    "GB are free; choose another folder, or less text with --tokens or --max-bytes"
                )


def _result_tokens(job: Job) -> tuple[float, float]:
    """About how many training and held-out tokens come out.

    Raises `UserError` for --tokens far beyond what there is.
    """
    spec, measured = job.spec, job.plan.measured
    share = _held_out_share(job)
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
    """About which share of the text is held out: of all sets, since only --sets leaves any out."""
    if job.held_out_below:
        return job.held_out_below / PLACES
    sizes = Counter()
    for unit in job.units:
        sizes[unit.split] += unit.bytes
    share = sizes["validation"] / max(1, sizes.total())
    limited = job.encoding.max_documents or job.encoding.max_bytes
    return min(share, job.encoding.validation_fraction) if limited else share


def _encoded_share(job: Job) -> float:
    """About which share of the text the rounds encode."""
    rates, held_out = job.plan.measured.set_tokens, _held_out_share(job)
    encoded = 0.0
    for name, rate in rates.items():
        train = job.plan.covered(name) - job.held_out_below
        encoded += rate * (1 - held_out) * max(0, train) / (PLACES - job.held_out_below)
        encoded += rate * held_out * job.spec.holds_out(name)
    return encoded / max(1e-12, sum(rates.values()))


def _peak(job: Job, result: float, held_out: float, arguments: argparse.Namespace) -> float:
    """Estimate the bytes that the output folder grows by before the parts make room.

    `held_out`: which share of the result that is.
    """
    if job.spec.mixture or job.spec.repeat:  # the parts are read more than once
        return result
    shard = arguments.shard_tokens * np.dtype(job.plan.dtype).itemsize
    return min(result, held_out * result + (job.workers + 1) * shard)


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
