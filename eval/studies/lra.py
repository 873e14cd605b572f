"""The Long Range Arena: LaS attention, its parts and CAT's filters of values."""

from eval.long_range.grids import FILTER_PAIRS, long_range_study

ENTRY = long_range_study(
    "lra",
    "the Long Range Arena",
    "lra",
    pairs=FILTER_PAIRS,
    source="LaS, Table 2",
    claim="LaS attention is better than every transformer that was reported, and LaS-chunk, which "
    "is linear, than all but on Pathfinder.",
    notes="The paper copies its transformers' rows from the LRA paper, where they were trained in "
    "another pipeline. LRA rewards locality and efficiency with data: pretraining on the task's "
    "own inputs closes most of the gap (Amos et al., 2023), so RoPE and sinusoids are trained in "
    "the same pipeline.",
    printed={
        "listops": {"las": 0.5305, "las:chunk=128": 0.4621, "transformer (LRA)": 0.3637},
        "imdb": {"las": 0.7928, "las:chunk=128": 0.7911, "transformer (LRA)": 0.6427},
        "aan": {"las": 0.8556, "las:chunk=128": 0.8384, "transformer (LRA)": 0.5746},
        "cifar10": {"las": 0.7044, "las:chunk=128": 0.6490, "transformer (LRA)": 0.4244},
        "pathfinder": {"las": 0.8162, "las:chunk=128": 0.5461, "transformer (LRA)": 0.7140},
    },
)
