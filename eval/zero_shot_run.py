"""Runs harness tasks on a model, task by task, and keeps what is finished.

OUT gets `tasks/`, one file for each finished task under a name that hashes all its numbers depend
on; a later call with the same settings reads it instead of computing the task again. The result
files zero_shot.json and .csv are written anew after every task. With samples, `samples/` has one
jsonl file per task with every prompt and answer.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import inspect
import json
import logging
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lm_eval.evaluator import evaluate
from lm_eval.utils import handle_non_serializable

from cat_lm.errors import UserError
from cat_lm.files import replacing, sha256, write_json
from cat_lm.pretrained import weight_files
from eval.provenance import provenance
from eval.tasks import table2
from eval.tasks.catalog import Catalog
from eval.tasks.sources import Hub, LocalFolder, rows_sha256
from eval.zero_shot_model import Scorer

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

SEED = 1234  # of few-shot examples and samplers, as the harness's own commands set it
BOOTSTRAP_ITERATIONS = 1000  # a standard error to about two per cent
# Keys of a definition that say where its rows are.
_OF_DATA = {"metadata", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset"}
_OF_DATA |= {"training_split", "validation_split", "test_split", "fewshot_split"}
PACKAGES = ("lm_eval", "datasets", "accelerate", "tokenizers")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run is asked for besides the model and the tasks; defaults as in the command."""

    data_dir: Path | None = None
    limit: int | None = None
    batch_size: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_length: int | None = None
    samples: bool = False
    bootstrap_iterations: int = BOOTSTRAP_ITERATIONS


def run(folder: Path, names: Sequence[str], out: Path, settings: Settings) -> dict[str, Any]:
    """Evaluates the model in the transformers folder `folder`; returns what zero_shot.json holds.

    Every rank that was launched must call it; only rank 0 writes, and returns the whole result.
    Raises UserError for bad input; all tasks' rows are read before the first is computed.
    """
    with _quiet():
        catalog = Catalog(names)
        source = Hub() if settings.data_dir is None else LocalFolder(settings.data_dir)
        tasks = {name: catalog.load(name, source) for name in catalog.specs}
        scorer = _scorer(folder, settings)
        for name, task in tasks.items():
            _check_rows(name, task, settings.limit, scorer.world_size)
        description = _describe_model(folder, scorer, settings)
        result = {
            "model": description,
            "settings": _describe_settings(settings, scorer),
            "tasks": {},
            "average": table2.average({}),
            "commit": _commit(),
            **_provenance(),
        }
        for name, task in tasks.items():
            key = _key(name, task, description, settings)
            values = _finished(out, name, key, settings) if scorer.rank == 0 else None
            if not _same_on_all_ranks(scorer, values is not None):
                values = _compute(name, task, scorer, settings, out, key)
            if scorer.rank == 0:
                result["tasks"][name] = values | {"data": source.records[name]}
                result["average"] = table2.average(result["tasks"])
                _write(out, result)
    return result


def _scorer(folder: Path, settings: Settings) -> Scorer:
    dtype = _stored_dtype(folder) if settings.dtype == "auto" else settings.dtype
    return Scorer(
        folder,
        dtype=dtype,
        device=settings.device,
        batch_size=settings.batch_size,
        max_length=settings.max_length,
    )


def _check_rows(name: str, task: ConfigurableTask, limit: int | None, ranks: int) -> None:
    rows = len(task.task_docs)
    rows = min(rows, limit or rows)
    if rows < ranks:
        raise UserError(f"task {name}: {rows} rows cannot be shared among {ranks} ranks; use fewer")


def _compute(
    name: str,
    task: ConfigurableTask,
    scorer: Scorer,
    settings: Settings,
    out: Path,
    key: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Runs one task on all ranks; rank 0 writes its files and returns its values."""
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(SEED)
    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    scorer.begin(name)
    begin = time.perf_counter()
    try:
        found = evaluate(
            scorer,
            {"tasks": {name: task}},
            limit=settings.limit,
            bootstrap_iters=settings.bootstrap_iterations,
            log_samples=settings.samples,
        )
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
    finally:
        scorer.end()
    seconds = time.perf_counter() - begin
    positions, truncated = scorer.totals()
    if scorer.rank != 0:
        return None
    if settings.samples:
        _write_samples(_samples_file(out, name, key), found["samples"][name])
    values = _values(found, name) | {
        "truncated": truncated,
        "batch_size": scorer.batch_sizes.get(0, scorer.batch_size),  # found, where it is "auto"
        "seconds": round(seconds, 3),
        "tokens_per_second": round(positions / seconds, 1),
        "key": dict(key),
    }
    write_json(_task_file(out, name, key), values)
    metrics = ", ".join(f"{m} {_number(v)}" for m, v in values["metrics"].items())
    print(f"{name}: {metrics} ({values['n']} rows, {seconds:.1f} s)", file=sys.stderr, flush=True)
    return values


def _values(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The harness's result of a task, its `metric,filter` names taken apart."""
    metrics, stderr = {}, {}
    for key, value in found["results"][name].items():
        metric, comma, filter_ = key.partition(",")
        if not comma:
            continue
        base = metric.removesuffix("_stderr")
        label = base if filter_ == "none" else key.replace("_stderr,", ",")
        (stderr if metric != base else metrics)[label] = _finite(value)
    return {
        "metrics": metrics,
        "stderr": stderr,
        "version": found["versions"][name],
        "n": found["n-samples"][name]["effective"],
        "rows": found["n-samples"][name]["original"],
        "num_fewshot": found["n-shot"][name],
        "higher_is_better": found["higher_is_better"].get(name, {}),
    }


def _finite(value: Any) -> Any:
    """JSON has no infinities: the number of a diverged model is absent, as an unknown error is."""
    if isinstance(value, str):  # the harness's "N/A"
        return None
    return float(value) if math.isfinite(value) else None


# What is finished


def _key(
    name: str, task: ConfigurableTask, model: Mapping[str, Any], settings: Settings
) -> dict[str, Any]:
    """All that a task's numbers depend on; not the batch size and not the number of ranks."""
    definition = {key: v for key, v in task.dump_config().items() if key not in _OF_DATA}
    # The few-shot examples' split is left out of it too: the rows have their own hash.
    definition["fewshot_config"] = {
        key: v for key, v in definition["fewshot_config"].items() if key != "split"
    }
    text = json.dumps(definition, sort_keys=True, default=_source_of)
    return {
        "task": name,
        "version": task.VERSION,
        "definition_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "harness": metadata.version("lm_eval"),
        "rows_sha256": rows_sha256(task),
        "limit": settings.limit,
        "bootstrap_iterations": settings.bootstrap_iterations,
        "model_sha256": model["sha256"],
        "tokenizer_sha256": model["tokenizer_sha256"],
        "dtype": model["dtype"],
        "max_length": model["max_length"],
    }


def _source_of(value: Any) -> str:
    """A function of a definition as text; its `str` has an address in it, new in each process."""
    return inspect.getsource(value) if callable(value) else str(value)


def _file_stem(name: str, key: Mapping[str, Any]) -> str:
    text = json.dumps(key, sort_keys=True, default=str)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _task_file(out: Path, name: str, key: Mapping[str, Any]) -> Path:
    return out / "tasks" / f"{_file_stem(name, key)}.json"


def _samples_file(out: Path, name: str, key: Mapping[str, Any]) -> Path:
    return out / "samples" / f"{_file_stem(name, key)}.jsonl"


def _finished(
    out: Path, name: str, key: Mapping[str, Any], settings: Settings
) -> dict[str, Any] | None:
    path = _task_file(out, name, key)
    if not path.is_file() or (settings.samples and not _samples_file(out, name, key).is_file()):
        return None
    print(f"{name}: finished before, read from {path}", file=sys.stderr)
    return json.loads(path.read_text(encoding="utf-8"))


def _same_on_all_ranks(scorer: Scorer, decision: bool) -> bool:
    """Rank 0's decision: the others may see the folder differently, or not at all."""
    if scorer.world_size == 1:
        return decision
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([decision])[0]


# What is said about a result


def _describe_model(folder: Path, scorer: Scorer, settings: Settings) -> dict[str, Any]:
    place = folder.resolve()
    prefix = scorer.prefix_token_id
    tokenizer_files = sorted(
        path for pattern in ("token*", "special_tokens_map.json") for path in folder.glob(pattern)
    )
    return {
        "label": place.parent.name if place.name == "model" else place.name,
        "folder": str(folder),
        "sha256": _joint_sha256([folder / "config.json", *weight_files(folder)]),
        "tokenizer_sha256": _joint_sha256(tokenizer_files),
        "parameters": scorer.model.num_parameters(),
        "dtype": str(scorer.model.dtype).removeprefix("torch."),
        "max_length": scorer.max_length,
        "prefix_token": {"id": prefix, "text": scorer.tokenizer.convert_ids_to_tokens(prefix)},
    }


def _describe_settings(settings: Settings, scorer: Scorer) -> dict[str, Any]:
    return {
        "limit": settings.limit,
        "batch_size": scorer.batch_size,
        "ranks": scorer.world_size,
        "device": str(scorer.device),
        "bootstrap_iterations": settings.bootstrap_iterations,
        "data_dir": None if settings.data_dir is None else str(settings.data_dir),
    }


def _joint_sha256(paths: Sequence[Path]) -> str:
    return hashlib.sha256("".join(sha256(path) for path in paths).encode()).hexdigest()


def _stored_dtype(folder: Path) -> str:
    """The dtype that config.json gives the weights, as transformers' and the harness's "auto"."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _provenance() -> dict[str, Any]:
    values = provenance()
    values["versions"] |= {name: metadata.version(name) for name in PACKAGES}
    return values


def _commit() -> str | None:
    """The checkout's commit (`+`: with changes)."""
    here = str(Path(__file__).resolve().parent)
    command = ["git", "-C", here, "describe", "--always", "--dirty=+", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return found.stdout.strip() or None
    return None


# Files


def _write(out: Path, result: Mapping[str, Any]) -> None:
    write_json(out / "zero_shot.json", result)
    with replacing(out / "zero_shot.csv") as file:
        writer = csv.writer(file)
        writer.writerow(("task", "metric", "value", "stderr", "n", "version"))
        for name, task in result["tasks"].items():
            for metric, value in task["metrics"].items():
                error = task["stderr"].get(metric)
                writer.writerow((name, metric, value, error, task["n"], task["version"]))
        average = result["average"]
        if average["value"] is not None:
            writer.writerow(("average", "acc", average["value"], average["stderr"], "", ""))


def _write_samples(path: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    with replacing(path) as file:
        for sample in sorted(samples, key=lambda row: (row["filter"], row["doc_id"])):
            line = json.dumps(sample, default=handle_non_serializable, ensure_ascii=False)
            file.write(line + "\n")


def table(result: Mapping[str, Any]) -> str:
    """The values as aligned text, a line per task and metric, then the average."""
    rows = [("task", "metric", "value", "± stderr", "rows", "version")]
    for name, task in result["tasks"].items():
        for metric, value in task["metrics"].items():
            error = task["stderr"].get(metric)
            text = "" if error is None else f"± {_number(error)}"
            rows.append((name, metric, _number(value), text, str(task["n"]), str(task["version"])))
    average = result["average"]
    if average["value"] is not None:
        error = "" if average["stderr"] is None else f"± {_number(average['stderr'])}"
        rows.append(("average", "of 7 accuracies", _number(average["value"]), error, "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (0, 1, 3)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    if abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.3g}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the harness's notes and prints out of this command's output."""
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    # Its bootstrap would fork this process, which has threads and perhaps a GPU.
    os.environ["DISABLE_MULTIPROC"] = "1"
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
