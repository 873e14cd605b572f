"""An optimizer of one's own, `optimizer.name: lion` (Chen et al., 2023, arXiv:2302.06675).

With gradient g, momentum m, learning rate lr and weight decay d:

    w ← w − lr (sign(a m + (1 − a) g) + d w),   then   m ← b m + (1 − b) g
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cat_lm.optimizers import OptimizerKind, register


@dataclass(frozen=True)
class Options:
    """What `optimizer.options` can give."""

    a: float = 0.9
    b: float = 0.99


class Lion(OptimizerKind):
    """What there is to know before a run."""

    name = "lion"
    Options = Options

    def state_kinds(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        return {name: ("momentum",) for name, _ in model.named_parameters()}

    def build(self, groups: list[dict], section: Any, options: Options) -> torch.optim.Optimizer:
        return Stepper(groups, {"lr": section.lr, "a": options.a, "b": options.b})


class Stepper(torch.optim.Optimizer):
    """Steps whole parameters, or under ZeRO the flat parts of this rank."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        skips = self.found_inf > 0  # Where a gradient is not finite, weights and state stay.
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros((), device=weight.device)
                    state["momentum"] = torch.zeros_like(weight, requires_grad=False)
                momentum = state["momentum"]
                update = momentum.lerp(weight.grad, 1 - group["a"]).sign()
                update += group["weight_decay"] * weight
                weight -= torch.where(skips, 0.0, group["lr"] * update)
                new = momentum.lerp(weight.grad, 1 - group["b"])
                momentum.copy_(torch.where(skips, momentum, new))
                state["step"] += ~skips


register(Lion())
