"""LaS attention's parts, and learned filters of values, on text in bytes."""

from eval.language.grids import NONE, PAPER, Question, both, language_study, pairs

_PLAIN, _DECAY, _AVERAGE, _LAS = map(both, ("las_vanilla", "las_l", "las_s", "las"))
_FILTER, _DECAY_FILTER = map(both, ("las_filter", "las_l_filter"))

ENTRY = language_study(
    "las-bytes",
    "what do decayed logits and averaged values give, and do learned filters of values more?",
    Question(
        contrasts=pairs(
            *((model, _PLAIN) for model in (_DECAY, _AVERAGE, _LAS, _FILTER, _DECAY_FILTER)),
            *((model, _DECAY) for model in (_LAS, _DECAY_FILTER)),
            *((_FILTER, _AVERAGE), (_DECAY_FILTER, _LAS)),
        ),
        documents=100,
        tokens=1_000_000,
        factors=(0.5, 1, 2, 4),
        beyond=(NONE,),
        methods=PAPER,
        tokenizer="bytes",
    ),
    source="LaS",
    claim="Both the decay and the smoothing help.",
)
