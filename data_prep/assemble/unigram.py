"""What a model that knows only how frequent tokens are would lose: the line to stay below."""

from __future__ import annotations

import numpy as np


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Nats per validation token under the training split's add-one-smoothed unigram model.

    `train` and `validation` count each token of a split: int64 [vocab_size].
    """
    log_probability = np.log(train + 1.0) - np.log(train.sum() + len(train))
    return float(-(validation * log_probability).sum() / validation.sum())
