"""Checkpoints that are either complete or ignored.

    checkpoints/
      latest                       name of the newest complete one, for people and other tools
      step-00000100/
        complete.json              marker: every file with its size; written after the rename
        state.json                 step, tokens, data fingerprint, world size, code version
        run_config.yaml            the resolved configuration
        model/                     config.json, model.safetensors: fp32 master weights
        tokenizer/
        state/                     rank-00000.safetensors …: AdamW's moments (cat_lm.training.state)
        random-00000.pt            generator states of each rank

It takes 12 bytes a parameter: 4 of weights, which are stored once, in model/, and 8 of moments.
Saving gathers the weights on the first rank's CPU (4 bytes a parameter: 28 GB for 7B parameters)
and moves each rank's moments through its own CPU.

It is *elastic*: the number of ranks and of nodes and the ZeRO stage may be others on resuming. With
the same number of ranks and the same stage the losses are those of a run that was never
interrupted, bit for bit. Otherwise weights, moments and steps are restored bit for bit too, and the
samples are the same; but sums over ranks are rounded in another order. Tests hold the next 20
losses, without dropout, to differences of 1e-4 in fp32 and 1e-2 in bf16; seen were 5e-7, and 1e-3
from stage 0, which has fp32 weights under autocast, to stage 1. With another number of ranks the
generators are seeded anew, by `generators.seed_of`, so that dropout draws other masks.

A checkpoint is written beside its final name, flushed, verified, renamed and then marked, so that
a process killed at any moment leaves the previous ones as they were. Finding one needs neither
torch nor DeepSpeed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cat_lm import __version__
from cat_lm.config import RunConfig, changed_values
from cat_lm.errors import SharedError, UserError
from cat_lm.io.files import sync_directory, write_json, write_text

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks
    from cat_lm.training.engine import Engine

MARKER = "complete.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
# A run that changes one of these is another run. Others (rates, lengths, micro-batches) may change
# on resuming; the log then says which.
_FIXED_KEYS = ("model.", "data.context_length", "data.mask_documents", "data.packing")
_FIXED_KEYS += ("train.seed", "train.global_batch_size", "train.precision")
# The result does not depend on it, so the same run may go on with another one.
_FREE_KEYS = ("model.attn_implementation",)


def is_complete(folder: Path) -> bool:
    """Whether the marker is there and every file it lists has the size it lists."""
    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
        self._current: Path | None = None  # saved or loaded last by this process
        self._lock = ranks.on_first(self._open)

    def _open(self) -> IO:
        """Makes the folder, for this process alone, and removes what a killed one left half-done.

        The lock ends with the process, however it ends.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = open(self.folder / ".lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"train.output_dir={self.config.train.output_dir}: another process trains in it"
            ) from None
        except OSError:
            pass  # some cluster file systems have no locks; a run there must start all the same
        for folder in self.folder.iterdir():
            unmarked = _STEP_FOLDER.fullmatch(folder.name) and not (folder / MARKER).exists()
            if unmarked or folder.name.startswith(".step-"):
                shutil.rmtree(folder, ignore_errors=True)
        return lock

    def save(self, engine: Engine, state: dict[str, Any], tokenizer: Path) -> Path:
        """Saves the state after `state["step"]` steps (a collective) and prunes old ones.

        Raises:
            SharedError: it could not be written; older checkpoints are untouched.
            RuntimeError: a collective failed, most likely because another rank has ended.
        """
        final = self.folder / f"step-{state['step']:08d}"
        if final == self._current:
            return final
        temporary = self.folder / f".{final.name}.saving"
        try:
            self.ranks.on_first(lambda: self._prepare(temporary))
            weights = engine.full_precision_weights()
            self.ranks.everywhere(lambda: self._write(temporary, engine, weights, state, tokenizer))
            self.ranks.on_first(lambda: self._publish(temporary, final, engine))
        except UserError as error:
            if self.ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            kept = complete_checkpoints(self.folder)
            raise SharedError(
                f"{final}: the checkpoint could not be written "
                f"({' '.join(str(error).split()) or type(error).__name__}); "
                f"newest complete one: {kept[-1].name if kept else 'none'}"
            ) from error
        self._current = final
        self.ranks.on_first(self._prune)
        return final

    def close(self) -> None:
        """Lets another process train in the folder."""
        if self._lock:
            self._lock.close()

    def _prepare(self, temporary: Path) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        for name in ("model", "state"):
            (temporary / name).mkdir(parents=True)

    def _write(
        self, temporary: Path, engine: Engine, weights: dict, state: dict, tokenizer: Path
    ) -> None:
        """Each rank writes, flushes and checks its own files."""
        from safetensors.torch import save_file

        from cat_lm.training.generators import save_random_states
        from cat_lm.training.state import state_file, verify_tensors, write_state

        rank = self.ranks.rank
        write_state(engine, temporary / "state")
        save_random_states(temporary / _random_file(rank))
        own = [temporary / "state" / state_file(rank), temporary / _random_file(rank)]
        if self.ranks.is_first:
            save_file(weights, temporary / "model/model.safetensors", {"format": "pt"})
            engine.model.config.save_pretrained(temporary / "model")
            shutil.copytree(tokenizer, temporary / "tokenizer")
            self.config.save(temporary / "run_config.yaml")
            state = {**state, "world_size": self.ranks.world_size, "code": _code_version()}
            write_json(temporary / "state.json", state)
            verify_tensors(temporary / "model/model.safetensors", weights)
            own += [temporary / "run_config.yaml", temporary / "state.json"]
            own += [*(temporary / "model").rglob("*"), *(temporary / "tokenizer").rglob("*")]
        self._flush(path for path in own if path.is_file())

    def _flush(self, paths: Iterable[Path]) -> None:
        for path in paths:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())

    def _publish(self, temporary: Path, final: Path, engine: Engine) -> None:
        from cat_lm.training.state import read_index

        # What could not be read back must never be marked as complete.
        read_index(temporary / "state", self.ranks.world_size, engine)
        paths = list(temporary.rglob("*"))
        sizes = {
            str(path.relative_to(temporary)): path.stat().st_size
            for path in paths
            if path.is_file()
        }
        for folder in (temporary, *(path for path in paths if path.is_dir())):
            sync_directory(folder)
        shutil.rmtree(final, ignore_errors=True)  # of this step, but not of this run's past
        os.rename(temporary, final)
        sync_directory(self.folder)
        write_json(final / MARKER, {"files": dict(sorted(sizes.items()))})
        write_text(self.folder / "latest", final.name + "\n")

    def _prune(self) -> None:
        rule = self.config.checkpoint
        for folder in complete_checkpoints(self.folder)[: -rule.keep_last]:
            kept = rule.keep_every_steps and step_of(folder) % rule.keep_every_steps == 0
            if kept or folder == self._current:
                continue
            # Out of sight first: a half-deleted checkpoint must not be taken for a whole one.
            doomed = self.folder / f".{folder.name}.deleting"
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def to_resume(self) -> Path | None:
        """The checkpoint that `train.resume` asks for, the same on every rank.

        Raises:
            UserError: a checkpoint was named and is not complete; or the run's folder has
                checkpoints that a start from there would mix with its own.
        """
        return self.ranks.agree_on(self.ranks.on_first(self._to_resume))

    def _to_resume(self) -> Path | None:
        wish, own = self.config.train.resume, complete_checkpoints(self.folder)
        if wish == "auto":
            return own[-1] if own else None
        start = None if wish == "never" else find_checkpoint(wish)
        if own and (start is None or step_of(own[-1]) > step_of(start)):
            raise UserError(
                f"train.output_dir={self.config.train.output_dir}: already holds {own[-1].name}; "
                "train.resume=auto continues it, another train.output_dir starts anew"
            )
        return start

    def load(self, folder: Path, engine: Engine, fingerprint: str) -> dict[str, Any]:
        """Restores model, optimizer and generators (a collective); returns the saved `state`.

        Settings that do not make it another run (rates, decay, lengths, ZeRO stage) are the
        configuration's; `state["changed"]` lists them, and another number of ranks, as lines for
        the log.

        Raises:
            UserError: the checkpoint belongs to other data, another model or batch, is of an older
                layout, or is damaged; on every rank.
        """
        from cat_lm.training import generators
        from cat_lm.training.state import read_index, read_state, refresh_model

        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        state["changed"] = self._check_compatible(folder, state, fingerprint)
        # The first rank alone reads all headers; on a file system of many nodes that is dear.
        index = self.ranks.agree_on(
            self.ranks.on_first(lambda: read_index(folder / "state", state["world_size"], engine))
        )
        weights = folder / "model/model.safetensors"
        self.ranks.everywhere(lambda: read_state(engine, index, folder / "state", weights))
        refresh_model(engine, state["step"], state.get("skipped", 0))
        self._current = folder
        rank, world_size = self.ranks.rank, self.ranks.world_size
        if state["world_size"] == world_size:
            random_file = folder / _random_file(rank)
            self.ranks.everywhere(lambda: generators.restore_random_states(random_file))
        else:
            generators.reseed(self.config.train.seed, state["step"], rank, world_size)
        return state

    def _check_compatible(self, folder: Path, state: dict, fingerprint: str) -> list[str]:
        import yaml

        if state["data"]["fingerprint"] != fingerprint:
            raise UserError(
                f"{folder}: was trained on other data: its fingerprint is "
                f"{state['data']['fingerprint'][:12]}, {' + '.join(self.config.data.folders)} has "
                f"{fingerprint[:12]}"
            )
        if not (folder / "state").is_dir():
            raise UserError(
                f"{folder}: has no state/: it was written by cat_lm "
                f"{state.get('code', {}).get('cat_lm')}, which kept DeepSpeed's own files; finish "
                "the run with that version, or start anew from its weights with train.init_from"
            )
        # Validated, so that keys which that version did not know yet have their defaults.
        old = RunConfig.model_validate(
            yaml.safe_load((folder / "run_config.yaml").read_text(encoding="utf-8"))
        )
        changes = changed_values(old.model_dump(mode="json"), self.config.model_dump(mode="json"))
        fixed = [
            f"{name} (was {a}, is {b})"
            for name, (a, b) in changes.items()
            if name.startswith(_FIXED_KEYS) and name not in _FREE_KEYS
        ]
        if fixed:
            raise UserError(f"{folder}: was trained with another {', '.join(fixed)}")
        lines = [f"{name}: was {a}, is {b}" for name, (a, b) in changes.items()]
        if state["world_size"] != self.ranks.world_size:
            lines.append(
                f"ranks: was {state['world_size']}, is {self.ranks.world_size}; random generators "
                f"seeded anew from train.seed, step {state['step']}, rank and number of ranks"
            )
        return lines


def _code_version() -> dict[str, str | None]:
    """cat_lm's version, and its git commit (`+`: with changes) where it is known."""
    checkout = Path(__file__).resolve().parents[2]
    return {"cat_lm": __version__, "commit": _copied_commit(checkout) or _git_commit(checkout)}


def _copied_commit(checkout: Path) -> str | None:
    """The commit of a copy that `launch.slurm` made; its code.json stands beside it."""
    try:
        record = json.loads((checkout.parent / "code.json").read_text(encoding="utf-8"))
        return record["commit"] + ("+" if record["dirty"] else "")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _git_commit(checkout: Path) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found or None


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.pt"
