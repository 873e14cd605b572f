"""How well a model predicts a stream of tokens: the one loop behind every perplexity here.

Protocol. The stream is cut into windows of T inputs that do not overlap; window i reads tokens
[iT, (i+1)T) and predicts tokens [iT+1, (i+1)T+1). So every token but the stream's first is scored
exactly once, at every T the same ones, and a token sees at most T tokens before it. The last
window may be shorter; nothing is padded.

Memory is linear in T: the head's logits are made for a few rows at a time and reduced to one
number per token, so [T, vocabulary] in fp32 never exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cat_lm.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LOGIT_ELEMENTS = 2**23  # fp32 logits alive at once: 32 MiB, which fits a CPU's caches best


@dataclass(frozen=True)
class Score:
    """Negative log-likelihood of a token stream.

    Attributes:
        nll: sum over the scored tokens, in nats.
        tokens: number of tokens scored.
        bytes: UTF-8 bytes of the text that those tokens spell.
        standard_error: of `loss`, in nats per token, over `groups`; nan for a single group.
        groups: number of documents or windows that the standard error is taken over.
        group_kind: `documents` or `windows`.
    """

    nll: float
    tokens: int
    bytes: int
    standard_error: float
    groups: int
    group_kind: str

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats per token); inf where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte, which does not depend on the tokenizer."""
        return self.nll / math.log(2) / self.bytes


def score_tokens(
    model: PreTrainedModel,
    tokens: np.ndarray,
    context_length: int,
    *,
    num_bytes: int,
    eod_id: int | None = None,
    batch_tokens: int = 8192,
    progress: Callable[[int], object] | None = None,
) -> Score:
    """Scores `tokens[1:]` at windows of `context_length` and sums up (see `token_nlls`).

    Args:
        num_bytes: UTF-8 bytes of the text of `tokens[1:]`.
        eod_id: where given and two or more documents are scored, the standard error is taken over
            documents; otherwise over windows.
    """
    nlls = token_nlls(model, tokens, context_length, batch_tokens=batch_tokens, progress=progress)
    groups, kind = _groups(tokens, context_length, eod_id)
    error, count = standard_error(nlls, groups)
    return Score(float(nlls.sum(dtype=np.float64)), len(nlls), num_bytes, error, count, kind)


def token_nlls(
    model: PreTrainedModel,
    tokens: np.ndarray,
    context_length: int,
    *,
    batch_tokens: int = 8192,
    progress: Callable[[int], object] | None = None,
) -> np.ndarray:
    """The negative log-likelihood of each of `tokens[1:]`, in nats: float32 [len(tokens) - 1].

    Args:
        model: a causal language model whose logits are its output embedding applied to its
            backbone's last hidden state; this is checked.
        tokens: int64 [N]; the first is context only.
        context_length: T, inputs per window.
        batch_tokens: windows are batched up to this many tokens (at least one window).
        progress: called with the number of tokens scored since the last call.

    Raises:
        UserError: fewer than T+1 tokens, a token outside the vocabulary, logits that cannot be
            made in chunks, or a window that does not fit into memory.
    """
    import torch

    if len(tokens) <= context_length:
        raise UserError(
            f"length {context_length}: the text has {len(tokens)} tokens, "
            f"{context_length + 1} are needed"
        )
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if tokens.max() >= vocabulary:
        raise UserError(
            f"token {tokens.max()}: outside the model's vocabulary of {vocabulary}; "
            "the tokens were made with another tokenizer"
        )
    stream = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64))
    nlls = torch.empty(len(tokens) - 1, dtype=torch.float32)
    with torch.inference_mode():
        _require_linear_head(model, stream[: min(len(stream), 9)])
        for start, stop, rows in _batches(len(nlls), context_length, batch_tokens):
            inputs = stream[start:stop].view(rows, -1).to(model.device)
            targets = stream[start + 1 : stop + 1].to(model.device)
            nlls[start:stop] = _window_nlls(model, inputs, targets).cpu()
            if progress:
                progress(stop - start)
    return nlls.numpy()


def standard_error(nlls: np.ndarray, groups: np.ndarray) -> tuple[float, int]:
    """The standard error of the mean over tokens when tokens of one group hang together.

    The mean is a ratio of sums over G groups, m = sum s_g / sum n_g; its linearised standard
    error is sqrt(G / (G-1) * sum (s_g - m n_g)^2) / sum n_g.

    Args:
        nlls: [N] nats.
        groups: [N] the group of each token, as integers.

    Returns:
        The standard error in nats per token (nan for one group), and G.
    """
    _, index = np.unique(groups, return_inverse=True)
    counts = np.bincount(index)
    sums = np.bincount(index, weights=nlls)
    total = len(counts)
    if total < 2:
        return math.nan, total
    residuals = sums - sums.sum() / counts.sum() * counts
    return math.sqrt(total / (total - 1) * (residuals**2).sum()) / counts.sum(), total


def _batches(count: int, length: int, budget: int) -> list[tuple[int, int, int]]:
    """(start, stop, windows) of each batch over `count` inputs; a short last window is alone."""
    whole = count // length
    step = max(1, budget // length)
    batches = [
        (first * length, last * length, last - first)
        for first in range(0, whole, step)
        for last in [min(first + step, whole)]
    ]
    return batches + ([(whole * length, count, 1)] if count % length else [])


def _window_nlls(
    model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """inputs [B, T], targets [B*T] -> nats [B*T]."""
    import torch

    try:
        hidden = model.base_model(inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        head = model.get_output_embeddings()
        rows = max(1, LOGIT_ELEMENTS // head.weight.shape[0])
        # Made beforehand: small tensors that stay between large ones that go would keep the
        # allocator from using the freed memory again.
        nlls = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
        for part, h, t in zip(
            nlls.split(rows), hidden.split(rows), targets.split(rows), strict=True
        ):
            part.copy_(torch.nn.functional.cross_entropy(head(h).float(), t, reduction="none"))
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise UserError(
            f"length {inputs.shape[1]}: a batch of {inputs.shape[0]} does not fit into memory"
        ) from error
    return nlls


def _require_linear_head(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Some architectures scale or cap their logits after the head; chunks would miss that."""
    import torch

    inputs = tokens[None].to(model.device)
    hidden = model.base_model(inputs, use_cache=False).last_hidden_state
    chunked = model.get_output_embeddings()(hidden).float()
    dense = model(inputs, use_cache=False).logits.float()
    if not torch.allclose(chunked, dense, rtol=1e-2, atol=1e-2, equal_nan=True):
        raise UserError(
            f"model type {model.config.model_type}: its logits are not its output embedding times "
            "its last hidden state, so they cannot be computed in chunks"
        )


def _groups(tokens: np.ndarray, length: int, eod_id: int | None) -> tuple[np.ndarray, str]:
    """The document of every scored token where there are several, otherwise its window."""
    if eod_id is not None:
        # An end-of-document token belongs to the document it ends.
        documents = np.cumsum(tokens[:-1] == eod_id)
        if documents[-1] > documents[0]:
            return documents, "documents"
    return np.arange(len(tokens) - 1) // length, "windows"
