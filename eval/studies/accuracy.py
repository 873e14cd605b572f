"""Accuracy of recall by length, of models with as many layers as in the paper."""

from eval.recall.grids import accuracy, recall_study

ENTRY = recall_study(
    "accuracy",
    "accuracy by length, baselines with two layers",
    accuracy,
    source="CAT, Figure 5 (AAAI), 3 (workshop), 5 (arXiv)",
    claim="One CAT layer solves multi-query recall of single keys (MQAR) and of bigrams (MQNAR) "
    "at every length and width, where baselines with two layers do not.",
)
