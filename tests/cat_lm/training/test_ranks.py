"""How ranks are started: a launcher's variables, devices, and the signals that stop them."""

from __future__ import annotations

import os
import signal
import socket
import sys
from signal import SIG_DFL, SIG_IGN, SIGHUP, SIGINT, SIGTERM, SIGUSR1

import pytest
import torch

import train
from cat_lm.core.errors import REQUEUE_EXIT_CODE, UserError
from cat_lm.training import distributed, launcher
from cat_lm.training.watchdog import StopSignal
from tests.commands import python

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
SRUN |= {"SLURM_JOB_ID": "62082", "SLURM_RESTART_COUNT": "1"}


@pytest.fixture
def environment(monkeypatch):
    """Return the call that leaves a process these variables of a launcher."""

    def give(**values: str) -> None:
        for name in VARIABLES:
            monkeypatch.setenv(name, "")  # restored afterwards
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return give


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n[003-004,9],m1", "n003"),
        ("gpu-12,gpu-14", "gpu-12"),
        ("rack[1-2]-ib,z", "rack1-ib"),
        ("single", "single"),
    ],
)
def test_ranks_meet_at_the_first_slurm_host(nodelist, host, environment):
    environment(**SRUN, SLURM_STEP_NODELIST=nodelist)
    assert launcher.join_launcher() == (3, 1, 4)
    assert os.environ["MASTER_ADDR"] == host and os.environ["MASTER_PORT"] == "22001"


def test_batch_script_itself_is_one_rank(environment):
    """It has the job's variables, but only srun starts the job's tasks."""
    environment(SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_LOCALID="0")
    assert launcher.world_size() == 1 and launcher.join_launcher() == (0, 0, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "abc"), ("WORLD_SIZE", "0"), ("RANK", "7"), ("MASTER_PORT", "99999")],
)
def test_wrong_variable_of_a_launcher_raises_user_error(name, value, environment):
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "12000"}
    environment(**{**good, name: value})
    with pytest.raises(UserError, match=f"{name}={value}: a launcher sets it to a number from"):
        launcher.join_launcher()
    environment(RANK="0", WORLD_SIZE="2")
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT"):
        launcher.join_launcher()


def test_ranks_that_do_not_all_meet_end_with_the_requeue_code():
    code = (
        "from cat_lm.core.errors import command\n"
        "from cat_lm.training import distributed\n"
        "@command\n"
        "def main():\n"
        "    with distributed.start(timeout_minutes=0.01):\n"
        "        pass\n"
        "main()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = python("-c", code, **given, MASTER_PORT=port, DS_ACCELERATOR="cpu")
    assert done.returncode == REQUEUE_EXIT_CODE, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: rank 0 on ") and "Traceback" not in done.stderr
    assert f"2 ranks were started and did not all meet at 127.0.0.1:{port} (" in line


@pytest.mark.parametrize(
    ("seen", "local_rank", "number"),
    [
        (8, 3, 3),
        (1, 3, 0),  # a task that sees its own GPU only
        (2, 3, None),
    ],
)
def test_rank_has_a_gpu_of_its_own(seen, local_rank, number, monkeypatch):
    """DeepSpeed reads LOCAL_RANK as the device's number."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    if number is None:
        with pytest.raises(UserError, match="local rank 3 has no GPU of its own: this node shows"):
            distributed._select_device(local_rank)
    else:
        device = distributed._select_device(local_rank)
        assert chosen == [device] == [torch.device("cuda", number)]
        assert os.environ["LOCAL_RANK"] == str(number)


def test_ranks_that_share_a_gpu_are_told_so(monkeypatch):
    said = "NCCL error in: ncclUtils.hpp, invalid usage\nLast error:\n"
    said += "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000"

    def refused(*arguments):
        raise torch.distributed.DistBackendError(said)

    monkeypatch.setattr(distributed, "join_launcher", lambda: (1, 1, 2))
    monkeypatch.setattr(distributed, "_init_process_group", refused)
    words = "rank 1 on .*: another rank has the same GPU; .*start one rank per GPU"
    with pytest.raises(UserError, match=words), distributed.start():
        pass


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_gpu_memory_is_allocated_in_blocks_that_grow(name, monkeypatch):
    """Unless somebody said otherwise, under the setting's new name or its old one."""
    for known in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(known, "own")  # restored afterwards
        if known != name:
            monkeypatch.delenv(known)
    monkeypatch.setattr(sys, "argv", ["train.py", "no-such.yaml"])
    with pytest.raises(SystemExit):
        train.main()
    expected = {name: "own"} if name else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert {k: v for k, v in os.environ.items() if k.endswith("_ALLOC_CONF")} == expected


@pytest.fixture
def handlers():
    """Ignore signals that nobody handles, and set their handlers back afterwards."""
    before = {number: signal.getsignal(number) for number in (SIGTERM, SIGUSR1, SIGHUP, SIGINT)}
    for number in (SIGTERM, SIGUSR1):
        signal.signal(number, SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_end_with_their_code_and_a_second_interrupt_at_once(handlers, capfd):
    stop = StopSignal()
    assert stop.agreed_exit_code((), alone=True) == 0 and stop.votes() == (0, 0)
    os.kill(os.getpid(), SIGUSR1)
    assert stop.agreed_exit_code((), alone=True) == REQUEUE_EXIT_CODE
    assert stop.votes() == (1, 0)
    with pytest.raises(KeyboardInterrupt):  # there is no step yet to wait for
        os.kill(os.getpid(), SIGINT)
    stop.catch_interrupts()
    os.kill(os.getpid(), SIGINT)
    assert stop.votes() == (1, 0)  # the first signal decides
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), SIGINT)
    assert "SIGUSR1 received" in capfd.readouterr().err


@pytest.mark.parametrize(("before", "code"), [(SIG_DFL, REQUEUE_EXIT_CODE), (SIG_IGN, 0)])
def test_closed_terminal_is_as_term_unless_nohup_keeps_it_off(before, code, handlers, capfd):
    signal.signal(SIGHUP, before)
    stop = StopSignal()
    assert signal.getsignal(SIGHUP) is not SIG_DFL  # of which this process would die
    os.kill(os.getpid(), SIGHUP)
    assert stop.agreed_exit_code((), alone=True) == code
    assert ("SIGHUP received" in capfd.readouterr().err) == bool(code)


@pytest.mark.parametrize(
    ("votes", "code"), [((0.0, 0.0), 0), ((3.0, 0.0), REQUEUE_EXIT_CODE), ((3.0, 1.0), 130)]
)
def test_ranks_agree_on_their_votes_only(votes, code, handlers):
    """Not on what one of them has heard since: the others would go on."""
    stop = StopSignal()
    stop.request()
    assert stop.agreed_exit_code(votes, alone=False) == code
