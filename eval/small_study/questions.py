"""The questions of the small study: models, and the differences that each is about.

A question's differences are fixed here, before anything is run; its intervals are corrected for
their number. `position` below: a model's file is NAME with rotary positions, NAME_nope without.
"""

from __future__ import annotations

import dataclasses

NONE, YARN = "none", "yarn"  # methods of eval.length_sweep

# File in configs/study -> what tables and figures call the model, in the order they show.
MODELS = {
    "pythia": "Pythia (RoPE)",
    "nope": "no convolution, NoPE",
    "cat_rope": "CAT, RoPE",
    "cat_nope": "CAT, NoPE",
    "mh_cat_rope": "MH-CAT, RoPE",
    "mh_cat_nope": "MH-CAT, NoPE",
    "cat_v": "CAT on v only, RoPE",
    "cat_v_nope": "CAT on v only, NoPE",
    "cat_k": "CAT on k only, RoPE",
    "cat_k_nope": "CAT on k only, NoPE",
    "cat_qk": "CAT on q and k, RoPE",
    "cat_qk_nope": "CAT on q and k, NoPE",
    "cat_kv": "CAT on k and v, RoPE",
    "cat_kv_nope": "CAT on k and v, NoPE",
    "cat_qv": "CAT on q and v, RoPE",
    "cat_qv_nope": "CAT on q and v, NoPE",
    "mh_cat_v": "MH-CAT on v only, RoPE",
    "mh_cat_v_nope": "MH-CAT on v only, NoPE",
    "mh_maps": "MH-CAT, maps mixed, RoPE",
    "mh_maps_nope": "MH-CAT, maps mixed, NoPE",
    "mh_maps_v": "maps mixed, v only, RoPE",
    "mh_maps_v_nope": "maps mixed, v only, NoPE",
    "cat_w4": "CAT, W=4, RoPE",
    "cat_w4_nope": "CAT, W=4, NoPE",
    "cat_w128": "CAT, W=128, RoPE",
    "cat_w128_nope": "CAT, W=128, NoPE",
    "canon_b": "depthwise W=4, RoPE",
    "canon_acd": "Canon ACD, RoPE",
    "canon_abcd": "Canon ABCD, RoPE",
    "cat_canon_acd": "CAT + Canon ACD, RoPE",
    "kv_shift": "CAT on k and v, W=2, RoPE",
    "tfpp": "TF++",
    "tfpp_cat": "TF++ + CAT",
    "tfpp_canon_acd": "TF++ + Canon ACD",
    "tfpp_canon_abcd": "TF++ + Canon ABCD",
    "tfpp_cat_canon_acd": "TF++ + CAT + Canon ACD",
    "qk_l2": "Pythia, l2 norm of q and k",
    "qk_rms": "Pythia, rms norm of q and k",
    **{
        f"{name}_{norm}": f"{streams}, {words}"
        for name, streams in (
            ("cat_k", "CAT on k only"),
            ("cat_qk", "CAT on q and k"),
            ("cat", "CAT"),
        )
        for norm, words in (
            ("l2", "l2 norm after"),
            ("rms", "rms norm after"),
            ("rms_before", "rms norm before"),
        )
    },
    "cat_l1": "CAT, filters of l1 norm 1",
    "cat_qk_r2": "CAT on q and k, rank 2",
    "cat_qk_r4": "CAT on q and k, rank 4",
    "cat_qk_r2_nope": "CAT on q and k, rank 2, NoPE",
    "cat_qk_r4_nope": "CAT on q and k, rank 4, NoPE",
    **{
        f"{name}{suffix}": f"{words}, {positions}"
        for name, words in (
            ("cat_ssm", "CAT, SSM filters of N=16"),
            ("cat_exp", "CAT, exponential filters"),
        )
        for suffix, positions in (("", "RoPE"), ("_nope", "NoPE"))
    },
    **{
        f"{name}{suffix}": f"{words}, {positions}"
        for name, words in (
            ("las_vanilla", "plain attention"),
            ("las_l", "decay"),
            ("las_s", "averaged values"),
            ("las", "decay, averaged values (LaS)"),
            ("las_filter", "filtered values"),
            ("las_l_filter", "decay, filtered values"),
        )
        for suffix, positions in (("", "RoPE"), ("_nope", "NoPE"))
    },
    "mta": "multi-token attention",
    "mta_kernel": "multi-token attention, heads not mixed",
    "mta_kernel_nope": "multi-token attention, heads not mixed, NoPE",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "gla": "GLA",
    "delta_net": "DeltaNet",
    "gated_deltanet": "Gated DeltaNet",
}
# Per position: the names of the same model with rotary positions and without.
_PLAIN, _CAT, _MULTIHEAD = (
    ("pythia", "nope"),
    ("cat_rope", "cat_nope"),
    ("mh_cat_rope", "mh_cat_nope"),
)


@dataclasses.dataclass(frozen=True)
class Question:
    """Say what is trained and compared for a question.

    Attributes:
        text: the question.
        contrasts: (model, minus): one's loss minus the other's.
        factors: lengths at which models are read, of the training length.
        interactions: pairs of differences, one of which is taken from the other.
        beyond: how positions are read where losses are compared at the longest length too: `NONE`,
            as trained, or `YARN`, for models with rotary positions, the others as trained. Empty:
            losses are compared at the training length alone.
        attention: whether the entropy of attention and its largest logit are measured.
        growth: whether a model's loss at the longest length is compared with its own at the
            trained one.
        scaled: whether models are also read with positions scaled to the length where nothing that
            is compared needs it, for the picture's second panel.
    """

    text: str
    contrasts: tuple[tuple[str, str], ...]
    factors: tuple[float, ...] = (0.5, 1, 2, 4, 8)
    interactions: tuple[tuple[tuple[str, str], tuple[str, str]], ...] = ()
    beyond: tuple[str, ...] = ()
    attention: bool = False
    growth: bool = False
    scaled: bool = True

    @property
    def models(self) -> tuple[str, ...]:
        """All that are compared, in the order of `MODELS`."""
        named = {model for pair in self.contrasts for model in pair}
        return tuple(model for model in MODELS if model in named)


def _both(model: str) -> tuple[str, str]:
    return model, f"{model}_nope"


def _pairs(*contrasts: tuple[tuple[str, str], tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Each contrast with rotary positions, then each without."""
    return tuple((a[side], b[side]) for side in (0, 1) for a, b in contrasts)


def _interactions(
    *contrasts: tuple[tuple[str, str], tuple[str, str]],
) -> tuple[tuple[tuple[str, str], tuple[str, str]], ...]:
    """Take each contrast without positions from that with rotary ones."""
    return tuple(((a[0], b[0]), (a[1], b[1])) for a, b in contrasts)


_V, _K, _QK, _KV, _QV = map(_both, ("cat_v", "cat_k", "cat_qk", "cat_kv", "cat_qv"))
_W4, _W128 = map(_both, ("cat_w4", "cat_w128"))
_SSM, _EXPONENTIAL = map(_both, ("cat_ssm", "cat_exp"))
_VANILLA, _DECAY, _AVERAGE, _LAS, _FILTER, _DECAY_FILTER = map(
    _both, ("las_vanilla", "las_l", "las_s", "las", "las_filter", "las_l_filter")
)
_MH_V, _MAPS, _MAPS_V = map(_both, ("mh_cat_v", "mh_maps", "mh_maps_v"))

# Convolved streams -> the model without a norm, and the names of those with one.
_NORMED = {"cat_k": "cat_k", "cat_qk": "cat_qk", "cat_rope": "cat"}
_RANKS = ("cat_qk_r2", "cat_qk_r4")

QUESTIONS = {
    "variants": Question(
        "which convolution, with and without positions?",
        (
            *((model, "pythia") for model in ("nope", *_CAT, *_MULTIHEAD)),
            *((model, "pythia") for model in ("cat_v", "cat_k", "canon_b")),
            ("cat_rope", "cat_v"),
            ("cat_rope", "cat_k"),
            ("mh_cat_rope", "cat_rope"),
            ("mh_cat_nope", "cat_nope"),
            ("canon_b", "cat_rope"),
        ),
        beyond=(NONE,),
    ),
    "streams": Question(
        "which of q, k and v needs the filter, with and without positions?",
        _pairs(
            *((model, _PLAIN) for model in (_V, _K, _QK, _KV, _QV, _CAT)),
            # What q and k add to v, and each stream to the other two.
            *((_CAT, model) for model in (_V, _QK, _KV, _QV)),
        ),
        factors=(1, 2, 4),  # both texts have 180 documents that long
        interactions=_interactions((_V, _PLAIN), (_QK, _PLAIN)),
        beyond=(NONE,),
        scaled=False,
    ),
    "maps": Question(
        "do filters that mix attention maps differ from those that mix embeddings?",
        _pairs(
            *((model, _PLAIN) for model in (_MULTIHEAD, _MAPS, _MH_V, _MAPS_V)),
            (_MAPS, _MULTIHEAD),
            (_MAPS_V, _MH_V),
            # What filters of q and k add to those of v.
            (_MULTIHEAD, _MH_V),
            (_MAPS, _MAPS_V),
        ),
        factors=(0.5, 1, 2),
        scaled=False,
    ),
    "length": Question(
        "what keeps perplexity at 32 times the training length: positions, windows, streams?",
        (
            *((none, rope) for rope, none in (_PLAIN, _CAT, _MULTIHEAD, _W4, _V)),
            *_pairs((_CAT, _PLAIN), (_MULTIHEAD, _CAT), (_CAT, _W4), (_CAT, _V)),
        ),
        factors=(1, 2, 4, 8, 16, 32),
        interactions=_interactions((_CAT, _PLAIN)),
        beyond=(NONE, YARN),
        growth=True,
    ),
    "canon": Question(
        "do Canon layers differ from CAT, and does either add to the other, in both families?",
        (
            *((model, "pythia") for model in ("cat_rope", "kv_shift", "canon_acd", "canon_abcd")),
            ("canon_abcd", "cat_rope"),
            ("canon_abcd", "canon_acd"),
            ("cat_canon_acd", "cat_rope"),
            ("cat_canon_acd", "canon_acd"),
            ("cat_canon_acd", "canon_abcd"),
            ("cat_kv", "kv_shift"),
            ("tfpp_cat", "tfpp"),
            ("tfpp_canon_acd", "tfpp"),
            ("tfpp_canon_abcd", "tfpp"),
            ("tfpp_canon_abcd", "tfpp_cat"),
            ("tfpp_cat_canon_acd", "tfpp_cat"),
            ("tfpp_cat_canon_acd", "tfpp_canon_acd"),
        ),
    ),
    "qk_norm": Question(
        "does normalising queries and keys change what their convolution gives?",
        (
            ("qk_l2", "pythia"),
            ("qk_rms", "pythia"),
            *((plain, "pythia") for plain in _NORMED),
            *(
                (f"{name}_{norm}", f"qk_{norm}")
                for name in _NORMED.values()
                for norm in ("l2", "rms")
            ),
            *((f"{name}_rms_before", f"{name}_rms") for name in _NORMED.values()),
            ("cat_l1", "cat_rope"),
        ),
        # What a convolution gives with a norm, minus what it gives without.
        interactions=tuple(
            ((f"{name}_{norm}", f"qk_{norm}"), (plain, "pythia"))
            for plain, name in _NORMED.items()
            for norm in ("l2", "rms")
        ),
        attention=True,
    ),
    "rank": Question(
        "what does a kernel of scores gain with its rank, and how far is multi-token attention?",
        (
            *((model, "pythia") for model in ("cat_qk", *_RANKS, "mta_kernel", "mta")),
            *((model, "cat_qk") for model in _RANKS),
            ("mta_kernel", "cat_qk_r4"),
            ("mta", "mta_kernel"),
            # Without positions alone a kernel of rank R is the convolution of scores.
            ("cat_qk_nope", "nope"),
            *((f"{model}_nope", "cat_qk_nope") for model in _RANKS),
            ("mta_kernel_nope", "cat_qk_r4_nope"),
        ),
        factors=(0.5, 1, 2, 4),  # rows of multi-token attention have at most 512 tokens
    ),
    "filters": Question(
        "do filters as long as the text give what 21 taps give, at 8 times the length too?",
        (
            *((none, rope) for rope, none in (_CAT, _SSM, _EXPONENTIAL)),
            *_pairs(
                (_CAT, _PLAIN),
                *((model, other) for model in (_SSM, _EXPONENTIAL) for other in (_PLAIN, _CAT)),
                (_SSM, _EXPONENTIAL),
                # Length and form apart: as many free taps as a row of training.
                (_W128, _CAT),
                (_SSM, _W128),
            ),
        ),
        factors=(1, 2, 4, 8),
        beyond=(NONE, YARN),
    ),
    "las": Question(
        "what do decayed logits and averaged values give, and do learned filters of values more?",
        _pairs(
            *((model, _VANILLA) for model in (_DECAY, _AVERAGE, _LAS, _FILTER, _DECAY_FILTER)),
            *((model, _DECAY) for model in (_LAS, _DECAY_FILTER)),
            (_FILTER, _AVERAGE),
            (_DECAY_FILTER, _LAS),
        ),
        factors=(0.5, 1, 2, 4),
        beyond=(NONE,),
    ),
}
