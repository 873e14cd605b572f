"""launch.slurm's commands in this process, with SLURM's own replaced."""

from __future__ import annotations

from pathlib import Path

from cat_lm.core.outputs import LISTING, read_listing
from launch.slurm import __main__ as program
from launch.slurm import snapshot
from launch.slurm.folder import RunFolder
from tests.calls import call_main
from tests.runs import run_values, write_config

STUBS = {
    "sbatch": """echo "sbatch $*" >>"$CALLS"
env >"$CALLS.environment"
if [ -n "${SBATCH_FAILS:-}" ]; then echo "sbatch: error: invalid account" >&2; exit 1; fi
echo "${JOB_ID:-41}"
""",
    "squeue": 'cat "$QUEUE" 2>/dev/null; true\n',
    "scancel": 'echo "scancel $*" >>"$CALLS"\n',
    "scontrol": """if [ -n "${JOB_IS_GONE:-}" ]; then echo "Invalid job id" >&2; exit 1; fi
echo "JobId=$3 ${JOB_SHOWN:-JobState=RUNNING Reason=None} Restarts=2"; echo "   NodeList=n[0-1]"
""",
}


class Place:
    """A folder with a configuration and SLURM's commands replaced."""

    def __init__(self, folder: Path, capsys, monkeypatch) -> None:
        self.folder, self.capsys, self.monkeypatch = folder, capsys, monkeypatch
        self.run_folder = RunFolder(folder / "run")
        self.data = folder / "data"
        self.data.mkdir()
        self.config = write_config(folder, run_values(self.data, self.run_folder.run))
        self.calls, self.queue = folder / "calls", folder / "queue"
        (folder / "bin").mkdir()
        for name, text in STUBS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
            (folder / "bin" / name).chmod(0o755)
        # Copying and flushing the whole checkout takes a second.
        small = folder / "checkout"
        (small / "cat_lm").mkdir(parents=True)
        (small / "cat_lm" / "a.py").write_text("1")
        (small / "train.py").write_text("# of the checkout")
        monkeypatch.setattr(snapshot, "PROJECT", small)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("CALLS", str(self.calls))
        monkeypatch.setenv("QUEUE", str(self.queue))
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.delenv("CAT_LM_SITE", raising=False)

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Runs the command: its exit code, stdout and stderr."""
        return call_main(program.main, self.monkeypatch, self.capsys, "launch.slurm", *arguments)

    def fails(self, *arguments: object) -> str:
        """The one line of an error; nothing may have been submitted."""
        code, _, err = self(*arguments)
        assert code == 2, err
        assert not self.calls.exists()
        return err

    def submit(self, *arguments: object) -> str:
        code, out, err = self("submit", self.config, "--nodes", 2, *arguments)
        assert (code, err) == (0, "")
        return out

    def queued(self, job: str, script: Path | str, state: str = "PENDING") -> None:
        self.queue.write_text(f"{job}|{state}|Resources||{script}\n", encoding="utf-8")


def copied(folder: RunFolder) -> set[str]:
    """The files of the run's code; the listing that lets a later copy replace them names all."""
    paths = (path for path in folder.code.rglob("*") if path.is_file())
    names = {str(path.relative_to(folder.code)) for path in paths} - {LISTING}
    assert set(read_listing(folder.code)) == names | {LISTING}
    return names
