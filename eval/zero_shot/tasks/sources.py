"""Read the rows of tasks: from local jsonl files, or from the Hub at a fixed commit.

Either way the harness's own definition makes the prompts and the metrics of them; `sourced_task`
replaces one method of the harness's task class, the one that gets the rows.

A local folder has `TASK.jsonl` for the split that the task evaluates on, and `TASK.SPLIT.jsonl`
for the split that few-shot examples come from where the definition asks for some. Rows have the
Hub's columns, before any of the definition's own processing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.task import TaskConfig
from pydantic import ConfigDict

from cat_lm.core.errors import UserError
from cat_lm.core.files import sha256
from cat_lm.core.readers import InsideName, Record, Versioned, read_json, read_json_lines
from eval.zero_shot.tasks.harness import first_line
from eval.zero_shot.tasks.rows import check_answers

MANIFEST = "manifest.json"
# What a definition names in the place of a dataset of the Hub, with files of its own.
FILE_FORMATS = ("json", "csv", "parquet", "arrow", "text")


def needed_splits(config: TaskConfig) -> list[str]:
    """Return the split to be evaluated, then that of few-shot examples where there are any."""
    evaluated = config.test_split or config.validation_split
    if evaluated is None:
        raise UserError(f"task {config.task}: its definition names no split to evaluate on")
    if not config.num_fewshot:
        return [evaluated]
    shots = config.fewshot_config.split or config.training_split or config.validation_split
    return list(dict.fromkeys([evaluated, shots or evaluated]))


def sourced_task(source: Source) -> type[ConfigurableTask]:
    """Return the harness's task class with `source` in place of `datasets.load_dataset`."""

    class SourcedTask(ConfigurableTask):
        def __init__(self, config: dict[str, Any]) -> None:
            self.task_docs = None
            try:
                # The harness hands the class over among the definition's keys.
                super().__init__(config={key: v for key, v in config.items() if key != "class"})
            except Exception:
                if self.task_docs is not None:  # The harness has tried the first row.
                    check_answers(self, source, needed_splits(self.config), 1)
                raise

        def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
            self.dataset = source.splits(self.config, dataset_kwargs or {})
            # The harness opens the few-shot split even for zero examples.
            for key in ("training_split", "validation_split", "fewshot_split"):
                if getattr(self.config, key) not in self.dataset:
                    setattr(self.config, key, None)
            if self.fewshot_cfg.split not in self.dataset:
                self.fewshot_cfg.split = None

    return SourcedTask


def rows_sha256(task: ConfigurableTask) -> str:
    """Hash the rows that the task's numbers depend on, whatever source they came from."""
    digest = hashlib.sha256()
    for split in needed_splits(task.config):
        for row in task.dataset[split]:
            line = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
            digest.update(line.encode("utf-8") + b"\n")
    return digest.hexdigest()


class LocalFolder:
    """The rows in the jsonl files of a folder; no network is used.

    Attributes:
        records: task -> where its rows came from, as far as it has been asked for.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.records: dict[str, dict[str, Any]] = {}
        self._places: dict[tuple[str, str], list[str]] = {}
        if not self.folder.is_dir():
            raise UserError(f"--data-dir {folder}: no such folder")
        self._prefetched = read_manifest(self.folder)["files"]

    def splits(self, config: TaskConfig, options: Mapping[str, Any]) -> dict[str, Dataset]:
        """Return the rows of each of `needed_splits`."""
        names, found, files = needed_splits(config), {}, {}
        for split in names:
            path = self.folder / file_name(config.task, split, names[0])
            found[split], self._places[config.task, split] = _read(path)
            files[path.name] = self._record(path)
        self.records[config.task] = {"files": files}
        return found

    def describe(self, task: str) -> str:
        """Return the place of a task's rows, for messages."""
        return str(self.folder / f"{task}.jsonl")

    def place(self, task: str, split: str, number: int) -> str:
        """Return the place of a split's row, counted from 0."""
        return self._places[task, split][number]

    def _record(self, path: Path) -> dict[str, Any]:
        record = {"sha256": sha256(path)}
        prefetched = self._prefetched.get(path.name, {})
        if prefetched and prefetched["sha256"] != record["sha256"]:
            raise UserError(
                f"{path}: is not what {self.folder / MANIFEST} says was prefetched; "
                f"delete the file and run --prefetch {self.folder} again"
            )
        return prefetched | record


class Hub:
    """The rows on the Hub, each dataset at one commit.

    Args:
        revisions: dataset -> commit to use; for others it is the newest one, asked for once.

    Attributes:
        records: as of `LocalFolder`.
    """

    def __init__(self, revisions: Mapping[str, str] | None = None) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.revisions: dict[str, str | None] = {
            dataset: commit for dataset, commit in (revisions or {}).items() if commit
        }

    def splits(self, config: TaskConfig, options: Mapping[str, Any]) -> Mapping[str, Dataset]:
        """Return the rows of every split."""
        if callable(config.custom_dataset):
            self.records[config.task] = {"generated_by": "the definition"}
            return config.custom_dataset(**(config.metadata or {}), **options)
        path, name = config.dataset_path, config.dataset_name
        options = {k: v for k, v in options.items() if k not in ("trust_remote_code", "revision")}
        is_local = path in FILE_FORMATS or Path(path).exists()  # A custom definition has files.
        try:
            found = self._load(path, name, options, is_local)
        except Exception as error:
            if is_local:
                raise UserError(
                    f"task {config.task}: the files that its definition names ({options or path}) "
                    f"cannot be read: {first_line(error)}"
                ) from error
            raise UserError(
                f"task {config.task}: {path} cannot be had from the Hub ({first_line(error)}); "
                f"with files on this machine give --data-dir DIR (DIR/{config.task}.jsonl), or "
                f"write such a folder where there is a network with python -m eval.zero_shot "
                f"--prefetch DIR --tasks {config.task}"
            ) from error
        place = {"dataset": path, "config": name, "split": needed_splits(config)[0]}
        files = {"files": options["data_files"]} if options.get("data_files") else {}
        self.records[config.task] = place | {"revision": self.revisions[path]} | files
        return found

    def describe(self, task: str) -> str:
        """Return the place of a task's rows, for messages."""
        return f"the Hub's {self.records.get(task, {}).get('dataset', 'dataset')}"

    def place(self, task: str, split: str, number: int) -> str:
        """Return the place of a split's row, counted from 0."""
        return f"{self.describe(task)}, split {split}, row {number}"

    def _load(
        self, path: str, name: str | None, options: dict, is_local: bool
    ) -> Mapping[str, Dataset]:
        if is_local:
            self.revisions[path] = None
            return load_dataset(path, name, **options)
        if path not in self.revisions:
            self.revisions[path] = newest_commit(path, "main")
        try:
            return load_dataset(path, name, revision=self.revisions[path], **options)
        except RuntimeError as error:
            # datasets runs no scripts any more; the Hub keeps parquet files made by them.
            if "script" not in str(error):
                raise
            self.revisions[path] = newest_commit(path, "refs/convert/parquet")
            return load_dataset(path, name, revision=self.revisions[path], **options)


Source = LocalFolder | Hub


def newest_commit(dataset: str, branch: str) -> str | None:
    """Return the commit at a branch of a Hub dataset; None in the Hub's offline mode."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return HfApi().dataset_info(dataset, revision=branch).sha
    except OfflineModeIsEnabled:
        return None  # What was downloaded before can still be opened.


def file_name(task: str, split: str, evaluated: str) -> str:
    """Return the name of a split's file; `evaluated` is the split that is scored."""
    return f"{task}.jsonl" if split == evaluated else f"{task}.{split}.jsonl"


class _PrefetchedFile(Record):
    model_config = ConfigDict(extra="allow")  # Where it came from stands beside it.

    task: str
    sha256: str
    rows: int


class _Manifest(Versioned):
    """The file that --prefetch writes beside its files."""

    revisions: dict[str, str | None]
    files: dict[InsideName, _PrefetchedFile]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read what --prefetch wrote about its files; empty tables where there is no manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        return {"revisions": {}, "files": {}}
    return read_json(path, _Manifest, "give a folder that --prefetch wrote").model_dump()


def _read(path: Path) -> tuple[Dataset, list[str]]:
    """Return the rows of a jsonl file, and the place of each, for messages."""
    if not path.exists():
        raise UserError(f"task data {path}: missing; one JSON row per line in the Hub's columns")
    places: list[str] = []
    rows = read_json_lines(path, lambda row, place: places.append(place), what="task data")
    if not rows:
        raise UserError(f"task data {path}: has no rows")
    for row, place in zip(rows, places, strict=True):
        # Arrow would fill up what is missing, and leave out what is too much.
        if other := sorted(row.keys() ^ rows[0].keys()):
            raise UserError(
                f"{place}: rows differ in their columns: {', '.join(other)} not in all of them"
            )
    try:
        return Dataset.from_list(rows), places
    except Exception as error:  # arrow raises its own classes for columns that change their type.
        raise UserError(
            f"task data {path}: rows differ in their columns: {first_line(error)}"
        ) from error
