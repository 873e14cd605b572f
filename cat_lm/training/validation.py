"""The loss on the validation split, which is the same for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.loader import Batch, ValidationWindows
from cat_lm.training.distributed import Ranks
from cat_lm.training.engine import Engine
from cat_lm.training.watchdog import Watchdog

ASKED_EVERY = 16  # batches between checks for a signal, which are collectives


class Validation:
    """Compute the loss on the first windows of the validation split, divided among the ranks."""

    def __init__(
        self, corpus: TokenCorpus, engine: Engine, ranks: Ranks, watchdog: Watchdog
    ) -> None:
        config = engine.config
        self._engine, self._ranks, self._watchdog = engine, ranks, watchdog
        self._windows = ValidationWindows(
            corpus, config.data.context_length, config.data.mask_documents
        )
        self.num_windows = len(self._windows)
        if config.validation.max_tokens is not None:
            asked = max(1, config.validation.max_tokens // config.data.context_length)
            self.num_windows = min(self.num_windows, asked)
        self._bytes_per_token = corpus.num_bytes / corpus.num_tokens
        self._batch_size = config.train.micro_batch_size
        self._share, self._shares = ranks.share(config.train.sequence_parallel)

    def run(
        self, max_batches: int | None = None, must_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return `val_loss` in nats per scored token, `val_perplexity`, `val_bits_per_byte`.

        It is a collective. Bits per byte are computed with the split's mean bytes per token.
        `must_stop` (a collective) is called regularly, because a validation may take longer than a
        cluster waits after its signal; if it returns True, the result is None.
        """
        stride = self._shares * self._batch_size
        total, scored = 0.0, 0
        starts = range(0, self.num_windows, stride)[:max_batches]
        for number, start in enumerate(starts, 1):
            if number % ASKED_EVERY == 0 and must_stop():
                return None
            batch_total, batch_scored = self._engine.evaluate(self._batch(start))
            total += batch_total
            scored += batch_scored
            self._watchdog.progress(f"window {start} of the validation")
        total, scored = self._ranks.sum(total, scored)
        loss = total / max(scored, 1)
        return {
            "val_loss": loss,
            "val_perplexity": math.exp(min(loss, 700.0)),
            "val_bits_per_byte": loss / math.log(2) / self._bytes_per_token,
        }

    def _batch(self, start: int) -> Batch:
        """Return this rank's batch of the windows from `start` on.

        Every rank computes the same number of batches, because ZeRO-3 gathers weights in every
        forward pass; windows after the last one have no labels.
        """
        numbers = start + self._share * self._batch_size + np.arange(self._batch_size)
        batch = self._windows.batch(np.minimum(numbers, self.num_windows - 1))
        batch["labels"][numbers >= self.num_windows] = IGNORE_INDEX
        return batch
