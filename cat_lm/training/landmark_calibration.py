"""Learns the filters of landmarks for a trained model, whose other weights stay as they are."""

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

ROWS = 4  # windows of a step
QUERIES = 64  # of each window, on which landmarks are taught
LEARNING_RATE = 1e-2  # at the first step; it falls to 0 in a line


def calibrate(
    model: PreTrainedModel,
    learned: Iterable[nn.Parameter],
    data: Path | str,
    tokens: int,
    length: int,
) -> list[float]:
    """Train parameters by the losses that the model's layers add, and by nothing else.

    What layers draw is the same in every call.

    Args:
        model: in fp32; its own parameters get no gradient but those that are learned.
        learned: filters and sharpness, which are trained in place; see
            `cat_lm.ops.landmark.teaching`.
        data: a prepared folder, of whose training split windows are drawn without repetition.
        tokens, length: to read, in whole steps of `ROWS` windows; of a window.

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


def ends_of(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean loss of the first tenth of the steps and of the last one."""
    tenth = max(1, len(losses) // 10)
    return float(np.mean(losses[:tenth])), float(np.mean(losses[-tenth:]))


def _drawn_windows(
    config: PreTrainedConfig, data: Path | str, tokens: int, length: int
) -> tuple[StreamWindows, np.ndarray]:
    """Return the windows, and those of each step by their numbers [steps, ROWS]."""
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
