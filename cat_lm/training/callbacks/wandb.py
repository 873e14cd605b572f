"""Weights & Biases: `logging.wandb_project`."""

from __future__ import annotations

import uuid
from typing import Any

from cat_lm.callbacks import Callback, CallbackKind, Run
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_text
from cat_lm.training.metrics import finite_numbers


class WeightsAndBiases(CallbackKind):
    name = "wandb"
    key = "logging.wandb_project"
    ranks = "first"

    def build(self, options: Any, run: Run) -> Callback:
        return WandbRun(run)


class WandbRun(Callback):
    """Log every number; a resumed run continues the same W&B run."""

    def __init__(self, run: Run) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"logging.wandb_project={run.config.logging.wandb_project}: wandb is not "
                "installed; pip install -e '.[wandb]'"
            ) from None
        self._wandb, self._run = wandb, run

    def launch(self, step: int) -> None:
        logging, folder = self._run.config.logging, self._run.folder
        identity = folder / "wandb_id"
        if not identity.exists():
            write_text(identity, uuid.uuid4().hex)
        self._tracked = self._wandb.init(
            project=logging.wandb_project,
            entity=logging.wandb_entity,
            group=logging.wandb_group,
            tags=list(logging.wandb_tags) or None,
            name=logging.wandb_name or folder.name,
            id=identity.read_text(encoding="utf-8"),
            dir=str(folder),
            resume="allow",
            config=self._run.config.model_dump(mode="json"),
        )

    def record(self, record: dict[str, Any]) -> None:
        self._tracked.log(finite_numbers(record), step=record["step"])

    def end(self, step: int, exit_code: int) -> None:
        self._tracked.finish()


ENTRY = WeightsAndBiases()
