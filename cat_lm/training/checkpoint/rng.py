"""The states of this rank's random generators, which draw the dropout."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import torch

from cat_lm.core.errors import UserError
from cat_lm.core.files import causes_told
from cat_lm.core.readers import read_bytes


def save_random_states(path: Path) -> None:
    """Write the states, and read them again.

    Raises:
        OSError: they could not be written, or are not in the file as they are.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    content = io.BytesIO()
    torch.save(states, content)
    with causes_told(path):  # torch's own writer would not say what the system said
        path.write_bytes(content.getvalue())
        stored = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    if not all(stored[device].equal(state) for device, state in states.items()):
        raise OSError(f"{path.name} was not stored as it is")


def restore_random_states(path: Path) -> None:
    """Continue the generators bit for bit; one of a device that was not there is left alone.

    Raises:
        UserError: there is no such file, or it holds no states of this machine's generators, or
            cannot be read; `TemporaryError` where it may be at the next start.
    """
    states = _read_states(path)
    try:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (RuntimeError, TypeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None


def _read_states(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; it holds the states of a rank's generators")
    content = io.BytesIO(read_bytes(path))
    try:
        states = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged archive makes of its reader
        raise UserError(
            f"{path}: cannot be read as states of generators ({type(error).__name__})"
        ) from None
    if not isinstance(states, dict) or "cpu" not in states:
        raise UserError(f"{path}: holds no state of the CPU's generator")
    sizes = {"cpu": torch.get_rng_state().numel()}
    if torch.cuda.is_available():
        sizes["cuda"] = torch.cuda.get_rng_state().numel()
    for device, size in sizes.items():
        state = states.get(device)
        if state is None:
            continue
        if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.dim() != 1:
            raise UserError(f"{path}: {device}: must be a tensor of bytes")
        if state.numel() != size:
            raise UserError(f"{path}: {device}: has {state.numel()} bytes, must have {size}")
    return states


def seed_of(seed: int, step: int, rank: int, world_size: int) -> int:
    """The seed of a rank whose generators have no past: 63 bits, other ones for any other numbers.

    The first 8 bytes of SHA-256 over the decimal numbers `seed step rank world_size`, little
    endian, without the highest bit.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank} {world_size}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def reseed(seed: int, step: int, rank: int, world_size: int) -> None:
    """Seeds the generators of all devices after a change of the number of ranks."""
    torch.manual_seed(seed_of(seed, step, rank, world_size))
