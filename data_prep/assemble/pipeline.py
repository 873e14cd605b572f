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
from cat_lm.data.manifest import MANIFEST, read_manifest
from cat_lm.data.tokenizers import check_spec, spec_sha256
from data_prep.assemble import output_folder
from data_prep.assemble.stage import UselessInput, assemble
from data_prep.common.locks import file_lock
from data_prep.common.selection_spec import SelectionSpec
from data_prep.common.unfinished import TOKENIZER
from data_prep.common.workers import tell_workers, useful_workers
from data_prep.encode.encoding import PLACES, Encoding
from data_prep.encode.estimate import Estimate
from data_prep.encode.job import Job
from data_prep.encode.parts import disk_errors
from data_prep.encode.plan import PLAN, Plan, dtype_name, first_round, make_tokenizer
from data_prep.encode.sample import held_out_fraction, measure
from data_prep.encode.work_folder import WorkFolder
from data_prep.sources import Source, open_source
from data_prep.sources.documents import Reading
from data_prep.sources.units import task_units, units_of


def prepare(arguments: argparse.Namespace) -> None:
    """Runs the preparation that the command line asks for and prints its summary."""
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
    if _is_complete(arguments, identity):  # finished data may lie where nothing can be written
        return
    if arguments.estimate:
        _print_estimate(arguments, source)
        return
    check_output(arguments.out)
    if arguments.scratch is not None:
        check_output(arguments.scratch, "--scratch")
    with output_folder.locked(arguments.out, shared=arguments.stage == "encode"):
        if _is_complete(arguments, identity):
            return
        work = WorkFolder.of(arguments.out, arguments.scratch)
        with disk_errors(arguments.out):
            job = _set_up(arguments, source, identity, work)
            try:
                _run(arguments, job, identity, work)
            except UselessInput:
                output_folder.discard(arguments.out, work)
                raise
            except UserError as error:
                # Others may be at work beside this one, or the next start may go on.
                if arguments.stage != "encode" and not is_temporary(error):
                    output_folder.abandon(arguments.out, work)
                raise


def _is_complete(arguments: argparse.Namespace, identity: dict) -> bool:
    folder = arguments.out
    complete = folder.is_dir() and output_folder.is_complete(folder, identity, arguments.overwrite)
    if complete:
        output_folder.tidy(folder, WorkFolder.of(folder, arguments.scratch))
        print(f"{folder}: already complete with these arguments, nothing to do")
    return complete


def _set_up(arguments: argparse.Namespace, source: Source, identity: dict, work: WorkFolder) -> Job:
    """Takes up what an earlier run has left, or begins; then prints the estimates."""
    start = time.monotonic()
    with file_lock(arguments.out / output_folder.SETUP_LOCK):
        if (arguments.out / MANIFEST).is_file():
            _rehearse(arguments, source, identity)
        together = arguments.stage != "all" and arguments.scratch is not None
        output_folder.begin(arguments.out, work, identity, arguments.overwrite, together)
        try:
            if arguments.stage != "encode":
                output_folder.remove_temporary(arguments.out)
                work.remove_temporary()
            plan = Plan.load(work.path, arguments.out / TOKENIZER)
            fraction = _held_out_fraction(arguments, source)
            # Among few documents the fraction depends on the sets, which --overwrite may change.
            if new := plan is None or plan.validation_fraction != fraction:
                plan = _plan(arguments, source, arguments.out / TOKENIZER, fraction)
            job = _job(arguments, source, plan, work.path)
            estimate = Estimate.of(job, arguments)
            estimate.check_disk()
            if new:
                plan.save(work.path)
        except UserError as error:
            # By a plan that is saved, other tasks of an array may be at work on their first parts.
            planned = arguments.stage == "encode" and (work.path / PLAN).is_file()
            if not planned and not is_temporary(error):
                output_folder.abandon(arguments.out, work)
            raise
    info, seconds = plan.tokenizer, time.monotonic() - start
    print(f"tokenizer: {info.kind}, {info.vocab_size} ids ({seconds:.1f} s)")
    tell_workers(arguments.workers, len(job.units))
    print(*estimate.lines(), *source.notes(plan.validation_fraction), sep="\n", flush=True)
    return job


def _rehearse(arguments: argparse.Namespace, source: Source, identity: dict) -> None:
    """Raises `UserError` for what shows before the work, so that no finished data go for it."""
    _estimate(arguments, source).check_disk()
    manifest = read_manifest(arguments.out)
    same_sets = all(
        manifest.get("arguments", {}).get(key) == identity[key] for key in ("source", "set_key")
    )
    if same_sets and "input" in manifest:
        _wishes(arguments).check_names(manifest["input"])


def _run(arguments: argparse.Namespace, job: Job, identity: dict, work: WorkFolder) -> None:
    if arguments.stage != "assemble":
        units = task_units(job.units, arguments.task)
        job.encode(units)
        if arguments.stage == "encode":
            print(f"{len(units):,} units are encoded; go on with --stage assemble")
            return
    assemble(job, work, identity, arguments)


def _identity(arguments: argparse.Namespace, source: Source) -> dict:
    """Everything that decides the result; workers, scratch and limits to errors do not."""
    names = (
        *("tokenizer", "eod_token", "text_key", "document_separator", "validation_path"),
        *("validation_fraction", "seed", "max_documents", "max_bytes", "shard_tokens"),
        *("exclude", "sets", "exclude_sets", "tokens", "mixture", "repeat", "set_key"),
    )
    values = {name: getattr(arguments, name) for name in names}
    return {
        "source": source.describe(),
        "tokenizer_sha256": spec_sha256(arguments.tokenizer),
        **values,
    }


def _wishes(arguments: argparse.Namespace) -> SelectionSpec:
    return SelectionSpec(
        None if arguments.sets is None else tuple(arguments.sets),
        tuple(arguments.exclude_sets or ()),
        arguments.tokens,
        arguments.mixture,
        arguments.repeat,
        arguments.max_repeats,
    )


def _encoding(arguments: argparse.Namespace, source: Source, fraction: float) -> Encoding:
    """Make the settings that need no tokenizer; `_job` completes them."""
    return Encoding(
        source=source,
        work=Path(),
        tokenizer_folder=Path(),
        tokenizer=None,
        dtype="",
        seed=arguments.seed,
        validation_fraction=fraction,
        max_documents=arguments.max_documents,
        max_bytes=arguments.max_bytes,
    )


def _held_out_fraction(arguments: argparse.Namespace, source: Source) -> float:
    encoding = _encoding(arguments, source, arguments.validation_fraction)
    return held_out_fraction(source, encoding, _wishes(arguments))


def _plan(arguments: argparse.Namespace, source: Source, folder: Path, fraction: float) -> Plan:
    encoding = _encoding(arguments, source, fraction)
    info = make_tokenizer(arguments.tokenizer, arguments.eod_token, folder, source, encoding)
    measured = measure(source, encoding, folder, info)
    held_out = _held_out_below(source, fraction)
    ranges = first_round(_wishes(arguments), measured, held_out)
    return Plan(info, dtype_name(info), fraction, [ranges], measured)


def _held_out_below(source: Source, fraction: float) -> int:
    return 0 if source.has_validation else int(fraction * PLACES)


def _job(arguments: argparse.Namespace, source: Source, plan: Plan, work: Path) -> Job:
    units = units_of(source)
    light = copy.copy(source)  # goes to the workers with every unit
    light.parts = []
    encoding = dataclasses.replace(
        _encoding(arguments, light, plan.validation_fraction),
        work=work,
        tokenizer_folder=arguments.out / TOKENIZER,
        tokenizer=plan.tokenizer,
        dtype=plan.dtype,
    )
    return Job(
        out=arguments.out,
        encoding=encoding,
        units=units,
        plan=plan,
        spec=_wishes(arguments),
        workers=useful_workers(arguments.workers, len(units)),
        held_out_below=_held_out_below(source, plan.validation_fraction),
    )


def _print_estimate(arguments: argparse.Namespace, source: Source) -> None:
    estimate = _estimate(arguments, source)
    print(*estimate.lines(), *source.notes(arguments.validation_fraction), sep="\n")
    estimate.check_disk()


def _estimate(arguments: argparse.Namespace, source: Source) -> Estimate:
    """Estimate the work, from a plan that is not kept."""
    with tempfile.TemporaryDirectory() as folder:
        fraction = _held_out_fraction(arguments, source)
        plan = _plan(arguments, source, Path(folder) / TOKENIZER, fraction)
    work = WorkFolder.of(arguments.out, arguments.scratch)
    job = _job(arguments, source, plan, work.path)
    return Estimate.of(job, arguments)
