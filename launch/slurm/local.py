"""`local`: run on one machine under torchrun, with the snapshots and restarts of SLURM jobs."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.training.watchdog import handled_signals
from launch.slurm import cluster, snapshot, torchrun
from launch.slurm.folder import RunFolder
from launch.slurm.options import Options
from launch.slurm.submit import plan_job, refuse_other_run, refuse_second_job

PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def local(arguments: argparse.Namespace) -> None:
    """Train until the run is finished; raise SystemExit with its exit code if it is not."""
    plan = plan_job(arguments)
    asked = plan.options.gpus_per_node
    # Without GPUs, the ranks would silently train on the CPU.
    if asked and (found := count_gpus(plan.options.env)) < asked:
        raise UserError(
            f"--gpus-per-node {asked}: this machine shows {found} GPU{'s' * (found != 1)}; ask "
            "for as many at most, or for CPU ranks with --tasks N"
        )
    with suppress(cluster.NoSlurm):
        refuse_second_job(plan.folder)
    refuse_other_run(plan)
    snapshot.save_code(plan.folder, snapshot.PROJECT)
    snapshot.save_config(plan.folder, plan.values)
    plan.record.write(plan.folder)
    plan.folder.reset_attempts("local")
    if code := Local(plan.folder, plan.options).run():
        raise SystemExit(code)


def count_gpus(variables: Mapping[str, str]) -> int:
    """Return the number of GPUs that ranks see with these additional environment variables."""
    count = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(count, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"--gpus-per-node: torch cannot count GPUs: {done.stderr.strip()[-300:]}")
    return int(done.stdout.split()[-1])


class Local:
    """The restart loop of the batch script (body.sh), for one machine."""

    def __init__(self, folder: RunFolder, options: Options) -> None:
        self.folder, self.options = folder, options
        self.torchrun: subprocess.Popen | None = None
        self.told_to_end = False  # True after TERM or INT

    def run(self) -> int:
        """Start the ranks until they finish or make no progress; return the last exit code."""
        before = {n: signal.signal(n, self.forward) for n in handled_signals(FORWARDED)}
        try:
            return self._loop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _loop(self) -> int:
        restart = code = 0
        while not self.told_to_end:
            stuck = self.folder.attempts_without_progress()
            checkpoint = self.folder.newest_checkpoint()
            if stuck >= self.options.max_restarts:
                log_line(
                    f"no progress: {stuck} attempts in a row began at checkpoint {checkpoint}; "
                    "not started again"
                )
                return 2
            self.folder.begin_attempt(f"local-{os.getpid()}", restart)
            log_line(f"restart {restart}, {self.options.world_size} ranks, checkpoint {checkpoint}")
            code = self.attempt()
            if code == 0:
                log_line("finished")
                return 0
            if code == 2:
                return 2
            ended = "stopped; train.resume=auto goes on" if self.told_to_end else "started again"
            log_line(f"exit code {code}: {ended}")
            restart += 1
        return code

    def attempt(self) -> int:
        """Run torchrun once; return its exit code after all its ranks have ended."""
        ranks = self.options.world_size
        threads = self.options.cpus_per_task or max(1, len(os.sched_getaffinity(0)) // ranks)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "GIT_CEILING_DIRECTORIES": str(self.folder.slurm),
        }
        if not self.options.gpus_per_node:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # If torchrun is killed, its ranks become children of this process.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.torchrun = subprocess.Popen(
            [
                *(sys.executable, "-c", torchrun.START, *torchrun.ONE_MACHINE),
                *("--nproc-per-node", str(ranks), "train.py"),
                *(str(self.folder.config), "train.resume=auto"),
            ],
            cwd=self.folder.code,
            env={**os.environ, **environment, **self.options.env},
            # Ctrl-C reaches only this process, which passes it to the ranks: torchrun would kill
            # them after 30 seconds.
            start_new_session=True,
        )
        if self.told_to_end:  # The signal came while torchrun started.
            self.torchrun.terminate()
        code = self.torchrun.wait()
        # If torchrun was killed, wait for its ranks, which still save a checkpoint.
        for rank in ranks_of(os.getpid()):
            with suppress(ChildProcessError):
                os.waitpid(rank, 0)
        return code if code >= 0 else 128 - code

    def forward(self, number: int, frame: object) -> None:
        """Send a signal to the ranks, because torchrun does not forward USR1."""
        self.told_to_end = self.told_to_end or number != signal.SIGUSR1
        if number == signal.SIGHUP:  # The terminal was closed, which torchrun treats as TERM.
            number = signal.SIGTERM
        if self.torchrun is None:
            return
        ranks = {*ranks_of(self.torchrun.pid), *ranks_of(os.getpid())} - {self.torchrun.pid}
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        if self.told_to_end and not ranks:
            self.torchrun.terminate()


def ranks_of(parent: int) -> list[int]:
    """Return the process ids of a process's children that run train.py, torchrun's ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # The process has just ended.
            # The command's name, in parentheses, may contain spaces and parentheses.
            above = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
            if above == parent and b"\0train.py\0" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def log_line(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} local: {text}", file=sys.stderr, flush=True)
