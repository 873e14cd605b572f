"""Selective copying by length, with one and two layers."""

from eval.recall.grids import copying, recall_study

ENTRY = recall_study(
    "selective-copy",
    "selective copying by length, one and two layers",
    copying,
    source="CAT, Figure 11 (workshop), 7 (arXiv)",
    claim="With one layer, CAT and Mamba copy nearly all tokens in order; with two, all models but "
    "LinCAT do.",
)
