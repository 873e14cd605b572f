"""Muon for the matrices of the layers, AdamW for the others: see `cat_lm.training.muon`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cat_lm.optimizers import OptimizerKind
from cat_lm.training.optimizers import adamw

if TYPE_CHECKING:
    from torch import nn

    from cat_lm.config.sections import OptimizerSection
    from cat_lm.training.checkpoint.optimizer_state import Trained
    from cat_lm.training.muon import MuonWithAdamW

KINDS = ("momentum",)


@dataclass(frozen=True)
class Options:
    """The keys of `optimizer:` that Muon reads."""

    momentum: float = 0.95
    muon_lr: float | None = None  # peak learning rate of the matrices; None: optimizer.lr
    ns_steps: int = 5
    scale: str = "match_rms_adamw"


class Muon(OptimizerKind):
    """Muon for the matrices of the layers, and AdamW for all other parameters."""

    name = "muon"
    Options = Options
    zero_stages = (0, 1)

    def state_kinds(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        from cat_lm.training.muon import matrices

        chosen = matrices(model)
        names = (name for name, _ in model.named_parameters())
        return {name: KINDS if name in chosen else adamw.KINDS for name in names}

    def lr_factor(
        self, kinds: tuple[str, ...], section: OptimizerSection, options: Options
    ) -> float:
        is_own = kinds == KINDS and options.muon_lr is not None
        return options.muon_lr / section.lr if is_own else 1.0

    def build(
        self, groups: list[dict], section: OptimizerSection, options: Options
    ) -> MuonWithAdamW:
        from cat_lm.training.muon import MuonWithAdamW

        own = {key: getattr(options, key) for key in ("momentum", "ns_steps", "scale")}
        return MuonWithAdamW(groups, **own, **adamw.adamw_arguments(section))

    def attach(self, optimizer: MuonWithAdamW, engine: Trained) -> None:
        from cat_lm.training.muon import attach

        attach(optimizer, engine)


ENTRY = Muon()
