"""The states of callbacks in a checkpoint: `callbacks/NAME.safetensors`, written by rank 0.

Tensors are stored unchanged, and other values as JSON in the file's metadata.
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
from cat_lm.training.checkpoint.optimizer_state import open_safetensors

FOLDER = "callbacks"
_VALUES = "values"


class CallbackState(NamedTuple):
    """A callback's state in the form in which it is stored."""

    tensors: dict[str, torch.Tensor]
    values: str  # JSON


EMPTY = CallbackState({}, "{}")


def to_stored_state(state: Any) -> CallbackState:
    """Return a callback's state in its stored form, with tensors copied to the CPU.

    Raises UserError for values that are neither tensors nor valid in JSON.
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
    """Write the callbacks' states to files; return each path with the tensors in it."""
    written = []
    for name, state in states.items():
        path = new / FOLDER / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        with raising_os_errors(path):
            save_file(state.tensors, path, {_VALUES: state.values})
        written.append((path, state.tensors))
    return written


def stored_states(checkpoint: Path) -> dict[str, Path]:
    """Return the state files in a checkpoint by the callbacks' names."""
    return {path.stem: path for path in sorted((checkpoint / FOLDER).glob("*.safetensors"))}


class StoredState(Mapping):
    """A callback's stored state; a tensor is read when it is accessed."""

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
def open_state(path: Path) -> Iterator[StoredState]:
    """Open a callback's state. Raises UserError for a damaged file."""
    with open_safetensors(path) as stored:
        yield StoredState(stored)
