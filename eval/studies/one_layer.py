"""Accuracy of recall by length, of models that all have one layer."""

from functools import partial

from eval.recall.grids import ONE_LAYER_NOTE, accuracy, recall_study

ENTRY = recall_study(
    "one-layer",
    "accuracy by length, all with one layer",
    partial(accuracy, one_layer=True),
    source="CAT, Figures 7 and 8 (workshop), 8 and 9 (arXiv)",
    claim="With one layer each, the baselines recall far less than with two.",
    notes=ONE_LAYER_NOTE,
)
