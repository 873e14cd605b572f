"""The text that small language models are scored on: the starts of many documents.

A split's first documents may be kept for choosing learning rates; they are then not among those
that are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data.corpus import TokenCorpus
from eval.lab.contrasts import ratio_error


class HeldOut(NamedTuple):
    """Rows of T tokens, each of one document.

    Attributes:
        inputs, labels: int64 [R, T]; labels −100 where a document has ended.
        documents: [R], the number of a row's document among those scored.
    """

    inputs: np.ndarray
    labels: np.ndarray
    documents: np.ndarray


def held_out(
    corpus: TokenCorpus, count: int, tokens: int, length: int, among: range | None = None
) -> HeldOut:
    """Read the first tokens of `count` documents that stand evenly over a split, or `among` some.

    Every token after a document's first, its EOD among them where that is near enough, is predicted
    once, from the tokens before it in its row: a row begins where the one before it ended.

    Args:
        tokens: to predict in a document at most.
        length: T.
        among: numbers of documents, `count` or more; none: all of the split.

    Raises:
        UserError: the split has fewer documents, ids that the vocabulary does not have, or in the
            documents nothing to predict.
    """
    if among is None:
        check_documents(corpus.name, corpus.num_documents, count)
        among = range(corpus.num_documents)
    rows: list[tuple[int, np.ndarray]] = []
    for number in range(count):
        start, stop = corpus.document(among[(2 * number + 1) * len(among) // (2 * count)])
        read = corpus.tokens(start, min(stop, start + tokens + 1))
        pieces = range(0, max(1, len(read) - 1), length)
        rows += [(number, read[first : first + length + 1]) for first in pieces]
    inputs = np.full((len(rows), length), corpus.eod_id, dtype=np.int64)
    labels = np.full((len(rows), length), IGNORE_INDEX, dtype=np.int64)
    for row, (_, read) in enumerate(rows):
        inputs[row, : min(length, len(read))] = read[:length]
        labels[row, : len(read) - 1] = read[1:]
    if (labels == IGNORE_INDEX).all():
        raise UserError(
            f"{corpus.name}: {count:,} documents of its validation split have no token to predict; "
            "prepare it with longer ones held out"
        )
    return HeldOut(inputs, labels, np.array([number for number, _ in rows]))


def check_documents(name: str, there: int, count: int, choosing: int = 0) -> None:
    """Check that a validation split has documents enough, to score and to choose by.

    Raises UserError.
    """
    if there < count + choosing:
        beside = f" and {choosing:,} others choose rates" if choosing else ""
        raise UserError(
            f"{name}: its validation split has {there:,} documents, {count:,} are to be scored"
            f"{beside}; prepare it with more held out (--validation-fraction, --validation-path)"
        )


def over_documents(nats: Sequence[float], tokens: Sequence[int]) -> dict[str, Any]:
    """Return the mean loss a token of documents' sums, and its standard error over documents.

    Returns:
        `loss`, `standard_error` (none for one document), `tokens_scored`.
    """
    error = ratio_error(nats, tokens) if len(tokens) > 1 else None
    total = sum(tokens)
    return {"loss": sum(nats) / total, "standard_error": error, "tokens_scored": total}
