"""The model as lm-evaluation-harness sees it: its own HF class, on one or several ranks."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from cat_lm.errors import UserError
from cat_lm.pretrained import choose_device, load_model, load_tokenizer

_LARGEST_BATCH, _LARGEST_CPU_BATCH = 64, 8
_LINE_SECONDS = 30  # between two lines of progress where stderr is no terminal


class Scorer(HFLM):
    """HFLM around a model that was loaded strictly, split over all ranks that were launched.

    What is added to HFLM: it never evaluates weights that were not in the folder; ranks count over
    all nodes and on CPUs too (HFLM takes the rank within a node, and none without a GPU); results
    are gathered in the order of the rows, so that nothing depends on the number of ranks; and it
    counts what it runs.

    Args:
        folder: a transformers folder.
        dtype: of the weights; a name of `cat_lm.pretrained.DTYPES`.
        batch_size: rows per forward pass, or None for the largest that fits.
        max_length: context in tokens; None takes `max_position_embeddings`.

    Attributes:
        positions: positions that went through the model on this rank, padding included.
        truncated: requests on this rank that lost the start of their context.

    Raises UserError where the folder has no usable model or tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        device: str,
        batch_size: int | None,
        max_length: int | None,
    ) -> None:
        tokenizer = load_tokenizer(folder)
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise UserError(f"tokenizer {folder}: has neither a BOS nor an EOS token to begin with")
        accelerator = _accelerator(device)
        model = load_model(
            folder, dtype=dtype, device=str(accelerator.device) if accelerator else device
        )
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            # Given here and not to the evaluator, which does not hand it on to a loaded model.
            batch_size=batch_size or "auto",
            max_batch_size=_LARGEST_BATCH,
            max_length=max_length,
        )
        if accelerator is not None:
            self.accelerator = accelerator
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        if batch_size is None and model.device.type == "cpu":
            # HFLM finds the largest batch by running out of memory, which a CPU does not survive.
            self.batch_size_per_gpu = self._batch_size_for_cpu()
        self.positions = self.truncated = 0
        self._progress: _Progress | None = None

    # One task at a time: names for the progress bar, counts from zero.

    def begin(self, task: str) -> None:
        self.positions = self.truncated = 0
        self._progress = _Progress(task) if self.rank == 0 else None
        self.set_cache_hook(_AnswerCounter(self._progress))

    def end(self) -> None:
        if self._progress is not None:
            self._progress.close()

    def totals(self) -> tuple[int, int]:
        """`positions` and `truncated` of all ranks together; every rank must call it."""
        counts = torch.tensor([[self.positions, self.truncated]], device=self.device)
        positions, truncated = self.all_gather(counts).sum(dim=0).tolist()
        return positions, truncated

    # HFLM's own methods

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False):
        if self._progress is not None:
            self._progress.add_work(len(requests), "requests")
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False):
        if self._progress is not None:
            lengths = [len(self.tok_encode(*request.args)) for request in requests]
            windows = sum(-(-length // self.max_length) for length in lengths)
            self._progress.add_work(windows, "windows")
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False):
        if self._progress is not None:
            self._progress.add_work(len(requests), "requests")
        return super().generate_until(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise UserError(
                f"a continuation of {longest} tokens does not fit into a context of "
                f"{self.max_length}; a larger --max-length may be given"
            )
        self.truncated += sum(
            len(context) + len(continuation) > self.max_length + 1
            for _, context, continuation in requests
        )
        answers = super()._loglikelihood_tokens(
            requests, disable_tqdm=True, override_bs=override_bs
        )
        if override_bs is not None and self._progress is not None:
            self._progress.advance(len(requests))  # windows of a rolling log-likelihood
        return answers

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.positions += inps.numel()
        return super()._model_call(inps, *args, **kwargs)

    def gather_object(self, obj: dict[str, Any], dst: int = 0) -> list[dict[str, Any]] | None:
        """What the ranks have of each task, in the order of the rows: rank r has every w-th row.

        The harness joins the ranks' lists end to end, and its bootstrapped errors and sums depend
        on the order.
        """
        parts = super().gather_object(obj, dst)
        return [_interleaved(parts)] + [_emptied(parts[0])] * (len(parts) - 1) if parts else parts

    def _batch_size_for_cpu(self) -> int:
        """Rows whose logits (three copies in fp32) take at most a quarter of the free memory."""
        row_bytes = 3 * 4 * self.max_length * self.model.config.vocab_size
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(1, min(_LARGEST_CPU_BATCH, free // 4 // row_bytes))


def launched_ranks() -> int:
    """The number of processes that torchrun or accelerate has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _accelerator(device: str):
    """The harness's own way to several ranks; None where there is only one."""
    if launched_ranks() == 1:
        return None
    from accelerate import Accelerator

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device}: with several ranks it must be auto, cpu or cuda")
    return Accelerator(cpu=choose_device(device).type == "cpu")


def _interleaved(parts: Sequence[Any]) -> Any:
    """Of mappings of mappings of lists: with the lists' elements taken in turn."""
    if isinstance(parts[0], dict):
        return {key: _interleaved([part[key] for part in parts]) for key in parts[0]}
    missing = object()
    turns = itertools.zip_longest(*parts, fillvalue=missing)
    return [value for turn in turns for value in turn if value is not missing]


def _emptied(part: Any) -> Any:
    return {key: _emptied(part[key]) for key in part} if isinstance(part, dict) else []


class _AnswerCounter:
    """Hears of every answer in the place of HFLM's cache of answers."""

    def __init__(self, progress: _Progress | None) -> None:
        self.progress = progress

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        if self.progress is not None and kind != "loglikelihood_rolling":
            self.progress.advance(1)


class _Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, task: str) -> None:
        self.task, self.unit = task, ""
        self.total = self.done = 0
        self.bar = None
        self.begin = self.last_line = time.monotonic()

    def add_work(self, count: int, unit: str) -> None:
        from tqdm import tqdm

        self.total, self.unit = self.total + count, unit
        if self.bar is None:
            self.bar = tqdm(total=0, desc=self.task, unit=f" {unit}", disable=None)
        self.bar.total = self.total
        self.bar.refresh()

    def advance(self, count: int) -> None:
        self.done += count
        self.bar.update(count)
        now = time.monotonic()
        if self.bar.disable and now - self.last_line >= _LINE_SECONDS:
            self.last_line = now
            seconds = now - self.begin
            print(
                f"{self.task}: {self.done} of {self.total} {self.unit} in {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
