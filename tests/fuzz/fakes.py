"""Commands that break each of the rules on purpose, `python -m tests.fuzz.fakes DEED IN OUT`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

STEP = Path("run/checkpoints/step-00000001")


def fine() -> None:
    """Refuses an input that is not as it was, and writes what it is asked to."""
    if Path("in.bin").read_bytes() != bytes(64):
        refused()
    Path("out").write_text("done")


def refused() -> None:
    print("error: in.bin: damaged", file=sys.stderr)
    raise SystemExit(2)


def trace() -> None:
    raise KeyError("step")


def code() -> None:
    raise SystemExit(3)


def silent() -> None:
    raise SystemExit(2)


def chatty() -> None:
    print("error: one\nerror: two", file=sys.stderr)
    raise SystemExit(2)


def lines() -> None:
    print("error: in.bin: cannot be read:\nDetails are above", file=sys.stderr)
    raise SystemExit(2)


def hang() -> None:
    while True:
        pass


def wait() -> None:
    time.sleep(1000)


def eat() -> None:
    taken = []
    while True:
        taken.append(b"x" * 2**24)


def ask() -> None:
    input("run the code? ")


def leave() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])


def delete() -> None:
    os.unlink("neighbour.txt")


def change() -> None:
    with open("in.bin", "ab") as stream:
        stream.write(b"more")


def escape() -> None:
    Path("../../x").write_text("outside")


def accept() -> None:
    """Says nothing of a damaged input."""


def lose() -> None:
    (STEP / "weights").unlink()


def nan() -> None:
    Path("out").mkdir()
    Path("out/result.json").write_text('{"loss": NaN}')


_DEEDS = (fine, refused, trace, code, silent, chatty, lines, hang, wait, eat, ask, leave)
_DEEDS += (delete, change, escape, accept, lose, nan)
DEEDS = {deed.__name__: deed for deed in _DEEDS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="fakes")
    parser.add_argument("deed", choices=DEEDS)
    parser.add_argument("input")
    parser.add_argument("out")
    parser.add_argument("--number", type=int)
    parser.add_argument("--new-option")
    parser.add_argument("--flag", action="store_true")
    DEEDS[parser.parse_args().deed]()
