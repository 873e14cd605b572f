"""Validation losses of further prepared folders: `validation.sets: {NAME: FOLDER}`.

Each folder's validation split is scored as the run's own one is, up to `validation.max_tokens`. The
metrics are `val_loss/NAME`, `val_perplexity/NAME` and `val_bits_per_byte/NAME`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cat_lm.callbacks import Callback, CallbackKind, Run

if TYPE_CHECKING:
    from cat_lm.training.validation import Validation


class ValidationSets(CallbackKind):
    name = "validation_sets"
    key = "validation.sets"
    collective = True

    def build(self, options: Any, run: Run) -> Callback:
        return NamedSets(run)


class NamedSets(Callback):
    """Score every named set at each validation."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._sets = {name: self._open(name, run) for name in run.config.validation.sets}

    @staticmethod
    def _open(name: str, run: Run) -> Validation:
        from cat_lm.core.errors import UserError
        from cat_lm.data.opening import check_ends, open_corpus
        from cat_lm.data.verified import verify
        from cat_lm.training.validation import Validation

        data, folder = run.config.data, run.config.validation.sets[name]
        # One rank per host reads and verifies the data, as in the preflight.
        reads = run.ranks.local_rank == 0
        corpus = open_corpus(folder, "validation", data.cache_dir, look=reads)
        ours, theirs = (c.parts[0].manifest["tokenizer"] for c in (run.corpus, corpus))
        if ours["sha256"] != theirs["sha256"]:
            raise UserError(
                f"validation.sets: {name}={folder} was prepared with the tokenizer "
                f"{theirs['spec']}, the data of the run with {ours['spec']}"
            )
        if reads:
            corpus.fetch(run.watchdog.progress)
            verify([corpus], data.cache_dir, progress=run.watchdog.progress)
        if reads and data.mask_documents:
            check_ends(corpus)
        return Validation(corpus, run.engine, run.ranks, run.watchdog)

    def validation(self, step: int, results: dict[str, float]) -> None:
        for name, validation in self._sets.items():
            found = validation.run(must_stop=self._run.must_stop)
            if found is None:
                return
            results |= {f"{metric}/{name}": value for metric, value in found.items()}


ENTRY = ValidationSets()
