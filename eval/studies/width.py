"""Accuracy of recall by width: memory and recall."""

from eval.recall.grids import recall_study, width_contrasts, widths

ENTRY = recall_study(
    "width",
    "accuracy by width: memory and recall",
    widths,
    axis="model width",
    contrasts=width_contrasts,
    source="CAT, Figure 5 (AAAI), 3 (workshop), 5 (arXiv)",
    claim="Models with a state of fixed size, Mamba and Based, recall more as they get wider; one "
    "CAT layer recalls everything at every width.",
)
