"""An exponential moving average of the weights: `train.ema_decay`.

    e_t = d e_{t−1} + (1 − d) w_t

after every step t, in fp32, where w are the master weights; e starts as the weights at launch.
Skipped steps count, although they do not change w. Each rank averages the part of the weights that
it writes into checkpoints, so that the number of ranks and the ZeRO stage may change on resuming.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cat_lm.callbacks import Callback, CallbackKind, Run

if TYPE_CHECKING:
    import torch


class Ema(CallbackKind):
    name = "ema"
    key = "train.ema_decay"
    collective = True

    def build(self, options: Any, run: Run) -> Callback:
        return WeightAverage(run)


class WeightAverage(Callback):
    """This rank's part of the averaged weights."""

    def __init__(self, run: Run) -> None:
        from cat_lm.training.checkpoint.optimizer_state import fragments_to_write

        self._engine, self._decay = run.engine, run.config.train.ema_decay
        self._parts = {fragment.name: fragment for fragment in fragments_to_write(run.engine)}
        self._averages: dict[str, torch.Tensor] = {}

    def _weights(self) -> list[torch.Tensor]:
        return [part.of(part.stepped) for part in self._parts.values()]

    def launch(self, step: int) -> None:
        if not self._averages:
            copies = (weights.clone() for weights in self._weights())
            self._averages = dict(zip(self._parts, copies, strict=True))

    def step(self, step: int) -> None:
        import torch

        if self._averages:  # A rank may have no part of a small model.
            torch._foreach_lerp_([*self._averages.values()], self._weights(), 1 - self._decay)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the averages on rank 0, by the parameters' names (a collective)."""
        from cat_lm.training.checkpoint.optimizer_state import gather_whole

        averages = self._averages.items()
        return gather_whole(self._engine, {n: (self._parts[n], part) for n, part in averages})

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            held = state[name].reshape(-1)[part.start : part.stop]
            self._averages[name] = held.to(part.stepped.device, copy=True)


ENTRY = Ema()
