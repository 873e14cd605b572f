"""Checkpoints that are either complete or ignored.

    checkpoints/
      latest                       name of the newest complete one, moved last
      step-00000100/
        complete.json              marker: every file with its size; written after the rename
        state.json                 step, tokens, data fingerprint, world size, code version
        run_config.yaml            the resolved configuration
        model/                     config.json, model.safetensors: fp32 master weights
        tokenizer/
        engine/                    DeepSpeed's own files: optimizer, partitions
        random-00000.pt            generator states of each rank

A checkpoint is written beside its final name, flushed, verified, renamed and then marked, so that
a process killed at any moment leaves the previous ones as they were. Finding one needs neither
torch nor DeepSpeed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm import __version__
from cat_lm.config import RunConfig, changed_keys
from cat_lm.errors import UserError
from cat_lm.files import sync_directory, write_json, write_text

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks
    from cat_lm.training.engine import Engine

MARKER = "complete.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
# A run that changes one of these is another run; nothing else makes a resumed run inexact.
_FIXED_KEYS = ("model.", "data.context_length", "data.mask_documents", "train.seed")
_FIXED_KEYS += ("train.global_batch_size", "train.zero_stage", "train.precision")
# The result does not depend on it, so the same run may go on with another one.
_FREE_KEYS = ("model.attn_implementation",)


def is_complete(folder: Path) -> bool:
    """Whether the marker is there and every file it lists has the size it lists."""
    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete step folders in a `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    steps = (path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name))
    return sorted((path for path in steps if is_complete(path)), key=step_of)


def step_of(folder: Path) -> int:
    return int(_STEP_FOLDER.fullmatch(folder.name)[1])


def find_checkpoint(path: Path | str) -> Path:
    """The newest complete checkpoint at `path`: a run, a `checkpoints` or a step folder.

    Raises:
        UserError: there is none; weights are never made up.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint or run folder")
    if _STEP_FOLDER.fullmatch(path.name):
        if not is_complete(path):
            raise UserError(f"{path}: is not a complete checkpoint ({MARKER} is absent or differs)")
        return path
    for folder in (path / "checkpoints", path):
        found = complete_checkpoints(folder)
        if found:
            return found[-1]
    raise UserError(f"{path}: holds no complete checkpoint (a step-… folder with {MARKER})")


class Checkpoints:
    """Saves, prunes and restores the checkpoints of one run."""

    def __init__(self, run_folder: Path, config: RunConfig, ranks: Ranks) -> None:
        self.folder = run_folder / "checkpoints"
        self.config, self.ranks = config, ranks
        if ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        ranks.wait()

    def save(self, engine: Engine, state: dict[str, Any], tokenizer: Path) -> Path:
        """Saves the state after `state["step"]` steps (a collective) and prunes old ones.

        Raises:
            UserError: it could not be written, on every rank; older checkpoints are untouched.
        """
        final = self.folder / f"step-{state['step']:08d}"
        if self.ranks.agree_on(is_complete(final)):
            return final
        temporary = self.folder / f".{final.name}.saving"
        errors = self._everywhere(lambda: self._prepare(temporary))
        errors = errors or self._everywhere(
            lambda: self._write(temporary, engine, state, tokenizer)
        )
        if not errors and self.ranks.is_first:
            errors = _attempt(lambda: self._publish(temporary, final))
        errors = self.ranks.agree_on(errors)
        if errors:
            if self.ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            kept = complete_checkpoints(self.folder)
            raise UserError(
                f"{final}: the checkpoint could not be written ({errors[0]}); "
                f"newest complete one: {kept[-1].name if kept else 'none'}"
            )
        return final

    def _everywhere(self, action) -> list[str]:
        """Runs `action` on every rank; the errors of all ranks, on every rank."""
        return [error for errors in self.ranks.gather(_attempt(action)) for error in errors]

    def _prepare(self, temporary: Path) -> None:
        if self.ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "model").mkdir(parents=True)

    def _write(self, temporary: Path, engine: Engine, state: dict, tokenizer: Path) -> None:
        import torch
        from safetensors.torch import save_file

        from cat_lm.training.distributed import quiet

        with quiet():
            engine.deepspeed.save_checkpoint(str(temporary), tag="engine", save_latest=False)
        random_states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random_states["cuda"] = torch.cuda.get_rng_state()
        torch.save(random_states, temporary / _random_file(self.ranks.rank))
        weights = engine.full_precision_weights()
        if self.ranks.is_first:
            save_file(weights, temporary / "model/model.safetensors", {"format": "pt"})
            engine.model.config.save_pretrained(temporary / "model")
            shutil.copytree(tokenizer, temporary / "tokenizer")
            self.config.save(temporary / "run_config.yaml")
            state = {**state, "world_size": self.ranks.world_size, "code": _code_version()}
            write_json(temporary / "state.json", state)
            _verify_weights(temporary / "model/model.safetensors", weights)
        self._flush(temporary)

    def _flush(self, temporary: Path) -> None:
        """Every rank flushes and checks its own files; the first one also those of nobody."""
        for path in (path for path in temporary.rglob("*") if path.is_file()):
            owner = re.search(r"(?:pp_rank_|random-)(\d+)", path.name)
            if self.ranks.rank != (int(owner[1]) if owner else 0):
                continue
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
            if path.suffix == ".pt" and not zipfile.is_zipfile(path):
                raise OSError(f"{path.name} is damaged")

    def _publish(self, temporary: Path, final: Path) -> None:
        files = [path for path in temporary.rglob("*") if path.is_file()]
        sizes = {str(path.relative_to(temporary)): path.stat().st_size for path in files}
        shutil.rmtree(final, ignore_errors=True)  # one that was never marked
        os.rename(temporary, final)
        sync_directory(self.folder)
        write_json(final / MARKER, {"files": dict(sorted(sizes.items()))})
        write_text(self.folder / "latest", final.name + "\n")
        self._prune()

    def _prune(self) -> None:
        rule = self.config.checkpoint
        for folder in complete_checkpoints(self.folder)[: -rule.keep_last]:
            if rule.keep_every_steps and step_of(folder) % rule.keep_every_steps == 0:
                continue
            doomed = self.folder / f".{folder.name}.deleting"
            (folder / MARKER).unlink()  # from here on nobody takes it for a whole one
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def to_resume(self) -> Path | None:
        """The checkpoint that `train.resume` asks for, the same on every rank.

        Raises:
            UserError: a checkpoint was named and is not complete, or there are checkpoints and
                `train.resume` is `never`.
        """
        wish = self.config.train.resume
        if wish not in ("auto", "never"):
            return Path(self.ranks.agree_on(str(find_checkpoint(wish))))
        names = [path.name for path in complete_checkpoints(self.folder)]
        newest = self.ranks.agree_on(names[-1] if names else None)
        if newest is None:
            return None
        if wish == "never":
            raise UserError(
                f"train.output_dir={self.config.train.output_dir}: already holds {newest}; "
                "train.resume=auto continues it, another train.output_dir starts anew"
            )
        return self.folder / newest

    def load(self, folder: Path, engine: Engine, fingerprint: str) -> dict[str, Any]:
        """Restores model, optimizer and generators; returns the saved `state`.

        Raises:
            UserError: the checkpoint belongs to other data, another model or recipe, or was
                written by another number of ranks.
        """
        import torch

        from cat_lm.training.distributed import quiet

        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        self._check_compatible(folder, state, fingerprint)
        with quiet():
            loaded, _ = engine.deepspeed.load_checkpoint(
                str(folder), tag="engine", load_lr_scheduler_states=False
            )
        if loaded is None:
            raise UserError(f"{folder}: DeepSpeed could not load it")
        random_states = torch.load(folder / _random_file(self.ranks.rank), weights_only=True)
        torch.set_rng_state(random_states["cpu"])
        if "cuda" in random_states and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_states["cuda"])
        return state

    def _check_compatible(self, folder: Path, state: dict[str, Any], fingerprint: str) -> None:
        import yaml

        if state["data"]["fingerprint"] != fingerprint:
            raise UserError(
                f"{folder}: was trained on other data: its fingerprint is "
                f"{state['data']['fingerprint'][:12]}, data.path={self.config.data.path} has "
                f"{fingerprint[:12]}"
            )
        if state["world_size"] != self.ranks.world_size:
            raise UserError(
                f"{folder}: was written by {state['world_size']} ranks, this run has "
                f"{self.ranks.world_size}; start it with {state['world_size']}"
            )
        old = yaml.safe_load((folder / "run_config.yaml").read_text(encoding="utf-8"))
        changed = changed_keys(old, self.config.model_dump(mode="json"))
        fixed = [key for key in changed if key.startswith(_FIXED_KEYS) and key not in _FREE_KEYS]
        if fixed:
            raise UserError(f"{folder}: was trained with another {', '.join(fixed)}")


def _code_version() -> dict[str, str | None]:
    """cat_lm's version, and its git commit (`+`: with changes) where it runs from a checkout."""
    package = Path(__file__).resolve().parents[1]
    try:
        found = subprocess.run(
            ["git", "-C", str(package), "describe", "--always", "--dirty=+", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found = ""
    return {"cat_lm": __version__, "commit": found or None}


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.pt"


def _attempt(action) -> list[str]:
    try:
        action()
    except (OSError, RuntimeError) as error:
        return [" ".join(str(error).split())]
    return []


def _verify_weights(path: Path, weights: dict) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        for name, weight in weights.items():
            if not stored.get_tensor(name).equal(weight):
                raise OSError(f"{path.name}: {name} was not stored as it is")
