"""Run harness tasks on a model, task by task, and keep what is finished.

OUT gets `tasks/`, one file for each finished task under a name that hashes all its numbers depend
on; a later call with the same settings reads it instead of computing the task again. The result
files zero_shot.json and .csv are written anew after every task; tasks of earlier calls with the
same settings stay in them. With samples, `samples/` has one jsonl file per task with every prompt
and answer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lm_eval.evaluator import evaluate

from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.core.files import replace_nonfinite
from cat_lm.core.outputs import claim_outputs
from cat_lm.core.readers import read_object, short
from cat_lm.pretrained.loading import (
    DTYPES,
    load_model,
    load_tokenizer,
    model_config,
    model_folder,
    model_label,
    refuse_beyond_positions,
)
from eval.common.models import folder_sha256, joint_sha256
from eval.common.precision import evaluation_device, evaluation_dtype
from eval.common.provenance import provenance
from eval.zero_shot.harness_model import Scorer, launched_accelerator, raise_on_all_ranks
from eval.zero_shot.results import (
    RESULT,
    TABLE,
    Place,
    describe_counts,
    earlier_tasks,
    number,
    write_result,
)
from eval.zero_shot.settings import Settings
from eval.zero_shot.tasks import table2
from eval.zero_shot.tasks.catalog import Catalog
from eval.zero_shot.tasks.harness import launched, quiet
from eval.zero_shot.tasks.rows import check_answers
from eval.zero_shot.tasks.sources import Hub, LocalFolder, needed_splits, rows_sha256

if TYPE_CHECKING:
    from accelerate import Accelerator
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

    from eval.zero_shot.tasks.sources import Source

SEED = 1234  # seed of few-shot examples and samplers, as in the harness's commands
# Keys of a definition that say where its rows are.
_OF_DATA = {"metadata", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset"}
_OF_DATA |= {"training_split", "validation_split", "test_split", "fewshot_split"}
PACKAGES = ("lm_eval", "datasets", "accelerate", "tokenizers")


def run(model: Path | str, names: Sequence[str], out: Path, settings: Settings) -> dict[str, Any]:
    """Evaluate the model in a transformers or run folder; return what zero_shot.json holds.

    Every rank that was launched must call it; only rank 0 writes, and returns the whole result.
    Tasks that `out` has already, with the same settings, stay in the result.

    Raises:
        UserError: on all ranks; for bad input, before the first task is computed, and for tasks
            that could not be computed, after all others are done and written.
    """
    with quiet():
        accelerator = launched_accelerator(settings.device)
        with raise_on_all_ranks(accelerator):
            folder = model_folder(model)
            tasks, source = load_tasks(names, settings, ranks=launched()[1])
            scorer = _load_scorer(folder, settings, accelerator)
            description = _describe_model(folder, scorer)
            shared = _shared_key(description, settings)
            if scorer.rank == 0:
                claim_outputs(out, RESULT, [TABLE])
            earlier = earlier_tasks(out, shared) if scorer.rank == 0 else {}
        made = provenance()
        made["versions"] |= {name: metadata.version(name) for name in PACKAGES}
        result = {
            "format": 1,
            "model": description,
            "settings": {
                "limit": settings.limit,
                "batch_size": scorer.batch_size,
                "ranks": scorer.world_size,
                "device": str(scorer.device),
                "bootstrap_iterations": settings.bootstrap_iterations,
                "data_dir": None if settings.data_dir is None else str(settings.data_dir),
            },
            "tasks": earlier,
            "average": table2.average(earlier),
            **made,
        }
        failed = []
        for name, task in tasks.items():
            place = Place(out, name, _key(name, task, folder) | shared)
            try:
                with raise_on_all_ranks(
                    accelerator
                ):  # Other ranks than the first may not see the files.
                    values = place.read(settings.samples) if scorer.rank == 0 else None
                if not scorer.from_first_rank(values is not None):
                    values = _compute(place, task, scorer, settings)
            except UserError as error:
                failed.append(str(error))
                if scorer.rank == 0 and len(tasks) > 1:
                    print(f"{error}; the other tasks go on", file=sys.stderr, flush=True)
                continue
            if scorer.rank == 0:
                result["tasks"][name] = values | {"data": source.records[name]}
                result["average"] = table2.average(result["tasks"])
                write_result(out, result)
    if failed and len(tasks) == 1:
        raise UserError(failed[0])
    if failed:
        rest = f"the {len(tasks) - len(failed)} others are in {out}"
        raise UserError(f"{len(failed)} of {len(tasks)} tasks failed: {'; '.join(failed)}; {rest}")
    return result


def load_tasks(
    names: Sequence[str], settings: Settings, ranks: int
) -> tuple[dict[str, ConfigurableTask], Source]:
    """Return the harness's tasks by name, with their rows, and where those are from.

    Raises UserError for unknown names, rows that are missing or wrong, or fewer than ranks.
    """
    catalog = Catalog(names, settings.include_path)
    source = Hub() if settings.data_dir is None else LocalFolder(settings.data_dir)
    tasks = {name: catalog.load(name, source) for name in catalog.specs}
    for task in tasks.values():
        check_answers(task, source, needed_splits(task.config), settings.limit)
    for name, task in tasks.items():
        rows = min(len(task.task_docs), settings.limit or len(task.task_docs))
        if rows < ranks:
            raise UserError(
                f"task {name}: {rows} rows cannot be shared among {ranks} ranks; use fewer"
            )
    return tasks, source


def _load_scorer(folder: Path, settings: Settings, accelerator: Accelerator | None) -> Scorer:
    # For every dtype: a number must not depend on whether its dtype was given or found.
    evaluation_device(settings.device)
    if settings.max_length is not None:
        given = f"--max-length {settings.max_length}"
        refuse_beyond_positions(model_config(folder), settings.max_length, given)
    dtype = settings.dtype
    if dtype == "auto" and (dtype := _stored_dtype(folder)) == "float32":
        dtype = evaluation_dtype("auto", [folder], settings.device)
    device = str(accelerator.device) if accelerator else settings.device
    return Scorer(
        load_model(folder, dtype=dtype, device=device),
        load_tokenizer(folder),
        batch_size=settings.batch_size,
        max_length=settings.max_length,
        accelerator=accelerator,
    )


def _compute(
    place: Place, task: ConfigurableTask, scorer: Scorer, settings: Settings
) -> dict[str, Any] | None:
    """Run one task on all ranks; rank 0 writes its files and returns its values."""
    values, samples = score(place.name, task, scorer, settings)
    if values is None:
        return None
    values["key"] = place.key
    place.write(values, samples)
    print(f"{place.name}: {describe_values(values)}", file=sys.stderr, flush=True)
    return values


def describe_values(values: Mapping[str, Any]) -> str:
    """Return a task's metrics, the rows they are of, and the seconds it took."""
    metrics = ", ".join(f"{m} {number(v)}" for m, v in values["metrics"].items())
    return f"{metrics} ({describe_counts(values)}; {values['seconds']:.1f} s)"


def score(
    name: str, task: ConfigurableTask, scorer: Scorer, settings: Settings
) -> tuple[dict[str, Any] | None, list[dict[str, Any]] | None]:
    """Run one task on all ranks; return its values, and its samples if asked for, on rank 0.

    It seeds the generators of Python, numpy and torch.

    Raises:
        RuntimeError: the harness has scored other rows than it was asked to.
    """
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(SEED)
    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    scorer.begin(name)
    begin = time.perf_counter()
    with raise_on_all_ranks(scorer.ranks), _named(name, scorer):
        found = evaluate(
            scorer,
            {"tasks": {name: task}},
            limit=settings.limit,
            bootstrap_iters=settings.bootstrap_iterations,
            log_samples=settings.samples,
        )
    seconds = time.perf_counter() - begin
    answered = [request.doc_id for request in task.instances if request.resps]
    positions, truncated, requests, scored = scorer.totals(len(answered), len(set(answered)))
    if scorer.rank != 0:
        return None, None
    values = _values(found, name)
    rows = values["rows"]
    if scored != (asked := min(rows, settings.limit or rows)):
        raise RuntimeError(f"task {name}: {scored} of {asked} rows were scored")
    there = len(task.dataset[needed_splits(task.config)[0]])
    values |= {
        "left_out": {"by_limit": rows - scored, "by_definition": there - rows},
        "requests": requests,
        "truncated": truncated,
        # The size that was found for "auto".
        "batch_size": scorer.batch_sizes.get(0, scorer.batch_size),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(positions / seconds, 1),
    }
    return values, found["samples"][name] if settings.samples else None


@contextlib.contextmanager
def _named(name: str, scorer: Scorer) -> Iterator[None]:
    """Turn what makes a task impossible into a UserError with its name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"task {name}: {error}") from None
    except OverflowError:
        raise UserError(
            f"task {name}: its perplexity is larger than any number; the model has diverged"
        ) from None
    except torch.OutOfMemoryError:
        raise UserError(
            f"task {name}: out of memory with --batch-size {scorer.batch_size} and a context of "
            f"{scorer.max_length}; use --batch-size auto or a smaller number"
        ) from None


def _values(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the harness's result of a task, its `metric,filter` names taken apart."""
    metrics, stderr = {}, {}
    for key, value in found["results"][name].items():
        metric, comma, filter_ = key.partition(",")
        if not comma:
            continue
        base = metric.removesuffix("_stderr")
        label = base if filter_ == "none" else key.replace("_stderr,", ",")
        known = not isinstance(value, str)  # The harness returns "N/A" for unknown errors.
        (stderr if metric != base else metrics)[label] = (
            replace_nonfinite(float(value)) if known else None
        )
    return {
        "metrics": metrics,
        "stderr": stderr,
        "version": found["versions"][name],
        "n": found["n-samples"][name]["effective"],
        "rows": found["n-samples"][name]["original"],
        "num_fewshot": found["n-shot"][name],
        "higher_is_better": found["higher_is_better"].get(name, {}),
    }


def _key(name: str, task: ConfigurableTask, folder: Path) -> dict[str, Any]:
    """Return all values of a task that its numbers depend on, including how the model generates."""
    # With its functions: the harness's text of one that has no source has an address in it.
    found = task.config.to_dict(keep_callable=True)
    definition = {key: v for key, v in found.items() if key not in _OF_DATA}
    # The few-shot examples' split is left out of it too: the rows have their own hash.
    definition["fewshot_config"] = {
        key: v for key, v in definition["fewshot_config"].items() if key != "split"
    }
    key = {}
    if task.OUTPUT_TYPE == "generate_until":
        path = folder / "generation_config.json"
        values = read_object(path) if path.is_file() else {}
        values.pop("transformers_version", None)
        key["generation_sha256"] = _sha256(json.dumps(values, sort_keys=True))
    return key | {
        "task": name,
        "version": task.VERSION,
        "definition_sha256": _sha256(json.dumps(definition, sort_keys=True, default=_source_of)),
        "rows_sha256": rows_sha256(task),
    }


def _shared_key(model: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return all other values that the numbers depend on; not batch size or number of ranks."""
    used = plugins.describe()  # The model may have a part of a plugin.
    return ({"plugins": used} if used else {}) | {
        "harness": metadata.version("lm_eval"),
        "limit": settings.limit,
        "bootstrap_iterations": settings.bootstrap_iterations,
        "model_sha256": model["sha256"],
        "tokenizer_sha256": model["tokenizer_sha256"],
        "dtype": model["dtype"],
        "max_length": model["max_length"],
    }


def _source_of(value: Any) -> Any:
    """Return a definition's function as text; its `str` has an address in it."""
    if isinstance(value, functools.partial):
        return [_source_of(value.func), value.args, value.keywords]
    if not callable(value):
        return str(value)
    try:
        return inspect.getsource(value)
    except (TypeError, OSError):  # It is a callable object or a built-in, without source.
        kind = value if hasattr(value, "__qualname__") else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"


def _describe_model(folder: Path, scorer: Scorer) -> dict[str, Any]:
    prefix = scorer.prefix_token_id
    return {
        "label": model_label(folder),
        "folder": str(folder),
        "sha256": folder_sha256(folder),
        "tokenizer_sha256": _tokenizer_sha256(scorer.tokenizer, folder),
        "parameters": scorer.model.num_parameters(),
        "dtype": str(scorer.model.dtype).removeprefix("torch."),
        "max_length": scorer.max_length,
        "prefix_token": {"id": prefix, "text": scorer.tokenizer.convert_ids_to_tokens(prefix)},
    }


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Hash the loaded tokenizer's behaviour, whatever files it was read from."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    if tokenizer.is_fast:
        values = json.loads(tokenizer.backend_tokenizer.to_str())
        # These are of the last call, not of the tokenizer.
        values |= {"truncation": None, "padding": None}
        text = json.dumps(values, sort_keys=True)
    else:
        names = {*tokenizer.vocab_files_names.values(), "tokenizer_config.json"}
        names |= {"special_tokens_map.json", "added_tokens.json"}
        paths = [folder / name for name in sorted(names)]
        text = joint_sha256([path for path in paths if path.is_file()])
    return _sha256(f"{type(tokenizer).__name__} {special} {text}")


def _stored_dtype(folder: Path) -> str:
    """Return the dtype that config.json gives the weights, as transformers' "auto" does."""
    config = read_object(folder / "config.json")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stored not in DTYPES:
        raise UserError(
            f"{folder / 'config.json'}: dtype is {short(stored)}: should be one of "
            f"{', '.join(DTYPES)}; or give --dtype"
        )
    return stored


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
