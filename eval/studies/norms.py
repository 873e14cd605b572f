"""Norms of queries and keys: what their convolution gives with one, and without."""

from eval.language.grids import PAPER, Question, language_study

_CONVOLVED = ("cat_k", "cat_qk", "cat")
_NORMED = tuple(
    ((f"{model}_{norm}", f"qk_{norm}"), (model, "pythia"))
    for model in _CONVOLVED
    for norm in ("l2", "rms")
)

ENTRY = language_study(
    "norms",
    "does normalising queries and keys change what their convolution gives?",
    Question(
        contrasts=(
            *((model, "pythia") for model in ("qk_l2", "qk_rms", *_CONVOLVED)),
            *(with_norm for with_norm, _ in _NORMED),
            *((f"{model}_rms_before", f"{model}_rms") for model in _CONVOLVED),
            ("cat_l1", "cat"),
        ),
        documents=50,
        interactions=_NORMED,
        methods=PAPER,
        attention=True,
    ),
    source="CAT, section 7",
    claim="Filters may dilute keys and queries, which a norm might mend.",
    notes="Norms stand after the filters where a name does not say before. Entropy is of a query "
    "that reads t keys, -Σ p ln p / ln t: 1 where all are read alike. Its differences are over "
    "seeds alone, and are corrected for each other.",
)
