"""Hopper's machine code: nothing endangers asynchronous products before they are waited for.

On an H100 the fused rotation at W = 128 gave other numbers in every run. What sets that kernel
apart from those that passed is that ptxas restores descriptors of matrices within a group of
products. test_triton_compile.py reads all kernels so; here are further windows and heads, and the
control.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from cat_lm.ops.convolution.triton import launch
from tests.cat_lm.ops.compiled import compiled, convolve, needs_triton, packed, read_cubin
from tests.cat_lm.ops.sass import hazards

pytestmark = needs_triton


@pytest.mark.nightly
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("window", "rotary"), [*itertools.product((4, 21, 64), (0, 16, 32, 64, 128))]
)
def test_convolutions_do_not_endanger_products(window, rotary, documents, packs):
    """Heads of 64 and 128 channels have one tile, but for what is rotated."""
    how = {"rotary": rotary, "documents": documents, "shape": (2, 2048, 8, 128)}
    kind = "qkv" if packs else "head"
    for kernel in compiled(partial(packed if packs else convolve, kind, window, **how)):
        assert "wgmma.mma_async" in kernel.asm["ptx"]
        assert hazards(read_cubin(kernel.asm["cubin"], "-sass")) == []


def test_fused_rotation_above_65_taps_is_found_and_refused(monkeypatch):
    monkeypatch.setattr(launch, "rotates_separately", lambda *_: False)
    monkeypatch.setattr(
        "cat_lm.ops.convolution.triton.convolution.rotates_separately", lambda *_: False
    )
    kernel = compiled(partial(packed, "qkv", 128, rotary=20))[0]
    found = hazards(read_cubin(kernel.asm["cubin"], "-sass"))
    assert len(found) > 20 and all("restored descriptor" in line for line in found)
    monkeypatch.undo()
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
