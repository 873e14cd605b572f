"""A SLURM cluster of two nodes on this machine, for tests and for trying commands by hand.

`python -m tests.slurm.cluster` starts one, prints the variable that points SLURM's commands to it,
and takes it down on Ctrl-C. It has its own munged, ports and folders and touches no other cluster.
Needs root and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NODES = ("n0", "n1")
_DAEMONS = ("munged", "slurmctld", "slurmd", "setpriv", "sbatch")
_ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # where daemons are, and not all users look
# In the environment of every daemon, and so of each slurmstepd, but of no user's shell.
_MARK = "CAT_LM_TEST_CLUSTER"

# More processors than there are: ranks of several jobs share the real ones.
# Jobs of several clusters on this machine must not meet at one port, which comes from the job's id.
# cred_expire is also how long a requeued job waits before it starts again (120 s by default).
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
JobRequeue=1
MinJobAge=7200
FirstJobId={first_job}
KillWait=5
SlurmdTimeout=15
MessageTimeout=10
ReturnToService=1
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory={memory}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory={memory}
PartitionName=main Nodes=n0,n1 Default=YES MaxTime=INFINITE DefaultTime=30 State=UP
"""


def why_not() -> str | None:
    """Return why no cluster can be started here, or None."""
    missing = [name for name in _DAEMONS if not _find(name)]
    if missing:
        return f"no {', '.join(missing)} on this machine (Debian: slurm-wlm, munge, util-linux)"
    return None if os.geteuid() == 0 else "a SLURM cluster of its own needs root"


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> object:
    """The first true value of `condition()`.

    Raises:
        TimeoutError: there was none in so many seconds; `what` says what was waited for.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {seconds:.0f} s")
        time.sleep(0.05)
    return value


class Cluster:
    """Up inside `with`: `environment` is what SLURM's commands and job submitters need."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cat-lm-slurm-"))
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Cluster:
        try:
            self._write_files()
            names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
            munge = (f"--{option}={self.folder}/munge.{name}" for option, name in names.items())
            self._start("munged", "--foreground", *munge)
            wait_for((self.folder / "munge.socket").exists, "socket of munged")
            self._start("slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            self.wait_for_nodes()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kills daemons, job steps and their processes, also orphaned ones; removes the folder."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        while processes := list(self._processes()):
            for process in processes:
                kill(process, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str) -> str:
        """The stdout of one of SLURM's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def node_states(self) -> dict[str, str]:
        """`sinfo`'s short state of each node: idle, mix, down*, …"""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split() for line in lines)

    def wait_for_nodes(self) -> None:
        """Until both nodes take jobs."""

        def ready() -> bool:
            with contextlib.suppress(AssertionError):  # the controller does not answer yet
                return set(self.node_states().values()) <= {"idle", "mix", "alloc"}
            return False

        try:
            wait_for(ready, "two ready nodes")
        except TimeoutError as error:
            logs = (log.read_text(errors="replace")[-2000:] for log in self.folder.glob("*.log"))
            raise AssertionError("\n".join([str(error), *logs])) from error

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """SIGKILL to the node's daemon alone: its job steps live on, as on a real node."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def _write_files(self) -> None:
        self.folder.chmod(0o755)  # munged wants a socket that everyone can reach
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        text = _CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            folder=self.folder,
            ports=_free_ports(1 + len(NODES)),
            memory=memory,
            first_job=random.randrange(1, 19_000),
        )
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")

    def _start(self, program: str, *options: str, name: str | None = None) -> None:
        """Starts a daemon in the foreground of its own session, so that Ctrl-C is ours alone.

        If this process is killed, the kernel ends the daemon.
        """
        with open(self.folder / f"{name or program}.out.log", "ab") as log:
            self._daemons[name or program] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", _find(program), *options],
                env={**self.environment, _MARK: str(self.folder)},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _processes(self) -> Iterator[int]:
        """Every process of this cluster: daemons, job steps, batch scripts, ranks."""
        for process, environment in environments():
            of_job = "SLURM_JOB_ID" in environment
            if environment.get(_MARK) == str(self.folder) or (
                of_job and environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
            ):
                yield process


def environments() -> Iterator[tuple[int, dict[str, str]]]:
    """(process id, its environment when it started) of every process we may look into."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            entries = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # ended meanwhile
        yield int(path.parent.name), dict(e.split("=", 1) for e in entries if "=" in e)


def kill(process: int, number: signal.Signals) -> None:
    """Sends a signal; a process that has ended meanwhile is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_ADMIN_PATH}")


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel hands out, and that jobs meet at."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(5_000, 12_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def main() -> None:
    if reason := why_not():
        raise SystemExit(f"error: {reason}")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's `&` has INT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        with Cluster() as cluster:
            print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
            print("# nodes n0 and n1 are up; Ctrl-C takes them down", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
