"""Process-wide settings for fast computation on a CPU."""

from __future__ import annotations

import torch

from cat_lm.core.host import keep_freed_memory


def make_process_ready(device: str | torch.device) -> None:
    """Set this process up for fast computation on `device`; a GPU needs nothing.

    On a CPU the memory of freed tensors is kept, and denormals are flushed: see the two functions.
    Programs call this, as far as they can before torch starts threads; importing the library
    changes nothing.
    """
    if torch.device(device).type == "cpu":
        keep_freed_memory()
        flush_denormals()


def flush_denormals() -> None:
    """Make the CPU treat numbers below 1.2e-38 (2^-126) as 0, in this thread and all it starts.

    Processors compute with such numbers in microcode, many times slower, and attention that has
    become sharp is full of them (softmax's exp(-88) and less). Where a processor cannot, all stays
    as it is.
    """
    torch.set_flush_denormal(True)
