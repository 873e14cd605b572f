"""Which part of LaS attention helps, inside chunks."""

from eval.long_range.grids import long_range_study, with_options

_MODELS = ("alibi", "l", "s", "s-alibi", "las")


def _printed(*numbers: float) -> dict[str, float]:
    """Return a row of the paper's table."""
    return dict(zip(_MODELS, numbers, strict=True))


ENTRY = long_range_study(
    "ablation",
    "which part of LaS helps, inside chunks",
    "ablation",
    pairs=(
        *with_options("chunk={chunk}", ("las", "s"), ("las", "l"), ("l", "alibi")),
        *with_options("chunk={chunk}", ("s-alibi", "s"), ("alibi", "nope")),
        ("l:position=none,chunk={chunk}", "alibi:chunk={chunk}"),
        ("las:position=none,chunk={chunk}", "s-alibi:chunk={chunk}"),
    ),
    source="LaS, Table 4",
    claim="Both the decay and the smoothing help; decay is better than ALiBi.",
    notes="The paper has no plain chunk baseline (here `vanilla:chunk=…`), so that its table "
    "cannot tell a decay that helps from a bias that hurts: decays of up to 1e-3 a token change "
    "logits by less than an eighth in chunks of 128. Its text exchanges the two columns of "
    "differences: those it calls LaS less L are LaS less S. ALiBi stands in place of the absolute "
    "positions that the others have, so that ALiBi less L changes two things: `nope`, and the "
    "decays with `position=none`, are compared with neither.",
    printed={
        "listops": _printed(0.3994, 0.4108, 0.4613, 0.4061, 0.4621),
        "imdb": _printed(0.661, 0.7065, 0.7586, 0.6635, 0.7911),
        "aan": _printed(0.7761, 0.8142, 0.8064, 0.8102, 0.8384),
        "cifar10": _printed(0.4224, 0.5948, 0.6138, 0.5168, 0.6490),
    },
)
