"""Optimizers by name: `optimizer.name`.

An optimizer of this project is a file in `cat_lm/training/optimizers`, and its keys are in
`optimizer:`. One of an installed package or a script is given to `register`, and its options are
`optimizer.options`:

    optimizer:
      name: lion
      options: {b: 0.98}

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from cat_lm.core.fields import NoOptions, build_options
from cat_lm.core.registry import Registry

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

# The keys of `optimizer:` that only some optimizers read; null where they are not given.
OWN_KEYS = ("momentum", "muon_lr", "ns_steps", "scale")


class OptimizerKind:
    """A kind of optimizer; one instance of a subclass is registered.

    The state of every tensor that the optimizer steps holds `step`, the number of steps taken as a
    float32 tensor, and one fp32 tensor of the same shape for each of its kinds, such as `exp_avg`.
    The optimizer reads its attribute `found_inf`, a tensor that is 1 for a step whose gradients are
    not finite: such a step changes neither weights nor state, and the host is not asked.

    Under ZeRO 1 to 3 a stepped tensor is this rank's part of many flattened parameters. An
    optimizer that needs whole matrices learns the layout in `attach`, from the `Engine` of
    `cat_lm.training.engine`. A `section` is the `OptimizerSection` of `cat_lm.config.sections`,
    which itself imports this module.

    Attributes:
        name: as in `optimizer.name`.
        Options: a frozen dataclass of plain values, see cat_lm/core/fields.py.
        zero_stages: the values of `train.zero_stage` that the optimizer works with.
    """

    name: ClassVar[str]
    Options: ClassVar[type] = NoOptions
    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)

    def state_kinds(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return the names of each parameter's state tensors, by the parameter's name.

        The model may be on the meta device. Parameters of other kinds are in other groups.
        """
        raise NotImplementedError

    def lr_factor(self, kinds: tuple[str, ...], section: Any, options: Any) -> float:
        """Return the factor between `optimizer.lr` and the rate of parameters of these kinds."""
        return 1.0

    def build(self, groups: list[dict], section: Any, options: Any) -> Optimizer:
        """Make the optimizer of parameter groups.

        Each group has `params`, their `names`, their `kinds` of state, and `weight_decay`.
        """
        raise NotImplementedError

    def attach(self, optimizer: Optimizer, engine: Any) -> None:
        """Prepare for the layout of the optimizer's tensors, which is final now (a collective)."""


def _check(kind: OptimizerKind) -> None:
    """Check what an optimizer says of itself. Raises ValueError."""
    named = f"optimizer.name {kind.name!r}"
    if not dataclasses.is_dataclass(kind.Options) or not kind.Options.__dataclass_params__.frozen:
        raise ValueError(f"{named}: its Options must be a frozen dataclass")
    stages = kind.zero_stages
    if not isinstance(stages, tuple) or not stages or set(stages) - {0, 1, 2, 3}:
        raise ValueError(f"{named}: zero_stages={stages!r}: must be a tuple of stages from 0 to 3")


OPTIMIZERS = Registry(
    "optimizer.name",
    OptimizerKind,
    package="cat_lm.training.optimizers",
    methods=("state_kinds", "build"),
    check=_check,
)
get, names, register = OPTIMIZERS.get, OPTIMIZERS.names, OPTIMIZERS.register


def chosen(section: Any) -> tuple[OptimizerKind, Any]:
    """Return the optimizer that a configuration asks for, with its options.

    Raises UserError for an unknown name or option, and for a key that it does not read.
    """
    kind = get(section.name)
    keys = {key: getattr(section, key) for key in OWN_KEYS if getattr(section, key) is not None}
    return kind, build_options(kind.Options, f"optimizer.name={kind.name}", keys | section.options)
