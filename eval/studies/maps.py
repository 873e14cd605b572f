"""Filters that mix attention maps beside those that mix embeddings."""

from eval.language.grids import Question, both, language_study, pairs

_PLAIN, _EMBEDDINGS, _EMBEDDINGS_V = map(both, ("pythia", "mh_cat", "mh_cat_v"))
_MAPS, _MAPS_V = map(both, ("mh_maps", "mh_maps_v"))

ENTRY = language_study(
    "maps",
    "do filters that mix attention maps differ from those that mix embeddings?",
    Question(
        contrasts=pairs(
            *((model, _PLAIN) for model in (_EMBEDDINGS, _MAPS, _EMBEDDINGS_V, _MAPS_V)),
            *((_MAPS, _EMBEDDINGS), (_MAPS_V, _EMBEDDINGS_V)),
            # What filters of q and k add to those of v.
            *((_EMBEDDINGS, _EMBEDDINGS_V), (_MAPS, _MAPS_V)),
        ),
        documents=180,
        factors=(0.5, 1, 2),
    ),
    source="CAT, section 3.1",
)
