"""The sensible range of every number of a cell: for the command line and for cells made in Python.

Imports no torch, so that `--help` and wrong numbers answer at once.
"""

from __future__ import annotations

from cat_lm.core import numbers

RANGES = {
    "d_model": numbers.SMALL_WIDTH,
    "seq_len": numbers.SMALL_CONTEXT,
    "lr": numbers.LEARNING_RATE,
    "seed": numbers.SEED,
    "epochs": numbers.EPOCHS,
    "train_examples": numbers.ROWS,
    "test_examples": numbers.ROWS,
    "validation_examples": numbers.ROWS,
    "layers": numbers.SMALL_DEPTH,
    "batch_size": numbers.BATCH,
    "weight_decay": numbers.WEIGHT_DECAY,
    "stop_above": numbers.STOP_ACCURACY,
    "eval_steps": numbers.STEPS.at_least(1),
    "embedding_dropout": numbers.DROPOUT,
}
# Rows times their length, of which each takes 8 bytes.
MOST_TOKENS = 2**36
