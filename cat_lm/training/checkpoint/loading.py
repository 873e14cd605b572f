"""Filling an engine from a checkpoint, after checking that it is of the same run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.config import RunConfig, changed_values
from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.ops.landmark.options import CALIBRATE
from cat_lm.training.checkpoint.finding import step_of
from cat_lm.training.checkpoint.records import (
    STATE,
    WEIGHTS,
    RunState,
    read_run_config,
    read_run_state,
)
from cat_lm.training.checkpoint.saving import random_file

if TYPE_CHECKING:
    from cat_lm.training.engine import Engine

# A run that changes one of these is another run. Others (rates, lengths, micro-batches) may change
# on resuming; the log then says which.
_FIXED_KEYS = ("model.", "data.context_length", "data.mask_documents", "data.packing")
_FIXED_KEYS += ("train.seed", "train.global_batch_size", "train.precision")
# The result does not depend on it, so the same run may go on with another one.
_FREE_KEYS = ("model.attn_implementation",)


@dataclass(frozen=True)
class Restored:
    """Say where a run goes on, and what of its settings is new, as lines for the log."""

    folder: Path
    state: RunState
    changed: list[str]


def read_compatible(folder: Path, config: RunConfig, world_size: int, fingerprint: str) -> Restored:
    """Read what a checkpoint says of itself.

    Raises:
        UserError: it belongs to other data, another model or batch, or to a run in which other
            weights learn.
    """
    state = read_run_state(folder)
    if state.step != step_of(folder):
        raise UserError(f"{folder / STATE}: step is {state.step}, which its folder's name is not")
    if state.data.fingerprint != fingerprint:
        raise UserError(
            f"{folder}: was trained on other data: its fingerprint is "
            f"{state.data.fingerprint[:12]}, {' + '.join(config.data.folders)} has "
            f"{fingerprint[:12]}"
        )
    old = read_run_config(folder).model_dump(mode="json")
    changes = changed_values(old, config.model_dump(mode="json"))
    fixed = [
        f"{name} (was {a}, is {b})"
        for name, (a, b) in changes.items()
        if name.startswith(_FIXED_KEYS) and name not in _FREE_KEYS
    ]
    if fixed:
        raise UserError(f"{folder}: was trained with another {', '.join(fixed)}")
    _check_what_learns(folder, *changes.get("train.landmark_loss", (None, None)))
    lines = [f"{name}: was {a}, is {b}" for name, (a, b) in changes.items()]
    if state.world_size != world_size:
        lines.append(
            f"ranks: was {state.world_size}, is {world_size}; random generators seeded anew from "
            f"train.seed, step {state.step}, rank and number of ranks"
        )
    now = plugins.describe()
    for name, was in state.code.plugins.items():
        if now.get(name, was) != was:  # what of it the model has cannot be seen from here
            lines.append(f"the plugin {name}: was {was}, is {now[name]}")
    return Restored(folder, state, lines)


def _check_what_learns(folder: Path, was: str | None, now: str | None) -> None:
    """Refuse to go on with calibration from moments that would move all weights, or the reverse.

    Raises:
        UserError: naming what to do instead.
    """
    if CALIBRATE in (was, now):
        raise UserError(
            f"{folder}: was trained with train.landmark_loss={was}, and is to go on with {now}, "
            f"where {CALIBRATE} alone leaves the other weights as they are; give another "
            "train.output_dir, and the model as train.init_from"
        )


def restore(engine: Engine, folder: Path, fingerprint: str) -> Restored:
    """Fill model, optimizer and generators (a collective).

    Raises:
        UserError: as `read_compatible`, or a file is damaged; on every rank.
    """
    from cat_lm.training import rng
    from cat_lm.training.optimizer_state import (
        StateIndex,
        check_weights,
        read_index,
        read_state,
        refresh_model,
    )

    ranks, config = engine.ranks, engine.config

    def look() -> tuple[Restored, StateIndex]:
        restored = read_compatible(folder, config, ranks.world_size, fingerprint)
        # Before the moments, which lie flat and could not say what shape is stored.
        check_weights(engine, folder / WEIGHTS)
        return restored, read_index(folder / "state", restored.state.world_size, engine)

    # The first rank alone reads what is the same for all; on a file system of many nodes that is
    # dear.
    found, index = ranks.broadcast(ranks.on_rank_zero(look))
    ranks.on_all_ranks(lambda: read_state(engine, index, folder / "state", folder / WEIGHTS))
    state = found.state
    refresh_model(engine, state.step, state.skipped)
    if state.world_size == ranks.world_size:
        path = folder / random_file(ranks.rank)
        ranks.on_all_ranks(lambda: rng.restore_random_states(path))
    else:
        rng.reseed(config.train.seed, state.step, ranks.rank, ranks.world_size)
    return found
