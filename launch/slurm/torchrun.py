"""Run torchrun, and end with the exit code of the rank that failed first (torchrun's is 1)."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
# Ranks of one machine meet at a free port, also where its name leads nowhere.
ONE_MACHINE = ("--standalone", "--local-addr", "127.0.0.1")
# `python -c START TORCHRUN-ARGUMENTS` runs torchrun in a new process.
START = "import sys; from launch.slurm.torchrun import main; sys.exit(main())"


def main() -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # If the launcher is killed, end torchrun and its ranks, which would train unobserved.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        print(f"rank {rank} ended first, exit code {code}", file=sys.stderr)
        # A negative code is the number of a signal, which shells add to 128.
        return code if code > 0 else 128 - code
    return 0
