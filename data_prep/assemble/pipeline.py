"""The steps of a preparation: plan, parts, selection of documents, shards, manifest."""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.files import atomic_write, write_json
from cat_lm.core.folders import check_output
from cat_lm.data.hub_tokenizers import pin
from cat_lm.data.manifest import MANIFEST, SPLITS
from cat_lm.data.tokenizers import check_spec, spec_sha256
from data_prep.assemble.manifest import build_manifest, print_summary
from data_prep.assemble.output_folder import MALFORMED, OutputFolder
from data_prep.assemble.selection import DocumentSelector, Selection, Shortage, find_limit_ends
from data_prep.assemble.shards import (
    ASSEMBLY,
    Assembly,
    ShardRecord,
    ShardTask,
    finished_shard,
    plan_shards,
    write_shard,
)
from data_prep.common.amounts import Limit, SelectionSpec
from data_prep.common.progress import progress_bar
from data_prep.common.workers import run_tasks, useful_workers
from data_prep.encode.encoding import PLACES, Encoding, Rules
from data_prep.encode.estimate import check_disk, print_estimate
from data_prep.encode.job import Job
from data_prep.encode.parts import disk_errors, load_record, part_path, write_record
from data_prep.encode.plan import (
    TOKENIZER,
    Plan,
    coverage_for,
    held_out_fraction,
    make_tokenizer,
    measure_source,
)
from data_prep.sources.base import Source, Unit, task_units, units_of
from data_prep.sources.documents import Reading
from data_prep.sources.open import open_source

Counts = dict[str, dict[str, Counter]]  # set -> split -> counts

# The arguments that determine the result; others, such as --workers and --scratch, do not.
DECISIVE = (
    *("tokenizer", "eod_token", "text_key", "document_separator", "validation_path"),
    *("validation_fraction", "seed", "max_documents", "max_bytes", "shard_tokens"),
    *("exclude", "sets", "exclude_sets", "tokens", "mixture", "repeat", "set_key"),
)


def prepare(arguments: argparse.Namespace) -> None:
    """Run the preparation of a command line, and print its summary."""
    check_spec(arguments.tokenizer)
    folder = OutputFolder.of(arguments.out, arguments.scratch)
    earlier = folder.earlier_arguments(arguments.overwrite)
    source = _open_source(arguments, earlier)
    arguments.tokenizer = pin(arguments.tokenizer, (found.get("tokenizer") for found in earlier))
    identity = {"source": source.describe(), "tokenizer_sha256": spec_sha256(arguments.tokenizer)}
    identity |= {name: getattr(arguments, name) for name in DECISIVE}
    is_complete = folder.is_complete(identity, arguments.overwrite)
    if not is_complete and arguments.estimate:
        with tempfile.TemporaryDirectory() as temporary:
            _plan_job(arguments, source, folder, Path(temporary) / TOKENIZER, None)
        return
    if not is_complete:  # Complete data may be in a read-only folder.
        check_output(arguments.out)
        if arguments.scratch is not None:
            check_output(arguments.scratch, "--scratch")
        with folder.locked(shared=arguments.stage == "encode"), disk_errors(arguments.out):
            is_complete = _prepare(arguments, source, folder, identity)
    if is_complete:
        folder.remove_leftovers()
        print(f"{folder.out}: already complete with these arguments, nothing to do")


def _open_source(arguments: argparse.Namespace, earlier: list[dict[str, Any]]) -> Source:
    """Open the source; a Hub repository at the commit that `earlier` arguments have."""
    listed = [found["source"] for found in earlier if isinstance(found.get("source"), dict)]
    commits = [found.get("revision") for found in listed if found.get("path") == arguments.path]
    source = open_source(
        arguments.source,
        arguments.path,
        Reading(arguments.text_key, arguments.document_separator, arguments.set_key),
        arguments.validation_path,
        arguments.validation_fraction,
        arguments.exclude or (),
        arguments.preset,
        next(filter(None, commits), None),
    )
    if arguments.files_share is not None:
        source.keep_share(arguments.files_share, arguments.seed)
    return source


def _prepare(
    arguments: argparse.Namespace, source: Source, folder: OutputFolder, identity: dict
) -> bool:
    """Prepare the data in the locked folder; return True if they were complete already."""
    with folder.setup_lock():
        # First complete what a kill has interrupted.
        if folder.publish(identity) or folder.is_complete(identity, arguments.overwrite):
            return True
        folder.start_or_resume(identity, arguments.overwrite, arguments.stage)
        if arguments.stage != "encode":
            folder.remove_temporary_files()
        tokenizer = folder.staging / TOKENIZER
        plan = Plan.load(folder.work, tokenizer)
        try:
            job = _plan_job(arguments, source, folder, tokenizer, plan)
        except UserError as error:
            # After an early error, leave nothing that would disturb the next attempt.
            if not is_temporary(error) and not any(folder.work.glob("p*.json")):
                folder.remove()
            raise
        if job.plan != plan:
            job.plan.save(folder.work)
    if arguments.stage != "assemble":
        units = task_units(job.units, arguments.task)
        job.encode(units)
        if arguments.stage == "encode":
            print(f"{len(units):,} units are encoded; continue with --stage assemble")
            return False
    assemble(job, folder, identity, arguments)
    return False


def _plan_job(
    arguments: argparse.Namespace,
    source: Source,
    folder: OutputFolder,
    tokenizer: Path,
    plan: Plan | None,
) -> Job:
    """Make the plan, or extend an existing one, print the estimates, and return the job.

    Args:
        tokenizer: the folder for the tokenizer of a new plan.
    """
    start, spec = time.monotonic(), SelectionSpec.of(arguments)
    limits = (arguments.max_documents, arguments.max_bytes)
    rules = Rules(arguments.seed, arguments.validation_fraction, *limits)
    # With few documents the fraction depends on the sets, which --overwrite may change.
    rules = replace(rules, validation_fraction=held_out_fraction(source, rules, spec))
    held_out = 0 if source.has_validation else int(rules.validation_fraction * PLACES)
    if plan is None or plan.validation_fraction != rules.validation_fraction:
        info = make_tokenizer(arguments.tokenizer, arguments.eod_token, tokenizer, source, rules)
        measured = measure_source(source, rules, tokenizer, info)
        coverage = coverage_for(spec, measured, held_out)
        plan = Plan(info, rules.validation_fraction, coverage, measured)
    else:
        plan = replace(
            plan, coverage=plan.coverage.join(coverage_for(spec, plan.measured, held_out))
        )
    light = copy.copy(source)  # It is sent to the workers with every unit.
    light.parts, light.scratch = [], folder.work
    job = Job(
        folder.staging,
        Encoding(light, folder.work, tokenizer, plan.tokenizer, rules, plan.coverage),
        units_of(source),
        plan,
        spec,
        useful_workers(arguments.workers),
        held_out,
    )
    info, seconds = plan.tokenizer, time.monotonic() - start
    print(f"tokenizer: {info.kind}, {info.vocab_size} ids ({seconds:.1f} s)")
    print_estimate(job, arguments)
    for note in source.notes(plan.validation_fraction):
        print(note)
    sys.stdout.flush()
    if not (folder.work / ASSEMBLY).is_file():
        check_disk(job)
    return job


def assemble(job: Job, folder: OutputFolder, identity: dict, arguments: argparse.Namespace) -> None:
    """Make the missing parts, the shards and the manifest, and print the summary."""
    start = time.monotonic()
    assembly = load_record(job.work / ASSEMBLY, Assembly) or _select_documents(
        job, folder, arguments
    )
    _write_shards(job, assembly)
    info, dtype = job.plan.tokenizer, job.encoding.dtype
    shards: dict[str, list] = {split: [] for split in SPLITS}
    counts = {split: np.zeros(info.vocab_size, dtype=np.int64) for split in SPLITS}
    for planned in assembly.shards:
        made = _read_finished_shard(job, planned.name, assembly.key)
        shards[planned.split].append(made.shard)
        counts[planned.split] += np.array(made.counts)
    contents = _describe_contents(assembly, job.encoding.source)
    manifest = build_manifest(identity, info, dtype, shards, counts, contents)
    write_json(job.staging / MANIFEST, manifest)
    folder.publish(identity)
    folder.remove()
    print_summary(manifest, arguments.source == "slimpajama")
    print(f"{folder.out}: complete (assembled in {time.monotonic() - start:.1f} s)")


def _describe_contents(assembly: Assembly, source: Source) -> dict[str, Any]:
    left_out = [asdict(entry) for entry in source.left_out]
    return {
        "empty_documents": assembly.empty,
        "malformed_documents": assembly.malformed,
        "sources": {name: dict(by_split) for name, by_split in sorted(assembly.counts.items())},
        "input": assembly.seen,
        **({"left_out": left_out} if left_out else {}),
        "selection": _describe_selection(assembly.selection),
    }


def _describe_selection(selection: Selection) -> dict:
    """Return the repetitions of each set for the manifest: whole ones, and the subset's bound."""
    return {
        name: {
            "whole": copies.whole,
            "subset_below": None if copies.cut is None else copies.cut.place / PLACES,
        }
        for name, copies in sorted(selection.train.items())
    }


def _read_finished_shard(job: Job, name: str, key: str) -> ShardRecord | None:
    return finished_shard(job.work, job.staging, name, key, job.encoding.dtype)


def _select_documents(job: Job, folder: OutputFolder, arguments: argparse.Namespace) -> Assembly:
    """Select the documents and plan the shards; encode more if the estimates were too low."""
    while True:
        units = job.complete_parts(job.units)
        seen, empty, malformed = _check_input(job, units, folder, arguments)
        parts = job.parts(units, sorted(seen))
        try:
            chooser = DocumentSelector(job.spec, parts, job.plan.coverage, job.held_out_below)
            selection = chooser.choose()
            break
        except Shortage as shortage:
            print("the estimate of what has to be encoded was too low: it is encoded again")
            job.cover(shortage.coverage)
    selection.ends = find_limit_ends(job.encoding.rules, parts)
    shards, counts = plan_shards(parts, selection, arguments.shard_tokens)
    for split in SPLITS:
        if split not in {shard.split for shard in shards}:
            folder.remove()
            raise UserError(
                f"{_source_option(arguments)}: the {split} split comes out empty; change "
                f"--validation-fraction (now {arguments.validation_fraction}) or --seed, cut texts "
                "into documents with --document-separator, choose other --sets, or give "
                "--validation-path"
            )
    assembly = Assembly(
        selection, shards, _sort_counts(counts), _sort_counts(seen), empty, malformed
    )
    write_record(job.work / ASSEMBLY, assembly)
    return assembly


def _check_input(
    job: Job, units: list[Unit], folder: OutputFolder, arguments: argparse.Namespace
) -> tuple[Counts, int, int]:
    """Return (counts of documents by set and split, empty documents, malformed records).

    Raises:
        UserError: too many records are malformed (malformed.log lists them), no document has any
            text, or an option names a set that does not exist.
    """
    seen: Counts = {}
    records = [job.record(unit) for unit in units]
    for record in records:
        for name, by_split in record.seen.items():
            for split, counts in by_split.items():
                seen.setdefault(name, {}).setdefault(split, Counter()).update(counts)
    documents = sum(c["documents"] for by_split in seen.values() for c in by_split.values())
    empty = sum(record.empty for record in records)
    malformed = sum(record.malformed for record in records)
    if malformed:
        with atomic_write(job.staging / MALFORMED, "wb") as log:
            for unit in units:
                log.write(part_path(job.work, unit.number, "malformed").read_bytes())
    limit: Limit = arguments.max_malformed
    total = documents + empty + malformed
    if limit.exceeded(malformed, total):
        first = next(filter(None, (record.first_malformed for record in records)))
        raise UserError(
            f"{malformed:,} of {total:,} records are malformed, more than --max-malformed "
            f"{limit.text} allows; the first: {first} (all: {job.staging / MALFORMED}); what "
            "is encoded is kept, a higher limit continues"
        )
    if not documents:
        folder.remove()
        raise UserError(f"{_source_option(arguments)}: empty input, no document with any text")
    job.spec.check_names(seen)
    return seen, empty, malformed


def _sort_counts(counts: Counts) -> dict[str, dict[str, dict]]:
    # Sort sets by name, and splits in their usual order.
    return {
        name: {split: dict(by_split[split]) for split in SPLITS if split in by_split}
        for name, by_split in sorted(counts.items())
    }


def _source_option(arguments: argparse.Namespace) -> str:
    path = f" --path {arguments.path}" if arguments.path else ""
    return f"--source {arguments.source}{path}"


def _write_shards(job: Job, assembly: Assembly) -> None:
    """Write the missing shards, and remove parts as soon as no shard needs them."""
    key, info, dtype = assembly.key, job.plan.tokenizer, job.encoding.dtype
    todo = {
        shard.name: shard
        for shard in assembly.shards
        if not _read_finished_shard(job, shard.name, key)
    }
    needs = Counter(unit for shard in todo.values() for unit in shard.units)
    units = [job.units[number] for number in sorted(needs)]
    job.complete_parts(units)
    _remove_parts(job, {unit.number for unit in job.units} - set(needs))
    parts = job.parts(units, assembly.selection.names)
    rest = (assembly.selection, job.staging, dtype, info.vocab_size, key)
    tasks = (ShardTask(shard, parts.of(shard.units), *rest) for shard in todo.values())
    total = sum(shard.tokens for shard in todo.values()) * dtype.itemsize
    workers = max(1, min(job.workers, len(todo)))
    with progress_bar("assembling shards", total) as bar:
        for name in run_tasks(write_shard, tasks, workers, bar.update):
            needs.subtract(todo[name].units)
            _remove_parts(job, {unit for unit in todo[name].units if not needs[unit]})


def _remove_parts(job: Job, units: set[int]) -> None:
    # Keep the part's record; without its files the part counts as unfinished.
    for unit in sorted(units):
        job.remove(unit, "bin", "docs")
