"""Checkpoints that tests make or damage: their markers, written as training writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from cat_lm.config import RunConfig
from cat_lm.core.files import checksum
from cat_lm.training.checkpoint.files import MARKER, StoredFile, write_marker
from cat_lm.training.checkpoint.run import Checkpoints
from cat_lm.training.distributed import Ranks
from tests.runs import run_values, write_config

STATE = {
    "format": 1,
    "step": 2,
    "tokens": 64,
    "data": {"path": None, "fingerprint": "f"},
    "world_size": 1,
    "skipped": 0,
    "skipped_in_a_row": 0,
    "code": {"cat_lm": "0.1.0", "commit": None, "plugins": {}},
    "validated": True,
}


def seal(folder: Path) -> None:
    """Make the marker of a step folder list its files as they are now."""
    write_marker(
        folder,
        {
            str(path.relative_to(folder)): StoredFile(
                bytes=path.stat().st_size, checksum=checksum(path, "xxh3_128")
            )
            for path in folder.rglob("*")
            if path.is_file() and path.name != MARKER
        },
    )


def flip(path: Path, place: int = -5) -> None:
    """Change one bit of a file, whose size stays."""
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def step_folder(run: Path, step: int) -> Path:
    """A checkpoint by its files' names; what is in the large ones does not matter here."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    for name in ("model/model.safetensors", "state/rank-00000.safetensors", "random-00000.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 100)
    (folder / "model/config.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps(STATE | {"step": step}))
    write_config(folder, run_values("data", run)).rename(folder / "run_config.yaml")
    seal(folder)
    return folder


def run_of_three(run: Path) -> Path:
    """Make a run folder with the checkpoints of steps 2, 4 and 6."""
    for step in (2, 4, 6):
        step_folder(run, step)
    return run


def names(run: Path) -> list[str]:
    """List what is in the run's folder of checkpoints, but for its lock."""
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name != ".lock")


def find_checkpoint_to_resume(run: Path, resume: str = "auto") -> tuple[Path | None, list[str]]:
    """(what a run would go on from, the lines for its log)."""
    lines: list[str] = []
    config = RunConfig.model_validate(run_values("data", run, resume=resume))
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    checkpoints = Checkpoints(run, config, ranks, lines.append)
    try:
        return checkpoints.find_checkpoint_to_resume(), lines
    finally:
        checkpoints.close()
