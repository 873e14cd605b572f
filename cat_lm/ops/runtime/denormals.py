"""Numbers too small for a normal fp32, on a CPU."""

from __future__ import annotations

import torch


def flush_denormals() -> None:
    """Have the CPU take numbers below 1.2e-38 (2^-126) as 0, in this thread and all it starts.

    Processors compute with such numbers in microcode, many times slower, and attention that has
    become sharp is full of them (softmax's exp(-88) and less). Programs call this before torch
    starts threads; importing the library changes nothing. Where a processor cannot, all stays as
    it is.
    """
    torch.set_flush_denormal(True)
