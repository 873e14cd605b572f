"""The states of this rank's random generators, which draw the dropout."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch


def save_random_states(path: Path) -> None:
    """Writes the states, and reads them again.

    Raises:
        OSError: they could not be written, or are not in the file as they are.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    torch.save(states, path)
    stored = torch.load(path, weights_only=True)
    if not all(stored[device].equal(state) for device, state in states.items()):
        raise OSError(f"{path.name} was not stored as it is")


def restore_random_states(path: Path) -> None:
    """Continues the generators bit for bit; one of a device that was not there is left alone."""
    states = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


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
