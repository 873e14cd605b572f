"""The processes of runs, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cat_lm.core.errors import UserError
from eval.common.interrupts import held
from eval.small_study.execute import (
    Workers,
    complete_run,
    result_path,
    unfinished,
)
from eval.small_study.plan import ROOT, SIZES, Job, Study
from tests.unit.imitated_study import Imitation


def test_stopped_processes_are_told_and_waited_for(tmp_path):
    study = Study(SIZES["cpu"], ("pythia",), (0, 1, 2), tmp_path, tmp_path)
    workers = Workers(study, parallel=2, threads=1)
    saved = tmp_path / "saved"
    saves = (
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        f"    open({str(saved)!r}, 'a').write('x'); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)\n"
    )

    def task(workers: Workers, job: Job) -> int:
        return workers.process(["-c", saves, str(tmp_path / job.name)], tmp_path / "log")

    def interrupt() -> None:
        while not all((tmp_path / job.name).exists() for job in study.jobs()[:2]):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        workers.run(study.jobs(), task, lambda *_: None)
    assert time.monotonic() - begin < 30
    assert saved.read_text() == "xx", "both were told once; the third was not begun"


def test_trainings_that_outlive_a_killed_call_keep_others_out(tmp_path):
    study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path / "out", tmp_path)
    # A call that dies by kill -9 while its process, a session of its own, goes on.
    call = (
        "import os, sys, threading, time; from pathlib import Path\n"
        "from eval.common.interrupts import held\n"
        "from eval.small_study.execute import Workers\n"
        "from eval.small_study.plan import SIZES, Study\n"
        f"study = Study(SIZES['cpu'], ('pythia',), (0,), Path({str(study.out)!r}), Path())\n"
        "code = 'import os, pathlib, sys, time; '\n"
        "code += 'pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)'\n"
        f"pid = {str(tmp_path / 'pid')!r}\n"
        "with held(study.out) as lock:\n"
        "    workers = Workers(study, 1, 1, lock)\n"
        "    begin = lambda: workers.process(['-c', code, pid], study.out / 'log')\n"
        "    threading.Thread(target=begin, daemon=True).start()\n"
        "    while not (os.path.exists(pid) and open(pid).read()): time.sleep(0.02)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", call], cwd=ROOT).returncode == -9
    orphan = int((tmp_path / "pid").read_text())
    try:
        with pytest.raises(UserError, match="left behind"), held(study.out):
            pass
    finally:
        os.kill(orphan, signal.SIGKILL)
    for _ in range(500):
        try:
            with held(study.out):
                return
        except UserError:
            time.sleep(0.02)
    pytest.fail("the lock outlives the processes")


def test_one_thread_each_and_the_log_has_command_and_output(tmp_path):
    study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path)
    log = tmp_path / "deep/log"
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.getcwd())"
    assert Workers(study, 1, 3).process(["-c", code], log) == 0
    text = log.read_text()
    assert text.startswith("$ python -c ") and f"3 {ROOT}" in text


def test_result_is_written_last(tmp_path, monkeypatch):
    study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path / "out", tmp_path)
    job = study.jobs()[0]
    seen = []
    imitation = Imitation()

    def process(workers: Workers, arguments: list[str], log: Path) -> int:
        seen.append(result_path(job).exists())
        return imitation(workers, arguments, log)

    monkeypatch.setattr(Workers, "process", process)
    assert unfinished([job]) == [job]
    complete_run(Workers(study, 1, 1), job)
    assert seen == [False] * 3 and unfinished([job]) == []
