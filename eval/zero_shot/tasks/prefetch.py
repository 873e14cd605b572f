"""Write the rows of tasks from the Hub into a folder that `--data-dir` reads without a network."""

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
    """Write the files of the tasks `names` into `folder`, and return those files.

    A folder that has a manifest already fixes the revisions: files that are there and whole are
    kept, the others come from the same commits. The manifest is written after every task, so an
    interrupted call loses nothing. Raises UserError where the Hub cannot be reached.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(folder)
    records = manifest["files"]
    catalog, hub = Catalog(names, include), Hub(manifest["revisions"])
    paths = []
    for name in catalog.specs:
        files = [file for file, record in records.items() if record["task"] == name]
        if not files or not all(_is_whole(folder / file, records[file]) for file in files):
            files = _fetch(name, catalog, hub, folder, records)
            values = {
                "format": 1,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "versions": {name: metadata.version(name) for name in ("lm_eval", "datasets")},
                "revisions": hub.revisions,
                "files": records,
            }
            write_json(folder / MANIFEST, values)
        rows = ", ".join(f"{records[file]['rows']} rows in {file}" for file in files)
        print(f"{name}: {rows}", file=sys.stderr)
        paths += [folder / file for file in files]
    return paths


def _is_whole(path: Path, record: dict[str, Any]) -> bool:
    return path.is_file() and sha256(path) == record["sha256"]


def _fetch(
    name: str, catalog: Catalog, hub: Hub, folder: Path, records: dict[str, Any]
) -> list[str]:
    task = catalog.load(name, hub)
    splits = needed_splits(task.config)
    files = {split: file_name(name, split, splits[0]) for split in splits}
    # Rows of the user's own may have such a name, and the manifest comes after a task's files.
    if new := [file for file in files.values() if file not in records]:
        claim_outputs(folder, new[0], new[1:], "--prefetch")
    for split, file_of_split in files.items():
        path, rows = folder / file_of_split, task.dataset[split]
        try:
            with atomic_write(path) as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except TypeError as error:  # Pictures and dates are not valid in JSON.
            raise UserError(f"task {name}: its rows do not fit into jsonl: {error}") from None
        about = {"task": name, "split": split, "rows": len(rows), "sha256": sha256(path)}
        records[path.name] = hub.records[name] | about
    return list(files.values())
