"""The text that small language models are scored on: the starts of many documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cat_lm.data.corpus import TokenCorpus
from cat_lm.errors import UserError
from cat_lm.labels import IGNORE_INDEX
from eval.common.comparison import ratio_error


class HeldOut(NamedTuple):
    """Rows of T tokens, each of one document.

    Attributes:
        inputs, labels: int64 [R, T]; labels −100 where a document has ended.
        documents: [R], the number of a row's document among those scored.
    """

    inputs: np.ndarray
    labels: np.ndarray
    documents: np.ndarray


def held_out(corpus: TokenCorpus, count: int, tokens: int, length: int) -> HeldOut:
    """Read the first tokens of `count` documents that stand evenly over a split.

    Every token after a document's first, its EOD among them where that is near enough, is predicted
    once, from the tokens before it in its row: a row begins where the one before it ended.

    Args:
        tokens: to predict in a document at most.
        length: T.

    Raises:
        UserError: the split has fewer documents, or ids that the vocabulary does not have.
    """
    check_documents(corpus.name, corpus.num_documents, count)
    rows: list[tuple[int, np.ndarray]] = []
    for number in range(count):
        start, stop = corpus.document((2 * number + 1) * corpus.num_documents // (2 * count))
        read = corpus.tokens(start, min(stop, start + tokens + 1))
        pieces = range(0, max(1, len(read) - 1), length)
        rows += [(number, read[first : first + length + 1]) for first in pieces]
    inputs = np.full((len(rows), length), corpus.eod_id, dtype=np.int64)
    labels = np.full((len(rows), length), IGNORE_INDEX, dtype=np.int64)
    for row, (_, read) in enumerate(rows):
        inputs[row, : min(length, len(read))] = read[:length]
        labels[row, : len(read) - 1] = read[1:]
    return HeldOut(inputs, labels, np.array([number for number, _ in rows]))


def check_documents(name: str, there: int, count: int) -> None:
    """Check that a validation split has documents enough. Raises UserError."""
    if there < count:
        raise UserError(
            f"{name}: its validation split has {there:,} documents, {count:,} are to be scored; "
            "prepare it with more held out (--validation-fraction, --validation-path)"
        )


def over_documents(nats: Sequence[float], tokens: Sequence[int]) -> dict[str, Any]:
    """Give the mean loss a token of documents' sums, and its standard error over documents.

    Returns:
        `loss`, `standard_error` (none for one document), `tokens_scored`.
    """
    error = ratio_error(nats, tokens) if len(tokens) > 1 else None
    total = sum(tokens)
    return {"loss": sum(nats) / total, "standard_error": error, "tokens_scored": total}
