"""Accuracy of recall at other lengths than the trained one."""

from eval.recall.grids import LENGTHS_NOTE, other_lengths, recall_study

ENTRY = recall_study(
    "length",
    "accuracy at other lengths than the trained one",
    other_lengths,
    source="CAT, Figure 6 (AAAI), 4 (workshop), 6 (arXiv)",
    claim="A CAT layer trained at one length keeps its accuracy at others, where the baselines' "
    "falls.",
    notes=LENGTHS_NOTE,
)
