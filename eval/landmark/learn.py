"""Learns the selectors that are learned, for a model that stays as it is, and keeps them.

All block sizes learn in the same passes over the data, each for itself: a loss reaches the
parameters of one selector alone.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write
from cat_lm.core.readers import Versioned, read_bytes
from cat_lm.training.landmark_calibration import calibrate, ends_of
from eval.lab.store import CellStore, key_hash
from eval.landmark.choices import STATE
from eval.landmark.selectors import LearnedFilter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.landmark.cores import Chooser


class _Learned(Versioned):
    """Hold the checksum of a file of selectors, which lies beside it."""

    sha256: str


@dataclass(frozen=True)
class Lessons:
    """Say what is learned, and from what.

    Attributes:
        data, tokens, length: prepared data, how many tokens, in windows of which length.
        state: numbers of state of the selector `ssm`.
    """

    data: str
    tokens: int
    length: int
    state: int = STATE


def learn(
    model: PreTrainedModel,
    choosers: Sequence[Chooser],
    names: Sequence[str],
    blocks: Sequence[int],
    local: int,
    lessons: Lessons,
    folder: Path,
    identity: dict[str, Any],
) -> str:
    """Set the choosers' learned selectors: those in `folder`, or new ones, which it then holds.

    Args:
        names: of `eval.landmark.choices.LEARNED`.
        identity: of the model and the data, by which what was learned is known again.

    Returns:
        The name under which they are kept, which tells them from all others.

    Raises:
        UserError: data that do not serve; see `calibrate`.
    """
    for chooser in choosers:
        chooser.learners = {
            (name, block): LearnedFilter(
                model.config, block, lessons.state if name == "ssm" else 0
            ).to(model.device)
            for block in blocks
            for name in names
        }
    key = identity | {
        "names": list(names), "blocks": list(blocks), "local": local, "tokens": lessons.tokens,
        "length": lessons.length,
    }  # fmt: skip
    if "ssm" in names:
        key["state"] = lessons.state
    name = key_hash(key)
    every = nn.ModuleList(nn.ModuleList(chooser.learners.values()) for chooser in choosers)
    store, path = CellStore(folder, _Learned), folder / f"{name}.pt"
    if path.is_file():
        _read(every, path, store.read(name))
        return name
    for chooser in choosers:
        chooser.local = local
    calibrate(model, every.parameters(), lessons.data, lessons.tokens, lessons.length)
    for chooser in choosers:
        chooser.local = None
    _say(choosers)
    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save(every.state_dict(), content)
    # The checksum comes first: after a kill in between, both are written again.
    store.write(name, {"sha256": _sha256(content.getvalue())})
    with atomic_write(path, "wb") as file:
        file.write(content.getvalue())
    return name


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(every: nn.Module, path: Path, learned: dict[str, Any] | None) -> None:
    errors = (RuntimeError, ValueError, EOFError, AttributeError, pickle.UnpicklingError)
    content = read_bytes(path)
    try:
        if learned is None or learned["sha256"] != _sha256(content):
            raise ValueError("it is not what was written")
        stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        every.load_state_dict(stored)
    except errors as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: damaged: {why}; delete it, and the same command learns it again"
        ) from None


def _say(choosers: Sequence[Chooser]) -> None:
    """Print the mean loss over the layers at the first tenth of the steps and at the last."""
    for name, block in choosers[0].taught:
        losses = torch.tensor([chooser.taught[name, block] for chooser in choosers]).mean(dim=0)
        first, last = ends_of(losses.tolist())
        print(f"{name}, block {block}: loss {first:.4f} at first, {last:.4f}", file=sys.stderr)
