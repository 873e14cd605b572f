"""Tasks of lm-evaluation-harness during training: `validation.tasks` of a run's configuration.

After every `validation.tasks_every_steps` steps the model in memory is scored as `eval.zero_shot`
scores an export of it, on all ranks. The metrics are `tasks/NAME/METRIC`. A task whose numbers
cannot be had, as of a model that has diverged, is named in the log, and training goes on.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.callbacks import Callback, CallbackKind, Run, register
from cat_lm.core.errors import UserError
from eval.zero_shot.settings import Settings
from eval.zero_shot.tasks.harness import quiet, require_harness

if TYPE_CHECKING:
    from eval.zero_shot.harness_model import Scorer


class Tasks(CallbackKind):
    name = "tasks"
    key = "validation.tasks"
    collective = True

    def build(self, options: Any, run: Run) -> Callback:
        require_harness()
        return TaskScores(run)


class TaskScores(Callback):
    """Score the tasks now and then; read them before the first step."""

    def __init__(self, run: Run) -> None:
        from eval.zero_shot.run import load_tasks

        validation = run.config.validation
        self._run, self._every = run, validation.tasks_every_steps or validation.every_steps
        folders = (validation.tasks_dir, validation.tasks_include)
        rows, include = (None if folder is None else Path(folder) for folder in folders)
        self._settings = Settings(
            data_dir=rows,
            include_path=include,
            limit=validation.tasks_rows,
            bootstrap_iterations=0,
        )
        with quiet():
            self._tasks, _ = load_tasks(
                validation.tasks, self._settings, ranks=run.ranks.world_size
            )

    def waits(self, step: int) -> bool:
        return step % self._every == 0

    def step(self, step: int) -> None:
        if self.waits(step):
            with self._run.watchdog.allow_slow_work(), self._computing() as scorer:
                record = self._scores(step, scorer)
            self._run.record(record)

    def _scores(self, step: int, scorer: Scorer) -> dict[str, Any]:
        from eval.zero_shot.harness_model import raise_on_all_ranks
        from eval.zero_shot.run import describe_values, score

        run, record = self._run, {"step": step, "tokens": step * self._run.config.tokens_per_step}
        for name, task in self._tasks.items():
            if run.must_stop():
                run.log(f"step {step}: a signal came before task {name}")
                break
            try:
                with quiet(), raise_on_all_ranks(scorer.ranks):
                    values, _ = score(name, task, scorer, self._settings)
            except UserError as error:
                run.log(f"step {step}: {error}")
                continue
            run.watchdog.progress(f"task {name}")
            if values is not None:
                run.log(f"step {step}: task {name}: {describe_values(values)}")
                record |= {f"tasks/{name}/{m}": value for m, value in values["metrics"].items()}
        return record

    @contextlib.contextmanager
    def _computing(self) -> Iterator[Scorer]:
        """Yield the scorer of the model, whose state is restored at the end of the block."""
        import torch

        from cat_lm.pretrained.loading import begin_as_trained, load_tokenizer
        from eval.zero_shot.harness_model import Scorer, launched_accelerator

        run, train = self._run, self._run.config.train
        tokenizer = load_tokenizer(run.corpus.folder / "tokenizer")
        begin_as_trained(tokenizer)
        # Stage 0 keeps the weights in fp32, and computes under autocast.
        autocast = torch.bfloat16 if train.precision == "bf16" and train.zero_stage == 0 else None
        # Prompts of all lengths would have graphs of their own.
        with _generators_kept(), torch.compiler.set_stance("force_eager"):
            try:
                yield Scorer(
                    run.engine.model,
                    tokenizer,
                    batch_size=None,
                    max_length=run.config.data.context_length,
                    accelerator=launched_accelerator(run.ranks.device.type),
                    autocast=autocast,
                )
            finally:
                run.engine.deepspeed.train()


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore random generators and the number of threads, which accelerate may change."""
    import numpy as np
    import torch

    threads, states = torch.get_num_threads(), (random.getstate(), np.random.get_state())
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads(threads)


register(Tasks())
