"""Ask whether a forward pass fits into memory before it is made.

On a CPU, Linux ends a process that takes too much without a word, so that waiting for an error is
not enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError
from cat_lm.core.host import GIB
from cat_lm.pretrained.memory import forward_bytes, free_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NotEnoughMemory(UserError):
    """A window that does not fit into memory; other lengths may."""

    def __init__(self, length: int, rows: int, detail: str = "") -> None:
        advice = f"; lower --batch-tokens to {length}" if rows > 1 else ""
        super().__init__(
            f"length {length}: a batch of {rows} does not fit into memory{detail}{advice}"
        )


def require_memory(model: PreTrainedModel, rows: int, length: int) -> None:
    """Raises NotEnoughMemory where `rows` windows of `length` tokens need more than is free."""
    needed, free = forward_bytes(model, rows, length), free_bytes(model.device)
    if free is not None and needed > free:
        detail = f" (about {needed / GIB:.2g} GiB needed, {free / GIB:.2g} free)"
        raise NotEnoughMemory(length, rows, detail)
