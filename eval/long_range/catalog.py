"""List the figures by name, with what the paper printed; imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """A figure or table of the LaS paper (Zimerman and Wolf, ICML 2024).

    Attributes:
        shows: its subject.
        number: in the paper.
        axis: what stands on the axis.
        claim: what the paper says that it shows.
        doubts: what to know when it is read.
        printed: task -> model -> the paper's number.
        pairs: of models, beside those with the first one, whose difference is what it is about;
            `{chunk}` stands for the scale's.
    """

    shows: str
    number: str
    axis: str
    claim: str
    doubts: str
    printed: dict[str, dict[str, float]]
    pairs: tuple[tuple[str, str], ...] = ()


_LOCAL = (
    "LRA rewards locality and efficiency with data: pretraining on the task's own inputs closes "
    "most of the gap (Amos et al., 2023), so RoPE and sinusoids are trained in the same pipeline."
)


# Does a learned filter of values keep what the box gives?
_FILTERS = (("cat-v", "s"), ("cat-v", "las"), ("cat-v-box", "s"), ("l-cat-v", "las"))


def _with(options: str, *pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Return pairs with options."""
    return tuple((f"{one}:{options}", f"{other}:{options}") for one, other in pairs)


def _ablation(*numbers: float) -> dict[str, float]:
    """A row of Table 4."""
    return dict(zip(("alibi", "l", "s", "s-alibi", "las"), numbers, strict=True))


FIGURES = {
    "lra": Figure(
        "the Long Range Arena",
        "Table 2",
        "length",
        "LaS attention is better than every transformer that was reported, and LaS-chunk, which is "
        "linear, than all but on Pathfinder.",
        "The paper copies its transformers' rows from the LRA paper, where they were trained in "
        f"another pipeline. {_LOCAL}",
        {
            "listops": {"las": 0.5305, "las:chunk=128": 0.4621, "transformer (LRA)": 0.3637},
            "imdb": {"las": 0.7928, "las:chunk=128": 0.7911, "transformer (LRA)": 0.6427},
            "aan": {"las": 0.8556, "las:chunk=128": 0.8384, "transformer (LRA)": 0.5746},
            "cifar10": {"las": 0.7044, "las:chunk=128": 0.6490, "transformer (LRA)": 0.4244},
            "pathfinder": {"las": 0.8162, "las:chunk=128": 0.5461, "transformer (LRA)": 0.7140},
        },
        _FILTERS,
    ),
    "ablation": Figure(
        "which part of LaS helps, inside chunks",
        "Table 4",
        "length",
        "Both the decay and the smoothing help; decay is better than ALiBi.",
        "The paper has no plain chunk baseline (here `vanilla:chunk=…`), so that its table cannot "
        "tell a decay that helps from a bias that hurts: decays of up to 1e-3 a token change "
        "logits by less than an eighth in chunks of 128. Its text exchanges the two columns of "
        "differences: those it calls LaS less L are LaS less S. ALiBi stands in place of the "
        "absolute positions that the others have, so that ALiBi less L changes two things: `nope`, "
        "and the decays with `position=none`, are beside it with neither.",
        {
            "listops": {
                "alibi": 0.3994,
                "l": 0.4108,
                "s": 0.4613,
                "s-alibi": 0.4061,
                "las": 0.4621,
            },
            "imdb": _ablation(0.661, 0.7065, 0.7586, 0.6635, 0.7911),
            "aan": _ablation(0.7761, 0.8142, 0.8064, 0.8102, 0.8384),
            "cifar10": {
                "alibi": 0.4224,
                "l": 0.5948,
                "s": 0.6138,
                "s-alibi": 0.5168,
                "las": 0.6490,
            },
        },
        (
            *_with("chunk={chunk}", ("las", "s"), ("las", "l"), ("l", "alibi"), ("s-alibi", "s")),
            ("alibi:chunk={chunk}", "nope:chunk={chunk}"),
            ("l:position=none,chunk={chunk}", "alibi:chunk={chunk}"),
            ("las:position=none,chunk={chunk}", "s-alibi:chunk={chunk}"),
        ),
    ),
    "context": Figure(
        "accuracy by the size of chunks",
        "Figure 5 (labelled Table 5)",
        "positions in a chunk",
        "Accuracy falls as chunks get smaller: LaS uses distant positions within a layer.",
        "The paper prints no numbers. Plain attention in chunks stands beside it.",
        {},
    ),
    "data-size": Figure(
        "accuracy by the number of training rows",
        "Figure 6 (labelled Table 6)",
        "training rows",
        "Accuracy grows with data, so that generalization is what is missing.",
        "The paper prints no numbers, and no other model. Every size has as many epochs, and so "
        "fewer steps where it is smaller.",
        {},
    ),
    "atomic": Figure(
        "R² on tasks that are neither smooth nor local",
        "Table 7",
        "length",
        "LaS attention lags behind plain attention on Select.",
        "The paper's length and depth are not stated; DLR's are taken. One sharp head that reads "
        "independent numbers through a box of P explains 1/P of their variance.",
        {
            "select": {"nope": 0.971, "las:position=none": 0.783},
            "cummax": {"nope": 1.0, "las:position=none": 0.995},
            "cumsum": {"nope": 1.0, "las:position=none": 0.997},
        },
        _with("position=none", *_FILTERS),
    ),
    "smnist": Figure(
        "MNIST pixel by pixel, in rows and permuted",
        "Table 3",
        "length",
        "LaS attention is better than a transformer by 0.28 and 0.15 points.",
        "The paper copies the transformer's row. A gap of 0.28 points is 28 of the 10,000 test "
        "images, about twice the deviation of the difference of two tests of so many (15 images), "
        "and of one seed's spread nothing is said.",
        {
            "smnist": {"las": 0.9918, "transformer (copied)": 0.9890},
            "pmnist": {"las": 0.9805, "transformer (copied)": 0.9790},
        },
        _FILTERS,
    ),
}
