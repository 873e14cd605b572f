"""The sensible range of every number of a cell; imports no torch."""

from __future__ import annotations

from cat_lm.core import numbers

RANGES = {
    "d_model": numbers.SMALL_WIDTH,
    "layers": numbers.SMALL_DEPTH,
    "lr": numbers.LEARNING_RATE,
    "seed": numbers.SEED,
    "epochs": numbers.EPOCHS,
    "batch_size": numbers.BATCH,
    "weight_decay": numbers.WEIGHT_DECAY,
    "patience": numbers.EPOCHS,
    "eval_steps": numbers.STEPS.at_least(1),
    "train_rows": numbers.ROWS,
    "validation_rows": numbers.ROWS,
    "test_rows": numbers.ROWS,
}
