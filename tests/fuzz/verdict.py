"""What is right and wrong about how a command ended.

Right: exit code 0, or exit code 2 with one `error: …` on stderr (one line, the list of errors of a
configuration, or argparse's usage and error). All else is a failure, and so are: code 0 though the
bytes of a file with a checksum differ, results that are not finite, a lost checkpoint, and anything
changed outside of what the command was given to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.fuzz.child import PROMPT, Ended
from tests.fuzz.snapshot import Snapshot, differences

PRECIOUS = "precious"  # names that begin so are the user's, wherever they lie
NOTES = ".verified.jsonl"
_STEP = re.compile(r"^(.*/checkpoints/(step-\d{8,}))/")
# What a command says of a file that it noticed and did without.
_NOTICED = re.compile(
    r"damaged|passed over|checksum|sha-?256|differ|not whole|incomplete|not complete|unreadable"
    r"|ignored|cannot|set aside|skipp|left out|does not match|no complete",
    re.IGNORECASE,
)
# A library's words beside the error; a command's own notes and progress are none.
_NOISE = re.compile(r"[Ww]arning|\[rank\d|^\S+\.py:\d+|^(INFO|DEBUG|ERROR)\b|^\[[\dEWI]")


@dataclass(frozen=True)
class Failure:
    """A broken rule: its kind, and the cause by which failures are grouped."""

    kind: str
    cause: str


@dataclass(frozen=True)
class Surroundings:
    """What was there before and after a case, and what of it the command may write.

    Attributes:
        root: folder of the snapshots.
        before, after: snapshots of `root`.
        home: the working folder of the command, relative to `root`.
        outputs: names relative to `root` that it may write, with all below them.
        damaged: the file that was damaged, relative to `root`, if any.
        guarded: whether a checksum vouches for that file.
    """

    root: Path
    before: Snapshot
    after: Snapshot
    home: str
    outputs: Sequence[str]
    damaged: str | None = None
    guarded: bool = False


def failures(ended: Ended, codes: Sequence[int], around: Surroundings) -> list[Failure]:
    """All rules that were broken; empty where the command did right.

    Args:
        codes: the exit codes that the command documents, such as 0 and 2.
    """
    found = [*_ending(ended, codes), *_changes(around)]
    if ended.code == 0:
        found += _accepted(ended, around)
    return found


def _ending(ended: Ended, codes: Sequence[int]) -> list[Failure]:
    found = [Failure(kind, _where_it_was(ended.stderr)) for kind in ended.trouble]
    if PROMPT in ended.stderr + ended.stdout or "[y/N]" in ended.stdout:
        found.append(Failure("prompt", PROMPT))
    if ended.code is None:
        return found
    if "Traceback (most recent call last)" in ended.stderr:
        return [*found, Failure("traceback", traceback_cause(ended.stderr))]
    if ended.code not in codes:
        cause = f"exit code {ended.code}: {normal(_last_line(ended.stderr))}"
        return [*found, Failure("exit code", cause)]
    if ended.code == 2 and (wrong := _message(ended.stderr)):
        return [*found, Failure("message", wrong)]
    return found


def _message(stderr: str) -> str | None:
    """What is wrong with the message of an exit code 2."""
    lines = [line for line in stderr.split("\n") if line.strip()]
    if any(line.startswith("usage:") for line in lines):
        place = next((i for i, line in enumerate(lines) if ": error: " in line), None)
        return "usage without an error" if place is None else None
    places = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if len(places) != 1:
        return f"{len(places)} lines of `error:`; the last line: {normal(_last_line(stderr))}"
    first = lines[places[0]]
    rest = lines[places[0] + 1 :]
    # The list of errors in a configuration: a first line that ends in a colon, then indented ones.
    if rest and not (first.rstrip().endswith(":") and all(li.startswith("  ") for li in rest)):
        return f"several lines: {normal(first)} … {normal(rest[-1])}"
    noise = [line for line in lines[: places[0]] if _NOISE.search(line)]
    if noise:
        return f"other lines beside it: {normal(noise[-1])}"
    if not first.removeprefix("error: ").strip():
        return "an empty message"
    return None


def _changes(around: Surroundings) -> list[Failure]:
    """What was changed outside of OUT, and what was lost inside of it."""
    changed = differences(around.before, around.after)
    made = {around.after[name] for name, how in changed.items() if how == "created"}
    outside = sorted(
        name
        for name, how in changed.items()
        # Notes of what was verified lie beside the data, as plans of packing do.
        if (
            Path(name).name != NOTES
            and not any(name == out or name.startswith(f"{out}/") for out in around.outputs)
        )
        # A user's file may move with the folder that it is in, but no more.
        or (
            Path(name).name.startswith(PRECIOUS)
            and how != "created"
            and around.before[name] not in made
        )
    )
    found = []
    if outside:
        shown = [f"{changed[name]} {_anonymous(name, around)}" for name in outside]
        found.append(Failure("outside", normal("; ".join(shown[:3]))))
    return found + _lost_checkpoints(around, changed)


def _lost_checkpoints(around: Surroundings, changed: dict[str, str]) -> list[Failure]:
    """Checkpoints that are gone or changed, but for those that newer ones have replaced."""
    folders = {m[1] for name in around.before if (m := _STEP.match(name))}
    after = {
        m[1] for name in around.after if (m := _STEP.match(name)) and name.endswith("ete.json")
    }
    kept = {entry[2] for entry in around.after.values() if entry[0] == "file"}
    found = []
    for folder in sorted(folders):
        touched = [name for name in changed if name.startswith(f"{folder}/")]
        lost = [n for n in touched if n in around.before and changed[n] != "created"]
        lost = [
            n for n in lost if around.before[n][0] == "file" and around.before[n][2] not in kept
        ]
        whole = f"{folder}/complete.json" in around.before and not (
            around.damaged or ""
        ).startswith(f"{folder}/")
        pruned = folder not in after and any(other > folder for other in after)
        if lost and not (whole and pruned):
            what = "whole" if whole else "damaged"
            found.append(Failure("lost checkpoint", f"a {what} one, {Path(folder).name}"))
    return found


def _accepted(ended: Ended, around: Surroundings) -> list[Failure]:
    found = []
    if around.guarded and around.damaged is not None:
        name = Path(around.damaged).name
        step = _STEP.match(around.damaged)
        names = (name, step[2]) if step else (name,)
        lines = (ended.stdout + ended.stderr).splitlines()
        if not any(_NOTICED.search(li) and any(n in li for n in names) for li in lines):
            inside = _anonymous(around.damaged, around)
            found.append(Failure("accepted damage", normal(inside)))
    for name in differences(around.before, around.after):
        path = around.root / name
        if ".aside" in name:  # damaged, and kept as it was found
            continue
        if name in around.after and around.after[name][0] == "file" and (what := nonsense(path)):
            found.append(Failure("nonsense", f"{normal(_anonymous(name, around))}: {what}"))
    return found[:2]


def nonsense(path: Path) -> str | None:
    """Return what in a written file is not finite: a weight, or a number of a JSON file."""
    if path.suffix == ".safetensors":
        return _nonfinite_weight(path)
    # A tokenizer's files are copies of what was given.
    if path.suffix not in (".json", ".jsonl") or path.name.startswith("tokenizer"):
        return None
    found: list[str] = []
    text = path.read_text("utf-8")
    for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
        with suppress(ValueError):  # Not all that is named so is JSON.
            json.loads(part, parse_constant=found.append)
    return f"holds {found[0]}" if found else None


def _nonfinite_weight(path: Path) -> str | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path).values()
    except (SafetensorError, OSError):
        return "is no safetensors file"
    finite = all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())
    return None if finite else "a weight is not finite"


def traceback_cause(stderr: str) -> str:
    """`ErrorType: message at file:function`, of the innermost frame in the project's own code."""
    error = next(
        (line for line in reversed(stderr.splitlines()) if re.match(r"[A-Za-z_][\w.]*(:|$)", line)),
        "?",
    )
    return f"{normal(error)} at {_own_frame(stderr)}"


def _own_frame(stderr: str) -> str:
    frames = re.findall(r'File "([^"]+)", line \d+,? in (\S+)', stderr)
    own = [f for f in frames if "site-packages" not in f[0] and "/lib/python" not in f[0]]
    own = [f for f in own if "/tests/fuzz/" not in f[0]]
    file, function = (own or frames or [("?", "?")])[-1]
    return f"{'/'.join(Path(file).parts[-2:])}:{function}"


def _where_it_was(stderr: str) -> str:
    """Of a process that was asked where it is: the innermost own function (stacks begin there)."""
    frames = re.findall(r'File "([^"]+)", line \d+ in (\S+)', stderr)
    own = [f for f in frames if "site-packages" not in f[0] and "/lib/python" not in f[0]]
    own = [f for f in own if "/tests/fuzz/" not in f[0]]
    if not own:
        return normal(_last_line(stderr))
    return f"in {'/'.join(Path(own[0][0]).parts[-2:])}:{own[0][1]}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def normal(text: str) -> str:
    """A message without what differs from case to case: numbers, paths and quoted values."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", text)
    text = re.sub(r"(?<![\w.])[~\w.-]*/[\w./+-]*", "PATH", text)
    text = re.sub(r"a{20,}", "aaa", text)
    text = re.sub(r"[0-9a-f]{12,}", "HEX", text)
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "N", text)[:200]


def _anonymous(name: str, around: Surroundings) -> str:
    """A name relative to the command's folder, in words that `normal` leaves alone."""
    inside = name.removeprefix(f"{around.home}/")
    pattern = re.sub(r"\d+", "N", inside)
    return pattern.replace("/", " / ")


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
