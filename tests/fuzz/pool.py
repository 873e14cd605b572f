"""Template processes: started when needed, asked for cases, started anew where one breaks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.fuzz.cases import REPOSITORY, parts_of
from tests.fuzz.privileges import NOBODY, without_root
from tests.fuzz.targets import BY_NAME
from tests.fuzz.world import build_world

_FREE_BYTES = 2 * 2**30


class Templates:
    """One worker's processes, one for each family, and its place for cases."""

    def __init__(self, scratch: Path, number: int) -> None:
        self.scratch = scratch
        self.place = scratch / f"worker-{number}"
        self._processes: dict[str, subprocess.Popen] = {}

    def ask(self, family: str, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of the family's process. Raises RuntimeError where it broke."""
        process = self._processes.get(family)
        if process is None or process.poll() is not None:
            process = self._processes[family] = self._start(family)
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            log = (self.scratch / f"{family}.log").read_text(errors="replace")[-2000:]
            code = process.wait()
            raise RuntimeError(f"{log}\nthe process of {family} ended with code {code}")
        answer = json.loads(line)
        if "broken" in answer:
            raise RuntimeError(answer["broken"])
        return answer

    def _start(self, family: str) -> subprocess.Popen:
        words = [*without_root(), sys.executable, "-m", "tests.fuzz.template"]
        with open(self.scratch / f"{family}.log", "a", encoding="utf-8") as log:
            return subprocess.Popen(
                [*words, family, str(self.scratch)],
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def case(self, identifier: str, seed: int) -> dict[str, Any]:
        """Runs a case; its record. One that the process could not run is a failure of its own."""
        target, _ = parts_of(identifier)
        request = {"id": identifier, "seed": seed, "place": str(self.place)}
        try:
            return self.ask(BY_NAME[target].family, request)
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[-1]
            return {
                **{"id": identifier, "target": target, "odd": "?", "command": "?", "code": None},
                **{"damaged": None, "seconds": 0.0, "megabytes": 0, "stdout": ""},
                "stderr": str(error),
                "failures": [{"kind": "harness", "cause": cause}],
            }

    def close(self) -> None:
        for process in self._processes.values():
            process.stdin.close()
            process.wait()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that the templates' user may write, removed at the end.

    In memory where there is room, as every file of a case is written and flushed.
    """
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > _FREE_BYTES
    scratch = Path(tempfile.mkdtemp(prefix="cat-lm-fuzz-", dir=memory if fits else None))
    try:
        for name in ("", "world", "home", "tmp", "cache"):
            (scratch / name).mkdir(exist_ok=True)
            (scratch / name).chmod(0o755)
            if os.geteuid() == 0:
                os.chown(scratch / name, NOBODY, NOBODY)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def has_harness() -> bool:
    return find_spec("lm_eval") is not None


def make_world(templates: Templates, with_harness: bool) -> None:
    """Makes the world's files in the scratch folder.

    Raises:
        RuntimeError: a command that makes a file of the world failed.
    """
    world = templates.scratch / "world"

    def run(family: str, module: str, *line: str) -> None:
        own_all(world)
        answer = templates.ask(family, {"module": module, "line": list(line)})
        if answer["code"] != 0:
            raise RuntimeError(f"{module} {' '.join(line)}: {answer['stderr'] or answer['stdout']}")

    build_world(world, run, with_harness)


def own_all(folder: Path) -> None:
    """Gives what root has written in `folder` to the user of the templates."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
