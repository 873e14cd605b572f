"""launch.slurm prepare: an array of tasks and a job after it."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

FLAGS = ("--source", "files", "--path", "a b.txt", "--tokenizer", "bytes", "--out", "corpus")


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    return place


def test_prepare_submits_an_array_and_a_job_after_it(here):
    """Its scripts run the stages, seen with srun replaced by the ranks' own command line."""
    (here.folder / "a b.txt").write_text("text")
    options = ("--tasks", 3, "--cpus-per-task", 4, "--env", "A=1 2")
    code, _, err = here("prepare", *options, "--", *FLAGS)
    assert (code, err) == (0, "")
    folder = here.folder / "corpus.slurm"
    assert here.calls.read_text().splitlines() == [
        *("sbatch --test-only", "sbatch --test-only"),
        f"sbatch --parsable {folder}/encode.sbatch",
        f"sbatch --parsable --dependency=afterok:41 --kill-on-invalid-dep=yes "
        f"{folder}/assemble.sbatch",
    ]
    assert not (here.folder / "corpus").exists()  # data_prep.prepare makes it
    assert (folder / "code" / "train.py").is_file()
    srun = here.folder / "bin" / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s|" "$A" "$PYTHONPATH" "$PYTHONSAFEPATH" "$@"')
    srun.chmod(0o755)
    job = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_PER_TASK": "5"}
    for stage, own in (("encode", "encode|--task|2/3|"), ("assemble", "assemble|")):
        script = folder / f"{stage}.sbatch"
        lines = script.read_text().splitlines()
        assert "#SBATCH --requeue" in lines
        assert ("#SBATCH --array=0-2" in lines) == (stage == "encode")
        words = ["bash", script]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd="/", env=job)
        assert done.stdout.startswith(f"1 2|{folder}/code|1|--ntasks=1|")
        flags = "|".join(FLAGS)
        assert done.stdout.endswith(f"data_prep.prepare|{flags}|--workers|5|--stage|{own}")
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", script], check=True)
    here.calls.unlink()
    here.queue.write_text(f"41_2|RUNNING|None|n0|{folder}/encode.sbatch\n")
    assert "`scancel 41` ends them" in here.fails("prepare", "--tasks", 3, "--", *FLAGS)


def test_prepare_in_a_container_sees_its_folders(here):
    elsewhere = here.folder.parent / f"{here.folder.name} data"
    (elsewhere / "in").mkdir(parents=True)
    options = ("--tasks", 3, "--container", "image", "--env", "A=1", "--print")
    flags = [f"{elsewhere}/in/*/x*.txt" if flag == "a b.txt" else flag for flag in FLAGS]
    code, out, err = here("prepare", *options, "--", *flags)
    assert (code, err) == (0, "")
    assert out.count("--container-env=PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED,A'\n") == 2
    own = f"{here.folder}/corpus.slurm:{here.folder}/corpus.slurm,{here.folder}:{here.folder}"
    assert f"--container-mounts={own},{elsewhere}/in:{elsewhere}/in'" in out
    assert f"--container-workdir={here.folder}\n" in out


def test_globs_and_names_with_brackets_are_what_prepare_takes_them_for(here):
    for name in ("data/deep/below/a.txt", "more/b.txt", "set [1]/c.txt"):
        (here.folder / name).parent.mkdir(parents=True)
        (here.folder / name).write_text("text")
    common = ("--source", "files", "--tokenizer", "bytes", "--out", "corpus", "--path")
    for path in ("data/**/*.txt", "data/deep/**/*.txt", "set [1]", "[m]ore/*.txt"):
        code, _, warning = here("prepare", "--tasks", 2, "--print", "--", *common, path)
        assert (code, warning) == (0, ""), path
    for link in ("here", "too"):  # the library's glob goes through both, 2 ** 40 times
        (here.folder / "data" / link).symlink_to(".")
    missing = here.fails("prepare", "--tasks", 2, "--", *common, "data/**/*.md")
    assert "--path data/**/*.md: no such file or folder" in missing


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
    ],
)
def test_bad_input_is_one_line(here, arguments, says):
    assert says in here.fails("prepare", *arguments)
