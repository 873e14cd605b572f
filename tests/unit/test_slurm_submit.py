"""launch.slurm's commands: what is checked, copied, submitted and remembered; SLURM is replaced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cat_lm.config import load_config
from cat_lm.errors import UserError
from launch.slurm import __main__ as program
from launch.slurm import attempts, snapshot
from launch.slurm.folder import RunFolder, read_record
from launch.slurm.options import Options, seconds_of
from launch.slurm.site import Site, load_site
from tests.runs import run_values, write_config

STUBS = {
    "sbatch": """echo "sbatch $*" >>"$CALLS"
if [ -n "${SBATCH_FAILS:-}" ]; then echo "sbatch: error: invalid account" >&2; exit 1; fi
echo "${JOB_ID:-41}"
""",
    "squeue": 'cat "$QUEUE" 2>/dev/null; true\n',
    "scancel": 'echo "scancel $*" >>"$CALLS"\n',
    "scontrol": """if [ -n "${JOB_IS_GONE:-}" ]; then echo "Invalid job id" >&2; exit 1; fi
echo "JobId=$3 JobState=RUNNING Reason=None Restarts=2"; echo "   NodeList=n[0-1]"
""",
    "sacct": 'if [ -n "${SACCT:-}" ]; then echo "$SACCT"; else exit 1; fi\n',
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
        self.monkeypatch.setattr(sys, "argv", ["launch.slurm", *map(str, arguments)])
        code = 0
        try:
            program.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        return code, *self.capsys.readouterr()

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


@pytest.fixture
def place(tmp_path, capsys, monkeypatch):
    return Place(tmp_path, capsys, monkeypatch)


def test_submit(place):
    out = place.submit("--time", "2:00:00", "train.seed=5", "--env", "A=b=c", "train.max_steps=9")
    folder = place.run_folder
    assert "submitted job 41: 2 x 1 ranks" in out and str(folder.log) in out
    assert place.calls.read_text().splitlines() == [
        "sbatch --test-only",
        f"sbatch --parsable {folder.script}",
    ]
    assert "--signal=USR1@300" in folder.script.read_text() and "A=b=c" in folder.script.read_text()
    config = load_config(folder.config)
    assert (config.train.seed, config.train.max_steps) == (5, 9)
    record = read_record(folder)
    assert record.job_ids == ["41"] and record.overrides == ["train.seed=5", "train.max_steps=9"]
    assert record.options == Options(nodes=2, time="2:00:00", env={"A": "b=c"})
    assert copied(folder) == {"cat_lm/a.py", "train.py"}


def test_print_writes_nothing(place):
    before = sorted(place.folder.iterdir())
    code, out, err = place("submit", place.config, "--nodes", 2, "--gpus-per-node", 2, "--print")
    assert (code, err) == (0, "")
    assert "#SBATCH --gpus-per-node=2\n" in out
    assert sorted(place.folder.iterdir()) == before


def test_paths_become_absolute(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    overrides = ["data.path=data", "train.output_dir=out/run", "train.init_from=~/weights"]
    values = snapshot.resolved(load_config(place.config, overrides))
    assert values["data"]["path"] == str(place.data)
    assert values["train"]["output_dir"] == str(place.folder / "out" / "run")
    assert values["train"]["init_from"] == str(place.folder / "weights")
    assert snapshot.inputs_of(values) == [str(place.data), str(place.folder / "weights")]
    remote = snapshot.resolved(load_config(place.config, ["data.path=s3://bucket/data"]))
    assert remote["data"]["path"] == "s3://bucket/data" and snapshot.inputs_of(remote) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", 0], "--nodes: 0: must be at least 1"),
        (["--nodes", "two"], "invalid whole number value: 'two'"),
        (["--nodes", 2, "--gpus-per-node", -1], "must be at least 0"),
        (["--nodes", 2, "--time", "tomorrow"], "--time tomorrow: must be minutes"),
        (["--nodes", 2, "--time", "0"], "more than nothing"),
        (["--nodes", 2, "--time", "5", "--lead-seconds", 300], "less than the time limit"),
        (["--nodes", 2, "--lead-seconds", 70000], "between 1 and 65535"),
        (["--nodes", 2, "--max-restarts", 0], "must be at least 1"),
        (["--nodes", 2, "--gpus-per-node", 4, "--tasks-per-node", 2], "--tasks-per-node 2"),
        (["--nodes", 2, "--container-mounts", "/a:/b"], "needs --container"),
        (["--nodes", 2, "--partition", ""], "--partition ''"),
        (["--nodes", 2, "--account", "a\n#SBATCH --x"], "must be one line"),
        (["--nodes", 2, "--env", "A"], "must have the form NAME=VALUE"),
        (["--nodes", 2, "--env", "1A=b"], "must have the form NAME=VALUE"),
        (["--nodes", 2, "--nods", 2], "unrecognized arguments: --nods"),
        (["--nodes", 3], "micro_batch_size x ranks = 2 x 3 = 6"),
        (["--nodes", 2, "--gpus-per-node", 4], "2 x 8 = 16"),
        (["--nodes", 2, "train.sead=1"], "the nearest known one is train.seed"),
        (["--nodes", 2, "train.seed"], "must have the form section.key=value"),
        (["--nodes", 2, "train.resume=/some/run"], "train.init_from"),
        (["--nodes", 2, "data.path=/no/such/data"], "/no/such/data: no such folder"),
        (["--nodes", 2, "--site", "/no/site.yaml"], "site file /no/site.yaml: no such file"),
        (["--nodes", 2, 'train.output_dir=a"b'], "no path with such characters"),
    ],
)
def test_bad_input_is_one_clear_line(place, arguments, says):
    err = place.fails("submit", place.config, *arguments)
    assert says in err and "Traceback" not in err
    assert not place.run_folder.run.exists()


def test_a_missing_config_and_a_missing_run(place):
    assert "no such configuration" in place.fails("submit", place.folder / "x.yaml", "--nodes", 1)
    for name in ("status", "cancel", "resume"):
        assert "no such run folder" in place.fails(name, place.folder / "nothing")
        assert "was never submitted" in place.fails(name, place.data)


def test_a_file_in_the_way(place):
    for name in ("run", "run/slurm"):
        path = place.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        assert f"{path} is a file" in place.fails("submit", place.config, "--nodes", 1)
        path.unlink()


def test_one_job_a_run(place):
    """Also a job that was submitted by hand counts; another run's does not."""
    place.queued("77", place.run_folder.script)
    assert "job 77 of this run is pending" in place.fails("submit", place.config, "--nodes", 1)
    place.queued("77", place.folder / "other" / "slurm" / "job.sbatch")
    place.submit()
    place.calls.unlink()
    place.queued("41", place.run_folder.script, "RUNNING")
    assert "job 41" in place.fails("resume", place.run_folder.run)
    code, out, _ = place("cancel", place.run_folder.run)
    assert code == 0 and "cancelled job 41 (running)" in out
    assert place.calls.read_text() == "scancel 41\n"
    place.calls.unlink()
    place.queue.unlink()
    assert "no queued or running job" in place.fails("cancel", place.run_folder.run)


def test_a_job_is_known_by_its_script(place):
    """Whatever characters are in its path, and with arguments."""
    run = place.folder / "a run"
    for script in (f"{run}/slurm/job.sbatch", f"{run}/slurm/job.sbatch some argument"):
        place.queued("77", script)
        err = place.fails("submit", place.config, "--nodes", 1, f"train.output_dir={run}")
        assert "job 77 of this run" in err and f"cancel '{run}'`" in err
    place.queued("77", f"{run}/slurm/job.sbatch.old")
    place.submit(f"train.output_dir={run}")


def test_an_older_runs_checkpoints_are_not_continued_by_accident(place):
    step = place.run_folder.checkpoints / "step-00000007"
    step.mkdir(parents=True)
    (step / "complete.json").write_text('{"files": {}}')
    assert "already holds step-00000007" in place.fails("submit", place.config, "--nodes", 1)
    place.submit("train.resume=auto")


def test_slurm_that_refuses_or_is_not_there(place, monkeypatch):
    monkeypatch.setenv("SBATCH_FAILS", "1")
    code, _, err = place("submit", place.config, "--nodes", 1)
    assert (code, err) == (2, "error: sbatch: sbatch: error: invalid account\n")
    assert not place.run_folder.slurm.exists()  # refused before anything is written
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = place("submit", place.config, "--nodes", 1)
    assert code == 2 and "this machine has no SLURM" in err and "launch.slurm local" in err


def test_resume_changes_what_is_given_and_keeps_the_rest(place, monkeypatch):
    place.submit("--partition", "short", "--time", "30", "--env", "A=1", "train.seed=3")
    folder = place.run_folder
    (folder.code / "train.py").write_text("# of the run")
    attempts.begin(folder, "41", 0)
    assert attempts.without_progress(folder) == 1
    monkeypatch.setenv("JOB_ID", "42")
    code, out, err = place(
        *("resume", folder.run, "--time", "60", "--env", "B=2", "train.max_steps=50")
    )
    assert (code, err) == (0, "") and "resumed job 42" in out
    record = read_record(folder)
    assert record.options == Options(
        nodes=2, partition="short", time="60", env={"A": "1", "B": "2"}
    )
    assert record.job_ids == ["41", "42"]
    assert record.overrides == ["train.seed=3", "train.max_steps=50"]
    config = load_config(folder.config)
    assert (config.train.seed, config.train.max_steps) == (3, 50)
    assert (folder.code / "train.py").read_text() == "# of the run"
    assert attempts.without_progress(folder) == 0 and len(attempts.lines(folder)) == 1
    place("resume", folder.run, "--new-code")
    assert (folder.code / "train.py").read_text() == "# of the checkout"
    assert "`submit` starts another run" in place("resume", folder.run, "train.output_dir=/x")[2]


def test_from_gpus_to_cpus_and_back(place):
    place.submit("--gpus-per-node", 2)
    run = place.run_folder.run
    place("resume", run, "--gpus-per-node", 0, "--tasks-per-node", 4, "--nodes", 1)
    text = place.run_folder.script.read_text()
    assert "--ntasks-per-node=4\n" in text and "--gpus" not in text
    place("resume", run, "--gpus-per-node", 1)
    assert "--ntasks-per-node=1\n#SBATCH --gpus-per-node=1\n" in place.run_folder.script.read_text()


def test_status(place, monkeypatch):
    place.submit()
    folder = place.run_folder
    _, out, _ = place("status", folder.run)
    assert "41: running" in out and "none yet" in out and str(folder.log) in out
    records = [{"step": 4, "loss": 2.5, "tokens_per_second": 1234.5}, {"step": 4, "val_loss": 2.4}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    folder.metrics.write_text(lines + '{"step": 5, "lo')
    for _ in range(3):
        attempts.begin(folder, "41", 0)
    path = place.folder / "status.json"
    code, out, err = place("status", folder.run, "--json", path)
    assert (code, err) == (0, "")
    assert "4, loss 2.5000, 1,234 tokens/s" in out and "3 in a row from none" in out
    found = json.loads(path.read_text())
    assert (found["job"], found["nodes"], found["restarts"]) == ("41", "n[0-1]", 2)
    assert (found["step"], found["loss"], found["attempts"]) == (4, 2.5, 3)
    monkeypatch.setenv("JOB_IS_GONE", "1")
    assert "unknown" in place("status", folder.run)[1]
    monkeypatch.setenv("SACCT", "CANCELLED by 0|n1")
    assert "41: cancelled by 0" in place("status", folder.run)[1]
    monkeypatch.setenv("PATH", "/nowhere")  # the files still tell
    assert "this machine has no SLURM" in place("status", folder.run)[1]
    assert "4, loss 2.5000" in place("status", folder.run)[1]


# Data preparation.

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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks", 0, "--", *FLAGS], "must be at least 1"),
        (["--tasks", 2], "after --"),
        (["--tasks", 2, "--", "--out", "x"], "--source"),
        (["--tasks", 2, "--", *FLAGS, "--stage=all"], "--stage=all: does not go with"),
        (["--tasks", 2, "--", *FLAGS, "--work", 2], "--work: does not go with"),
        (["--tasks", 2, "--", *FLAGS], "--path a b.txt: no such file or folder"),
        (["--tasks", 2, "--", *FLAGS, "--tokenizer", "nope"], "--tokenizer nope: no such file"),
        (["--tasks", 2, "--", *FLAGS, "--overwrite"], "--overwrite: does not go with"),
        (["--tasks", 2, "--", *FLAGS, "--validation-fraction", 2], "between 0 and 1"),
    ],
)
def test_bad_input_of_prepare(place, monkeypatch, arguments, says):
    monkeypatch.chdir(place.folder)
    assert says in place.fails("prepare", *arguments)


def test_only_prepare_takes_flags_of_another_program(place):
    err = place.fails("submit", place.config, "--nodes", 1, "--", "train.seed=1")
    assert "unrecognized arguments: -- train.seed=1" in err


# Time limits and lead signals.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("2:00:05", 7205),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:01", 172801),
        ("UNLIMITED", None),
    ],
)
def test_slurms_time_limits(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("time", "lead"), [(None, 300), ("10:00", 300), ("1", 30), ("9:00:00", 300)]
)
def test_the_lead_is_at_most_half_the_limit(time, lead):
    assert Options(nodes=1, time=time).check().lead == lead


# The site's file.


def site_file(folder: Path, text: str) -> Path:
    path = folder / "site.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("partion: gpu", "partion: unknown key; the nearest known one is partition"),
        ("gpu_request: tres", "gpu_request='tres'"),
        ("cpus_per_task: none", "cpus_per_task='none'"),
        ("- a", "must hold keys such as"),
        ("a: [", "not valid YAML"),
        ("sbatch: [nodes]", "sbatch: 'nodes': must be one option"),
        ("sbatch: [--no-requeue]", "launch.slurm sets this one itself"),
        ("sbatch: [--output=x.log]", "launch.slurm sets this one itself"),
        ('srun: ["--a\\n b"]', "srun: '--a\\n b'"),
        ("time: 2:00:00", "time=7200: must be text; put it in quotes"),
        ("env: {A: 1}", "env.A=1: must be text; put it in quotes"),
        ("srun: [mpi]", "srun: 'mpi': must be one argument"),
        ("env: {A-B: x}", "env: 'A-B'"),
        ("setup: module load x", "setup="),
    ],
)
def test_site_errors_name_the_key(tmp_path, text, says):
    with pytest.raises(UserError) as error:
        load_site(site_file(tmp_path, text))
    assert says in str(error.value) and "site.yaml" in str(error.value)


def test_where_the_site_file_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CAT_LM_SITE", raising=False)
    assert load_site(None) == (Site(), None)
    usual = tmp_path / ".config" / "cat_lm"
    usual.mkdir(parents=True)
    (usual / "site.yaml").write_text("partition: usual")
    assert load_site(None)[0].partition == "usual"
    monkeypatch.setenv("CAT_LM_SITE", str(site_file(tmp_path, "")))
    assert load_site(None)[0] == Site()
    other = tmp_path / "other.yaml"
    other.write_text("partition: given")
    assert load_site(other) == (Site(partition="given"), other)


def test_the_command_line_wins_over_the_site(place):
    site = site_file(place.folder, "partition: slow\naccount: lm\nenv: {A: site, B: site}\n")
    place.submit("--site", site, "--partition", "fast", "--env", "A=mine")
    text = place.run_folder.script.read_text()
    assert "--partition=fast\n" in text and "--account=lm\n" in text
    assert "    A=mine\n    B=site\n" in text
    # `resume` reads the same file, and forgets no site value that was not given.
    site.write_text("account: other")
    place("resume", place.run_folder.run)
    text = place.run_folder.script.read_text()
    assert "--partition=fast\n" in text and "--account=other\n" in text


def test_the_example_is_a_valid_site_and_names_every_key():
    example = snapshot.PROJECT / "launch" / "site.example.yaml"
    site, _ = load_site(example)
    assert site.partition
    text = example.read_text(encoding="utf-8")
    missing = [key for key in Site.model_fields if f"{key}:" not in text]
    assert missing == [] and set(yaml.safe_load(text)) <= set(Site.model_fields)


# The copy of the code.


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "cat_lm" / "__pycache__").mkdir(parents=True)
    (folder / "cat_lm" / "a.py").write_text("1\n")
    (folder / "cat_lm" / "__pycache__" / "a.pyc").write_text("x")
    (folder / "train.py").write_text("train\n")
    (folder / ".gitignore").write_text("__pycache__/\n/data/\n")
    (folder / "data").mkdir()
    (folder / "data" / "big").write_text("data")
    return folder


def committed(project: Path) -> Path:
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "x")
    return project


def copied(folder: RunFolder) -> set[str]:
    paths = (path for path in folder.code.rglob("*") if path.is_file())
    return {str(path.relative_to(folder.code)) for path in paths}


def test_snapshot_of_a_clean_checkout(project, tmp_path):
    folder = RunFolder(tmp_path / "run")
    record = snapshot.save_code(folder, committed(project))
    assert copied(folder) == {".gitignore", "cat_lm/a.py", "train.py"}
    assert (record["dirty"], record["untracked"], len(record["commit"])) == (False, [], 40)
    assert folder.code_diff.read_text() == ""
    assert json.loads(folder.code_record.read_text()) == record


def test_snapshot_of_a_dirty_checkout(project, tmp_path):
    """Modified, added, staged and removed files; the diff brings the commit to the copy."""
    committed(project)
    (project / "train.py").write_text("changed ü\n")
    (project / "cat_lm" / "näw.py").write_text("new\n")
    (project / "cat_lm" / "a.py").unlink()
    # What nobody added to git may be a secret, unless it is code.
    (project / ".env").write_text("PASSWORD=1\n")
    (project / "id_rsa").write_text("key\n")
    (project / "cat_lm" / ".netrc").write_text("password\n")
    folder = RunFolder(tmp_path / "run")
    record = snapshot.save_code(folder, project)
    assert copied(folder) == {".gitignore", "train.py", "cat_lm/näw.py"}
    assert (folder.code / "train.py").read_text() == "changed ü\n"
    assert (record["dirty"], record["untracked"]) == (True, ["cat_lm/näw.py"])
    assert "+changed ü" in folder.code_diff.read_text()
    # Later edits do not reach the run, a new copy drops what is gone.
    (project / "train.py").write_text("later\n")
    assert (folder.code / "train.py").read_text() == "changed ü\n"
    (project / "cat_lm" / "näw.py").unlink()
    snapshot.save_code(folder, project)
    assert copied(folder) == {".gitignore", "train.py"}


def test_a_checkout_that_git_refuses_is_no_checkout_without_git(project, tmp_path):
    committed(project)
    (project / ".git/HEAD").write_text("damaged\n")
    with pytest.raises(UserError, match="git refuses to tell the commit"):
        snapshot.save_code(RunFolder(tmp_path / "run"), project)


def test_snapshot_without_git(project, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.slurm.mkdir(parents=True)
    folder.code_diff.write_text("of an earlier submission")
    record = snapshot.save_code(folder, project)
    assert copied(folder) == {"cat_lm/a.py", "train.py"}
    assert (record["commit"], record["dirty"]) == (None, None)
    assert not folder.code_diff.exists()


def test_snapshot_of_this_checkout(tmp_path):
    """Whatever runs, prepares and evaluates is in it, the batch script's text too."""
    folder = RunFolder(tmp_path / "run")
    snapshot.save_code(folder, snapshot.PROJECT)
    names = ("train.py", "launch/slurm/body.sh", "data_prep/prepare.py", "configs/quickstart.yaml")
    for name in names:
        assert (folder.code / name).read_bytes() == (snapshot.PROJECT / name).read_bytes()


def test_a_repository_around_the_project_is_not_its_version(project, tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    assert snapshot.save_code(RunFolder(tmp_path / "run"), project)["commit"] is None


def test_a_run_folder_inside_the_checkout_is_not_copied_into_itself(project):
    committed(project)
    folder = RunFolder(project / "outputs" / "run")
    for _ in range(2):
        snapshot.save_code(folder, project)
        assert copied(folder) == {".gitignore", "cat_lm/a.py", "train.py"}


def test_data_in_the_checkout_is_refused(project, tmp_path, monkeypatch):
    committed(project)
    monkeypatch.setattr(snapshot, "MOST_BYTES", 1000)
    (project / "eval").mkdir(exist_ok=True)
    (project / "eval/tokens.bin").write_bytes(bytes(2000))
    with pytest.raises(UserError, match=r"largest file is eval/tokens.bin: move data out"):
        snapshot.save_code(RunFolder(tmp_path / "run"), project)
    assert not (tmp_path / "run").exists()
