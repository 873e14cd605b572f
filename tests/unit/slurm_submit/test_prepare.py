"""launch.slurm prepare: an array of tasks and a job after it."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

FLAGS = ("--source", "files", "--path", "a b.txt", "--tokenizer", "bytes", "--out", "corpus")


def test_prepare_submits_an_array_and_a_job_after_it(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    (place.folder / "a b.txt").write_text("text")
    code, _, err = place("prepare", "--tasks", 3, "--cpus-per-task", 4, "--", *FLAGS)
    assert (code, err) == (0, "")
    folder = place.folder / "corpus.slurm"
    assert place.calls.read_text().splitlines() == [
        *("sbatch --test-only", "sbatch --test-only"),
        f"sbatch --parsable {folder}/encode.sbatch",
        f"sbatch --parsable --dependency=afterok:41 --kill-on-invalid-dep=yes "
        f"{folder}/assemble.sbatch",
    ]
    assert not (place.folder / "corpus").exists()  # data_prep.prepare makes it
    assert (folder / "code" / "train.py").is_file()
    place.calls.unlink()
    place.queue.write_text(f"41_2|RUNNING|None|n0|{folder}/encode.sbatch\n")
    assert "`scancel 41` ends them" in place.fails("prepare", "--tasks", 3, "--", *FLAGS)


def test_the_scripts_of_prepare_run_its_stages(place, monkeypatch):
    """With srun replaced by the ranks' own command line."""
    monkeypatch.chdir(place.folder)
    (place.folder / "a b.txt").write_text("text")
    place("prepare", "--tasks", 3, "--env", "A=1 2", "--", *FLAGS)
    srun = place.folder / "bin" / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s|" "$A" "$PYTHONPATH" "$PYTHONSAFEPATH" "$@"')
    srun.chmod(0o755)
    for stage, own in (("encode", "encode|--task|2/3|"), ("assemble", "assemble|")):
        script = place.folder / "corpus.slurm" / f"{stage}.sbatch"
        assert "--requeue" in script.read_text()
        done = subprocess.run(
            ["bash", script],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
            env={
                "PATH": os.environ["PATH"],
                "SLURM_ARRAY_TASK_ID": "2",
                "SLURM_CPUS_PER_TASK": "5",
            },
        )
        assert done.stdout.startswith(f"1 2|{place.folder}/corpus.slurm/code|1|--ntasks=1|")
        flags = "|".join(FLAGS)
        assert done.stdout.endswith(f"data_prep.prepare|{flags}|--workers|5|--stage|{own}")
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", script], check=True)


def test_prepare_in_a_container(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    options = ("--tasks", 3, "--container", "image", "--env", "A=1", "--print")
    code, out, err = place("prepare", *options, "--", *FLAGS)
    assert (code, err) == (0, "")
    assert out.count("--container-env=PYTHONPATH,PYTHONSAFEPATH,A'\n") == 2
    here = place.folder
    assert f"--container-mounts={here}/corpus.slurm:{here}/corpus.slurm,{here}:{here}'" in out
    assert f"--container-workdir={here}\n" in out


def test_globs_and_names_with_brackets_are_what_prepare_takes_them_for(place, monkeypatch):
    """A ** was taken for one folder, a folder's name for a pattern, and no glob was mounted."""
    monkeypatch.chdir(place.folder)
    for name in ("data/deep/below/a.txt", "more/b.txt", "set [1]/c.txt"):
        (place.folder / name).parent.mkdir(parents=True)
        (place.folder / name).write_text("text")
    common = ("--source", "files", "--tokenizer", "bytes", "--out", "corpus", "--path")
    for path in ("data/**/*.txt", "data/deep/**/*.txt", "set [1]", "[m]ore/*.txt"):
        code, _, warning = place("prepare", "--tasks", 2, "--print", "--", *common, path)
        assert (code, warning) == (0, ""), path
    missing = place.fails("prepare", "--tasks", 2, "--", *common, "data/**/*.md")
    assert "--path data/**/*.md: no such file or folder" in missing
    for link in ("here", "too"):  # the library's glob goes through both, 2 ** 40 times
        (place.folder / "data" / link).symlink_to(".")
    assert place.fails("prepare", "--tasks", 2, "--", *common, "data/**/*.md") == missing
    elsewhere = place.folder.parent / f"{place.folder.name} data"
    (elsewhere / "in").mkdir(parents=True)
    given = ("--container", "image.sqsh", "--print", "--", *common, f"{elsewhere}/in/*/x*.txt")
    _, printed, _ = place("prepare", "--tasks", 2, *given)
    assert f"{elsewhere}/in:{elsewhere}/in" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks", 0, "--", *FLAGS], "'0' must be from 1 to 1,000,000"),
        (["--tasks", 2], "after --"),
        (["--tasks", 2, "--", "--out", "x"], "--source"),
        (["--tasks", 2, "--", *FLAGS, "--stage=all"], "--stage=all: does not go with"),
        (["--tasks", 2, "--", *FLAGS, "--work", 2], "--work: does not go with"),
        (["--tasks", 2, "--", *FLAGS], "--path a b.txt: no such file or folder"),
        (["--tasks", 2, "--", *FLAGS, "--tokenizer", "nope"], "--tokenizer nope: no such file"),
        (["--tasks", 2, "--", *FLAGS, "--overwrite"], "--overwrite: does not go with"),
        (["--tasks", 2, "--", *FLAGS, "--validation-fraction", 2], "must be from 0 to 1"),
    ],
)
def test_bad_input_of_prepare(place, monkeypatch, arguments, says):
    monkeypatch.chdir(place.folder)
    assert says in place.fails("prepare", *arguments)
