"""The second stage: what the parts are chosen and cut into, and the finished folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write
from cat_lm.core.folders import make_temporary
from cat_lm.data.manifest import SPLITS
from cat_lm.data.shards import ShardInfo
from data_prep.assemble import output_folder
from data_prep.assemble.manifest import build_manifest, print_summary
from data_prep.assemble.selection import Selection
from data_prep.assemble.shard_plan import (
    Assembly,
    ShardTask,
    finished_shard,
    plan_shards,
    token_counts_path,
    write_shard,
)
from data_prep.assemble.token_budget import Chooser
from data_prep.common.amounts import Limit
from data_prep.common.progress import TextProgress
from data_prep.common.unfinished import MAKING, MALFORMED, claim, put, shard_names
from data_prep.common.workers import run_tasks
from data_prep.encode.job import Job
from data_prep.encode.parts import Parts, part_path, read_record, remove_part, write_record
from data_prep.encode.plan import Shortage
from data_prep.encode.work_folder import ASSEMBLY, WorkFolder
from data_prep.sources import KNOWN_SETS, UNKNOWN_SET
from data_prep.sources.base import counted_with
from data_prep.sources.units import Unit


class UselessInput(UserError):
    """Nothing can come of this input with these arguments; what is encoded need not be kept."""


def assemble(job: Job, work: WorkFolder, identity: dict, arguments: argparse.Namespace) -> None:
    """Makes what is left of the parts, then the shards, then the manifest; prints the summary."""
    start = time.monotonic()
    assembly = _load(job) or _decide(job, work, arguments)
    key = _key(assembly)
    _write_shards(job, assembly, key)
    shards: dict[str, list[ShardInfo]] = {split: [] for split in SPLITS}
    vocab_size = job.plan.tokenizer.vocab_size
    counts = {split: np.zeros(vocab_size, dtype=np.int64) for split in SPLITS}
    for planned in assembly.shards:
        info = finished_shard(job.work, job.out, planned.name, key, job.plan.dtype)
        shards[planned.split].append(info)
        counts[planned.split] += np.load(token_counts_path(job.work, planned.name))
    tokenizer, dtype, source = job.plan.tokenizer, job.plan.dtype, job.encoding.source
    manifest = build_manifest(identity, tokenizer, dtype, assembly, shards, counts, source.left_out)
    output_folder.finish(job.out, work, manifest)
    known = (*KNOWN_SETS, UNKNOWN_SET) if arguments.source == "slimpajama" else ()
    print_summary(manifest, known)
    print(f"{job.out}: complete (assembled in {time.monotonic() - start:.1f} s)")


def _load(job: Job) -> Assembly | None:
    record = read_record(job.work / ASSEMBLY, Assembly.__dataclass_fields__)
    if record is None:
        return None
    assembly = Assembly.from_json(record)
    return assembly if assembly.rounds == len(job.plan.rounds) else None


def _key(assembly: Assembly) -> str:
    return hashlib.sha256(json.dumps(assembly.to_json(), sort_keys=True).encode()).hexdigest()


def _decide(job: Job, work: WorkFolder, arguments: argparse.Namespace) -> Assembly:
    """Chooses the documents, encoding more of them where the estimates were too low."""
    while True:
        units = _complete_parts(job)
        seen, empty, malformed = _met(job, units)
        _check_input(job, units, seen, empty, malformed, arguments)
        parts = job.parts(units, sorted(seen))
        further = job.plan.further_round(parts.names, job.spec)
        if further is None:
            try:
                selection = _select(job, parts)
                break
            except Shortage as shortage:
                further = job.plan.round_for(parts.names, job.spec, shortage)
                print("the estimate of what has to be encoded was too low: a further round")
        job.add_round(further)
    shards, counts = plan_shards(parts, selection, arguments.shard_tokens)
    _check_splits({shard.split for shard in shards}, arguments)
    rounds = len(job.plan.rounds)
    assembly = Assembly(rounds, selection, shards, _plain(counts), _plain(seen), empty, malformed)
    work.remove_shards()
    (job.work / "shards").mkdir(exist_ok=True)
    claim(job.out, shard_names(shard.name for shard in shards))
    write_record(job.work / ASSEMBLY, assembly.to_json())
    return assembly


def _complete_parts(job: Job) -> list[Unit]:
    """Encodes whatever is missing or damaged of all rounds; the units that the result needs."""
    while True:
        job.encode(job.units)
        units = job.needed_units()
        job.encode(units, range(1, len(job.plan.rounds)))
        if not (damaged := job.check(units)):
            return units
        print(f"{len(damaged)} damaged parts are made again", flush=True)


def _met(job: Job, units: list[Unit]) -> tuple[dict[str, dict[str, Counter]], int, int]:
    """All documents of the units by set and split, chosen or not; the empty; the malformed."""
    seen: dict[str, dict[str, Counter]] = {}
    empty = malformed = 0
    for unit in units:
        record = job.record(unit, 0)
        empty += record["empty"]
        malformed += record["malformed"]
        for name, by_split in record["seen"].items():
            for split, counts in by_split.items():
                seen.setdefault(name, {}).setdefault(split, Counter()).update(counts)
    return seen, empty, malformed


def _plain(counts: dict[str, dict[str, Counter]]) -> dict[str, dict[str, dict]]:
    """Counts as they go into JSON: sets by name, and the splits in their usual order."""
    return {
        name: {split: dict(by_split[split]) for split in SPLITS if split in by_split}
        for name, by_split in sorted(counts.items())
    }


def _check_input(
    job: Job,
    units: list[Unit],
    seen: dict[str, dict[str, Counter]],
    empty: int,
    malformed: int,
    arguments: argparse.Namespace,
) -> None:
    """Writes malformed.log. Raises `UserError` for too many malformed records or absent sets."""
    documents = sum(c["documents"] for by_split in seen.values() for c in by_split.values())
    if malformed:
        claim(job.out, [MALFORMED])
        with put(job.out, MALFORMED) as path, atomic_write(path, "wb") as log:
            for unit in units:
                with open(part_path(job.work, unit.number, 0, "malformed"), "rb") as stream:
                    shutil.copyfileobj(stream, log)
    limit: Limit = arguments.max_malformed
    records = documents + empty + malformed
    if limit.exceeded(malformed, records):
        first = next(filter(None, (job.record(u, 0)["first_malformed"] for u in units)))
        raise UserError(
            f"{malformed:,} of {records:,} records are malformed, more than --max-malformed "
            f"{limit.text} allows; the first: {first} (all: {job.out / MALFORMED}); what "
            "is encoded is kept, a higher limit continues"
        )
    if not documents:
        raise UselessInput(f"{_where(arguments)}: empty input, no document with any text")
    job.spec.check_names(seen)


def _where(arguments: argparse.Namespace) -> str:
    path = f" --path {arguments.path}" if arguments.path else ""
    return f"--source {arguments.source}{path}"


def _check_splits(made: set[str], arguments: argparse.Namespace) -> None:
    for split in SPLITS:
        if split not in made:
            raise UselessInput(
                f"{_where(arguments)}: the {split} split comes out empty; change "
                f"--validation-fraction (now {arguments.validation_fraction}) or --seed, cut texts "
                "into documents with --document-separator, choose other --sets, or give "
                "--validation-path"
            )


def _select(job: Job, parts: Parts) -> Selection:
    def scan() -> Iterator[tuple[int, np.ndarray]]:
        return ((unit, parts.read(unit).documents) for unit in sorted(parts.records))

    chooser = Chooser(job.spec, parts.names, scan, job.plan.covered, job.held_out_below)
    selection = chooser.choose()
    selection.ends = _limit_ends(job, parts)
    return selection


def _limit_ends(job: Job, parts: Parts) -> dict[str, tuple[int, int]]:
    """The document with which --max-documents or --max-bytes is reached, for each split."""
    encoding = job.encoding
    if encoding.max_documents is None and encoding.max_bytes is None:
        return {}
    ends: dict[str, tuple[int, int]] = {}
    counts: dict[str, Counter] = {}
    for unit in sorted(parts.records):
        split = parts.unit_splits[unit]
        counted = counted_with(split)
        seen = counts.setdefault(counted, Counter())
        documents = parts.read(unit).documents
        for size, position in zip(documents["bytes"], documents["position"], strict=True):
            if counted in ends:
                break
            seen.update(documents=1, bytes=int(size))
            if encoding.limit_reached(split, seen["documents"], seen["bytes"]):
                ends[counted] = (unit, int(position))
    return ends


def _write_shards(job: Job, assembly: Assembly, key: str) -> None:
    """Writes the shards that are not there yet; removes parts as soon as no shard needs them."""
    todo = {
        shard.name: shard
        for shard in assembly.shards
        if finished_shard(job.work, job.out, shard.name, key, job.plan.dtype) is None
    }
    needs = Counter(unit for shard in todo.values() for unit in shard.units)
    while True:
        units = [job.units[number] for number in sorted(needs)]
        job.encode(units, range(assembly.rounds))
        if not job.check(units):
            break
    _release(job, {unit.number for unit in job.units} - set(needs), assembly.rounds)
    if not todo:
        return
    parts = job.parts(units, assembly.selection.names)
    tasks = (
        ShardTask(
            shard,
            parts.of(shard.units),
            assembly.selection,
            job.out,
            job.plan.dtype,
            job.plan.tokenizer.vocab_size,
            key,
        )
        for shard in todo.values()
    )
    size = np.dtype(job.plan.dtype).itemsize
    total = sum(shard.tokens for shard in todo.values()) * size
    make_temporary(job.out / MAKING)
    with TextProgress("assembling", total, "of shards") as progress:
        workers = min(job.workers, len(todo))
        for name in run_tasks(write_shard, tasks, workers, progress.update):
            free = set()
            for unit in todo[name].units:
                needs[unit] -= 1
                if not needs[unit]:
                    free.add(unit)
            _release(job, free, assembly.rounds)


def _release(job: Job, units: set[int], rounds: int) -> None:
    """Removes the tokens of parts that have been read for the last time."""
    for unit in sorted(units):
        for number in range(rounds):
            remove_part(job.work, unit, number, ("bin", "docs"))
            job.forget(unit, number)
