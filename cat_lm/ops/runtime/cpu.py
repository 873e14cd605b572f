"""What makes a process compute fast on a CPU."""

from __future__ import annotations

import torch

from cat_lm.core.host import keep_freed_memory


def make_process_ready(device: str | torch.device) -> None:
    """Have this process compute as fast as it can on `device`; a GPU needs nothing of it.

    On a CPU the memory of freed tensors is kept, and denormals are flushed: see the two functions.
    Programs call this, as far as they can before torch starts threads; importing the library
    changes nothing.
    """
    if torch.device(device).type == "cpu":
        keep_freed_memory()
        flush_denormals()


def flush_denormals() -> None:
    """Have the CPU take numbers below 1.2e-38 (2^-126) as 0, in this thread and all it starts.

    Processors compute with such numbers in microcode, many times slower, and attention that has
    become sharp is full of them (softmax's exp(-88) and less). Where a processor cannot, all stays
    as it is.
    """
    torch.set_flush_denormal(True)
