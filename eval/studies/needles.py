"""How many needles models find in longer text that read chosen blocks of keys."""

from __future__ import annotations

from functools import partial

from eval.lab.contrasts import first_minus_others
from eval.lab.places import NEGATIVE, Place, Run
from eval.lab.study import Study, StudyOptions
from eval.recall.cell import Cell
from eval.recall.grids import controls, measured_values

WAYS = ("dense", "guided", "hard")
MODELS = ("cat", *(f"landmark:block=8,training={way}" for way in WAYS))
# Scale -> vocabulary, width, trained length, other lengths, training rows, epochs, rates, seeds.
SCALES = {
    "smoke": (64, 16, 32, (64,), 256, 1, (1e-2,), 2),
    "cpu": (512, 64, 128, (1024, 4096, 16384), 100_000, 3, (1e-2,), 3),
    "paper": (8192, 64, 512, (1024, 4096, 16384, 65536), 100_000, 32, (1e-3, 3e-3, 1e-2), 3),
}


def plan_places(asked: StudyOptions) -> list[Place]:
    """Return a place for each model; no mixing is the negative control."""
    vocabulary, width, length, tested, examples, epochs, rates, seeds = SCALES[asked.scale]
    found = []
    for mixer in (*MODELS, NEGATIVE):
        cell = Cell(
            f"needle:vocab_size={vocabulary}",
            mixer,
            width,
            length,
            epochs=epochs,
            train_examples=examples,
            test_examples=64,
            stop_above=None,
            test_lengths=tested,
        )
        run = Run("needles", f"d = {width}", mixer, cell, "lengths")
        is_control = mixer == NEGATIVE
        number = 1 if is_control else asked.seeds or seeds
        found.append(Place(run, rates[:1] if is_control else rates, number))
    return found


ENTRY = Study(
    "needles",
    "how many needles models find in longer text that read chosen blocks",
    plan_places,
    measured_values,
    source="LCAT, section 5 and Figure 3",
    notes="Four keys with their values stand anywhere in the text and are asked at its end. "
    "Landmarks are averages of 8 keys; a query reads the 4 blocks chosen and 2 near it. Models are "
    "trained on all keys (`dense`), with a loss for landmarks in addition (`guided`), or on the "
    "chosen blocks (`hard`).",
    measures={"": "needles found"},
    contrasts=partial(first_minus_others, more=tuple((MODELS[3], m) for m in MODELS[1:3])),
    controls=controls,
    options=(),
)
