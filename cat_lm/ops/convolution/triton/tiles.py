"""Parts of kernels: rows of a tensor, taps by lag, rotary partners, one tile of a convolution.

A tile is BLOCK time steps by COLUMNS channels of one head of one row. Its convolution is a banded
Toeplitz matrix times the inputs that it can see, which are the tile itself ("near") and the HALO
steps before it ("far"), or after it for the gradient of x. All tiles of a head share the matrix, so
a program builds it once; document borders are zeros in it, and then it differs by tile.

In fp32, where matrix units would round the inputs to tf32, for filters per channel, which make no
matrix product, and for windows beyond the halo, the sum over lags is taken as it is defined.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cat_lm.ops.runtime.triton_launch import INTERPRETED

# Arguments that differ from call to call with batches and lengths. Compiled for values that 16
# divides, and for 1, kernels would be compiled anew; no pointer's alignment depends on these.
VARYING = ("tiles_per_program", "blocks_per_program", "batch_size", "length")


class Tile(NamedTuple):
    """The compile-time constants of the kernels per head or channel.

    Attributes:
        window: W.
        block, columns: steps and channels of a tile.
        halo: the steps before it, or after it, that its convolution reads by matrix products.
        use_dot: whether there are matrix products.
        rotary: number of rotated channels.
        per_channel: whether filters are [W, D] a head, and not [W].
        streams: 3 for packed queries, keys and values; 1 for one tensor.
    """

    window: int
    block: int
    columns: int
    halo: int
    use_dot: bool
    rotary: int = 0
    per_channel: bool = False
    streams: int = 1


# The interpreter holds bf16 as integers and would multiply those.
UPCAST = tl.constexpr(INTERPRETED)


@triton.jit
def add_product(sums, a, b):
    """Return sums + a b in fp32, without tf32 rounding for fp32 inputs."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def add_separately(sums, a, b):
    """sums + a b for sums that are a product themselves.

    Not in one: of products that go into products the compiler makes a chain, in which the warps
    beyond the fourth do what the others do, and of + it would make that again.
    """
    product = add_product(tl.zeros(sums.shape, dtype=tl.float32), a, b)
    return tl.fma(product, 1.0, sums)


@triton.jit
def load_rows(ptr, first, rows, length, columns, inside, stride, EARLY: tl.constexpr = False):
    """Load [rows, columns] of a matrix of `length` rows, from row `first`; zeros outside.

    EARLY: whether `first` may be negative.
    """
    times = first + rows
    present = times < length
    if EARLY:
        present = present & (times >= 0)
    mask = present[:, None] & inside[None, :]
    # The place of the tile needs 64 bits, places within it do not.
    start = ptr + first.to(tl.int64) * stride
    return tl.load(start + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, values, first, rows, length, columns, inside, stride):
    """Write what `load_rows` would read, in the dtype of the matrix."""
    mask = (first + rows < length)[:, None] & inside[None, :]
    start = ptr + first.to(tl.int64) * stride
    places = start + rows[:, None] * stride + columns[None, :]
    tl.store(places, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def earliest_inputs(positions_ptr, batch, first, length, BEGIN: tl.constexpr, COUNT: tl.constexpr):
    """The first step of the tile that each output from BEGIN on may read, if there are documents.

    The steps are made here: those that loops share would take registers through them.
    """
    steps = BEGIN + tl.arange(0, COUNT)
    earliest = steps
    if positions_ptr is not None:
        reach_ptr = positions_ptr + batch * length + first
        earliest = steps - tl.load(reach_ptr + steps, mask=first + steps < length, other=0)
    return earliest


@triton.jit
def taps_of_lags(f_ptr, lags, WINDOW: tl.constexpr):
    """Load the filter at a tensor of lags, zero outside the window."""
    return tl.load(f_ptr + lags, mask=(lags >= 0) & (lags < WINDOW), other=0.0)


@triton.jit
def taps_of_channels(f_ptr, lag, width, columns, inside, PER_CHANNEL: tl.constexpr):
    """The filter at one lag: [1, COLUMNS] of a filter [W, D] per channel, otherwise one number."""
    if PER_CHANNEL:
        taps = tl.load(f_ptr + lag * width + columns, mask=inside, other=0.0)[None, :]
    else:
        taps = tl.load(f_ptr + lag)
    return taps.to(tl.float32)


@triton.constexpr_function
def rotated_columns(rotary, columns):
    """Columns of the tile of rotated channels, which are worked on apart from the others.

    Partners are computed for them alone, as far as that is at most half of the COLUMNS; otherwise
    all columns are one tile. Matrix units take no fewer than 16.
    """
    least = max(16, triton.next_power_of_2(rotary))
    return least if 2 * least <= columns else columns


@triton.constexpr_function
def has_rotated_tile(rotary, columns):
    """Return True if the rotated channels have a tile of their own."""
    return rotary > 0 and rotated_columns(rotary, columns) < columns


@triton.constexpr_function
def aligned(rotary):
    """Return the largest power of two up to 16 that divides ROTARY / 2: partners come in such
    groups.
    """
    half = rotary // 2
    return min(16, half & -half) if half else 1


@triton.jit
def rotary_partners(columns, ROTARY: tl.constexpr):
    """The channel that each rotated channel is paired with; meaningless from ROTARY on.

    They are loaded as vectors of `aligned` channels.
    """
    HALF: tl.constexpr = ROTARY // 2
    ALIGNMENT: tl.constexpr = aligned(ROTARY)
    partners = tl.where(columns < HALF, columns + HALF, columns - HALF)
    return tl.max_contiguous(tl.multiple_of(partners, [ALIGNMENT]), [ALIGNMENT])
