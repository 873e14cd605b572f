"""AdamW and Muon: does the optimizer change what CAT's filters give?"""

from eval.language.grids import Question, language_study

_ADAMW, _MUON = ("cat", "pythia"), ("cat_muon", "pythia_muon")

ENTRY = language_study(
    "optimizers",
    "does Muon train better than AdamW, and does CAT's gain depend on it?",
    Question(
        contrasts=(_ADAMW, _MUON, ("pythia_muon", "pythia"), ("cat_muon", "cat")),
        documents=50,
        factors=(1,),
        interactions=((_MUON, _ADAMW),),
    ),
    source="Muon is Scalable for LLM Training (arXiv:2502.16982)",
    claim="With updates scaled to AdamW's size, Muon needs fewer tokens at AdamW's rates.",
    notes="Filters, embeddings, norms and the output layer are trained by AdamW in all models. "
    "Each model has its own learning rate, which Muon's matrices share.",
)
