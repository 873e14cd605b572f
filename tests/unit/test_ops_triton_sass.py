"""Hopper's machine code: nothing endangers asynchronous products before they are waited for.

On an H100 the fused rotation at W = 128 gave other numbers in every run. What sets that kernel
apart from those that passed is that ptxas restores descriptors of matrices within a group of
products. All kernels that test_ops_triton_compile.py compiles for Hopper (packed streams and single
ones, the multi-head convolution, landmark attention, the long filter, the scan, the loss) are read
so there; here are further windows and heads, and the control.
"""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

from tests.unit.sass import disassemble, hazards
from tests.unit.test_ops_triton_compile import HOPPER, SHARED_MEMORY, built, own_cache  # noqa: F401

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def read(window: int, rotary: int, positions: str | None, *, packed: bool, backward: bool) -> list:
    """Compile a convolution of bf16 heads for Hopper, whatever the launcher says; its hazards."""
    from cat_lm.ops.convolution.triton import launch
    from cat_lm.ops.convolution.triton.backward import backward_kernel
    from cat_lm.ops.convolution.triton.forward import forward_kernel
    from cat_lm.ops.convolution.triton.tiles import Tile

    kernel = backward_kernel if backward else forward_kernel
    pointers = {name: "bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    pointers |= {"positions_ptr": positions, "df_ptr": "fp32", "dbias_ptr": "fp32"}
    pointers |= dict.fromkeys(("cos_ptr", "sin_ptr"), "bf16" if rotary else None)
    halo = max(16, 1 << (window - 2).bit_length())
    tile = Tile(window, 64, 64, halo, True, rotary, streams=3 if packed else 1)
    how = launch.launch_of(tile, positions is not None, backward, SHARED_MEMORY[HOPPER])
    options = how.options()
    made = built(kernel, HOPPER, pointers, {"TILE": options.pop("TILE")}, options)
    assert "wgmma.mma_async" in made.asm["ptx"]
    return hazards(disassemble(made.asm["cubin"]))


# Heads of 64 and 128 channels have one tile, but for what is rotated: a quarter of GPT-NeoX's heads
# and all of Llama's. Window, rotated channels, positions, packed, backward.
SHORT = [(64, 16, None, True, True), (64, 16, "i32", True, False)]
OTHERS = itertools.product(
    (4, 21, 64), (0, 16, 32, 64, 128), (None, "i32"), (True, False), (False, True)
)


@pytest.mark.parametrize(
    ("window", "rotary", "positions", "packed", "backward"),
    [
        *SHORT,
        *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS if case not in SHORT),
    ],
)
def test_convolutions_do_not_endanger_products(window, rotary, positions, packed, backward):
    assert read(window, rotary, positions, packed=packed, backward=backward) == []


def test_the_fused_rotation_above_65_taps_is_found_and_refused():
    from cat_lm.ops.convolution.triton import launch

    found = read(128, 20, None, packed=True, backward=False)
    assert len(found) > 20 and all("restored descriptor" in line for line in found)
    x = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="window=66: a rotation within the kernel gives wrong"):
        launch.choose_launch(x, 66, rotary=20)
    assert launch.choose_launch(x, 65, rotary=20).tile.use_dot


CODE = """
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR16].tnspB, RZ, !UPT ;
        /*0020*/              @!P0 {} ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R12, gdesc[UR16], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, {} ;
        /*0050*/                   LDS.128 R4, [R3] ;
        /*0060*/               @P1 BRA 0x0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   LDS.128 R8, [R3] ;
"""


@pytest.mark.parametrize(
    ("instruction", "left", "found"),
    [
        ("R2UR UR19, R2", "0x0", "restored"),
        ("R2UR UR16, R2", "0x0", None),  # of the first factor, which is in registers
        ("UMOV UR18, 0x80", "0x0", None),
        ("LDS.128 R8, [R3]", "0x0", "overwritten"),
        ("LDS.64 R6, [R3]", "0x0", None),
        ("LDSM.16.M88.4 R5, [R3]", "0x0", "overwritten"),
        ("IMAD.WIDE R7, R2, R3, R4", "0x0", "overwritten"),
        ("FADD R31, R2, R3", "0x0", "overwritten"),  # the sum has R24 to R31
        ("IADD3 R32, P1, P2, R24, R8, R9", "0x0", None),
        ("ISETP.GE.AND P1, PT, R8, R9, PT", "0x0", None),
        ("STS.128 [R8], R12", "0x0", None),
        ("MOV R12, R2", "0x0", None),  # before the product that reads it
        ("MOV R12, R2", "0x1", "overwritten"),  # in the next round, while that goes on
    ],
)
def test_hazards_are_told_from_other_instructions(instruction, left, found):
    lines = hazards(CODE.format(instruction, left))
    assert len(lines) == (found is not None)
    assert found is None or (found in lines[0] and instruction in lines[0])
