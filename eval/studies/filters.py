"""Filters as long as the text beside those of 21 taps."""

from eval.language.grids import NONE, YARN, Question, both, language_study, pairs

_PLAIN, _CAT, _W128 = map(both, ("pythia", "cat", "cat_w128"))
_SSM, _EXPONENTIAL = map(both, ("cat_ssm", "cat_exp"))

ENTRY = language_study(
    "filters",
    "do filters as long as the text give what 21 taps give, at 8 times the length too?",
    Question(
        contrasts=(
            *((none, rope) for rope, none in (_CAT, _SSM, _EXPONENTIAL)),
            *pairs(
                (_CAT, _PLAIN),
                *((model, other) for model in (_SSM, _EXPONENTIAL) for other in (_PLAIN, _CAT)),
                (_SSM, _EXPONENTIAL),
                # Length and form apart: as many free taps as a row of training.
                *((_W128, _CAT), (_SSM, _W128)),
            ),
        ),
        documents=80,
        factors=(1, 2, 4, 8),
        beyond=(NONE, YARN),
    ),
    source="CAT, section 7",
    notes="Unscaled rotary positions fail beyond the trained length, whatever else a model has.",
)
