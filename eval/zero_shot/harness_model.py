"""Give lm-evaluation-harness a model: its own HF class, on one or several ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from cat_lm.core.errors import UserError
from cat_lm.generate import refuse_nonsense
from cat_lm.pretrained.loading import check_vocabulary, choose_device
from cat_lm.pretrained.memory import free_bytes
from eval.zero_shot.tasks.harness import first_line, launched

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LARGEST_BATCH, _LARGEST_CPU_BATCH = 64, 8
_LINE_SECONDS = 30  # The interval between progress lines if stderr is no terminal.


class Scorer(HFLM):
    """Score requests as HFLM does, with a model in memory, on all launched ranks.

    HFLM takes the rank within a node, and none without a GPU; here ranks count over all nodes and
    on CPUs too. Results are gathered in the order of the rows, so that nothing depends on the
    number of ranks, and what is run is counted.

    Args:
        model: on the device that it computes on.
        tokenizer: its own.
        batch_size: rows per forward pass, or None for the largest that fits.
        max_length: context in tokens; None takes `max_position_embeddings`.
        accelerator: the result of `launched_accelerator`.
        autocast: the dtype that it computes in under autocast, None for that of its weights.

    Attributes:
        ranks: the accelerator.
        positions: positions that went through the model on this rank, padding included.
        truncated: requests on this rank that lost the start of their context.

    Raises:
        UserError: the tokenizer does not belong to the model, or cannot begin a text.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int | None,
        max_length: int | None,
        accelerator: Accelerator | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        _require_prefix(tokenizer)
        check_vocabulary(tokenizer, model.config)
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            # Given here and not to the evaluator, which does not hand it on to a loaded model.
            batch_size=batch_size or "auto",
            max_batch_size=_LARGEST_BATCH,
            max_length=max_length,
            # Those of narrow logits would be rounded before a choice's are summed.
            softmax_dtype=torch.float32,
            mixed_precision_dtype=autocast,
        )
        self.ranks = accelerator
        if accelerator is not None:
            self.accelerator = accelerator
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        if batch_size is None and model.device.type == "cpu":
            # HFLM finds the largest batch by running out of memory, which a CPU does not survive.
            self.batch_size_per_gpu = self._batch_size_for_cpu()
        self.set_cache_hook(self)
        self.begin("")

    def begin(self, task: str) -> None:
        """Begin a task: set its name and reset the counts."""
        self.positions = self.truncated = self._repeated = 0
        self._task = task

    def totals(self, *own: int) -> list[int]:
        """Return `positions`, `truncated` and `own` summed over ranks; every rank must call it."""
        counts = torch.tensor([[self.positions, self.truncated, *own]], device=self.device)
        return self.all_gather(counts).sum(dim=0).tolist()

    def from_first_rank(self, value: Any) -> Any:
        """Return rank 0's value on every rank; every rank must call it."""
        if self.ranks is None:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    @contextlib.contextmanager
    def _progress(self, total: int, unit: str) -> Iterator[None]:
        """Show a bar on rank 0 meanwhile; an error on one rank ends the block on all."""
        # Where stderr is no terminal, a line stands now and then.
        seconds = 0.1 if sys.stderr.isatty() else _LINE_SECONDS
        how = {"mininterval": seconds, "delay": seconds, "leave": False}
        # The environment silences the harness's own bars, but none that says so itself.
        how |= {"desc": self._task, "unit": f" {unit}", "disable": self.rank != 0}
        with tqdm(total=total, **how) as self._bar, raise_on_all_ranks(self.ranks):
            yield

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Count an answer; HFLM calls this as it would call a cache of answers."""
        if kind != "loglikelihood_rolling":  # Their windows are counted instead.
            self._bar.update()

    # Methods of HFLM. Each of the first three is called equally often on every rank.

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False):
        # Where another rank has more requests, the harness repeats the last one.
        self._repeated = len(requests) - len({id(request) for request in requests})
        with self._progress(len(requests), "requests"):
            answers = super().loglikelihood(requests, disable_tqdm=True)
            _require_numbers([likelihood for likelihood, _ in answers])
            return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False):
        lengths = [len(self.tok_encode(*request.args)) for request in requests]
        windows = sum(-(-length // self.max_length) for length in lengths)
        with self._progress(windows, "windows"):
            answers = super().loglikelihood_rolling(requests, disable_tqdm=True)
            _require_numbers(answers)
            return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False):
        with self._progress(len(requests), "requests"):
            try:
                return super().generate_until(requests, disable_tqdm=True)
            except AssertionError as error:
                if "Invalid configuration" not in str(error):
                    raise
                raise UserError(
                    f"its answers leave no room in a context of {self.max_length}; "
                    "a larger --max-length may be given"
                ) from error

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if override_bs is None:  # Else these are windows, which are as long as the context.
            with raise_on_all_ranks(self.ranks):
                longest = max((len(continuation) for *_, continuation in requests), default=0)
                if longest > self.max_length:
                    raise UserError(
                        f"a continuation of {longest} tokens does not fit into a context of "
                        f"{self.max_length}; a larger --max-length may be given"
                    )
        self.truncated += sum(
            len(context) + len(continuation) > self.max_length + 1
            for _, context, continuation in requests[: len(requests) - self._repeated]
        )
        how = {"disable_tqdm": True, "override_bs": override_bs}
        answers = super()._loglikelihood_tokens(requests, **how)
        if override_bs is not None:
            self._bar.update(len(requests))
        return answers

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, mask = super().tok_batch_encode(strings, padding_side, truncation=truncation)
        if left_truncate_len is None:
            return tokens, mask
        self.truncated += int((mask.sum(dim=1) > left_truncate_len).sum())
        return tokens[:, -left_truncate_len:], mask[:, -left_truncate_len:]

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.positions += inps.numel()
        return super()._model_call(inps, *args, **kwargs)

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._model_generate(*args, logits_processor=[refuse_nonsense], **kwargs)

    def gather_object(self, obj: dict[str, Any], dst: int = 0) -> list[dict[str, Any]] | None:
        """Gather each task's values in the order of the rows: of W ranks, rank r has every W-th.

        The harness joins the ranks' lists end to end, but bootstrapped errors depend on the order.
        """
        parts = super().gather_object(obj, dst)
        return [_interleave(parts)] + [_emptied(parts[0])] * (len(parts) - 1) if parts else parts

    def _batch_size_for_cpu(self) -> int:
        """Return the rows whose logits (three copies in fp32) take a quarter of free memory."""
        row_bytes = 3 * 4 * self.max_length * self.model.config.vocab_size
        free = free_bytes(self.device) or 0  # With unknown memory, use a single row.
        return max(1, min(_LARGEST_CPU_BATCH, free // 4 // row_bytes))


class Encoder(HFLM):
    """Encode text as the harness does, without a model.

    Raises:
        UserError: the tokenizer has no token to begin a text with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # Not HFLM's own, which loads a model: these three are all that encoding reads.
        _require_prefix(tokenizer)
        self.tokenizer = tokenizer
        self.add_bos_token = self.custom_prefix_token_id = None


def _require_prefix(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path}: has neither a BOS nor an EOS token to begin with"
        )


def _require_numbers(likelihoods: Sequence[float]) -> None:
    """Raise UserError for NaN, of which the harness would choose the first."""
    wrong = sum(not math.isfinite(likelihood) for likelihood in likelihoods)
    if wrong:
        raise UserError(
            f"{wrong} of {len(likelihoods)} log-likelihoods are not finite: the model has "
            "diverged, or its numbers are too large for --dtype; use --dtype float32 or another "
            "model"
        )


def launched_accelerator(device: str) -> Accelerator | None:
    """Return the harness's own access to several ranks; None if there is only one."""
    if launched()[1] == 1:
        return None
    from accelerate import Accelerator

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device}: with several ranks it must be auto, cpu or cuda")
    return Accelerator(cpu=choose_device(device).type == "cpu")


@contextlib.contextmanager
def raise_on_all_ranks(accelerator: Accelerator | None) -> Iterator[None]:
    """Make an error inside the block on one rank a UserError on all, which else would wait for it.

    Every rank must enter; in the block no rank may wait for others before it can have failed.
    """
    own = None
    try:
        yield
    except Exception as error:
        if accelerator is None:
            raise
        own = error
    if accelerator is None:
        return
    from accelerate.utils import gather_object

    if own is None or isinstance(own, UserError):
        text = own and str(own)
    else:
        text = f"{type(own).__name__}: {first_line(own)}"
    texts = gather_object([text])
    if own is not None and not isinstance(own, UserError):
        raise own
    for rank, said in enumerate(texts):
        if said is not None:
            raise UserError(said if rank == 0 else f"rank {rank}: {said}") from None


def _interleave(parts: Sequence[Any]) -> Any:
    """Join nested mappings of lists by taking elements in turn."""
    if isinstance(parts[0], dict):
        return {key: _interleave([part[key] for part in parts]) for key in parts[0]}
    missing = object()
    turns = itertools.zip_longest(*parts, fillvalue=missing)
    return [value for turn in turns for value in turn if value is not missing]


def _emptied(part: Any) -> Any:
    return {key: _emptied(part[key]) for key in part} if isinstance(part, dict) else []
