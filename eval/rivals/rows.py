"""The rows of the comparison, what is fixed for all of them, and its command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from cat_lm.config import RunConfig
from cat_lm.core.cli import Parser
from cat_lm.core.errors import UserError
from eval.small_study.arguments import add_options, chosen_models, common_values, from_root
from eval.small_study.plan import ROOT, SIZES, Job, Study
from eval.small_study.questions import YARN, Question

BASE = "tfpp"  # whose loss panel (c) is taken from
REFERENCE = "pythia"  # whose number of parameters all have
TOLERANCE = 0.02  # of that number
SEEDS = (0, 1, 2, 3, 4, 5)  # words are read at six: adding more after a look is no test
TOKENS = {"cpu": 512_000, "gpu": 10_485_760}  # of a run that is reported
DOCUMENTS = {"cpu": 100, "gpu": 80}  # held out, each scored at all lengths
RATES = {"cpu": (1e-3, 3e-3, 1e-2), "gpu": (3e-4, 1e-3, 3e-3)}
_RIVALS = ("tfpp_canon_abcd", "mamba", "mamba2", "gla", "delta_net", "gated_deltanet")
QUESTION = Question(
    "how do CAT and its rivals compare at equal parameters, tokens and care?",
    (
        # What filters give to the same model without them, and the two kinds of transformer.
        *((model, "pythia") for model in ("cat_rope", "mh_cat_rope", "kv_shift", "tfpp")),
        ("tfpp_cat", "tfpp"),
        ("cat_rope", "kv_shift"),
        # The rivals beside the better transformer, without and with CAT's filters.
        *((model, "tfpp") for model in _RIVALS),
        *(("tfpp_cat", model) for model in _RIVALS),
    ),
    beyond=(YARN,),
)


@dataclasses.dataclass(frozen=True)
class Comparison(Study):
    """The study of all rows, with recall beside what every study measures."""

    question: str = "rivals"

    @property
    def asked(self) -> Question:
        """The one question that there is."""
        return QUESTION

    @property
    def recall_length(self) -> int:
        """The window in which tokens are recalled, in tokens.

        It is the one that is trained: in a longer one attention would be judged by positions that
        it has never seen.
        """
        return self.trained_length

    def comparisons(self) -> int:
        """Count those of losses, and those of recall."""
        return super().comparisons() + len(self.contrasts)

    def scored_tokens(self) -> int:
        """Count what is read of the text for recall, too: windows overlap by half."""
        return super().scored_tokens() + 2 * self.sweep_tokens()

    def settings(self, fingerprints: Mapping[str, str]) -> dict[str, Any]:
        """Gather what decides the numbers."""
        return super().settings(fingerprints) | {"recall_length": self.recall_length}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval.rivals",
        description="Trains CAT, Canon layers, Mamba, GLA and the DeltaNets at equal parameters "
        "and tokens, each at the best of its learning rates, and compares their losses, their "
        "lengths, what they recall of real text, and what they cost. A stopped comparison goes on "
        "where it was.",
    )
    words = "; ".join(f"{size}: {','.join(map('{:g}'.format, r))}" for size, r in RATES.items())
    add_options(
        parser,
        cpu="hours on one core",
        out="runs/rivals-SIZE",
        models="some rows",
        rates=words,
        tokens="; ".join(f"{size}: {count:,}" for size, count in TOKENS.items()),
        documents="; ".join(f"{size}: {count}" for size, count in DOCUMENTS.items()),
        seeds=SEEDS,
    )
    return parser.parse_args(argv)


def comparison_of(arguments: argparse.Namespace) -> Comparison:
    """The comparison that the command line asks for. Raises UserError where it makes no sense."""
    size = SIZES[arguments.size]
    arguments.rates = arguments.rates or RATES[size.name]
    # Always said, so that runs that choose rates have the same share of warm-up.
    arguments.tokens = arguments.tokens or TOKENS[size.name]
    return Comparison(
        size=dataclasses.replace(size, documents=DOCUMENTS[size.name]),
        models=chosen_models(arguments, QUESTION, "the comparison"),
        out=from_root(arguments.out or ROOT / f"runs/rivals-{size.name}"),
        **common_values(arguments),
    )


def check_rows(study: Comparison, vocabulary: int) -> None:
    """Check that all rows have the same size and read the same tokens. Raises UserError."""
    from cat_lm.training.estimate import num_parameters

    reference = study.config(Job(REFERENCE, 0, study.out))
    rows = {model: study.config(Job(model, 0, study.out)) for model in study.models}
    sizes = {model: num_parameters(config, vocabulary) for model, config in rows.items()}
    check_sizes(sizes, num_parameters(reference, vocabulary), vocabulary)
    for model, config in rows.items():
        if _read(config) != _read(reference):
            raise UserError(
                f"configs/study/{model}.yaml: reads {_read(config)}, {REFERENCE} "
                f"{_read(reference)}; rows are compared at equal tokens"
            )


def check_sizes(parameters: Mapping[str, int], reference: int, vocabulary: int) -> None:
    """Check that no row has more or fewer parameters than `TOLERANCE` allows.

    Args:
        parameters: by row.
        reference: the number that all should have.
        vocabulary: of the data, that the numbers are with.

    Raises:
        UserError: a row has not.
    """
    for model, count in parameters.items():
        off = count / reference - 1
        if abs(off) > TOLERANCE:
            raise UserError(
                f"configs/study/{model}.yaml: has {count:,} parameters with a vocabulary of "
                f"{vocabulary:,}, {off:+.1%} of {REFERENCE}'s {reference:,}; rows may differ by "
                f"{TOLERANCE:.0%}: leave it out of --models, or take data of another vocabulary"
            )


def _read(config: RunConfig) -> str:
    steps = f"{config.total_steps:,} steps of {config.train.global_batch_size} rows"
    return f"{steps} of {config.data.context_length} tokens"
