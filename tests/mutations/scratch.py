"""A clone of HEAD in which the source is broken, tested and put back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A test that has run as long when the time is up counts as one that the fault makes hang.
HANGS_SECONDS = 120.0
_STARTED = re.compile(r"^(tests/\S+?::.+?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", re.M)


@dataclass(frozen=True)
class Outcome:
    """What a run of tests found.

    Attributes:
        test: the one that failed; None where none did.
        how: `failed`, `crashed` or `hangs`; "" where none did.
        is_cut: whether the time was up before all tests had run.
    """

    test: str | None = None
    how: str = ""
    is_cut: bool = False


class Clone:
    """A checkout of its own.

    Args:
        folder: an empty one; the checkout is a folder in it.
        root: of the repository whose HEAD it is of.

    Attributes:
        commit: the HEAD.
    """

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder, self.root = folder, folder / "checkout"
        self.commit = _git(root, "rev-parse", "HEAD")
        _git(folder, "clone", "-q", "--no-checkout", str(root), str(self.root))
        _git(self.root, "checkout", "-q", "--detach", self.commit)
        # Subprocesses that tests start elsewhere find this checkout, not the installed one.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        self.environment |= {"PYTHONPATH": str(self.root)}
        self.environment.setdefault("CAT_LM_SHARED", str(root.parent / "shared"))
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def write(self, file: str, text: str) -> None:
        """Replace a file of the source."""
        (self.root / file).write_text(text, encoding="utf-8")
        self._forget_bytecode(file)

    def commit_changes(self) -> None:
        """Commit, as tests look whether the checkout has changes."""
        identity = ("-c", "user.name=mutations", "-c", "user.email=mutations@localhost")
        _git(self.root, *identity, "commit", "-q", "--all", "--no-verify", "-m", "a fault")

    def reset(self) -> None:
        """Put the source back as HEAD has it; take away what tests have left."""
        changed = _git(self.root, "diff", "--name-only", self.commit).splitlines()
        _git(self.root, "reset", "-q", "--hard", self.commit)
        _git(self.root, "clean", "-qfd")
        for file in changed:
            self._forget_bytecode(file)

    def _forget_bytecode(self, file: str) -> None:
        # Python would take it for current, by a time in seconds and a size that may be the same.
        path = self.root / file
        for left in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            left.unlink()

    def test(self, tests: Sequence[str], seconds: float, without: Collection[str] = ()) -> Outcome:
        """Run tests in this order, in one process, to the first that fails.

        Args:
            tests: without parameters, or a single one with them.
            without: tests to leave out, with their parameters.

        Raises:
            RuntimeError: pytest cannot run them.
        """
        log = self.folder / "pytest.log"
        words = ("-v", "-x", "-rfE", "--all", "--durations=0", "-p", "no:cacheprovider")
        left_out = [f"--deselect={test}" for test in without if "[" in test]
        tests = [test for test in tests if test not in without]
        if not tests:
            return Outcome()
        with open(log, "wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *words, *left_out, *tests],
                cwd=self.root, env=self.environment, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                still = time.time() - log.stat().st_mtime  # pytest writes before and after a test
            finally:
                _end(process)
        said = log.read_text(encoding="utf-8", errors="replace")
        if code in (0, 5):  # 5: all were left out
            return Outcome()
        lines = said.strip().splitlines()
        started = [found[1].strip() for line in lines if (found := _STARTED.match(line))]
        if code is None:
            hangs = bool(started) and still >= min(HANGS_SECONDS, seconds / 2)
            return Outcome(started[-1], "hangs") if hangs else Outcome(is_cut=True)
        if failed := _FAILED.findall(said):
            return Outcome(failed[0], "failed")
        if code < 0 and started:
            return Outcome(started[-1], "crashed")
        said = [line for line in lines if line.startswith("ERROR")] or lines
        raise RuntimeError(said[-1] if said else f"pytest ends with code {code}")


def _end(process: subprocess.Popen) -> None:
    """End pytest, which ends what tests have started, and then whatever is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()
