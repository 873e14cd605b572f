"""Accuracy of recall at other lengths, of models that all have one layer."""

from functools import partial

from eval.recall.grids import LENGTHS_NOTE, ONE_LAYER_NOTE, other_lengths, recall_study

ENTRY = recall_study(
    "one-layer-length",
    "other lengths, all with one layer",
    partial(other_lengths, one_layer=True),
    source="CAT, Figures 9 and 10 (workshop), 10 and 11 (arXiv)",
    claim="With one layer each, CAT alone keeps its accuracy at other lengths.",
    notes=f"{LENGTHS_NOTE} {ONE_LAYER_NOTE}",
)
