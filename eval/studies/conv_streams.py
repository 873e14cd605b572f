"""Which of q, k and v needs the filter in a language model."""

from eval.language.grids import NONE, Question, both, by_position, language_study, pairs

_PLAIN, _CAT = both("pythia"), both("cat")
_V, _K, _QK, _KV, _QV = map(both, ("cat_v", "cat_k", "cat_qk", "cat_kv", "cat_qv"))

ENTRY = language_study(
    "conv-streams",
    "which of q, k and v needs the filter, with and without positions?",
    Question(
        contrasts=pairs(
            *((model, _PLAIN) for model in (_V, _K, _QK, _KV, _QV, _CAT)),
            # What q and k add to v, and each stream to the other two.
            *((_CAT, model) for model in (_V, _QK, _KV, _QV)),
        ),
        documents=180,
        factors=(1, 2, 4),  # The library and SlimPajama's sample have 180 documents of this length.
        interactions=by_position((_V, _PLAIN), (_QK, _PLAIN)),
        beyond=(NONE,),
    ),
    source="CAT, arXiv version, section 7",
    claim="Convolving keys and queries does not help in real runs.",
)
