"""Names that the commands offer. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

# See `eval.landmark.selectors`; in the order of tables and colours.
SELECTORS = (
    "oracle",
    "ssm",
    "learned",
    "box",
    "exponential",
    "local",
    "random",
)
# Learned afterwards, from data.
LEARNED = ("ssm", "learned")
STATE = 16  # of ssm, where no number is given
USUAL = tuple(name for name in SELECTORS if name not in LEARNED)
