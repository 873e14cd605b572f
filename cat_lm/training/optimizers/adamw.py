"""AdamW (Loshchilov and Hutter, arXiv:1711.05101): torch's fused one, which can skip steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cat_lm.optimizers import OptimizerKind

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from cat_lm.config.sections import OptimizerSection

KINDS = ("exp_avg", "exp_avg_sq")


def adamw_arguments(section: OptimizerSection) -> dict[str, Any]:
    """Return the arguments of torch's AdamW for a configuration."""
    return {"lr": section.lr, "betas": section.betas, "eps": section.eps, "fused": True}


class AdamW(OptimizerKind):
    """AdamW for all parameters."""

    name = "adamw"

    def state_kinds(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        return {name: KINDS for name, _ in model.named_parameters()}

    def build(self, groups: list[dict], section: OptimizerSection, options: Any) -> Optimizer:
        import torch

        return torch.optim.AdamW(groups, **adamw_arguments(section))


ENTRY = AdamW()
