"""A training step as a run takes it: DeepSpeed's engine around the models that are compared.

All that a run pays for belongs to its time: gradients accumulated in fp32, their norm and clipping,
AdamW with fp32 weights and moments, the loss read back. The rate is zero, so that the weights stay
what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from eval.speed.choices import is_stock
from eval.speed.model.build import ModelSize, random_ids

if TYPE_CHECKING:
    from cat_lm.training.distributed import Ranks
    from eval.speed.model.train import TrainCase

STEP = "a run's own: fp32 accumulation, clipping, AdamW in fp32, ZeRO-1"
_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}


@contextmanager
def ranks_of(device: str) -> Iterator[Ranks]:
    """Join a group of one, on the device that training takes.

    Raises:
        UserError: `device` is another one.
    """
    from cat_lm.training import distributed

    with distributed.start() as ranks:
        if torch.device(device).type != ranks.device.type:
            raise UserError(
                f"--device {device}: a run's own step is on {ranks.device.type} here; leave out "
                "--optimizer or --device"
            )
        yield ranks


def run_values(size: ModelSize, name: str, context_length: int, batch_size: int) -> dict[str, Any]:
    """Return the configuration of a run of one of `choices.models`, of no data and no folder."""
    return {
        "model": size.section(name, context_length).model_dump(),
        "data": {"path": "random", "context_length": context_length},
        "optimizer": {"lr": 1e-3},
        "train": {
            "output_dir": "none",
            "global_batch_size": batch_size,
            "micro_batch_size": batch_size,
            "max_steps": 1000,
            "precision": _PRECISIONS[size.dtype],
        },
    }


def run_step(case: TrainCase, name: str, model: nn.Module, ranks: Ranks) -> Callable[[], None]:
    """Put the model into a run's engine; the call is one optimizer step of one micro-batch.

    Raises:
        UserError: from the call, where the engine skipped the step.
    """
    from cat_lm.training.engine import Engine

    values = run_values(case.size, name, case.context_length, case.batch_size)
    values["train"]["compile"] = case.compile
    engine = Engine(
        _LibraryModel(model) if is_stock(name) else model, RunConfig.model_validate(values), ranks
    )
    ids = random_ids(case.size, case.batch_size, case.context_length).cpu().numpy()

    def step() -> None:
        if engine.train_step({"input_ids": ids, "labels": ids}, lr=0.0).skipped:
            raise UserError(f"model {name}: its gradients are not finite; the step was skipped")

    return step


class _LibraryModel(nn.Module):
    """transformers' own class under the engine's keywords, of which it knows not all."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for module in model.modules():
            # Its norms do not say what decays (`parameters_by_decay`); at a rate of zero nothing.
            kind = type(module)
            if kind.__module__.startswith("transformers.") and module._parameters:
                kind.no_decay = getattr(kind, "no_decay", ())

    def forward(
        self, input_ids: Tensor, shift_labels: Tensor, num_items_in_batch: float, **_: Any
    ) -> Any:
        """Return the output with the loss: the sum over `shift_labels` [B, T] by the number."""
        return self.model(
            input_ids=input_ids,
            labels=shift_labels,
            shift_labels=shift_labels,
            num_items_in_batch=num_items_in_batch,
            use_cache=False,
        )
