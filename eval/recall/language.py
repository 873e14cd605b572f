"""A small language model around a mixer: what a mixer's options do on text.

The model of eval/recall/model.py with feed-forward networks, trained on prepared data (see
data_prep) with AdamW, a linear warm-up over a tenth of the steps, a cosine to a tenth of the
learning rate, and gradients clipped at 1; its measure is the loss on the starts of many documents
of the data's validation split. A learning rate is chosen by the split's first documents, which are
not among these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.core.readers import Versioned
from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.loader import TrainLoader
from cat_lm.data.opening import open_verified
from cat_lm.mixers import make_mixer
from cat_lm.training.schedule import cosine
from eval.lab import training
from eval.lab.cell import Step
from eval.lab.contrasts import ratio_error
from eval.recall.cell import FilterCell, FilterRecord, dropout_of
from eval.recall.model import RecallModel, learned_filters

FLOOR = 0.1  # final learning rate relative to the peak
_POINTS = 20  # the fewest points of a run's history


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
        tokens: the most tokens to predict in a document.
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


@dataclass(frozen=True)
class LanguageCell(FilterCell):
    """All that decides a language model's result.

    Attributes:
        data: folder written by data_prep.prepare.
        fingerprint: the fingerprint of these data, so that other data make another cell.
        batch_size: rows of seq_len tokens.
        documents: number of documents of the validation split that are scored.
        choosing_documents: the first ones of that split, by which a rate is chosen and which are
            not scored; 0: none, and all of the split may be scored.
        document_tokens: the most tokens to predict in each, from its start.
    """

    data: str
    fingerprint: str
    mixer: str
    d_model: int
    seq_len: int
    layers: int
    steps: int
    lr: float
    seed: int = 0
    batch_size: int = 16
    weight_decay: float = 0.1
    documents: int = 200
    document_tokens: int = 256
    task: str = "language"
    choosing_documents: int = 0
    shape: ClassVar[type[Versioned]] = FilterRecord

    trainer: ClassVar[str] = __name__

    def plan(self) -> Iterator[Step]:
        every = max(1, self.steps // _POINTS)
        for step in range(1, self.steps + 1):
            yield Step(step, 1, slice(0, self.batch_size), step % every == 0, False)

    @property
    def tested_rows(self) -> int:
        """Return the largest number of rows of seq_len tokens that are scored."""
        documents = self.documents + self.choosing_documents
        return documents * -(-self.document_tokens // self.seq_len)

    def resolved(self) -> dict[str, Any]:
        """Return the mixer with all options and the model's options, including defaults."""
        mixer = make_mixer(self.mixer)
        return {"mixer": mixer.describe(), "embedding_dropout": dropout_of(mixer)}

    def timed(self) -> LanguageCell:
        few = {"documents": 1, "choosing_documents": 0, "document_tokens": 1}
        return dataclasses.replace(self, lr=1e-9, seed=0, steps=1, **few)

    def score(self, record: dict[str, Any]) -> float:
        """Return minus the loss on unreported documents, to tune the learning rate."""
        return -record["validation"]["loss"]


class Trial(training.Trial):
    """The training and scoring of a language model.

    `accuracy` is that of the next token, `loss` in nats a token; `validation` has the loss on the
    documents that choose a rate, if there are any.
    """

    clip = 1.0
    optimizer_options: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.95)}
    keeps_best = False

    def __init__(self, cell: LanguageCell, device: str) -> None:
        self.corpus = open_verified(cell.data, "train")
        if self.corpus.fingerprint != cell.fingerprint:
            raise UserError(f"--data {cell.data}: changed since the command began")
        self.loader = TrainLoader(self.corpus, cell.seq_len, cell.batch_size, cell.seed)
        super().__init__(cell, device)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: _rate(done + 1, cell.steps)
        )

    def build(self) -> RecallModel:
        cell = self.cell
        return RecallModel(
            make_mixer(cell.mixer),
            vocabulary=self.corpus.vocab_size,
            d_model=cell.d_model,
            positions=cell.seq_len,
            layers=cell.layers,
            feed_forward=True,
        )

    def load(self) -> None:
        """Read the text that is scored, and where there is such, that by which a rate is chosen."""
        cell, corpus = self.cell, open_verified(self.cell.data, "validation")
        first = cell.choosing_documents
        check_documents(corpus.name, corpus.num_documents, cell.documents, first)
        parts = [(cell.documents, range(first, corpus.num_documents)), (first, range(first))]
        self.texts = [
            held_out(corpus, count, cell.document_tokens, cell.seq_len, among)
            for count, among in parts
            if count
        ]

    def batch(self, step: Step) -> tuple[Tensor, Tensor]:
        return self._tensors(self.loader.batch(step.number - 1))

    def imitate(self, rows: int) -> tuple[Tensor, Tensor]:
        return self._tensors({k: v[:rows] for k, v in self.loader.batch(0).items()})

    def loss(self, batch: tuple[Tensor, Tensor], own: list[Tensor]) -> Tensor:
        tokens, labels = batch
        return F.cross_entropy(self._logits(tokens, own), labels)

    def validate(self) -> dict[str, float]:
        return {}

    def advance(self, step: Step) -> None:
        self.schedule.step()

    def test(self) -> dict[str, Any]:
        found, *others = map(self._score, self.texts)
        validation = {key: of[key] for of in others for key in ("loss", "tokens_scored")}
        filters = learned_filters(self.model)
        return found | ({"validation": validation} if others else {}) | {"filters": filters}

    @torch.no_grad()
    def _score(self, scored: HeldOut) -> dict[str, Any]:
        self.model.eval()
        count = int(scored.documents[-1]) + 1
        nats, tokens, right = torch.zeros(3, count, dtype=torch.float64)
        for start in range(0, len(scored.inputs), self.cell.batch_size):
            rows = slice(start, start + self.cell.batch_size)
            batch = {"input_ids": scored.inputs[rows], "labels": scored.labels[rows]}
            inputs, labels = self._tensors(batch)
            logits = self._logits(inputs)
            losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
            owners = torch.from_numpy(scored.documents[rows])
            for sums, values in (
                (nats, losses),
                (tokens, labels != IGNORE_INDEX),
                (right, logits.argmax(dim=-1) == labels),
            ):
                sums.index_add_(0, owners, values.view(len(owners), -1).sum(dim=1).cpu().double())
        found = over_documents(nats.tolist(), tokens.long().tolist())
        found["accuracy"] = float(right.sum()) / found["tokens_scored"]
        by_document = {"nats": [round(value, 4) for value in nats.tolist()]}
        return {**found, "documents": {**by_document, "tokens": tokens.long().tolist()}}

    def _tensors(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return tokens [B, T] and labels [B·T]."""
        tokens, labels = (torch.from_numpy(batch[name]) for name in ("input_ids", "labels"))
        return tokens.to(self.device), labels.to(self.device).flatten()

    def _logits(self, tokens: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        """Return logits [B·T, vocabulary]."""
        return self.model(tokens, torch.ones_like(tokens, dtype=torch.bool), losses)


def _rate(step: int, steps: int) -> float:
    """Return the fraction of the learning rate at update `step` of `steps`."""
    warmup = max(1, steps // 10)
    if step <= warmup:
        return step / warmup
    return FLOOR + (1 - FLOOR) * cosine(step - warmup, steps - warmup)
