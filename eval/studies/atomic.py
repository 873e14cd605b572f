"""LaS attention on tasks that are neither smooth nor local."""

from eval.long_range.grids import FILTER_PAIRS, long_range_study, with_options

ENTRY = long_range_study(
    "atomic",
    "R² on tasks that are neither smooth nor local",
    "atomic",
    pairs=with_options("position=none", *FILTER_PAIRS),
    measures={"": "R²"},
    source="LaS, Table 7",
    claim="LaS attention lags behind plain attention on Select.",
    notes="The paper's length and depth are not stated; DLR's are taken. One sharp head that reads "
    "independent numbers through a box of P explains 1/P of their variance.",
    printed={
        "select": {"nope": 0.971, "las:position=none": 0.783},
        "cummax": {"nope": 1.0, "las:position=none": 0.995},
        "cumsum": {"nope": 1.0, "las:position=none": 0.997},
    },
)
