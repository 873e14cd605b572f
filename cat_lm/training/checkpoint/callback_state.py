"""The states of callbacks in a checkpoint: `callbacks/NAME.safetensors`, written by the first rank.

Tensors are stored as they are; other values as JSON in the file's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cat_lm.core.errors import UserError
from cat_lm.core.files import raising_os_errors
from cat_lm.training.checkpoint.optimizer_state import opened

FOLDER = "callbacks"
_VALUES = "values"


class CallbackState(NamedTuple):
    """A callback's state as its file holds it."""

    tensors: dict[str, torch.Tensor]
    values: str  # JSON


EMPTY = CallbackState({}, "{}")


def storable(state: Any) -> CallbackState:
    """Copy what a callback returns as its state to the CPU.

    Raises UserError for what neither is a tensor nor has a form in JSON.
    """
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise UserError("its state must be a mapping from names")
    tensors = {
        key: value.detach().to("cpu", copy=True).contiguous()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    values = {key: value for key, value in state.items() if key not in tensors}
    try:
        return CallbackState(tensors, json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"its state cannot be stored: {error}") from None


def write_callback_states(
    new: Path, states: Mapping[str, CallbackState]
) -> list[tuple[Path, dict[str, torch.Tensor]]]:
    """Write each callback's state, by its name; return the files with the tensors in them."""
    written = []
    for name, state in states.items():
        path = new / FOLDER / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        with raising_os_errors(path):
            save_file(state.tensors, path, {_VALUES: state.values})
        written.append((path, state.tensors))
    return written


def stored_states(checkpoint: Path) -> dict[str, Path]:
    """Return the files of the callbacks' states in a step folder, by the callbacks' names."""
    return {path.stem: path for path in sorted((checkpoint / FOLDER).glob("*.safetensors"))}


class StoredState(Mapping):
    """A stored state, of which each tensor is read when it is asked for."""

    def __init__(self, stored: safe_open) -> None:
        self._stored = stored
        self._values = json.loads((stored.metadata() or {}).get(_VALUES, "{}"))
        self._tensors = set(stored.keys())

    def __getitem__(self, key: str) -> Any:
        if key in self._tensors:
            return self._stored.get_tensor(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._values, *sorted(self._tensors)])

    def __len__(self) -> int:
        return len(self._values) + len(self._tensors)


@contextmanager
def opened_state(path: Path) -> Iterator[StoredState]:
    """Open a callback's state. Raises UserError for a damaged file."""
    with opened(path) as stored:
        yield StoredState(stored)
