"""The steps of a preparation: plan, parts, choice of documents, shards, manifest."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import tempfile
import time
from pathlib import Path

from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.folders import check_output
from cat_lm.data.tokenizers import check_spec, spec_sha256
from data_prep.assemble.output_folder import OutputFolder
from data_prep.assemble.shards import ASSEMBLY
from data_prep.assemble.stage import UselessInput, assemble
from data_prep.common.amounts import SelectionSpec
from data_prep.encode.encoding import Encoding, Rules
from data_prep.encode.estimate import check_disk, print_estimate
from data_prep.encode.job import Job
from data_prep.encode.parts import disk_errors
from data_prep.encode.plan import (
    PLAN,
    TOKENIZER,
    Plan,
    coverage_for,
    held_out_fraction,
    make_tokenizer,
    measure,
)
from data_prep.sources.base import Source, task_units, units_of
from data_prep.sources.documents import Reading
from data_prep.sources.open import open_source


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
    if _is_complete(folder, identity, arguments):  # which may lie where nothing can be written
        return
    if arguments.estimate:
        _estimate(arguments, source, folder)
        return
    check_output(arguments.out)
    if arguments.scratch is not None:
        check_output(arguments.scratch, "--scratch")
    with folder.locked(shared=arguments.stage == "encode"), disk_errors(arguments.out):
        with folder.setup_lock():
            folder.publish()  # what a kill interrupted
            if _is_complete(folder, identity, arguments):
                return
            together = arguments.stage != "all" and arguments.scratch is not None
            folder.take_up(identity, arguments.overwrite, together)
        try:
            job = _set_up(arguments, source, folder)
            _run(arguments, job, identity, folder)
        except UserError as error:
            if _is_worthless(error, arguments, folder):
                folder.tidy()
            raise


def _is_complete(folder: OutputFolder, identity: dict, arguments: argparse.Namespace) -> bool:
    is_complete = folder.is_complete(identity, arguments.overwrite)
    if is_complete:
        print(f"{folder.out}: already complete with these arguments, nothing to do")
    return is_complete


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
    with folder.setup_lock():
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
    print(*source.notes(made.validation_fraction), sep="\n", flush=True)
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
        workers=arguments.workers,
        held_out_below=rules.held_out_below(source),
    )


def _estimate(arguments: argparse.Namespace, source: Source, folder: OutputFolder) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        plan = _plan(arguments, source, Path(temporary) / TOKENIZER, None)
    job = _job(arguments, source, plan, folder)
    print_estimate(job, arguments)
    print(*source.notes(arguments.validation_fraction), sep="\n")
    check_disk(job, arguments.shard_tokens)
