"""LaS attention by the size of its chunks."""

from eval.long_range.grids import long_range_study

ENTRY = long_range_study(
    "context",
    "accuracy by the size of chunks",
    "context",
    axis="positions in a chunk",
    source="LaS, Figure 5 (labelled Table 5)",
    claim="Accuracy falls as chunks get smaller: LaS uses distant positions within a layer.",
    notes="The paper prints no numbers. Plain attention in chunks is trained too.",
)
