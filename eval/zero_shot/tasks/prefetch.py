"""Writes the rows of tasks from the Hub into a folder that `--data-dir` reads without a network."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write, sha256, write_json
from cat_lm.core.outputs import claim_outputs
from eval.zero_shot.tasks.catalog import Catalog
from eval.zero_shot.tasks.sources import MANIFEST, Hub, file_name, needed_splits, read_manifest


def prefetch(names: Sequence[str], folder: Path | str, include: Path | None = None) -> list[Path]:
    """Fills `folder` with the files of the tasks `names`, and returns those files.

    A folder that has a manifest already fixes the revisions: files that are there and whole are
    kept, the others come from the same commits. The manifest is written after every task, so an
    interrupted call loses nothing. Raises UserError where the Hub cannot be reached.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(folder)
    catalog, hub = Catalog(names, include), Hub(manifest["revisions"])
    paths = []
    for name in catalog.specs:
        files = _whole_files(folder, name, manifest["files"])
        if not files:
            files = _fetch(name, catalog, hub, folder, manifest["files"])
            _write_manifest(folder, hub, manifest["files"])
        rows = ", ".join(f"{manifest['files'][file]['rows']} rows in {file}" for file in files)
        print(f"{name}: {rows}", file=sys.stderr)
        paths += [folder / file for file in files]
    return paths


def _whole_files(folder: Path, task: str, records: dict[str, Any]) -> list[str]:
    """The files of a task that the manifest lists, where all are as it says; else none."""
    files = [name for name, record in records.items() if record["task"] == task]
    whole = all(
        (folder / name).is_file() and sha256(folder / name) == records[name]["sha256"]
        for name in files
    )
    return files if whole else []


def _fetch(
    name: str, catalog: Catalog, hub: Hub, folder: Path, records: dict[str, Any]
) -> list[str]:
    task = catalog.load(name, hub)
    splits = needed_splits(task.config)
    paths = {split: folder / file_name(name, split, splits[0]) for split in splits}
    # Rows of the user's own may have such a name, and the manifest comes after a task's files.
    if new := [path.name for path in paths.values() if path.name not in records]:
        claim_outputs(folder, new[0], new[1:], "--prefetch")
    written = []
    for split, path in paths.items():
        try:
            with atomic_write(path) as file:
                for row in task.dataset[split]:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except TypeError as error:  # pictures, dates
            raise UserError(f"task {name}: its rows do not fit into jsonl: {error}") from None
        records[path.name] = hub.records[name] | {
            "task": name,
            "split": split,
            "rows": len(task.dataset[split]),
            "sha256": sha256(path),
        }
        written.append(path.name)
    return written


def _write_manifest(folder: Path, hub: Hub, records: dict[str, Any]) -> None:
    write_json(
        folder / MANIFEST,
        {
            "format": 1,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {name: metadata.version(name) for name in ("lm_eval", "datasets")},
            "revisions": hub.revisions,
            "files": records,
        },
    )
