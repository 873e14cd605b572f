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
    """Write the states. Raises OSError where they could not be written."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    content = io.BytesIO()
    torch.save(states, content)
    with causes_told(path):
        path.write_bytes(content.getvalue())


def restore_random_states(path: Path) -> None:
    """Continue the generators bit for bit; one of a device that was not there is left alone.

    Raises:
        UserError: the file holds no states of this machine's generators, or cannot be read;
            `TemporaryError` where it may be at the next start.
    """
    content = io.BytesIO(read_bytes(path))
    try:
        states = torch.load(content, map_location="cpu", weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except Exception as error:  # whatever a damaged archive makes of its reader
        raise UserError(
            f"{path}: cannot be read as states of generators ({type(error).__name__})"
        ) from None


def seed_of(seed: int, step: int, rank: int, world_size: int) -> int:
    """Return the seed of a rank whose generators have no past: 63 bits.

    The first 8 bytes of SHA-256 over the decimal numbers `seed step rank world_size`, little
    endian, without the highest bit.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank} {world_size}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def reseed(seed: int, step: int, rank: int, world_size: int) -> None:
    """Seed the generators of all devices after a change of the number of ranks."""
    torch.manual_seed(seed_of(seed, step, rank, world_size))
