"""What all launches share: the table of tile sizes and the number of programs.

Tile sizes are a table and not the outcome of timing at run time: ranks that tuned themselves could
differ, and with them the order of sums.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cat_lm.ops.convolution.triton.tiles import Tile, has_rotated_tile
from cat_lm.ops.runtime.triton_launch import cdiv, contiguous, next_power_of_2

# Wider windows would need more shared memory for the halo than older GPUs have.
WIDEST_DOT_WINDOW = 129
# The widest of a halo of 64 steps: see `rotates_separately`.
WIDEST_FUSED_ROTATION = 65

# About eight programs for each multiprocessor of a large GPU; a constant, so that sums over
# programs do not depend on the device.
PROGRAMS = 1024

SHARED_MEMORY_OF_A100 = 166912


@dataclass(frozen=True)
class Launch:
    """A tile of the kernels per head or channel, and what the compiler is told about it."""

    tile: Tile
    num_warps: int
    num_stages: int
    # Registers a thread at most, where two programs then fit on a multiprocessor.
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the compile-time arguments and compiler options of a kernel."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.registers is not None and torch.version.hip is None:
            options["maxnreg"] = self.registers
        return {"TILE": self.tile} | options

    def chunks(self, x: Tensor, backward: bool = False) -> int:
        """Return how many parts x's columns are divided into, including the rotated ones for
        gradients.
        """
        apart = self.tile.use_dot and has_rotated_tile(self.tile.rotary, self.tile.columns)
        return cdiv(x.shape[-1], self.tile.columns) + bool(backward and apart)

    def tiles(self, x: Tensor) -> int:
        """Count the tiles along all rows of x [B, T, H, …, D], for one head and column."""
        return x.shape[0] * cdiv(x.shape[1], self.tile.block)

    def tiles_per_program(self, x: Tensor, most: int) -> int:
        """Return the tiles of one program, 1 to `most`, so that about PROGRAMS share the work.

        A program that has several tiles builds its Toeplitz matrix once, and loads the next tile
        while it works on one.
        """
        programs = self.tiles(x) * self.chunks(x) * x.shape[2] * self.tile.streams
        return max(1, min(most, programs // PROGRAMS))


def uses_dot(dtype: torch.dtype, window: int, per_channel: bool) -> bool:
    return dtype != torch.float32 and window <= WIDEST_DOT_WINDOW and not per_channel


def choose_launch(
    x: Tensor,
    window: int,
    *,
    per_channel: bool = False,
    documents: bool = False,
    backward: bool = False,
    rotary: int = 0,
) -> Launch:
    """Choose the tile for x [B, T, H, (3,) D], of which the first `rotary` channels are rotated.

    With matrix products 64 steps are the height of Hopper's matrix instruction, and 64 channels
    leave registers for two programs or more on a multiprocessor. Without, 4096 elements and 4 warps
    hold an output tile in 32 registers a thread. What needs further registers (sums of the
    gradients, masks of documents) has 8 warps, of which two programs fit where a thread has 128;
    both together take more than that. Where all channels of a tile are rotated, their partners and
    angles leave such kernels registers for half of them.

    Raises:
        ValueError: the rotation must have a kernel of its own, see `rotates_separately`.
    """
    if rotary > 0 and rotates_separately(x.dtype, window, per_channel):
        raise ValueError(
            f"window={window}: a rotation within the kernel gives wrong numbers on Hopper above "
            f"{WIDEST_FUSED_ROTATION} taps; rotate by triton/rotation.py"
        )
    use_dot = uses_dot(x.dtype, window, per_channel)
    halo = 0 if window == 1 or not use_dot else max(16, next_power_of_2(window - 1))
    columns = min(64, max(16, next_power_of_2(x.shape[-1])))
    streams = math.prod(x.shape[3:-1])
    tile = Tile(window, 64, columns, halo, use_dot, rotary, per_channel, streams)
    return launch_of(tile, documents, backward, shared_memory(x.device))


@functools.cache
def launch_of(tile: Tile, documents: bool, backward: bool, shared: int) -> Launch:
    """Choose the compiler options, and half the columns if all would not fit."""
    if not tile.use_dot:
        return Launch(tile, 8 if backward else 4, 1)
    warps = 8 if backward or documents else 4
    if warps == 8 and tile.rotary > 0 and not has_rotated_tile(tile.rotary, tile.columns):
        tile = tile._replace(columns=min(32, tile.columns))
    registers = 128 if backward != documents and tile.halo <= 32 else None
    # Two stages load the next tile while one is worked on; that takes shared memory which
    # consumer GPUs have not, and with a wide halo not even an A100. Sums are the same.
    stages = 2 if tile.halo <= 64 and shared >= SHARED_MEMORY_OF_A100 else 1
    return Launch(tile, warps, stages, registers)


def rotates_separately(dtype: torch.dtype, window: int, per_channel: bool = False) -> bool:
    """Return True if a separate kernel rotates channels, before or after the convolution.

    So they are beside a halo of more than 64 steps. On an H100 (triton 3.6.0) the forward kernel of
    packed streams with partners and such a halo gave other numbers in every run, and read where
    nothing is; that with a shorter one, that without rotation and the rotation alone gave the right
    ones. Its PTX is correct, but ptxas 12.8 has no uniform registers left for the descriptors of so
    many products and restores them while products of their group are under way, which
    tests/cat_lm/ops/test_triton_sass.py looks for.
    """
    return uses_dot(dtype, window, per_channel) and window > WIDEST_FUSED_ROTATION


def rotated(cos: Tensor | None) -> int:
    """Return the number R of rotated channels for angles [B or 1, T, R]; 0 without angles."""
    return 0 if cos is None else cos.shape[-1]


def angle_arguments(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the kernel arguments for angles [B or 1, T, R]: tensors and row stride."""
    if rotated(cos) == 0:
        return None, None, 0
    return contiguous(cos), contiguous(sin), 0 if cos.shape[0] == 1 else cos[0].numel()


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory in bytes that a program may use; an A100's without a GPU."""
    if device.type != "cuda":
        return SHARED_MEMORY_OF_A100
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
