"""The cross-entropy of cross_entropy_triton.py on a CPU, by cross_entropy.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.ops.runtime.compiler import SHARED, Sources
from cat_lm.ops.runtime.native import Kernel

# By their numbers in cross_entropy.cpp.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# `LossCall` of cross_entropy.cpp; `work` is the number of logits.
KERNEL = Kernel(
    "cross_entropy",
    Sources("cross_entropy", (Path(__file__).with_name("cross_entropy.cpp"), *SHARED)),
    integers=("dtype", "threads", "rows", "vocabulary", "ignored", "wants_gradient"),
    pointers=("logits", "labels", "losses", "workspace"),
    small=1 << 14,
)


def cross_entropy_(logits: Tensor, labels: Tensor, losses: Tensor, wants_gradient: bool) -> None:
    """Compute as `cross_entropy_triton.cross_entropy_`; the logits lie side by side.

    Raises:
        IndexError: a label is outside of the vocabulary.
    """
    rows, vocabulary = logits.shape
    known = (labels == IGNORE_INDEX) | ((labels >= 0) & (labels < vocabulary))
    if not known.all():
        wrong = labels[~known][0].item()
        raise IndexError(f"label {wrong} is not one of the {vocabulary} ids of the vocabulary")
    numbers = {"dtype": DTYPES[logits.dtype], "rows": rows, "vocabulary": vocabulary}
    numbers |= {"ignored": IGNORE_INDEX, "wants_gradient": wants_gradient}
    tensors = {"logits": logits, "labels": labels, "losses": losses}
    KERNEL(tensors, work=logits.numel(), **numbers)
