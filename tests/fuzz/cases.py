"""Cases: from a number and a seed to a folder, a damaged file or an odd line, and a verdict."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz import verdict
from tests.fuzz.child import Ended, import_what_was_used, main_of, run_command
from tests.fuzz.mutations import damage
from tests.fuzz.snapshot import snapshot
from tests.fuzz.targets import BY_NAME, Target
from tests.fuzz.values import odd_line, options_of, subcommands_of
from tests.fuzz.world import World

REPOSITORY = Path(__file__).resolve().parents[2]
# Below the place of a case: two levels up from the command's folder is still inside.
INSIDE = "a/b/case"
# Where a command may leave what it likes.
_OWN = ("home", "tmp", "cache")
KINDS = ("file", "line", "plain")


@dataclass
class Case:
    """One call of a command, all that is odd about it, and how it went.

    Attributes:
        id: TARGET-KIND-NUMBER; `file` damages a file, `line` the command line, `plain` nothing.
        damaged: the file, relative to the command's folder; None: the line is odd.
        odd: what was done.
    """

    id: str
    target: Target
    line: list[str]
    odd: str
    damaged: str | None = None
    outputs: list[str] = field(default_factory=list)


def parts_of(identifier: str) -> tuple[str, str]:
    """The target and the kind of a case. Raises KeyError for what is no case's name."""
    target, _, rest = identifier.rpartition("-")
    target, _, kind = target.rpartition("-")
    if target not in BY_NAME or kind not in KINDS or not rest.isdigit():
        raise KeyError(identifier)
    return target, kind


def lay_out(identifier: str, seed: int, world: World, place: Path) -> Case:
    """Makes the folder of a case below `place` and decides what is odd."""
    name, kind = parts_of(identifier)
    target, rng = BY_NAME[name], random.Random(f"{seed} {identifier}")
    shutil.rmtree(place, ignore_errors=True)
    here = place / INSIDE
    for folder in (here, *(place / own for own in _OWN), place / "stranger"):
        folder.mkdir(parents=True)
    (place / "stranger/thesis.txt").write_text("ten years of work\n")
    (place / "a/precious.txt").write_text("mine\n")
    (here / "precious.txt").write_text("mine too\n")
    world.lay_out(here, target.needs)
    if "run" in target.needs:
        foreign = here / "run/checkpoints/step-00000777"
        foreign.mkdir()
        (foreign / "precious.txt").write_text("notes of mine\n")
    case = Case(identifier, target, list(target.line), "nothing")
    if kind == "file":
        _damage_file(case, here, rng, place / "stranger")
    elif kind == "line":
        _make_line_odd(case, here, rng)
    return case


def _damage_file(case: Case, here: Path, rng: random.Random, stranger: Path) -> None:
    """Damages one file; all patterns that match something are as likely."""
    found = [
        [p for p in sorted(here.glob(pattern)) if p.is_file() and not _is_precious(p)]
        for pattern in case.target.files
    ]
    path = rng.choice(rng.choice([files for files in found if files]))
    case.odd = f"{path.relative_to(here)}: {damage(path, rng, stranger)}"
    case.damaged = str(path.relative_to(here))


def _is_precious(path: Path) -> bool:
    return path.name.startswith(verdict.PRECIOUS)


def _make_line_odd(case: Case, here: Path, rng: random.Random) -> None:
    target = case.target
    options, words = described(target)
    keys = config_keys() if target.keys else ()
    case.line, what, value = odd_line(target.line, options, words, keys, rng)
    case.odd = f"{what} = {value!r}"
    path = os.path.normpath(here / value)
    # A value may name what is to be written, but nothing that was there, nor the folder itself.
    if not os.path.lexists(path) and not str(here).startswith(path):
        case.outputs = [path]


def run_case(identifier: str, seed: int, world: World, place: Path) -> dict[str, Any]:
    """Runs a case and judges it; the record for the report. Its folder stays until the next one."""
    case = lay_out(identifier, seed, world, place)
    target, here = case.target, place / INSIDE
    before = snapshot_of(place)
    ended = run_command(
        *(target.module, case.line, here, environment(place), place / "home/logs"),
        *(target.stdin, target.limit_seconds, target.limit_bytes),
    )
    import_what_was_used(place / "home/logs")
    written = [f"{INSIDE}/{name}" for name in target.outputs]
    written += [os.path.relpath(path, place) for path in case.outputs]
    around = verdict.Surroundings(
        *(place, before, snapshot_of(place), INSIDE, written),
        damaged=f"{INSIDE}/{case.damaged}" if case.damaged else None,
        guarded=bool(case.damaged) and verdict.matches(case.damaged, target.guarded),
    )
    found = verdict.failures(ended, target.codes, around)
    if identifier.split("-")[-2] == "plain" and ended.code != target.usual:
        cause = f"exit code {ended.code}, usually {target.usual}: {ended.stderr[-300:]}"
        found.append(verdict.Failure("harness", cause))
    return record(case, ended, found)


def record(case: Case, ended: Ended, found: list[verdict.Failure]) -> dict[str, Any]:
    command = ["train.py"] if case.target.module == "train" else ["-m", case.target.module]
    return {
        "id": case.id,
        "target": case.target.name,
        "odd": case.odd,
        "damaged": case.damaged,
        "command": shlex.join(["python", *command, *case.line]),
        "code": ended.code,
        "seconds": round(ended.seconds, 3),
        "megabytes": ended.bytes >> 20,
        "failures": [vars(failure) for failure in found],
        "stdout": ended.stdout[-4000:],
        "stderr": ended.stderr[-12000:],
    }


def snapshot_of(place: Path) -> dict:
    """The case's surroundings, without what a command may leave where it likes."""
    left_out = tuple(f"{own}/" for own in _OWN)
    return {name: e for name, e in snapshot(place).items() if not name.startswith(left_out)}


def environment(place: Path) -> dict[str, str]:
    """Of a command: no network, no GPU, one thread, and folders of its own."""
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "XDG_CACHE_HOME": str(place / "cache"),
        "HF_HOME": str(place / "cache/hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
        # Another user than the checkout's asks for its commit.
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }


class _Captured(BaseException):
    """Carries a parser out of a command, past its handlers of errors."""


_DESCRIBED: dict[str, tuple[dict[str, bool], set[str]]] = {}


def described(target: Target) -> tuple[dict[str, bool], set[str]]:
    """The options of a target's command, and its subcommands, from the parser that it makes."""
    if target.name not in _DESCRIBED:
        parser = _parser_of(target)
        own = target.line[: target.line.index("--")] if "--" in target.line else target.line
        _DESCRIBED[target.name] = options_of(parser, own), subcommands_of(parser)
    return _DESCRIBED[target.name]


def _parser_of(target: Target) -> argparse.ArgumentParser:
    names = ("parse_args", "parse_known_args", "parse_intermixed_args")
    kept = {name: getattr(argparse.ArgumentParser, name) for name in names}
    argv = sys.argv

    def capture(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Captured(self)

    sys.argv = [target.module, *target.line]
    try:
        for name in names:
            setattr(argparse.ArgumentParser, name, capture)
        main_of(target.module)()
    except _Captured as captured:
        return captured.args[0]
    finally:
        sys.argv = argv
        for name, method in kept.items():
            setattr(argparse.ArgumentParser, name, method)
    raise RuntimeError(f"{target.module}: its main parses no arguments")


def config_keys() -> tuple[str, ...]:
    """Every key of a run's configuration, as in an override."""
    from cat_lm import architectures
    from cat_lm.config import known_keys

    return tuple(
        dict.fromkeys(
            f"{section}.{key}"
            for name in architectures.names()
            for section, keys in known_keys({"model": {"architecture": name}}).items()
            for key in keys
        )
    )
