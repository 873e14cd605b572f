"""Train the filters of landmarks for a trained model; its other weights are frozen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from cat_lm.core.errors import UserError
from cat_lm.data.loader import StreamWindows
from cat_lm.data.opening import open_verified

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ROWS = 4  # windows per step
QUERIES = 64  # queries per window that landmarks are trained on
LEARNING_RATE = 1e-2  # that of the first step; it decays linearly to 0


def calibrate(
    model: PreTrainedModel,
    learned: Iterable[nn.Parameter],
    data: Path | str,
    tokens: int,
    length: int,
) -> list[float]:
    """Train parameters in place by the auxiliary losses of the model's layers only.

    Every call uses the same random numbers.

    Args:
        model: the model in fp32; all parameters but the learned ones are frozen.
        learned: the parameters to train (filters and sharpness); see
            `cat_lm.ops.landmark.teaching`.
        data: a prepared folder; windows of its training split are drawn without repetition.
        tokens: number of tokens to read, in whole steps of `ROWS` windows.
        length: tokens per window.

    Returns:
        The mean of the layers' losses at every step, in nats.
    """
    windows, numbers = _drawn_windows(model.config, data, tokens, length)
    model.requires_grad_(False)
    optimizer = torch.optim.Adam([x.requires_grad_(True) for x in learned], lr=LEARNING_RATE)
    found: list[float] = []
    bar = tqdm(numbers, unit="step", desc="calibrating", disable=None)
    with bar, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for step, rows in enumerate(bar):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / len(numbers))
            batch = windows.read(np.sort(rows), mask_documents=True)
            inputs = {
                name: torch.from_numpy(batch[name]).to(model.device)
                for name in ("input_ids", "document_ids")
            }
            losses: list[torch.Tensor] = []
            model.base_model(**inputs, use_cache=False, auxiliary_losses=losses)
            loss = torch.stack(losses).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def first_and_last_loss(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean losses of the first and of the last tenth of the steps."""
    tenth = max(1, len(losses) // 10)
    return float(np.mean(losses[:tenth])), float(np.mean(losses[-tenth:]))


def _drawn_windows(
    config: PreTrainedConfig, data: Path | str, tokens: int, length: int
) -> tuple[StreamWindows, np.ndarray]:
    """Return the windows, and the window numbers of each step, [steps, ROWS]."""
    corpus = open_verified(data, "train")
    if corpus.vocab_size > config.vocab_size:
        raise UserError(
            f"--calibrate {data}: its tokenizer has {corpus.vocab_size} tokens, the model "
            f"{config.vocab_size}; give data of the model's own tokenizer"
        )
    windows = StreamWindows(corpus, length)
    steps = tokens // (ROWS * length)
    if not 1 <= steps <= windows.num_windows // ROWS:
        raise UserError(
            f"--tokens {tokens}: a step reads {ROWS} windows of {length} tokens, and {data} has "
            f"{windows.num_windows} of them; give {ROWS * length} to "
            f"{windows.num_windows // ROWS * ROWS * length}"
        )
    order = np.random.default_rng(0).permutation(windows.num_windows)
    return windows, order[: steps * ROWS].reshape(steps, ROWS)
