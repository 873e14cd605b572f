"""A rank of several that fails ends at once, without the interpreter's own end."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from cat_lm.core.errors import UserError, command
from tests.distributed.ranks import run_on_ranks

ERRORS = {"input": UserError("seed: no number"), "code": RuntimeError("NCCL error")}


def fail(ranks, kind: str, marker: str) -> None:
    """Fails as a command does; the marker is made by a thread that outlives the main one."""
    sys.argv = ["train.py"]
    # Its own file: the process that ranks are forked from may be older than this test's capture.
    sys.stderr = open(f"{marker}-{ranks.rank}.txt", "w", encoding="utf-8")  # noqa: SIM115

    def outlive() -> None:
        threading.main_thread().join()
        Path(marker).touch()

    def main() -> None:
        raise ERRORS[kind]

    threading.Thread(target=outlive).start()
    command(main)()


@pytest.mark.parametrize(("kind", "code"), [("input", 2), ("code", 1)])
def test_a_failing_rank_does_not_go_through_the_interpreters_end(kind, code, tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(ProcessExitedException) as raised:
        run_on_ranks(fail, 2, kind, str(marker))
    assert raised.value.exit_code == code
    assert not marker.exists()
    said = Path(f"{marker}-{raised.value.error_index}.txt").read_text()
    if kind == "code":
        assert said.startswith("Traceback") and "RuntimeError: NCCL error" in said
    else:
        assert said == "error: seed: no number\n"


def test_one_rank_ends_as_any_program(tmp_path):
    """The control: there the thread is waited for."""
    marker = tmp_path / "marker"
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        run_on_ranks(fail, 1, "input", str(marker))
    assert marker.exists()
