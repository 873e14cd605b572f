"""Learns the filters of landmarks for a trained model, whose other weights stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from cat_lm.data.opening import open_verified
from cat_lm.data.windows import StreamWindows
from cat_lm.errors import UserError
from cat_lm.model.landmark import LandmarkCore, train_landmarks
from cat_lm.pretrained import choose_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ROWS = 4  # windows of a step
QUERIES = 64  # of each window, on which landmarks are taught
LEARNING_RATE = 1e-2  # at the first step; it falls to 0 in a line


def drawn_windows(
    config: PreTrainedConfig, data: Path | str, tokens: int, length: int
) -> tuple[StreamWindows, np.ndarray]:
    """Draw windows of a prepared folder's training split without repetition.

    Args:
        config: of the model that reads them.
        tokens: how many are read, in whole steps of `ROWS` windows.
        length: of a window.

    Returns:
        The windows, and those of each step by their numbers [steps, ROWS].

    Raises:
        UserError: the data are of a larger vocabulary than the model's, or fewer than asked for.
    """
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


def calibrate(
    model: PreTrainedModel, data: Path | str, tokens: int, length: int
) -> tuple[float, float]:
    """Train filters and sharpness by the guided loss; see `cat_lm.ops.landmark.teaching`.

    Args:
        model: in fp32, with landmark attention whose filters are learned; it is trained in place.
        data: a prepared folder, of whose training split windows are drawn without repetition.
        tokens: how many are read, in whole steps of `ROWS` windows.
        length: of a window.

    Returns:
        The mean loss of the first tenth of the steps and of the last one, in nats.

    Raises:
        UserError: the data are of a larger vocabulary than the model's, or fewer than asked for.
    """
    windows, numbers = drawn_windows(model.config, data, tokens, length)
    losses = _train(model, windows, numbers)
    tenth = max(1, len(losses) // 10)
    return float(np.mean(losses[:tenth])), float(np.mean(losses[-tenth:]))


def _train(model: PreTrainedModel, windows: StreamWindows, numbers: np.ndarray) -> list[float]:
    train_landmarks(model.to(choose_device()).eval(), "guided", QUERIES)
    model.requires_grad_(False)
    learned = []
    for module in model.modules():
        if isinstance(module, LandmarkCore):
            module.train()  # alone: dropout stays off
            learned += list(module.requires_grad_(True).parameters())
    found = teach(model, windows, numbers, [{"params": learned, "lr": LEARNING_RATE}])
    train_landmarks(model.cpu().eval(), "hard", 0)
    return found


def teach(
    model: PreTrainedModel,
    windows: StreamWindows,
    numbers: np.ndarray,
    groups: Sequence[dict[str, Any]],
) -> list[float]:
    """Train parameters by the losses that the model's layers add, and by nothing else.

    What layers draw is the same in every call.

    Args:
        numbers: of the windows of each step, [steps, rows].
        groups: for Adam, each with `lr`, the rate of the first step; rates fall to 0 in a line.

    Returns:
        The mean of the layers' losses at every step.
    """
    optimizer = torch.optim.Adam(groups)
    first = [group["lr"] for group in optimizer.param_groups]
    found: list[float] = []
    bar = tqdm(numbers, unit="step", desc="calibrating", disable=None)
    with bar, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for step, rows in enumerate(bar):
            for group, rate in zip(optimizer.param_groups, first, strict=True):
                group["lr"] = rate * (1 - step / len(numbers))
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
