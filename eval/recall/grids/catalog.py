"""List the figures by name; imports no torch, so that `--help` is quick.

A new figure is a row here, and in plan.py the function of its grid where that is a new one too.
"""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """A figure of the paper.

    Attributes:
        shows: its subject.
        number: in the three versions of the paper (AAAI / workshop / arXiv).
        grid: the cells it is made of, in `GRIDS` of plan.py.
        one_layer: whether all models have one layer, or each as many as in the paper.
        claim: what the paper says that it shows.
        notes: what to know when it is read.
    """

    shows: str
    number: str
    grid: str
    one_layer: bool
    claim: str
    notes: str = ""


_ONE_LAYER = (
    "To know: one layer of Based is its short convolution alone, as its attention stands in every "
    "second layer."
)

FIGURES = {
    "accuracy": Figure(
        "accuracy by length, baselines with two layers",
        "5 / 3 / 5",
        "accuracy",
        False,
        "One CAT layer solves multi-query recall of single keys (MQAR) and of bigrams (MQNAR) at "
        "every length and width, where baselines with two layers do not.",
    ),
    "length": Figure(
        "accuracy at other lengths than the trained one",
        "6 / 4 / 6",
        "length",
        False,
        "A CAT layer trained at one length keeps its accuracy at others, where the baselines' "
        "falls.",
    ),
    "one-layer": Figure(
        "accuracy by length, all with one layer",
        "– / 7, 8 / 8, 9",
        "accuracy",
        True,
        "With one layer each, the baselines recall far less than with two.",
        _ONE_LAYER,
    ),
    "one-layer-length": Figure(
        "other lengths, all with one layer",
        "– / 9, 10 / 10, 11",
        "length",
        True,
        "With one layer each, CAT alone keeps its accuracy at other lengths.",
        _ONE_LAYER,
    ),
    "width": Figure(
        "accuracy by width: memory and recall",
        "5 / 3 / 5",
        "width",
        False,
        "Models with a state of fixed size, Mamba and Based, recall more as they get wider; one "
        "CAT layer recalls everything at every width.",
    ),
    "selective-copy": Figure(
        "selective copying by length, one and two layers",
        "– / 11 / 7",
        "copying",
        False,
        "With one layer, CAT and Mamba copy nearly all tokens in order; with two, all models but "
        "LinCAT do.",
    ),
}
