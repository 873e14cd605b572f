"""The texts and records of a run: its plan, and a record and a log line for each step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from cat_lm.config import RunConfig
from cat_lm.data.loader import TrainLoader
from cat_lm.training.distributed import Ranks
from cat_lm.training.engine import StepResult
from cat_lm.training.estimate import (
    count_parameters,
    flops_per_token,
    lookup_parameters,
    memory_per_rank,
    peak_flops,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Report:
    """Convert results of steps into records for metrics.jsonl and lines for the log."""

    def __init__(self, config: RunConfig, model: PreTrainedModel, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.parameters = count_parameters(model)
        self.vocab_size = model.config.vocab_size
        self.computing = self.parameters - lookup_parameters(model)
        self.flops = flops_per_token(config, self.vocab_size)
        self.peak = peak_flops(config, ranks.device)
        self.auxiliary_name = config.objective.name
        self._mean_seconds: float | None = None
        # Number, seconds and data-waiting seconds of the steps since the last log line.
        self._since = (0, 0.0, 0.0)

    def plan(self, loader: TrainLoader) -> str:
        """Return the log's description of the run: model, data, steps, compute and memory."""
        config, train = self.config, self.config.train
        steps, world_size = config.total_steps, self.ranks.world_size
        tokens = steps * config.tokens_per_step
        epochs = steps * train.global_batch_size / loader.samples_per_epoch
        on_gpu, parts = self.ranks.device.type == "cuda", train.sequence_parallel
        shared = f" ({parts} share a sequence)" if parts > 1 else ""
        memory = memory_per_rank(config, self.parameters, world_size, self.vocab_size, on_gpu).total
        return "\n".join(
            (
                f"model: {self.parameters:,} parameters "
                f"({self.computing:,} without what is only looked up), "
                f"{config.model.architecture}, {config.architecture.summary(config.model).words}",
                *loader.describe(steps),
                f"the run sees {tokens:,} tokens, {epochs:.2f} epochs",
                f"steps: {steps:,} of {config.tokens_per_step:,} tokens: {train.global_batch_size} "
                f"sequences of {config.data.context_length}, {train.micro_batch_size} at once on "
                f"{world_size} ranks{shared}, accumulated {config.accumulation_steps(world_size)} "
                f"times; warm-up {config.steps_of('warmup'):,} steps",
                f"compute: {self.flops * tokens:.3g} FLOPs; memory: about {memory / 2**30:.2f} GiB "
                f"a rank (ZeRO-{train.zero_stage})",
                "reference: a unigram model's validation loss is "
                f"{loader.corpus.manifest['unigram_loss']:.4f}",
            )
        )

    def record(
        self, step: int, result: StepResult, lr: float, waited: float, seconds: float
    ) -> dict[str, Any]:
        """Return a step's record for metrics.jsonl; times in seconds, loss in nats per token."""
        rate = self.config.tokens_per_step / seconds
        count, elapsed, waits = self._since
        self._since = (count + 1, elapsed + seconds, waits + waited)
        self._mean_seconds = 0.95 * (self._mean_seconds or seconds) + 0.05 * seconds
        record = {
            "step": step,
            "tokens": step * self.config.tokens_per_step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens_per_second": rate,
            "mfu": self._mfu(rate),
            "data_seconds": waited,
            "step_seconds": seconds,
        }
        if result.auxiliary is not None:
            record[self.auxiliary_name] = result.auxiliary
        return {**record, "skipped": True} if result.skipped else record

    def _mfu(self, rate: float) -> float | None:
        """Return the model FLOPs utilization at `rate` tokens/s; None if the peak is unknown."""
        return rate * self.flops / (self.peak * self.ranks.world_size) if self.peak else None

    def line(self, record: dict[str, Any]) -> str:
        """Return a step's log line; speed and waiting for data are means since the last line."""
        steps, (count, seconds, waits) = self.config.total_steps, self._since
        self._since = (0, 0.0, 0.0)
        rate = count * self.config.tokens_per_step / seconds
        mfu = self._mfu(rate)
        own = record.get(self.auxiliary_name)
        said = "" if own is None else f"{self.auxiliary_name.replace('_', ' ')} {own:.4f}, "
        left = (steps - record["step"]) * self._mean_seconds
        return (
            f"step {record['step']}/{steps}: loss {record['loss']:.4f}, "
            f"{said}gradient norm {record['grad_norm']:.3f}, lr {record['lr']:.3e}, "
            f"{rate:,.0f} tokens/s, "
            f"MFU {'n/a' if mfu is None else f'{mfu:.1%}'}, "
            f"data {waits / seconds:.1%}, "
            f"{tqdm.format_interval(left)} left"
        )

    def validation_lines(self, step: int, results: dict[str, float]) -> list[str]:
        """Return a log line for each validation set; the keys of the set NAME end in /NAME."""
        lines = []
        for key, loss in results.items():
            metric, slash, name = key.partition("/")
            # A plugin's callback may add a loss without the other metrics.
            if metric == "val_loss" and f"val_bits_per_byte{slash}{name}" in results:
                lines.append(
                    f"step {step}: validation loss{f' of {name}' if name else ''} {loss:.4f}, "
                    f"perplexity {results[f'val_perplexity{slash}{name}']:.2f}, "
                    f"{results[f'val_bits_per_byte{slash}{name}']:.4f} bits per byte"
                )
        return lines

    def progress_bar(self, done: int, total: int) -> tqdm:
        """Return a progress bar, which is shown only on the terminal of rank 0."""
        return tqdm(
            initial=done,
            total=total,
            unit="step",
            disable=None if self.ranks.is_first else True,
            file=sys.stderr,
        )
