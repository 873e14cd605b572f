"""What is right and wrong about how a command ended.

Right: exit code 0, or exit code 2 with one `error: …` on stderr (one line, the list of errors of a
configuration, or argparse's usage and error). All else is a failure, and so are: code 0 though the
bytes of a file with a checksum differ, results that are not finite, a lost checkpoint, and anything
changed outside of what the command was given to write.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from tests.fuzz.server import Ended

PRECIOUS = "precious"  # names that begin so are the user's, wherever they lie
NOTES = ".verified.jsonl"  # notes of what was verified lie beside the data
STEP = re.compile(r"^(.*/checkpoints/(step-\d{8,}))/")
# What a command says of a file that it noticed and did without.
_NOTICED = re.compile(
    r"damaged|passed over|checksum|sha-?256|differ|not whole|incomplete|not complete|unreadable"
    r"|ignored|cannot|set aside|skipp|left out|does not match|no complete",
    re.IGNORECASE,
)
# A library's words beside the error; a command's own notes and progress are none.
_NOISE = re.compile(r"[Ww]arning|\[rank\d|^\S+\.py:\d+|^(INFO|DEBUG|ERROR)\b|^\[[\dEWI]")
_OTHERS = re.compile(r"site-packages|/lib/python|/tests/fuzz/server|/tests/commands|<frozen")


@functools.cache
def failure_type(cause: str) -> type[AssertionError]:
    """Return the exception of a cause: Hypothesis reports those of different types separately."""
    return type(cause, (AssertionError,), {"__module__": "fuzz"})


def snapshot(root: Path, left_out: Sequence[str]) -> dict[str, str]:
    """Return what every entry below `root` is: a folder, a link to …, or a file with its digest."""
    found = {}
    for path in root.rglob("*"):
        name = path.relative_to(root)
        if name.parts[0] in left_out:
            continue
        what = "folder" if path.is_dir() else "other"
        if path.is_symlink():
            what = f"link to {os.readlink(path)}"
        elif path.is_file():
            with open(path, "rb") as stream:
                what = f"file {hashlib.file_digest(stream, 'blake2s').hexdigest()}"
        found[str(name)] = what
    return found


@dataclass(frozen=True)
class Surroundings:
    """What was there before and after a case, and what of it the command may write.

    Attributes:
        root: folder of the snapshots; all names are relative to it.
        before, after: snapshots of `root`.
        outputs: names that it may write, with all below them.
        damaged: the file that was damaged, if any.
        guarded: whether a checksum vouches for that file.
    """

    root: Path
    before: dict[str, str]
    after: dict[str, str]
    outputs: Sequence[str]
    damaged: str = ""
    guarded: bool = False

    @functools.cached_property
    def changes(self) -> dict[str, str]:
        """Return `created`, `deleted` or `changed` of every name that is not as it was."""
        found = {}
        for name in sorted(self.before.keys() | self.after.keys()):
            old, new = self.before.get(name), self.after.get(name)
            if old != new:
                found[name] = "deleted" if new is None else "changed" if old else "created"
        return found


def failures(ended: Ended, codes: Sequence[int], around: Surroundings) -> list[str]:
    """Return all rules that were broken, as `kind: cause`; none where the command did right.

    Args:
        codes: the exit codes that the command documents, such as 0 and 2.
    """
    found = [*_ending(ended, codes), *_written_outside(around), *_lost_checkpoints(around)]
    if ended.code == 0:
        found += [*_accepted_damage(ended, around), *_nonsense(around)]
    # One cause is one text: numbers of layers and steps differ from case to case.
    return [re.sub(r"(?<=[a-z]-)\d+|\d{3,}", "N", each) for each in found]


def _ending(ended: Ended, codes: Sequence[int]) -> list[str]:
    if ended.trouble:
        return [f"{ended.trouble}: in {_own_frame(ended.stderr, 0)}"]
    if "[y/N]" in ended.stdout:
        return ["prompt: the command asked for input"]
    if "Traceback (most recent call last)" in ended.stderr:
        errors = re.findall(r"^[A-Za-z_][\w.]*(?=:|$)", ended.stderr, re.MULTILINE)
        return [f"traceback: {(errors or ['?'])[-1]} at {_own_frame(ended.stderr, -1)}"]
    if ended.code not in codes:
        return [f"exit code: {ended.code}"]
    wrong = message_problem(ended.stderr) if ended.code == 2 else None
    return [f"message: {wrong}"] if wrong else []


def message_problem(stderr: str) -> str | None:
    """Return what is wrong with the message of an exit code 2."""
    lines = [line for line in stderr.split("\n") if line.strip()]
    if any(line.startswith("usage:") for line in lines):
        return None if any(": error: " in line for line in lines) else "usage without an error"
    places = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if len(places) != 1:
        return f"{len(places)} lines of `error:`"
    first, rest = lines[places[0]], lines[places[0] + 1 :]
    # The list of errors in a configuration: a first line that ends in a colon, then indented ones.
    if rest and not (first.rstrip().endswith(":") and all(li.startswith("  ") for li in rest)):
        return "several lines"
    if any(_NOISE.search(line) for line in lines[: places[0]]):
        return "other lines beside it"
    return None if first.removeprefix("error: ").strip() else "an empty message"


def _own_frame(stderr: str, place: int) -> str:
    """Return the project's own function that was innermost: the last, or the first of a stack."""
    frames = re.findall(r'File "([^"]+)", line \d+,? in (\S+)', stderr)
    own = [frame for frame in frames if not _OTHERS.search(frame[0])]
    file, function = (own or frames or [("?", "?")])[place]
    return f"{'/'.join(Path(file).parts[-2:])}:{function}"


def _written_outside(around: Surroundings) -> list[str]:
    """Return what was changed outside of OUT, and what of the user's was lost inside of it."""
    made = {around.after[name] for name, how in around.changes.items() if how == "created"}
    found = []
    for name, how in around.changes.items():
        may = any(name == out or name.startswith(f"{out}/") for out in around.outputs)
        # A user's file may move with the folder that it is in, but no more.
        precious = Path(name).name.startswith(PRECIOUS) and how != "created"
        lost = precious and around.before[name] not in made
        if lost or not (may or Path(name).name == NOTES):
            found.append(f"{how} {name}")
    return [f"outside: {'; '.join(found[:3])}"] if found else []


def _lost_checkpoints(around: Surroundings) -> list[str]:
    """Return checkpoints that are gone or changed, but for those that newer ones have replaced."""
    steps = {m[1] for name in around.before if (m := STEP.match(name))}
    complete = {
        m[1] for name in around.after if (m := STEP.match(name)) and name.endswith("/complete.json")
    }
    kept = set(around.after.values())
    found = []
    for step in sorted(steps):
        changed = [n for n in around.changes if n.startswith(f"{step}/") and n in around.before]
        lost = [around.before[n] for n in changed if around.before[n].startswith("file")]
        is_whole = f"{step}/complete.json" in around.before
        is_whole = is_whole and not around.damaged.startswith(f"{step}/")
        pruned = step not in complete and any(other > step for other in complete)
        if not kept.issuperset(lost) and not (is_whole and pruned):
            found.append(f"lost checkpoint: a {'whole' if is_whole else 'damaged'} one")
    return found


def _accepted_damage(ended: Ended, around: Surroundings) -> list[str]:
    if not around.guarded:
        return []
    step = STEP.match(around.damaged)
    names = (Path(around.damaged).name, *([step[2]] if step else []))
    for line in (ended.stdout + ended.stderr).splitlines():
        if _NOTICED.search(line) and any(name in line for name in names):
            return []
    return [f"accepted damage: {around.damaged}"]


def _nonsense(around: Surroundings) -> list[str]:
    found = []
    for name, how in around.changes.items():
        # What is set aside is damaged, and kept as it was found.
        if how == "deleted" or ".aside" in name or not around.after[name].startswith("file"):
            continue
        if what := nonsense(around.root / name):
            found.append(f"nonsense: {name} {what}")
    return found


def nonsense(path: Path) -> str | None:
    """Return what in a written file is not finite: a weight, or a number of a JSON file."""
    if path.suffix == ".safetensors":
        try:
            tensors = load_file(path).values()
        except (SafetensorError, OSError):
            return "is no safetensors file"
        finite = all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())
        return None if finite else "a weight is not finite"
    # A tokenizer's files are copies of what was given.
    if path.suffix not in (".json", ".jsonl") or path.name.startswith("tokenizer"):
        return None
    found: list[str] = []
    text = path.read_text("utf-8")
    for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
        with suppress(ValueError):  # Not all that is named so is JSON.
            json.loads(part, parse_constant=found.append)
    return f"holds {found[0]}" if found else None
