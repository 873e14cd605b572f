"""A small language model around a mixer: what a mixer's options do on text.

The model of eval/recall/model.py with feed-forward networks, trained on prepared data (see
data_prep) with AdamW, a linear warm-up over a tenth of the steps, a cosine to a tenth of the
learning rate, and gradients clipped at 1; its measure is the loss on the starts of many documents
of the data's validation split. A learning rate is chosen by the split's first documents, which are
not among these.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.core.readers import Versioned
from cat_lm.data.loader import TrainLoader
from cat_lm.data.opening import open_verified
from cat_lm.mixers import make_mixer
from cat_lm.training.schedule import cosine
from eval.lab import cell
from eval.lab.training import own_loss
from eval.recall.model import (
    RecallModel,
    embedding_dropout,
    learned_filters,
    parameters,
)
from eval.recall.train.held_out import HeldOut, check_documents, held_out, over_documents
from eval.recall.train.records import FilterRecord, delays

CLIP = 1.0
FLOOR = 0.1  # of the learning rate, where the cosine ends


@dataclass(frozen=True)
class LanguageCell(cell.Cell):
    """All that decides a language model's result.

    Attributes:
        data: folder written by data_prep.prepare.
        fingerprint: of these data, so that other data make another cell.
        batch_size: rows of seq_len tokens.
        documents: of the validation split that are scored.
        choosing_documents: the first ones of that split, by which a rate is chosen and which are
            not scored; 0: none, and all of the split may be scored.
        document_tokens: that are predicted in each at most, from its start.
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

    @property
    def all_steps(self) -> int:
        return self.steps

    @property
    def tested_rows(self) -> int:
        """Rows of seq_len tokens that are scored at most."""
        documents = self.documents + self.choosing_documents
        return documents * -(-self.document_tokens // self.seq_len)

    def resolved(self) -> dict[str, Any]:
        """The mixer with all options, defaults too, and the frame's; plain values."""
        mixer = make_mixer(self.mixer)
        return {"mixer": mixer.describe(), "embedding_dropout": embedding_dropout(mixer, None)}

    def timed(self, steps: int = 1) -> LanguageCell:
        """The same kind of step, so many times; equal for cells whose steps cost the same."""
        few = {"documents": 1, "choosing_documents": 0, "document_tokens": 1}
        return dataclasses.replace(self, lr=1e-9, seed=0, steps=steps, **few)

    def seconds(self, size: int, device: str) -> tuple[float, float]:
        from eval.recall.train import cost

        return cost.language_seconds(self, device)

    def derived(self, record: dict[str, Any]) -> dict[str, Any]:
        return {"delays": delays(record["filters"])}

    def score(self, record: dict[str, Any]) -> float:
        """Return what a rate is chosen by: the loss on documents that are not reported."""
        return -record["validation"]["loss"]

    def summary(self, record: dict[str, Any]) -> str:
        return f"accuracy {record['accuracy']:.3f}"

    def run(self, device: str, *, quiet: bool = False) -> dict[str, Any]:
        """Trains and scores; `accuracy` is that of the next token, `loss` in nats a token.

        `validation` has the loss on the documents that choose a rate, if there are any.

        Raises:
            UserError: data or options that do not fit.
        """
        started = time.monotonic()
        corpus = open_verified(self.data, "train")
        if corpus.fingerprint != self.fingerprint:
            raise UserError(f"--data {self.data}: changed since the command began")
        loader = TrainLoader(corpus, self.seq_len, self.batch_size, self.seed)
        texts = self._held_out()
        torch.manual_seed(self.seed)
        mixer = make_mixer(self.mixer)
        model = RecallModel(
            mixer,
            vocabulary=corpus.vocab_size,
            d_model=self.d_model,
            positions=self.seq_len,
            layers=self.layers,
            feed_forward=True,
        ).to(device)
        history = self._train(model, loader, device)
        trained = time.monotonic()
        found, *others = (self._score(model, text, device) for text in texts)
        for of_choosing in others:
            found["validation"] = {key: of_choosing[key] for key in ("loss", "tokens_scored")}
        return {
            "cell": self.key(),
            **self.resolved(),
            "parameters": parameters(model),
            **found,
            "history": history,
            "steps": self.steps,
            "filters": learned_filters(model),
            "seconds": {
                "training": round(trained - started, 2),
                "testing": round(time.monotonic() - trained, 2),
            },
        }

    def _held_out(self) -> list[HeldOut]:
        """Read the text that is scored, and where there is such, that by which a rate is chosen."""
        corpus, first = open_verified(self.data, "validation"), self.choosing_documents
        check_documents(corpus.name, corpus.num_documents, self.documents, first)
        parts = [(self.documents, range(first, corpus.num_documents)), (first, range(first))]
        return [
            held_out(corpus, count, self.document_tokens, self.seq_len, among)
            for count, among in parts
            if count
        ]

    def _train(
        self, model: RecallModel, loader: TrainLoader, device: str
    ) -> list[dict[str, float]]:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=self.weight_decay
        )
        model.train()
        history, every = [], max(1, self.steps // 20)
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * _rate(step + 1, self.steps)
            tokens, labels = _tensors(loader.batch(step), device)
            own: list[Tensor] = []
            loss = F.cross_entropy(_logits(model, tokens, own), labels)
            optimizer.zero_grad(set_to_none=True)
            (loss + own_loss(own)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if (step + 1) % every == 0:
                history.append({"step": step + 1, "loss": float(loss.detach())})
        return history

    @torch.no_grad()
    def _score(self, model: RecallModel, scored: HeldOut, device: str) -> dict[str, Any]:
        model.eval()
        count = int(scored.documents[-1]) + 1
        nats, tokens, right = torch.zeros(3, count, dtype=torch.float64)
        for start in range(0, len(scored.inputs), self.batch_size):
            rows = slice(start, start + self.batch_size)
            batch = {"input_ids": scored.inputs[rows], "labels": scored.labels[rows]}
            inputs, labels = _tensors(batch, device)
            logits = _logits(model, inputs)
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


def _tensors(batch: dict[str, Any], device: str) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and labels [B·T]."""
    tokens, labels = (torch.from_numpy(batch[name]) for name in ("input_ids", "labels"))
    return tokens.to(device), labels.to(device).flatten()


def _logits(model: RecallModel, tokens: Tensor, losses: list[Tensor] | None = None) -> Tensor:
    """[B·T, vocabulary]."""
    return model(tokens, torch.ones_like(tokens, dtype=torch.bool), losses)


def _rate(step: int, steps: int) -> float:
    """The share of the learning rate at update `step` of `steps`."""
    warmup = max(1, steps // 10)
    if step <= warmup:
        return step / warmup
    return FLOOR + (1 - FLOOR) * cosine(step - warmup, steps - warmup)
