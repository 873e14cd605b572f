"""The sensible range of every number of a cell: for the command line and for cells made in Python.

Imports no torch, so that `--help` and wrong numbers answer at once.
"""

from __future__ import annotations

from cat_lm import limits

RANGES = {
    "d_model": limits.SMALL_WIDTH,
    "seq_len": limits.SMALL_CONTEXT,
    "lr": limits.LEARNING_RATE,
    "seed": limits.SEED,
    "epochs": limits.EPOCHS,
    "train_examples": limits.ROWS,
    "test_examples": limits.ROWS,
    "validation_examples": limits.ROWS,
    "layers": limits.SMALL_DEPTH,
    "batch_size": limits.BATCH,
    "weight_decay": limits.WEIGHT_DECAY,
    "stop_above": limits.STOP_ACCURACY,
    "eval_steps": limits.STEPS.at_least(1),
    "embedding_dropout": limits.DROPOUT,
}
# Rows times their length, of which each takes 8 bytes.
MOST_TOKENS = 2**36
