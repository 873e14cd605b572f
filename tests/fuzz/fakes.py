"""Commands that break each of the rules on purpose, `python -m tests.fuzz.fakes DEED IN OUT`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

STEP = Path("run/checkpoints/step-00000001")


def _fine() -> None:
    """Refuse an input that is not as it was, and write what is asked for."""
    if Path("in.bin").read_bytes() != bytes(64):
        _end(2, "error: in.bin: damaged")
    Path("out").write_text("done")


def _end(code: int, text: str = "") -> None:
    print(text, file=sys.stderr, end="\n" if text else "")
    raise SystemExit(code)


def _trace() -> None:
    raise KeyError("step")


def _hang() -> None:
    while True:
        pass


def _eat() -> None:
    taken = []
    while True:
        taken.append(b"x" * 2**24)


def _leave() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])


def _write_nan() -> None:
    Path("out").mkdir()
    Path("out/result.json").write_text('{"loss": NaN}')


DEEDS: dict[str, Callable[[], object]] = {
    "fine": _fine,
    "refused": lambda: _end(2, "error: in.bin: damaged"),
    "trace": _trace,
    "code": lambda: _end(3),
    "silent": lambda: _end(2),
    "chatty": lambda: _end(2, "error: one\nerror: two"),
    "lines": lambda: _end(2, "error: in.bin: cannot be read:\nDetails are above"),
    "hang": _hang,
    "wait": lambda: time.sleep(1000),
    "eat": _eat,
    "ask": lambda: input("run the code? "),
    "leave": _leave,
    "delete": lambda: os.unlink("neighbour.txt"),
    "change": lambda: Path("in.bin").write_bytes(b"more"),
    "escape": lambda: Path("../../x").write_text("outside"),
    "accept": lambda: None,
    "lose": lambda: (STEP / "weights").unlink(),
    "nan": _write_nan,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="fakes")
    parser.add_argument("deed", choices=DEEDS)
    parser.add_argument("input")
    parser.add_argument("out")
    parser.add_argument("--number", type=int)
    parser.add_argument("--new-option")
    parser.add_argument("--flag", action="store_true")
    DEEDS[parser.parse_args().deed]()
