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
    """Fail as a command does; a thread that outlives the main one makes the marker."""
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


@pytest.mark.parametrize(
    ("world_size", "kind", "code"), [(2, "input", 2), (2, "code", 1), (1, "input", 2)]
)
def test_failing_rank_of_several_leaves_without_the_interpreters_end(
    world_size, kind, code, tmp_path
):
    """One rank alone is the control: there the thread is waited for."""
    marker = tmp_path / "marker"
    with pytest.raises((ProcessExitedException, ProcessRaisedException)) as raised:
        run_on_ranks(fail, world_size, kind, str(marker))
    assert marker.exists() == (world_size == 1)
    if world_size == 2:
        assert raised.value.exit_code == code
        said = Path(f"{marker}-{raised.value.error_index}.txt").read_text()
        if kind == "code":
            assert said.startswith("Traceback") and "RuntimeError: NCCL error" in said
        else:
            assert said == "error: seed: no number\n"
