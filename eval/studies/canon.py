"""Canon layers beside CAT, in two families."""

from eval.language.grids import PAPER, Question, language_study

_PYTHIA = ("cat", "kv_shift", "canon_acd", "canon_abcd")

ENTRY = language_study(
    "canon",
    "do Canon layers differ from CAT, and does either add to the other, in both families?",
    Question(
        contrasts=(
            *((model, "pythia") for model in _PYTHIA),
            *(("canon_abcd", model) for model in ("cat", "canon_acd")),
            *(("cat_canon_acd", model) for model in ("cat", "canon_acd", "canon_abcd")),
            ("cat_kv", "kv_shift"),
            *((f"tfpp_{model}", "tfpp") for model in ("cat", "canon_acd", "canon_abcd")),
            ("tfpp_canon_abcd", "tfpp_cat"),
            *(("tfpp_cat_canon_acd", f"tfpp_{model}") for model in ("cat", "canon_acd")),
        ),
        documents=50,
        methods=PAPER,
    ),
    notes="TF++ is Llama.",
)
