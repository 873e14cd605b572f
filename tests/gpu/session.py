"""`bash tests/gpu/run.sh [OUT]`: the GPU tests, then every benchmark, each with its own record.

Steps of `tests/gpu/plan.py` run one after the other within --minutes, each as a process with a
limit of its own. OUT gets NAME.json and NAME.log of each step, and summary.json, whole after every
step: device, versions, commit, and what passed, failed (with the line that says why), or was not
reached. A session that is killed leaves what it had. The same command goes on in the same OUT:
steps that passed are kept, those that were cut off or failed run again.

--rehearse runs every step at tiny sizes on a CPU: what it proves is that a session would run.

Exit codes: 0 all steps that ran passed, 1 one failed, timed out, or lacks a package, 2 bad input or
no GPU, 130 and 143 ended by a signal.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from cat_lm.cli import Parser, number, path
from cat_lm.errors import UserError, command
from cat_lm.limits import Range
from tests.gpu.plan import REPOSITORY, Step, plan

MINUTES = Range(0.01, 24 * 60)
LEAST_SECONDS = 5.0  # a step is not begun with less time left
GRACE_SECONDS = 10.0  # from TERM to KILL


class Session:
    """One run of the plan into a folder.

    Attributes:
        summary: what summary.json holds.
    """

    def __init__(self, out: Path, seconds: float, about: dict[str, Any]) -> None:
        self.out, self.about = out, about
        self.end = time.monotonic() + seconds
        self.process: subprocess.Popen | None = None
        self.summary = {**about, "minutes": seconds / 60, "ended": None, "steps": []}

    def run(self, steps: list[Step]) -> int:
        """Run what has not passed yet; 1 if a step failed, else 0."""
        kept = self._passed_before()
        # All are in the summary from the start: what was not reached shows.
        rows = self.summary["steps"] = [
            kept.get(step.name) or {"name": step.name, "status": "not reached"} for step in steps
        ]
        self.save()
        for number_, (step, row) in enumerate(zip(steps, rows, strict=True), start=1):
            if row["status"] == "passed":
                say(f"{number_}/{len(steps)} {step.name}: passed before")
            elif self._left() < LEAST_SECONDS:
                break
            else:
                self._step(step, row)
                said = f": {row['error']}" if row.get("error") else ""
                took = f" in {row['seconds']:.1f} s" if "seconds" in row else ""
                say(f"{number_}/{len(steps)} {step.name}: {row['status']}{took}{said}")
            self.save()
        self.finish("all steps are done" if self._left() >= LEAST_SECONDS else "the time is over")
        return int(any(row["status"] in ("failed", "timed out", "lacks") for row in rows))

    def finish(self, why: str) -> None:
        """End what runs, and say in the summary why the session ended."""
        if self.process is not None and self.process.poll() is None:
            _end(self.process)
        self.summary["ended"] = why
        self.save()

    def save(self) -> None:
        from cat_lm.io.files import write_json

        self.summary["updated"] = _now()
        write_json(self.out / "summary.json", self.summary)

    def _left(self) -> float:
        return self.end - time.monotonic()

    def _passed_before(self) -> dict[str, dict]:
        """Rows of steps that passed in this folder, by name.

        Raises:
            UserError: the folder's session was another one's.
        """
        file = self.out / "summary.json"
        if not file.exists():
            return {}
        earlier = json.loads(file.read_text(encoding="utf-8"))
        for key in ("commit", "rehearsal", "device", "versions"):
            if earlier[key] != self.about[key]:
                raise UserError(
                    f"{self.out}: holds a session with {key} {earlier[key]}, this one's is "
                    f"{self.about[key]}: give another folder"
                )
        return {row["name"]: row for row in earlier["steps"] if row["status"] == "passed"}

    def _step(self, step: Step, row: dict[str, Any]) -> None:
        """Run a step; its row says how it went."""
        row.clear()
        row["name"] = step.name
        if lacks := step.lacks():
            status = "absent" if step.optional else "lacks"
            row.update(status=status, error=f"{', '.join(lacks)} is not installed")
            return
        record, log = self.out / f"{step.name}.json", self.out / f"{step.name}.log"
        record.unlink(missing_ok=True)
        words = [word.replace("{record}", str(record)) for word in step.command]
        limit, whole = min(60 * step.minutes, self._left()), self._left() >= 60 * step.minutes
        row.update(status="running", command=words, limit_seconds=limit, started=_now())
        self.save()
        start = time.monotonic()
        with log.open("wb") as lines:
            self.process = _start(words, lines)
            try:
                code = self.process.wait(limit)
            except subprocess.TimeoutExpired:
                _end(self.process)
                code = None
        row.update(seconds=time.monotonic() - start, exit_code=code, log=log.name)
        row["record"] = record.name if _is_json(record) else None
        if code == 0 and row["record"]:
            row["status"] = "passed"
        elif code is None:
            row["status"] = "timed out" if whole else "cut off"
            row["error"] = f"took longer than {limit:.0f} s"
        else:
            row["status"] = "failed"
            row["error"] = _error(record, log) if code else "left no record"


def _start(words: list[str], lines: Any) -> subprocess.Popen:
    """A process with a group of its own, which the kernel ends if this one is killed."""
    parent_death_signal, library = 1, ctypes.CDLL(None)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=lines,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: library.prctl(parent_death_signal, signal.SIGKILL),
    )


def _end(process: subprocess.Popen) -> None:
    """TERM to the whole group, which may have workers, then KILL."""
    for number_ in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number_)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _is_json(record: Path) -> bool:
    try:
        json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _error(record: Path, log: Path) -> str:
    """The line that says what was wrong: a test's, `error: …`, an exception's, or the last one."""
    if _is_json(record):
        tests = json.loads(record.read_text(encoding="utf-8")).get("tests", [])
        failed = [test for test in tests if test["outcome"] == "failed"]
        if failed:
            return f"{len(failed)} failed, first {failed[0]['name']}: {failed[0]['message']}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (told or raised or lines or ["no output"])[-1].strip()


def about(rehearsal: bool) -> dict[str, Any]:
    """Device, driver, versions, commit, date; what a record of a session begins with.

    Raises:
        UserError: there is no GPU, and this is no rehearsal.
    """
    import torch

    from eval.common.provenance import provenance
    from eval.speed.machine import describe

    if not rehearsal and not torch.cuda.is_available():
        raise UserError(
            "no CUDA GPU: torch sees none here; --rehearse runs every step at tiny sizes on a CPU"
        )
    device = describe(torch.device("cpu" if rehearsal else "cuda"))
    moving = ("sm_clock_mhz",)
    return {
        **provenance(),
        "rehearsal": rehearsal,
        "device": {key: value for key, value in device.items() if key not in moving},
        "driver": None if rehearsal else _driver(),
    }


def _driver() -> str | None:
    """The driver's version; None where nvidia-smi is not there to be asked."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return said.stdout.split("\n")[0].strip() or None


def choose(steps: list[Step], names: str | None) -> list[Step]:
    """Steps whose names begin with one of the given beginnings, in the plan's order.

    Raises:
        UserError: a beginning of none.
    """
    if names is None:
        return steps
    for name in names.split(","):
        if not name or not any(step.name.startswith(name) for step in steps):
            known = ", ".join(step.name for step in steps)
            raise UserError(f"--steps {names}: no step begins with {name!r}; there are {known}")
    return [step for step in steps if step.name.startswith(tuple(names.split(",")))]


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _parser() -> Parser:
    parser = Parser(prog="bash tests/gpu/run.sh", description=__doc__.split("\n\n")[1])
    add = parser.add_argument
    add("out", nargs="?", type=path, default=Path("runs/gpu"), metavar="OUT", help="runs/gpu")
    add("--minutes", type=number(MINUTES), default=20.0, metavar="N", help="for all (default: 20)")
    add("--steps", metavar="LIST", help="only those that begin so: tests,conv-qkv,train")
    add("--list", action="store_true", help="only print the steps, in their order")
    add("--rehearse", action="store_true", help="every step at tiny sizes, on a CPU")
    return parser


@command
def main() -> None:
    options = _parser().parse_args()
    steps = choose(plan(options.rehearse), options.steps)
    if options.list:
        print("\n".join(step.name for step in steps))
        return
    session_about = about(options.rehearse)
    options.out.mkdir(parents=True, exist_ok=True)
    session = Session(options.out.resolve(), 60 * options.minutes, session_about)

    def stop(received: int, frame: object) -> NoReturn:
        session.finish(f"signal {signal.Signals(received).name}")
        sys.exit(128 + received)

    for number_ in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number_, stop)
    code = session.run(steps)
    found = [row["status"] for row in session.summary["steps"]]
    counts = ", ".join(f"{found.count(status)} {status}" for status in dict.fromkeys(found))
    say(f"{session.summary['ended']}: {counts}; {options.out / 'summary.json'}")
    raise SystemExit(code)
