"""Reading a checkpoint in the background ends with the run that asked for it."""

import threading

import torch

from cat_lm.config import RunConfig
from cat_lm.training.checkpoint import Checkpoints, verify
from cat_lm.training.distributed import Ranks
from tests.checkpoints import step_folder
from tests.runs import run_values


def test_closing_ends_what_still_reads_the_checkpoint(tmp_path, monkeypatch):
    step_folder(tmp_path, 2)
    monkeypatch.setattr(verify, "LARGE", 0)
    begun, closed, reads = threading.Event(), threading.Event(), []

    def progress(what: str) -> None:
        reads.append(what)
        begun.set()
        assert closed.wait(60)

    config = RunConfig.model_validate(run_values("data", tmp_path, resume="auto"))
    checkpoints = Checkpoints(
        tmp_path, config, Ranks(0, 0, 1, torch.device("cpu")), progress=progress
    )
    checkpoints.to_resume()
    assert begun.wait(60)
    told = len(reads)
    checkpoints.close()
    closed.set()
    future = checkpoints._verifier._begun[1]
    assert future.exception(60) is not None
    assert len(reads) <= told + 2  # each of two threads may have been past its look at the stop
