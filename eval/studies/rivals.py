"""CAT and its rivals at equal parameters, tokens and care."""

from eval.language.grids import YARN, Question, language_study

_RIVALS = ("tfpp_canon_abcd", "mamba", "mamba2", "gla", "delta_net", "gated_deltanet")

ENTRY = language_study(
    "rivals",
    "how do CAT and its rivals compare at equal parameters, tokens and care?",
    Question(
        contrasts=(
            # What filters give to the same model without them, and the two kinds of transformer.
            *((model, "pythia") for model in ("cat", "mh_cat", "kv_shift", "tfpp")),
            *(("tfpp_cat", "tfpp"), ("cat", "kv_shift")),
            # The rivals beside the better transformer, without and with CAT's filters.
            *((model, "tfpp") for model in _RIVALS),
            *(("tfpp_cat", model) for model in _RIVALS),
        ),
        documents=100,
        beyond=(YARN,),
        recall=True,
        is_equal=True,
    ),
    source="CAT, Table 2",
    notes="Embeddings, heads and projections start from one standard deviation in all rows; what "
    "writes to the residual stream starts as each family does. Recalled are tokens whose pair with "
    "the one before stands earlier in the window and is rare in the training text. On a GPU the "
    "residual stream of Mamba and Mamba-2 is in fp32, that of the others in bf16.",
)
