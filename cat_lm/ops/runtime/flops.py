"""Counts the floating-point operations of a forward pass, whatever kernel computes it.

torch's counter sees products of matrices, and nothing of what an operator does inside of a kernel
or element by element. An operator with another number says it by `flops`, beside its definition.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def attention_flops(query: Any, key: Any, value: Any, *_: Any, **how: Any) -> int:
    """Count the products with keys [B, H or fewer, S, D] and with values."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


# torch's counter has no formula for a CPU's attention.
_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


class FlopCounter:
    """Counts what is computed while it is entered; products add 2 operations for each number.

    Attention counts over the full square of queries and keys, whatever a mask leaves out.
    """

    _active: FlopCounter | None = None

    def __init__(self) -> None:
        self._mode = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
        self._said = 0.0

    def __enter__(self) -> FlopCounter:
        self._mode.__enter__()
        FlopCounter._active = self
        return self

    def __exit__(self, *raised: Any) -> None:
        FlopCounter._active = None
        self._mode.__exit__(*raised)

    @property
    def total(self) -> float:
        """Return the operations so far."""
        return self._mode.get_total_flops() + self._said

    def replace(self, before: float, said: float) -> None:
        """Count `said` operations instead of those since the total was `before`."""
        self._said += said - (self.total - before)


def flops(formula: Callable[..., float]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that counts an operator's operations by `formula`.

    Args:
        formula: takes the operator's arguments and gives the operations of one forward call.
    """

    def define(operator: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operator)
        def counted(*args: Any, **kwargs: Any) -> Any:
            counter = FlopCounter._active
            if counter is None:
                return operator(*args, **kwargs)
            before = counter.total
            found = operator(*args, **kwargs)
            counter.replace(before, formula(*args, **kwargs))
            return found

        return counted

    return define
