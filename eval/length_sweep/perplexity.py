"""Score a model's predictions of a stream of tokens: the loop behind every perplexity of eval.

Protocol. A stream, or each document of it, is read in windows of T inputs; the input at position i
predicts token i+1. The first window scores all its T predictions; each further one moves on by the
stride S and scores the last S. The last window reaches back so that it is full, as in the
lm-evaluation-harness' rolling perplexity, which is S = T. So every token but the first is scored
exactly once, at every T and S the same ones, seeing at most T tokens before it and, but for the
first T of a document, at least T − S + 1. Nothing is truncated.

Memory is linear in T: the head's logits are made for a few rows at a time and reduced to one
number per token, so [T, vocabulary] in fp32 never exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cat_lm.core.errors import UserError
from cat_lm.core.host import GIB
from cat_lm.pretrained.memory import LOGIT_ELEMENTS, forward_bytes, free_bytes
from eval.lab.contrasts import ratio_error

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BINS_PER_DOUBLING = 2  # Bins of a loss curve over positions.


class NotEnoughMemory(UserError):
    """A window that does not fit into memory; other lengths may."""

    def __init__(self, length: int, rows: int, detail: str = "") -> None:
        advice = f"; lower --batch-tokens to {length}" if rows > 1 else ""
        super().__init__(
            f"length {length}: a batch of {rows} does not fit into memory{detail}{advice}"
        )


@dataclass(frozen=True)
class Window:
    """Inputs tokens[start:stop]; of their predictions those from `first` on are scored."""

    start: int
    first: int
    stop: int

    @property
    def inputs(self) -> int:
        """Return the number of inputs."""
        return self.stop - self.start


@dataclass(frozen=True)
class Score:
    """Negative log-likelihood of a token stream.

    Attributes:
        nll: sum over the scored tokens, in nats.
        tokens: number of tokens scored.
        bytes: UTF-8 bytes of the text that those tokens spell.
        words: whitespace-separated words of that text.
        standard_error: standard error of `loss`, in nats per token, over `groups`; nan for a single
            group.
        groups: number of documents or windows that the standard error is taken over.
        group_kind: `documents` or `windows`.
        positions: the loss by position in the window (see `position_curve`).
        document_nlls, document_tokens: of each document in its order, nats and scored tokens; None
            where the groups are windows.
    """

    nll: float
    tokens: int
    bytes: int
    words: int
    standard_error: float
    groups: int
    group_kind: str
    positions: list[dict[str, Any]]
    document_nlls: list[float] | None = None
    document_tokens: list[int] | None = None

    @property
    def loss(self) -> float:
        """Return nats per token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """Return exp(nats per token); inf on overflow."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        """Return exp(nats per word), the harness's WikiText metric; inf on overflow."""
        return _exp(self.nll / self.words)

    @property
    def bits_per_byte(self) -> float:
        """Return bits per UTF-8 byte, which do not depend on the tokenizer."""
        return self.nll / math.log(2) / self.bytes


def score_tokens(
    model: PreTrainedModel,
    tokens: np.ndarray,
    context_length: int,
    *,
    num_bytes: int,
    num_words: int,
    eod_id: int | None = None,
    per_document: bool = False,
    spans: Sequence[tuple[int, int]] | None = None,
    stride: int | None = None,
    batch_tokens: int = 8192,
    progress: Callable[[int], object] | None = None,
) -> Score:
    """Score `tokens[1:]` at windows of `context_length` and sum up (see `token_nlls`).

    Args:
        num_bytes, num_words: sizes of the scored text.
        eod_id: ends every document. Where two or more are scored, the standard error is taken over
            documents; otherwise over windows.
        per_document: windows do not cross the ends of documents; otherwise those are tokens like
            any other.
        spans: the documents, where they are known, as `document_spans` gives them; tokens that
            none of them predicts are not scored.
    """
    documents = spans
    if documents is None:
        whole = [(0, len(tokens) - 1)]
        documents = document_spans(tokens, eod_id) if per_document else whole
    windows = [w for span in documents for w in span_windows(*span, context_length, stride)]
    nlls = token_nlls(model, tokens, windows, batch_tokens=batch_tokens, progress=progress)
    if spans:
        sizes = [stop - start for start, stop in spans]
        groups, kind = np.repeat(np.arange(len(spans)), sizes), "documents"
    else:
        groups, kind = _groups(tokens, windows, eod_id)
    curve = position_curve(nlls, windows)
    nlls = nlls[np.concatenate([np.arange(*span) for span in documents])]
    nll = float(nlls.sum(dtype=np.float64))
    sums, sizes = group_sums(nlls, groups)
    error, counts = ratio_error(sums, sizes), (len(nlls), num_bytes, num_words)
    parts = (sums.tolist(), sizes.tolist()) if kind == "documents" else (None, None)
    return Score(nll, *counts, error, len(sizes), kind, curve, *parts)


def document_spans(tokens: np.ndarray, eod_id: int | None) -> list[tuple[int, int]]:
    """Return (start, stop) of each document: inputs tokens[start:stop] predict all of its tokens.

    A document is read after the end-of-document token before it, and its own end is predicted.
    """
    starts = [0, *(np.flatnonzero(tokens[1:-1] == eod_id) + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(tokens) - 1], strict=True))


def span_windows(start: int, stop: int, length: int, stride: int | None = None) -> list[Window]:
    """Return the windows over inputs `start` … `stop` − 1 (see the module's protocol).

    Args:
        length: T, inputs per window.
        stride: S, tokens that each window after the first scores; T by default and at most.
    """
    step = min(stride or length, length)
    stops = [*range(start + length, stop, step), stop] if start < stop else []
    scored = [start, *stops]
    return [
        Window(max(start, end - length), first, end)
        for first, end in zip(scored, stops, strict=False)
    ]


def token_nlls(
    model: PreTrainedModel,
    tokens: np.ndarray,
    windows: Sequence[Window],
    *,
    batch_tokens: int = 8192,
    progress: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Return the negative log-likelihood of `tokens[1:]`, in nats: float32 [len(tokens) - 1].

    Args:
        model: a causal language model whose logits are its output embedding applied to its
            backbone's last hidden state; this is checked.
        tokens: int64 [N]; the first is context only.
        windows: each token is scored in one of them (nan where it is in none).
        batch_tokens: windows are batched up to this many tokens (at least one window).
        progress: called with the number of tokens scored since the last call.

    Raises:
        UserError: a token outside the vocabulary, or logits that cannot be made in chunks.
        NotEnoughMemory: a UserError; the longest window does not fit.
    """
    import torch

    vocabulary = model.get_output_embeddings().weight.shape[0]
    if tokens.max() >= vocabulary:
        raise UserError(
            f"token {tokens.max()}: outside the model's vocabulary of {vocabulary}; "
            "the tokens were made with another tokenizer"
        )
    batches = _batches(windows, batch_tokens)
    rows, longest = len(batches[0]), batches[0][0].inputs
    # On a CPU, Linux would kill a process that takes too much memory.
    needed, free = forward_bytes(model, rows, longest), free_bytes(model.device)
    if free is not None and needed > free:
        detail = f" (about {needed / GIB:.2g} GiB needed, {free / GIB:.2g} free)"
        raise NotEnoughMemory(longest, rows, detail)
    stream = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64))
    nlls = torch.full((len(tokens) - 1,), math.nan, dtype=torch.float32)
    with torch.inference_mode():
        _require_linear_head(model, stream[: min(len(stream), 9)])
        for batch in batches:
            found = _batch_nlls(model, stream, batch).cpu()
            sizes = [window.stop - window.first for window in batch]
            for window, values in zip(batch, found.split(sizes), strict=True):
                nlls[window.first : window.stop] = values
            if progress:
                progress(sum(sizes))
    return nlls.numpy()


def group_sums(nlls: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of the values [N] of each group [N], in the groups' order."""
    _, index = np.unique(groups, return_inverse=True)
    return np.bincount(index, weights=nlls), np.bincount(index)


def position_curve(nlls: np.ndarray, windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Return the mean loss by the number of tokens seen, in bins that grow with it.

    Args:
        nlls: [N] nats, of the tokens that `windows` score.

    Returns:
        For each bin that holds tokens: `start` and `stop`, where start <= tokens seen in the
        window < stop; `tokens` in it; `loss`, nats per token, None where it is not finite.
    """
    seen = np.concatenate(
        [np.arange(w.first - w.start, w.stop - w.start, dtype=np.int64) + 1 for w in windows]
    )
    order = np.concatenate([np.arange(w.first, w.stop) for w in windows])
    doublings = math.ceil(math.log2(int(seen.max()) + 1))
    powers = 2 ** (np.arange(doublings * BINS_PER_DOUBLING + 1) / BINS_PER_DOUBLING)
    edges = np.unique(np.ceil(powers - 1e-9).astype(np.int64))
    index = np.searchsorted(edges, seen, side="right") - 1
    counts = np.bincount(index, minlength=len(edges))
    sums = np.bincount(index, weights=nlls[order], minlength=len(edges))
    return [
        {
            "start": int(edges[i]),
            "stop": int(edges[i + 1]),
            "tokens": int(counts[i]),
            "loss": float(sums[i] / counts[i]) if math.isfinite(sums[i]) else None,
        }
        for i in np.flatnonzero(counts)
    ]


def _batches(windows: Sequence[Window], budget: int) -> list[list[Window]]:
    """Group windows of similar length, the longest first, so that lack of memory shows at once."""
    batches: list[list[Window]] = []
    for window in sorted(windows, key=lambda window: -window.inputs):
        if batches and (len(batches[-1]) + 1) * batches[-1][0].inputs <= budget:
            batches[-1].append(window)
        else:
            batches.append([window])
    return batches


def _batch_nlls(
    model: PreTrainedModel, stream: torch.Tensor, batch: Sequence[Window]
) -> torch.Tensor:
    """Return the nats of the scored tokens, window after window.

    Rows are filled up on their right, which no earlier position can see, so that attention needs
    no mask: with one, it would not be linear in memory.
    """
    import torch

    longest = batch[0].inputs
    inputs = stream.new_zeros(len(batch), longest)
    scored = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, window in enumerate(batch):
        inputs[row, : window.inputs] = stream[window.start : window.stop]
        scored[row, window.first - window.start : window.inputs] = True
    targets = torch.cat([stream[window.first + 1 : window.stop + 1] for window in batch])
    try:
        hidden = model.base_model(inputs.to(model.device), use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1) if scored.all() else hidden[scored.to(hidden.device)]
        return _head_nlls(model.get_output_embeddings(), hidden, targets.to(hidden.device))
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise NotEnoughMemory(longest, len(batch)) from error


def _head_nlls(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the nats [N] of targets [N] after hidden [N, C]."""
    import torch

    rows = max(1, LOGIT_ELEMENTS // head.weight.shape[0])
    # Allocate the result first: small tensors between large freed ones would fragment memory.
    nlls = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
    for part, h, t in zip(nlls.split(rows), hidden.split(rows), targets.split(rows), strict=True):
        part.copy_(torch.nn.functional.cross_entropy(head(h).float(), t, reduction="none"))
    return nlls


def _require_linear_head(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Raise UserError for a model that scales or caps its logits after the head."""
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


def _groups(
    tokens: np.ndarray, windows: Sequence[Window], eod_id: int | None
) -> tuple[np.ndarray, str]:
    """Return the document of every scored token if there are several, otherwise its window."""
    if eod_id is not None:
        # An end-of-document token belongs to the document it ends.
        documents = np.cumsum(tokens[:-1] == eod_id)
        if documents[-1] > documents[0]:
            return documents, "documents"
    groups = np.empty(len(tokens) - 1, dtype=np.int64)
    for number, window in enumerate(windows):
        groups[window.first : window.stop] = number
    return groups, "windows"


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
