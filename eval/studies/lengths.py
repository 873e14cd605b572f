"""What keeps a language model's loss at 32 times the training length."""

from eval.language.grids import NONE, YARN, Question, both, by_position, language_study, pairs

_PLAIN, _CAT, _MULTIHEAD = map(both, ("pythia", "cat", "mh_cat"))
_W4, _V = map(both, ("cat_w4", "cat_v"))

ENTRY = language_study(
    "lengths",
    "what keeps the loss at 32 times the training length: positions, windows, streams?",
    Question(
        contrasts=(
            *((none, rope) for rope, none in (_PLAIN, _CAT, _MULTIHEAD, _W4, _V)),
            *pairs((_CAT, _PLAIN), (_MULTIHEAD, _CAT), (_CAT, _W4), (_CAT, _V)),
        ),
        documents=60,
        factors=(1, 2, 4, 8, 16, 32),
        interactions=by_position((_CAT, _PLAIN)),
        beyond=(NONE, YARN),
        growth=True,
        trials=2,  # With one trial, a model with `maps` lost 0.078 nats by a wrong choice.
    ),
    source="CAT, section 6.2",
    claim="Positions may be left out beyond the training length.",
    notes="Documents have 4,096 tokens: give a text of long documents, such as SlimPajama's, of "
    "which more than half is held out. Unscaled rotary positions fail beyond the trained length, "
    "whatever else a model has.",
)
