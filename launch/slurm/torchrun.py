"""torchrun that ends with the code of the rank that failed first; torchrun's own is always 1."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
# Ranks of one machine meet at a free port, also where its name leads nowhere.
ONE_MACHINE = ("--standalone", "--local-addr", "127.0.0.1")
# What `python -c START TORCHRUN-ARGUMENTS` does in a process of its own.
START = "import sys; from launch.slurm.torchrun import main; sys.exit(main())"


def main() -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # A launcher that is killed cannot end its ranks; they would train on with nobody watching.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        print(f"rank {rank} ended first, exit code {code}", file=sys.stderr)
        # Minus the signal's number where a signal ended it; shells add it to 128.
        return code if code > 0 else 128 - code
    return 0
