"""`local`: one machine without SLURM. The same snapshot and restarts, under torchrun."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.training.watchdog import handled_signals
from launch.slurm import cluster, snapshot, torchrun
from launch.slurm.folder import RunFolder
from launch.slurm.options import Options, options_from
from launch.slurm.submit import plan_of, refuse_other_run, refuse_second_job

PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def local(arguments: argparse.Namespace) -> None:
    """Runs until the run is finished; leaves with its exit code where it is not."""
    arguments.tasks_per_node = arguments.tasks
    plan = plan_of(arguments.config, arguments.overrides, options_from(arguments))
    check_gpus(plan.options)
    with suppress(cluster.NoSlurm):
        refuse_second_job(plan.folder, cluster.active_job(plan.folder))
    refuse_other_run(plan)
    snapshot.save_code(plan.folder, snapshot.PROJECT)
    snapshot.save_config(plan.folder, plan.values)
    plan.record.write(plan.folder)
    plan.folder.reset_attempts("local")
    code = Local(plan.folder, plan.options).run()
    if code:
        raise SystemExit(code)


def check_gpus(options: Options) -> None:
    """Raises UserError where the ranks, in their environment, have fewer GPUs than asked for."""
    if not options.gpus_per_node:
        return
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"],
        env={**os.environ, **options.env},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["torch cannot be imported"]
        raise UserError(f"--gpus-per-node {options.gpus_per_node}: {lines[-1]}")
    found = int(done.stdout.split()[-1])
    if found < options.gpus_per_node:
        raise UserError(
            f"--gpus-per-node {options.gpus_per_node}: this machine shows {found} "
            f"GPU{'' if found == 1 else 's'}; ask for as many at most, or for CPU ranks with "
            "--tasks N"
        )


class Local:
    """The loop of the batch script (body.sh), for one machine."""

    def __init__(self, folder: RunFolder, options: Options) -> None:
        self.folder, self.options = folder, options
        self.torchrun: subprocess.Popen | None = None
        self.told_to_end = False  # by TERM or INT, as scancel would

    def run(self) -> int:
        """Starts the ranks again until they finish or must not be started; the last exit code."""
        restart = code = 0
        with self.signals_forwarded():
            while not self.told_to_end:
                stuck = self.folder.attempts_without_progress()
                checkpoint = self.folder.newest_checkpoint()
                if stuck >= self.options.max_restarts:
                    say(
                        f"no progress: {stuck} attempts in a row began at checkpoint {checkpoint}; "
                        "not started again"
                    )
                    return 2
                self.folder.begin_attempt(f"local-{os.getpid()}", restart)
                say(f"restart {restart}, {self.options.world_size} ranks, checkpoint {checkpoint}")
                code = self.attempt()
                if code == 0:
                    say("finished")
                    return 0
                if code == 2:
                    return 2
                again = (
                    "stopped; train.resume=auto goes on" if self.told_to_end else "started again"
                )
                say(f"exit code {code}: {again}")
                restart += 1
        return code

    def attempt(self) -> int:
        ranks = self.options.world_size
        cores = len(os.sched_getaffinity(0))
        environment = {"OMP_NUM_THREADS": str(self.options.cpus_per_task or max(1, cores // ranks))}
        environment |= {"GIT_CEILING_DIRECTORIES": str(self.folder.slurm)}
        if not self.options.gpus_per_node:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if sys.platform == "linux":  # ranks of a torchrun that was killed become children of this
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.torchrun = subprocess.Popen(
            [
                *(sys.executable, "-c", torchrun.START, "--standalone"),
                *("--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1", "train.py"),
                *(str(self.folder.config), "train.resume=auto"),
            ],
            cwd=self.folder.code,
            env={**os.environ, **environment, **self.options.env},
            # Ctrl-C reaches only this process, which passes it to the ranks: torchrun would kill
            # them after 30 seconds.
            start_new_session=True,
        )
        if self.told_to_end:  # while it started
            self.torchrun.terminate()
        code = self.torchrun.wait()
        # Where it was killed, its ranks still save, and end; until then the run's folder is theirs.
        for rank in ranks_of(os.getpid()):
            with suppress(ChildProcessError):
                os.waitpid(rank, 0)
        return code if code >= 0 else 128 - code

    @contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        before = {n: signal.signal(n, self.forward) for n in handled_signals(FORWARDED)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def forward(self, number: int, frame: object) -> None:
        """torchrun does not know USR1, so the ranks themselves are signalled."""
        self.told_to_end = self.told_to_end or number != signal.SIGUSR1
        if number == signal.SIGHUP:  # the terminal was closed; to torchrun, too, that is TERM
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
    """The children of a process that run train.py: torchrun's are the ranks."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The command's name, in parentheses, may hold anything.
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if above == parent and b"\0train.py\0" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue  # it has just ended
    return found


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} local: {text}", file=sys.stderr, flush=True)
