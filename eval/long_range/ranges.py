"""The sensible range of every number of a cell; imports no torch."""

from __future__ import annotations

from cat_lm import limits

RANGES = {
    "d_model": limits.SMALL_WIDTH,
    "layers": limits.SMALL_DEPTH,
    "lr": limits.LEARNING_RATE,
    "seed": limits.SEED,
    "epochs": limits.EPOCHS,
    "batch_size": limits.BATCH,
    "weight_decay": limits.WEIGHT_DECAY,
    "patience": limits.EPOCHS,
    "eval_steps": limits.STEPS.at_least(1),
    "train_rows": limits.ROWS,
    "validation_rows": limits.ROWS,
    "test_rows": limits.ROWS,
}
