"""launch.slurm's commands: what is checked, copied, submitted and remembered."""

from __future__ import annotations

import json

import pytest

from cat_lm.config import load_config
from launch.slurm import snapshot
from launch.slurm.folder import read_record
from launch.slurm.options import Options
from tests.checkpoints import seal, step_folder
from tests.launch.places import copied


def test_submit(place):
    out = place.submit("--time", "2:00:00", "train.seed=5", "--env", "A=b=c", "train.max_steps=9")
    folder = place.run_folder
    assert "submitted job 41: 2 x 1 ranks" in out and str(folder.log) in out
    assert place.calls.read_text().splitlines() == [
        "sbatch --test-only",
        f"sbatch --parsable {folder.script}",
    ]
    text = folder.script.read_text()
    assert "--signal=USR1@300" in text and "A=b=c" in text and "made=()\n" in text
    config = load_config(folder.config)
    assert (config.train.seed, config.train.max_steps) == (5, 9)
    assert config.data.cache_dir is None  # the default stays the default
    record = read_record(folder)
    assert record.job_ids == ["41"] and record.overrides == ["train.seed=5", "train.max_steps=9"]
    assert record.options == Options(nodes=2, time="2:00:00", env={"A": "b=c"})
    assert copied(folder) == {"cat_lm/a.py", "train.py"}


def test_several_configurations_are_all_checked_before_one_is_submitted(place, monkeypatch):
    """Their states are a table."""
    monkeypatch.chdir(place.folder)
    other, second = place.folder / "other.yaml", place.folder / "second"
    text = place.config.read_text()
    other.write_text(text.replace(str(place.run_folder.run), str(second)))
    assert other.read_text() != text
    given = (place.config, other, "--nodes", 2)
    err = place.fails("submit", *given, "train.output_dir=one")
    assert "one: two of the configurations would write to it" in err
    step_folder(second, 5)
    assert "already holds step-00000005" in place.fails("submit", *given)
    assert not place.run_folder.script.exists()
    code, out, err = place("submit", *given, "train.resume=auto", "train.seed=5")
    assert (code, err) == (0, ""), err
    assert out.count("submitted job ") == 2
    calls = [call.split()[1] for call in place.calls.read_text().splitlines()[-4:]]
    assert calls == ["--test-only", "--test-only", "--parsable", "--parsable"]
    for run in (place.run_folder.run, second):
        assert load_config(run / "slurm" / "config.yaml").train.seed == 5
    path = place.folder / "status.json"
    code, out, _ = place("status", place.run_folder.run, second, "--json", path)
    head, *rows = out.splitlines()
    assert code == 0 and head.split()[-3:] == ["checkpoint", "attempts", "run"]
    assert [row.split()[-1] for row in rows] == [str(place.run_folder.run), str(second)]
    assert [row.split()[4] for row in rows] == ["none", "step-00000005"]
    runs = json.loads(path.read_text())["runs"]
    assert [run["run"] for run in runs] == [str(place.run_folder.run), str(second)]


def test_variables_of_the_shell_do_not_win(place, monkeypatch):
    """As sbatch would have it, over all #SBATCH lines; one of what nobody asks for stays."""
    site = place.folder / "site.yaml"
    site.write_text("partition: gpu\nsbatch: [--hint=nomultithread]\n")
    aside = ["SBATCH_ERROR", "SBATCH_GRES", "SBATCH_NO_REQUEUE", "SBATCH_PARTITION"]
    aside += ["SBATCH_TIMELIMIT", "SBATCH_WAIT", "SLURM_HINT"]
    kept = ["SBATCH_ACCOUNT", "SBATCH_CLUSTERS", "SBATCH_DEBUG", "SBATCH_WAIT_ALL_NODES"]
    for name in aside + kept:
        monkeypatch.setenv(name, "1")
    options = ("--nodes", 1, "--gpus-per-node", 2, "--site", site)
    code, _, err = place("submit", place.config, *options)
    said = f"left aside, or they would win over what is asked for: {', '.join(aside)}\n"
    assert (code, err) == (0, said)
    seen = (place.folder / "calls.environment").read_text().splitlines()
    assert {line.partition("=")[0] for line in seen} & {*aside, *kept} == set(kept)
    script = place.run_folder.script
    by_hand = " ".join(f"-u {name}" for name in aside)
    assert f"\n#     env {by_hand} sbatch {script}\n" in script.read_text()


def test_paths_become_absolute(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    overrides = ["data.path=data", "train.output_dir=out/run", "train.init_from=~/weights"]
    values = snapshot.resolve_paths(load_config(place.config, overrides))
    assert values["data"]["path"] == str(place.data)
    assert values["train"]["output_dir"] == str(place.folder / "out" / "run")
    assert snapshot.inputs_of(values) == [str(place.data), str(place.folder / "weights")]
    remote = snapshot.resolve_paths(load_config(place.config, ["data.path=s3://bucket/data"]))
    assert remote["data"]["path"] == "s3://bucket/data" and snapshot.inputs_of(remote) == []


@pytest.mark.parametrize(
    ("given", "cache"), [([], ".cache/cat_lm/data"), (["data.cache_dir=~/copies"], "copies")]
)
def test_container_sees_the_cache(place, given, cache):
    """Also the default one, by its path here: copies and notes would be lost with the container."""
    place.submit("--container", "image", *given)
    folder = place.folder / cache
    assert f",{folder}:{folder}'\n" in place.run_folder.script.read_text()
    assert load_config(place.run_folder.config).data.cache_dir == str(folder)
    assert not folder.exists()  # it may lie on the nodes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", 0], "--nodes: '0' must be from 1 to 65,536"),
        (["--nodes", 2, "--time", "tomorrow"], "--time tomorrow: must be minutes"),
        (["--nodes", 2, "--time", "0"], "more than nothing"),
        (["--nodes", 2, "--time", "5", "--lead-seconds", 300], "less than the time limit"),
        (["--nodes", 2, "--gpus-per-node", 4, "--tasks-per-node", 2], "--tasks-per-node 2"),
        (["--nodes", 2, "--container-mounts", "/a:/b"], "needs --container"),
        (["--nodes", 2, "--account", "a\n#SBATCH --x"], "account is"),
        (["--nodes", 2, "--env", "1A=b"], "must have the form NAME=VALUE"),
        (["--nodes", 2, "--nods", 2], "unrecognized arguments: --nods; did you mean --nodes?"),
        (["--nodes", 1, "--", "train.seed=1"], "unrecognized arguments: -- train.seed=1"),
        (["--nodes", 3], "micro_batch_size x ranks = 2 x 3 = 6"),
        (["--nodes", 2, "train.sead=1"], "the nearest known one is train.seed"),
        (["--nodes", 2, "train.resume=/some/run"], "train.init_from"),
        (["--nodes", 2, "data.path=/no/such/data"], "/no/such/data: no such folder"),
        (["--nodes", 2, "--site", "/no/site.yaml"], "site file /no/site.yaml: no such file"),
        (["--nodes", 2, 'train.output_dir=a"b'], "no path with such characters"),
    ],
)
def test_bad_input_is_one_line(place, arguments, says):
    err = place.fails("submit", place.config, *arguments)
    assert says in err and err.count("\n") == 1
    assert not place.run_folder.run.exists()


def test_print_writes_nothing_and_warns_of_missing_folders(place):
    """A laptop has neither the cluster's data nor its file systems."""
    before = sorted(place.folder.iterdir())
    missing = ["data.path=/no/such/data", "train.output_dir=/proc/no/run"]
    code, out, err = place("submit", place.config, "--nodes", 2, *missing, "--print")
    assert code == 0 and out.startswith("#!/bin/bash") and sorted(place.folder.iterdir()) == before
    warnings = err.splitlines()
    assert len(warnings) == 2 and all(w.startswith("warning: on this machine, ") for w in warnings)
    assert "/proc/no/run" in warnings[0] and "/no/such/data: no such folder" in warnings[1]


def test_folders_that_are_no_runs_are_refused(place):
    for name in ("status", "cancel", "resume"):
        for folder in (place.folder / "nothing", "~nobody-at-all/x"):
            assert "no such run folder" in place.fails(name, folder)
        assert "was never submitted" in place.fails(name, place.data)
    for name in ("run", "run/slurm"):
        path = place.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        assert "is a file; give a folder" in place.fails("submit", place.config, "--nodes", 1)
        path.unlink()


def test_run_has_one_job_known_by_its_script(place):
    """Also one that was submitted by hand, whatever characters and arguments it has."""
    run = place.folder / "a run"
    other = f"train.output_dir={run}"
    for script in (f"{run}/slurm/job.sbatch", f"{run}/slurm/job.sbatch some argument"):
        place.queued("77", script)
        err = place.fails("submit", place.config, "--nodes", 1, other)
        assert "job 77 of this run is pending" in err and f"cancel '{run}'`" in err
    place.queued("77", f"{run}/slurm/job.sbatch.old")
    place.submit(other)
    place.calls.unlink()
    place.queued("41", f"{run}/slurm/job.sbatch", "RUNNING")
    assert "job 41" in place.fails("resume", run)
    code, out, _ = place("cancel", run)
    assert code == 0 and "cancelled job 41 (running)" in out
    assert place.calls.read_text() == "scancel 41\n"
    place.calls.unlink()
    place.queue.unlink()
    assert "no queued or running job" in place.fails("cancel", run)


def test_older_checkpoints_are_not_continued_by_accident(place):
    step = place.run_folder.checkpoints / "step-00000007"
    step.mkdir(parents=True)
    for name in ("state.json", "run_config.yaml", "model/config.json", "model/model.safetensors"):
        (step / name).parent.mkdir(exist_ok=True)
        (step / name).touch()
    seal(step)
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
    folder.begin_attempt("41", 0)
    assert folder.attempts_without_progress() == 1
    monkeypatch.setenv("JOB_ID", "42")
    changes = ("--time", "60", "--env", "B=2", "train.max_steps=50")
    code, out, err = place("resume", folder.run, *changes)
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
    assert folder.attempts_without_progress() == 0 and len(folder.attempt_lines()) == 1
    place("resume", folder.run, "--new-code")
    assert (folder.code / "train.py").read_text() == "# of the checkout"
    other = "train.output_dir=/proc/self"  # which may not be written to, as a warning would say
    error = place("resume", folder.run, other, "--print")[2]
    assert "`submit` starts another run" in error and error.count("\n") == 1


def test_resume_from_gpus_to_cpus_and_back(place):
    place.submit("--gpus-per-node", 2)
    run = place.run_folder.run
    place("resume", run, "--gpus-per-node", 0, "--tasks-per-node", 4, "--nodes", 1)
    text = place.run_folder.script.read_text()
    assert "--ntasks-per-node=4\n" in text and "--gpus" not in text
    place("resume", run, "--gpus-per-node", 1)
    assert "--ntasks-per-node=1\n#SBATCH --gpus-per-node=1\n" in place.run_folder.script.read_text()


def test_status_reads_what_is_whole(place, monkeypatch):
    place.submit()
    folder = place.run_folder
    _, out, _ = place("status", folder.run)
    assert "41: running" in out and "none yet" in out and str(folder.log) in out
    records = [{"step": 4, "loss": 2.5, "tokens_per_second": 1234.5}, {"step": 4, "val_loss": 2.4}]
    bad = ['{"step": 5, "loss": "x"}', '{"step": [], "loss": 1}', "[1]", '{"step": 5, "lo']
    folder.metrics.write_bytes(b"\xff\n" + "\n".join([*map(json.dumps, records), *bad]).encode())
    with open(folder.attempts, "ab") as attempts:
        attempts.write(b"\xff\n")
    for _ in range(3):
        folder.begin_attempt("41", 0)
    path = place.folder / "status.json"
    code, out, err = place("status", folder.run, "--json", path)
    assert (code, err) == (0, "")
    assert "4, loss 2.5000, 1,234 tokens/s" in out and "3 in a row from none" in out
    found = json.loads(path.read_text())
    assert (found["job"], found["nodes"], found["restarts"]) == ("41", "n[0-1]", 2)
    assert (found["step"], found["loss"], found["attempts_without_progress"]) == (4, 2.5, 3)
    monkeypatch.setenv("JOB_IS_GONE", "1")
    assert "41: unknown" in place("status", folder.run)[1]
    monkeypatch.setenv("PATH", "/nowhere")  # the files still tell
    shown = place("status", folder.run)[1]
    assert "this machine has no SLURM" in shown and "4, loss 2.5000" in shown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("{}", "has no format, must be 1"),
        (
            '{"format": 1, "config": "a", "overrides": [], "options": {"nodes": "x"}}',
            'options.nodes is "x"',
        ),
    ],
)
def test_damaged_job_record_is_one_line(place, text, says):
    folder = place.run_folder
    folder.slurm.mkdir(parents=True)
    folder.record.write_text(text)
    for name in ("status", "cancel", "resume"):
        err = place.fails(name, folder.run)
        assert says in err and err.endswith("submit the run again\n") and err.count("\n") == 1
