"""The steps of a preparation: plan, parts, choice of documents, shards, manifest."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.files import atomic_write, write_json
from cat_lm.core.folders import check_output
from cat_lm.data.manifest import MANIFEST, SPLITS
from cat_lm.data.shards import ShardInfo
from cat_lm.data.tokenizers import check_spec, spec_sha256
from data_prep.assemble.manifest import build_manifest, print_summary
from data_prep.assemble.output_folder import MALFORMED, OutputFolder
from data_prep.assemble.selection import Chooser, Shortage, limit_ends
from data_prep.assemble.shards import (
    ASSEMBLY,
    Assembly,
    ShardTask,
    finished_shard,
    plan_shards,
    token_counts_path,
    write_shard,
)
from data_prep.common.amounts import Limit, SelectionSpec
from data_prep.common.progress import TextProgress
from data_prep.common.workers import run_tasks, useful_workers
from data_prep.encode.encoding import Encoding, Rules
from data_prep.encode.estimate import check_disk, print_estimate
from data_prep.encode.job import Job
from data_prep.encode.parts import disk_errors, load_record, part_path, write_record
from data_prep.encode.plan import (
    PLAN,
    TOKENIZER,
    Plan,
    coverage_for,
    held_out_fraction,
    make_tokenizer,
    measure,
)
from data_prep.sources.base import Source, Unit, task_units, units_of
from data_prep.sources.documents import Reading
from data_prep.sources.open import open_source


class UselessInput(UserError):
    """Nothing can come of this input with these arguments; what is encoded need not be kept."""


def prepare(arguments: argparse.Namespace) -> None:
    """Run the preparation that the command line asks for and print its summary."""
    check_spec(arguments.tokenizer)
    reading = Reading(arguments.text_key, arguments.document_separator, arguments.set_key)
    source = open_source(
        arguments.source,
        arguments.path,
        reading,
        arguments.validation_path,
        arguments.validation_fraction,
        arguments.exclude or (),
    )
    identity = _identity(arguments, source)
    folder = OutputFolder.of(arguments.out, arguments.scratch)
    is_complete = folder.is_complete(identity, arguments.overwrite)
    if not is_complete and arguments.estimate:
        _estimate(arguments, source, folder)
        return
    if not is_complete:  # Complete data may lie where nothing can be written.
        check_output(arguments.out)
        if arguments.scratch is not None:
            check_output(arguments.scratch, "--scratch")
        with folder.locked(shared=arguments.stage == "encode"), disk_errors(arguments.out):
            is_complete = _prepare(arguments, source, folder, identity)
    if is_complete:
        folder.tidy_complete(identity)
        print(f"{folder.out}: already complete with these arguments, nothing to do")


def _prepare(
    arguments: argparse.Namespace, source: Source, folder: OutputFolder, identity: dict
) -> bool:
    """Do the work; return True if it was done already. The folder is locked."""
    with folder.setup_lock():
        # What a kill interrupted is completed first.
        if folder.publish(identity) or folder.is_complete(identity, arguments.overwrite):
            return True
        together = arguments.stage != "all" and arguments.scratch is not None
        folder.take_up(identity, arguments.overwrite, together)
        with _tidied_if_worthless(arguments, folder):
            job = _set_up(arguments, source, folder)
    with _tidied_if_worthless(arguments, folder):
        _run(arguments, job, identity, folder)
    return False


@contextmanager
def _tidied_if_worthless(arguments: argparse.Namespace, folder: OutputFolder) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if _is_worthless(error, arguments, folder):
            folder.tidy()
        raise


def _is_worthless(error: UserError, arguments: argparse.Namespace, folder: OutputFolder) -> bool:
    """Return True if nothing of a preparation that failed is worth keeping.

    So a mistake that shows at once leaves nothing in the way of the next attempt.
    """
    if isinstance(error, UselessInput):
        return True
    # Other tasks of an array may be at work, once there is a plan.
    is_shared = arguments.stage == "encode" and (folder.work / PLAN).is_file()
    return not is_shared and not is_temporary(error) and not any(folder.work.glob("part-*.json"))


def _set_up(arguments: argparse.Namespace, source: Source, folder: OutputFolder) -> Job:
    """Make the plan, or take up the one that is there; then print the estimates."""
    start = time.monotonic()
    if arguments.stage != "encode":
        folder.remove_unfinished_files()
    plan = Plan.load(folder.work, folder.staging / TOKENIZER)
    made = _plan(arguments, source, folder.staging / TOKENIZER, plan)
    job = _job(arguments, source, made, folder)
    if not (folder.work / ASSEMBLY).is_file():
        check_disk(job, arguments.shard_tokens)
    if made != plan:
        made.save(folder.work)
    info, seconds = made.tokenizer, time.monotonic() - start
    print(f"tokenizer: {info.kind}, {info.vocab_size} ids ({seconds:.1f} s)")
    print_estimate(job, arguments)
    for note in source.notes(made.validation_fraction):
        print(note)
    sys.stdout.flush()
    return job


def _run(arguments: argparse.Namespace, job: Job, identity: dict, folder: OutputFolder) -> None:
    if arguments.stage != "assemble":
        units = task_units(job.units, arguments.task)
        job.encode(units)
        if arguments.stage == "encode":
            print(f"{len(units):,} units are encoded; go on with --stage assemble")
            return
    assemble(job, folder, identity, arguments)


def _identity(arguments: argparse.Namespace, source: Source) -> dict:
    """Return everything that decides the result; workers, scratch and limits to errors do not."""
    names = (
        *("tokenizer", "eod_token", "text_key", "document_separator", "validation_path"),
        *("validation_fraction", "seed", "max_documents", "max_bytes", "shard_tokens"),
        *("exclude", "sets", "exclude_sets", "tokens", "mixture", "repeat", "set_key"),
    )
    values = {name: getattr(arguments, name) for name in names}
    tokenizer = spec_sha256(arguments.tokenizer)
    return {"source": source.describe(), "tokenizer_sha256": tokenizer, **values}


def _plan(arguments: argparse.Namespace, source: Source, folder: Path, plan: Plan | None) -> Plan:
    """Make a plan, whose tokenizer goes into `folder`, or complete one that is there."""
    spec = SelectionSpec.of(arguments)
    limits = (arguments.max_documents, arguments.max_bytes)
    rules = Rules(arguments.seed, arguments.validation_fraction, *limits)
    # Among few documents it depends on the sets, which --overwrite may change.
    rules = dataclasses.replace(rules, validation_fraction=held_out_fraction(source, rules, spec))
    held_out = rules.held_out_below(source)
    if plan is None or plan.validation_fraction != rules.validation_fraction:
        info = make_tokenizer(arguments.tokenizer, arguments.eod_token, folder, source, rules)
        measured = measure(source, rules, folder, info)
        coverage = coverage_for(spec, measured, held_out)
        return Plan(info, rules.validation_fraction, coverage, measured)
    coverage = plan.coverage.join(coverage_for(spec, plan.measured, held_out))
    return dataclasses.replace(plan, coverage=coverage)


def _job(arguments: argparse.Namespace, source: Source, plan: Plan, folder: OutputFolder) -> Job:
    limits = (arguments.max_documents, arguments.max_bytes)
    rules = Rules(arguments.seed, plan.validation_fraction, *limits)
    light = copy.copy(source)  # goes to the workers with every unit
    light.parts = []
    return Job(
        staging=folder.staging,
        encoding=Encoding(
            light,
            folder.work,
            folder.staging / TOKENIZER,
            plan.tokenizer,
            plan.dtype,
            rules,
            plan.coverage,
        ),
        units=units_of(source),
        plan=plan,
        spec=SelectionSpec.of(arguments),
        workers=useful_workers(arguments.workers),
        held_out_below=rules.held_out_below(source),
    )


def _estimate(arguments: argparse.Namespace, source: Source, folder: OutputFolder) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        plan = _plan(arguments, source, Path(temporary) / TOKENIZER, None)
    job = _job(arguments, source, plan, folder)
    print_estimate(job, arguments)
    for note in source.notes(arguments.validation_fraction):
        print(note)
    check_disk(job, arguments.shard_tokens)


def assemble(job: Job, folder: OutputFolder, identity: dict, arguments: argparse.Namespace) -> None:
    """Make what is left of the parts, then the shards, then the manifest; print the summary."""
    start = time.monotonic()
    assembly = load_record(job.work / ASSEMBLY, Assembly) or _decide(job, folder, arguments)
    _write_shards(job, assembly)
    shards: dict[str, list[ShardInfo]] = {split: [] for split in SPLITS}
    vocab_size = job.plan.tokenizer.vocab_size
    counts = {split: np.zeros(vocab_size, dtype=np.int64) for split in SPLITS}
    for planned in assembly.shards:
        info = _finished(job, planned.name, assembly.key)
        shards[planned.split].append(info)
        counts[planned.split] += np.load(token_counts_path(job.work, planned.name))
    tokenizer, dtype, source = job.plan.tokenizer, job.plan.dtype, job.encoding.source
    manifest = build_manifest(identity, tokenizer, dtype, assembly, shards, counts, source.left_out)
    write_json(job.staging / MANIFEST, manifest)
    folder.publish(identity)
    folder.tidy()
    print_summary(manifest, arguments.source == "slimpajama")
    print(f"{folder.out}: complete (assembled in {time.monotonic() - start:.1f} s)")


def _finished(job: Job, name: str, key: str) -> ShardInfo | None:
    return finished_shard(job.work, job.staging, name, key, job.plan.dtype)


def _decide(job: Job, folder: OutputFolder, arguments: argparse.Namespace) -> Assembly:
    """Choose the documents, encoding more of them where the estimates were too low."""
    while True:
        units = job.complete_parts(job.units)
        seen, empty, malformed = _met(job, units)
        folder.check_free([MALFORMED] if malformed else [])
        _check_input(job, units, seen, empty, malformed, arguments)
        parts = job.parts(units, sorted(seen))
        try:
            chooser = Chooser(job.spec, parts, job.plan.coverage, job.held_out_below)
            selection = chooser.choose()
            break
        except Shortage as shortage:
            print("the estimate of what has to be encoded was too low: it is encoded again")
            job.cover(shortage.coverage)
    selection.ends = limit_ends(job.encoding.rules, parts)
    shards, counts = plan_shards(parts, selection, arguments.shard_tokens)
    _check_splits({shard.split for shard in shards}, arguments)
    folder.check_free(f"{shard.name}{end}" for shard in shards for end in (".bin", ".idx"))
    assembly = Assembly(selection, shards, _plain(counts), _plain(seen), empty, malformed)
    write_record(job.work / ASSEMBLY, dataclasses.asdict(assembly))
    return assembly


def _met(job: Job, units: list[Unit]) -> tuple[dict[str, dict[str, Counter]], int, int]:
    """Count the documents of the units by set and split, the empty ones, and the malformed."""
    seen: dict[str, dict[str, Counter]] = {}
    empty = malformed = 0
    for record in map(job.record, units):
        empty += record["empty"]
        malformed += record["malformed"]
        for name, by_split in record["seen"].items():
            for split, counts in by_split.items():
                seen.setdefault(name, {}).setdefault(split, Counter()).update(counts)
    return seen, empty, malformed


def _plain(counts: dict[str, dict[str, Counter]]) -> dict[str, dict[str, dict]]:
    # Sets by name, and the splits in their usual order.
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
    """Write malformed.log. Raises UserError for too many malformed records or absent sets."""
    documents = sum(c["documents"] for by_split in seen.values() for c in by_split.values())
    if malformed:
        with atomic_write(job.staging / MALFORMED, "wb") as log:
            for unit in units:
                log.write(part_path(job.work, unit.number, "malformed").read_bytes())
    limit: Limit = arguments.max_malformed
    records = documents + empty + malformed
    if limit.exceeded(malformed, records):
        first = next(filter(None, (job.record(unit)["first_malformed"] for unit in units)))
        raise UserError(
            f"{malformed:,} of {records:,} records are malformed, more than --max-malformed "
            f"{limit.text} allows; the first: {first} (all: {job.staging / MALFORMED}); what "
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


def _write_shards(job: Job, assembly: Assembly) -> None:
    """Write the shards that are not there yet; remove parts as soon as no shard needs them."""
    key = assembly.key
    todo = {shard.name: shard for shard in assembly.shards if not _finished(job, shard.name, key)}
    needs = Counter(unit for shard in todo.values() for unit in shard.units)
    units = [job.units[number] for number in sorted(needs)]
    job.complete_parts(units)
    _release(job, {unit.number for unit in job.units} - set(needs))
    parts = job.parts(units, assembly.selection.names)
    dtype, vocab_size = job.plan.dtype, job.plan.tokenizer.vocab_size
    tasks = (
        ShardTask(
            shard,
            parts.of(shard.units),
            assembly.selection,
            job.staging,
            dtype,
            vocab_size,
            key,
        )
        for shard in todo.values()
    )
    total = sum(shard.tokens for shard in todo.values()) * np.dtype(dtype).itemsize
    workers = max(1, min(job.workers, len(todo)))
    with TextProgress("assembling", total, "of shards") as progress:
        for name in run_tasks(write_shard, tasks, workers, progress.update):
            needs.subtract(todo[name].units)
            _release(job, {unit for unit in todo[name].units if not needs[unit]})


def _release(job: Job, units: set[int]) -> None:
    # The record stays, by which what is left of the part counts as unfinished.
    for unit in sorted(units):
        job.remove(unit, "bin", "docs")
