"""Bad input to every command of eval.recall: one clear line and exit code 2, before any work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eval import study
from eval.recall.__main__ import main
from tests.calls import call_main
from tests.conftest import REPOSITORY

RUN = "run --task mqar:vocab_size=64 --mixer cat --d-model 16 --seq-len 16 --out OUT"
SHORT = " --epochs 1 --train-examples 8 --test-examples 4 --device cpu"


def fails(words: str, capsys, monkeypatch) -> str:
    """The last line of stderr of a command that must end with code 2."""
    program, command = main, words.split()
    if command[:1] == ["study"]:
        program, command = study.main, command[1:]
    code, _, told = call_main(program, monkeypatch, capsys, "eval.recall", *command)
    assert code == 2, told
    assert "Traceback" not in told
    return told.strip().splitlines()[-1]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("x")


# what follows a command that is right -> what the line must say
RUNS = {
    f"--seed {2**70}": "must be from 0 to 4,611,686,018,427,387,904",
    "--device meta": "--device meta: cannot be used",
    "--fixed-items": "fixed_items: needs test_lengths",
    "--task ar --test-lengths 16 --fixed-items": "--fixed-items: ar has no number of keys",
    "--task mqr": "--task='mqr': must be one of ar, nar",
    "--task mqar:keys": "'keys' must be key=value",
    "--task mqar:": "must be name or name:key=value,key=value, without spaces",
    "--task mqar:keys=5": "keys=5: seq_len=16 fits 1 to 4",
    "--task mqar:keys=two": "keys=two: must be a whole number such as",
    "--task mqar:filler=spaces": "filler='spaces': choose one of unused, random, zeros",
    "--task mqar:vocab_size=4": "vocab_size=4",
    "--task mqar:power_a=nan": "power_a=nan",
    "--task mqnar:ngram=0": "ngram=0: must be at least 1",
    "--task hard-mqnar:pool=1": "pool=1: 1 2-grams",
    "--task mqar:unmatched=7": "7 queries without a match need 18 tokens; seq_len=16 is too short",
    "--task ar:unmatched=1": "unknown option 'unmatched'",
    "--validation-examples 0": "--validation-examples: '0' must be from 1 to 1,000,000,000",
    "--task ar:layout=pair": "layout='pair': choose one of pairs, free",
    "--task selective-copy": "copies=16: 32 tokens are needed",
    "--task selective-copy:copies=4,signals=3": "need as many signals",
    "--mixer kat": "--mixer='kat': must be one of attention",
    "--mixer cat:heads=3": "heads=3 do not divide d_model=16",
    "--d-model 0": "--d-model: '0' must be from 1 to 16,384",
    "--seq-len 3": "seq_len=3 is too short",
    "--lr nan": "--lr: 'nan' must be",
    "--stop-above never": "'never' must be a number, or none",
    "--embedding-dropout 1": "--embedding-dropout: '1' must be from 0 to 0.99",
    "--mixer cat:conv_mixing=maps": "needs conv_type=multihead and the stream v",
    "--task mqar:vocab_size=2048 --mixer multi-token --test-lengths 1024": (
        "multi-token: takes rows of at most 512 tokens"
    ),
    "--test-lengths 2": "--test-lengths 2: is shorter than the training's 16 tokens",
    "--test-lengths 16,x": "'x' must be a whole number such as",
    "--train-examples 1_000_000_000 --seq-len 1024": "are more than 68,719,476,736 tokens",
    "--test-lengths 128": "--test-lengths 128: vocab_size=64",
    "--out FILE": "--out FILE: is a file; give a folder",
    "--out FILE/a/b": "/FILE is a file; give a folder",
}

# a command -> what the line must say
OTHERS = {
    "": "the following arguments are required: command",
    "plot": "invalid choice: 'plot'",
    "run --task mqar": "the following arguments are required: --mixer",
    "study acuracy --out OUT": "invalid choice: 'acuracy'",
    "study accuracy --out OUT --workers 0": "--workers: '0' must be from 1 to 4,096",
    "study accuracy --out OUT --stack 0": "'0' must be from 1 to 10,000, or auto",
    "study accuracy --out OUT --device cuda:99": "--device cuda:99",
    "study accuracy --out OUT --seeds 0": "--seeds: '0' must be from 1",
    "study accuracy --out FILE": "--out FILE: is a file; give a folder",
    "study accuracy --out OUT --models cat kat": "--models='kat': must be one of attention",
    "study length --scale paper --out OUT --models multi-token --estimate-only": (
        "multi-token: takes rows of at most 512 tokens, not of 1024"
    ),
    "study accuracy --out OUT --models cat:window={copies}": "window={copies}: must be a wh",
    "study width --out OUT --models cat cat": "--models cat: is given twice",
    "study width --out OUT --models cat none": "--models none: is in every figure",
    "study length --out OUT --rows MQNAR": "--rows 'MQNAR': choose among MQAR; ha",
    "tradeoff --scale smoke --out FILE": "--out FILE: is a file",
    "study streams --out OUT --data": "--data: expected at least one argument",
    "study streams --data NOWHERE --out OUT": "NOWHERE: no such folder",
    "study streams --data . --out OUT": "holds no finished data",
    "study streams --data '' --out OUT": "--data: \"''\" is no path",
    "theory --out FILE": "--out FILE: is a file; give a folder",
    "theory --out OUT --rows 19": "'19' must be from 20 to 1,000,000",
}


COMMANDS = [pytest.param(f"{RUN}{SHORT} {words}", told, id=words) for words, told in RUNS.items()]
COMMANDS += [pytest.param(words, told, id=words or "nothing") for words, told in OTHERS.items()]


@pytest.mark.parametrize("words,told", COMMANDS)
def test_bad_input_is_refused(words, told, capsys, monkeypatch):
    assert told in fails(words, capsys, monkeypatch)
    assert not list(Path().glob("OUT/cells/*.json"))


def test_a_damaged_cell_is_named(capsys, monkeypatch):
    call_main(main, monkeypatch, capsys, "eval.recall", *f"{RUN}{SHORT}".split())
    (path,) = Path("OUT/cells").glob("*.json")
    whole = path.read_text()
    for damaged in (whole[:100], "", "[]", json.dumps({"format": 1, "cell": {}})):
        path.write_text(damaged)
        told = fails(f"{RUN}{SHORT}", capsys, monkeypatch)
        assert str(path) in told and "damaged" in told


def signals_heard() -> None:
    """A shell's & has the first ignored, nohup the second."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        *("kill", "interrupt", "kill a worker"),
        *(pytest.param(how, marks=pytest.mark.nightly) for how in ("terminate", "hang up")),
    ],
)
def test_an_end_of_a_grid_ends_its_processes(how, tmp_path):
    """An interrupt as a terminal sends it, to the whole group; other signals to the first alone."""
    signals = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "hang up": signal.SIGHUP}
    command = [sys.executable, "-m", "eval.study", "accuracy", "--scale", "smoke"]
    command += ["--out", str(tmp_path / "OUT"), "--workers", "2", "--device", "cpu"]
    grid = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=signals_heard,
    )
    try:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("OUT/cells/*.json")) and time.monotonic() < deadline:
            assert grid.poll() is None, grid.communicate()
            time.sleep(0.1)
        if how == "interrupt":
            os.killpg(grid.pid, signal.SIGINT)
        elif how in signals:
            grid.send_signal(signals[how])
        else:
            workers = psutil.Process(grid.pid).children()
            next(w for w in workers if "spawn_main" in " ".join(w.cmdline())).kill()
        _, told = grid.communicate(timeout=120)
    finally:
        if grid.poll() is None:
            os.killpg(grid.pid, signal.SIGKILL)
            grid.wait()
    if how not in ("kill", "kill a worker"):
        assert grid.returncode == 130
        assert told.strip().splitlines()[-1] == "interrupted"
        assert "Traceback" not in told and "leaked" not in told
    if how == "kill a worker":
        assert grid.returncode == 2 and "Traceback" not in told
        assert "a process of the grid was killed" in told and "the same command goes on" in told
    finished = list(tmp_path.glob("OUT/cells/*.json"))
    assert finished and all(json.loads(path.read_text())["accuracy"] >= 0 for path in finished)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(grid.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("processes are left")
