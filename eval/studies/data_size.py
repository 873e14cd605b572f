"""LaS attention by the number of training rows."""

from eval.long_range.grids import long_range_study

ENTRY = long_range_study(
    "data-size",
    "accuracy by the number of training rows",
    "data-size",
    axis="training rows",
    source="LaS, Figure 6 (labelled Table 6)",
    claim="Accuracy grows with data, so that generalization is what is missing.",
    notes="The paper prints no numbers, and no other model. Every size has as many epochs, and so "
    "fewer steps where it is smaller.",
)
