"""Selective copying: repeat, in order, the signal tokens that stand among noise (Definition 4).

    autoregressive   X ⊥ s1 s2 … s(M−1)    labels s1 … sM, from ⊥ on
    oneshot          X ⊥ ⊥ … ⊥             labels s1 … sM at the M markers

Autoregressive is the paper's; one-shot is the form of S4's and Mamba's code, where markers and not
the answers are fed. X has M signal tokens at sorted random positions and noise elsewhere. Token
ids: noise 0..n−1, signal n..n+S−1, ⊥ the last.

The paper copies 16 tokens and leaves length, vocabulary and uniqueness open; its Theorem 4 is
about unique tokens, which needs S ≥ M. `signals=14,unique=false` with one noise token is the
vocabulary of 16 of Mamba's experiment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.mixers.parts.base import check_choice, check_counts
from eval.recall.tasks.base import Task, draw_distinct, require

MODES = ("autoregressive", "oneshot")


@dataclass(frozen=True)
class SelectiveCopying(Task):
    """Options of selective copying.

    Attributes:
        seq_len: T = tokens of X plus `copies`: all that a model reads.
        copies: M, tokens to copy.
        signals: S, different signal tokens.
        noises: different noise tokens.
        unique: whether the M tokens of a row are distinct.
        mode: autoregressive or oneshot.
    """

    copies: int = 16
    signals: int = 16
    noises: int = 1
    unique: bool = True
    mode: str = "autoregressive"
    recalls: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice(self, "mode", MODES)
        check_counts(self, "copies", "signals", "noises")
        m = self.copies
        require(
            2 * m <= self.seq_len,
            f"copies={m}: {2 * m} tokens are needed, seq_len is {self.seq_len}",
        )
        require(
            not self.unique or self.signals >= m,
            f"unique copies={m} need as many signals, not {self.signals} (or unique=false)",
        )

    @property
    def vocabulary(self) -> int:
        return self.noises + self.signals + 1

    @property
    def chance(self) -> float:
        if self.unique and self.mode == "autoregressive" and self.copies > 1:
            # The token before, which is at hand, is not the answer.
            later = (self.copies - 1) / (self.signals - 1)
            return (1 / self.signals + later) / self.copies
        return 1 / self.signals

    @property
    def runs_free(self) -> bool:
        return self.mode == "autoregressive"

    def rows(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        m, body = self.copies, self.seq_len - self.copies
        if self.unique:
            signal = draw_distinct(rng, count, m, 0, self.signals) + self.noises
        else:
            signal = rng.integers(0, self.signals, (count, m)) + self.noises
        positions = np.sort(draw_distinct(rng, count, m, 0, body), axis=1)
        # All inputs begin as ⊥.
        inputs = np.full((count, self.seq_len), self.vocabulary - 1, dtype=np.int64)
        inputs[:, :body] = rng.integers(0, self.noises, (count, body))
        np.put_along_axis(inputs[:, :body], positions, signal, axis=1)
        if self.mode == "autoregressive":
            inputs[:, body + 1 :] = signal[:, :-1]
        labels = np.full(inputs.shape, IGNORE_INDEX, dtype=np.int64)
        labels[:, body:] = signal
        return inputs, labels
