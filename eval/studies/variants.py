"""Which convolution lowers a language model's loss, with and without positions."""

from eval.language.grids import NONE, PAPER, Question, language_study

ENTRY = language_study(
    "variants",
    "which convolution, with and without positions?",
    Question(
        contrasts=(
            *(
                (model, "pythia")
                for model in ("pythia_nope", "cat", "cat_nope", "mh_cat", "mh_cat_nope")
            ),
            *((model, "pythia") for model in ("cat_v", "cat_k", "canon_b")),
            *(("cat", "cat_v"), ("cat", "cat_k"), ("mh_cat", "cat"), ("mh_cat_nope", "cat_nope")),
            ("canon_b", "cat"),
        ),
        documents=100,
        beyond=(NONE,),
        methods=PAPER,
    ),
    source="CAT, Table 2 and Figure 1",
    claim="CAT with positions outperforms Pythia, and does so at all test lengths.",
)
