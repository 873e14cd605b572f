"""What a kernel of scores gains with its rank, and multi-token attention."""

from eval.language.grids import PAPER, Question, language_study

_RANKS = ("cat_qk_r2", "cat_qk_r4")

ENTRY = language_study(
    "rank",
    "what does a kernel of scores gain with its rank, and how far is multi-token attention?",
    Question(
        contrasts=(
            *((model, "pythia") for model in ("cat_qk", *_RANKS, "mta_kernel", "mta")),
            *((model, "cat_qk") for model in _RANKS),
            *(("mta_kernel", "cat_qk_r4"), ("mta", "mta_kernel"), ("cat_qk_nope", "pythia_nope")),
            *((f"{model}_nope", "cat_qk_nope") for model in _RANKS),
            ("mta_kernel_nope", "cat_qk_r4_nope"),
        ),
        documents=50,
        factors=(0.5, 1, 2, 4),  # Multi-token attention supports at most 512 tokens.
        methods=PAPER,
    ),
    notes="Without positions alone a kernel of rank R is what R filters of q and k do: with rotary "
    "ones they are filtered before they are turned. Multi-token attention has the published kernel "
    "(6 queries and 11 keys, five of them after the key itself, where the filters have 21 taps "
    "back) in every layer, and mixes heads after the softmax only.",
)
