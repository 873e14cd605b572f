"""The site's file, time limits and lead signals."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cat_lm.core.errors import UserError
from launch.slurm import snapshot
from launch.slurm.options import Options, seconds_of
from launch.slurm.site import Site, load_site


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


def site_file(folder: Path, text: str) -> Path:
    path = folder / "site.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("partion: gpu", "partion: unknown key; the nearest known one is partition"),
        ("gpu_request: tres", "gpu_request='tres'"),
        ("cpus_per_task: none", "cpus_per_task='none': must be a whole number"),
        ("- a", "must hold keys such as"),
        ("a: [", "not valid YAML"),
        ("sbatch: [nodes]", "sbatch: 'nodes': must be one long option"),
        ("sbatch: [--]", "sbatch: '--': must be one long option"),
        ("sbatch: ['-N 2']", "must be one long option"),
        ("sbatch: [--no-requeue]", "launch.slurm sets this one itself"),
        ("sbatch: [--output=x.log]", "launch.slurm sets this one itself"),
        ('srun: ["--a\\n b"]', "srun: '--a\\n b'"),
        ("time: 7200", "time=7200: must be text; put it in quotes"),
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


@pytest.mark.parametrize(
    "option",
    [
        *("--nodes=2", "--time=10", "--tasks-per-node=3", "--outp=x.log", "--no-requ", "--wait"),
    ],
)
def test_what_the_script_rests_on_has_other_forms(tmp_path, option):
    """The site's lines come last, where sbatch lets the last one win."""
    with pytest.raises(UserError, match="slurm sets this one itself"):
        load_site(site_file(tmp_path, f"sbatch: ['{option}']"))


@pytest.mark.parametrize(
    "option",
    [
        *("--time-min=10", "--ntasks-per-socket=2", "--wait-all-nodes=1", "--hold"),
        *('--comment="by -N2"', "--hint=nomultithread", "--nodelist=n1"),
    ],
)
def test_what_only_looks_like_the_script_s_own_is_the_site_s(tmp_path, option):
    assert load_site(site_file(tmp_path, f"sbatch: ['{option}']"))[0].sbatch == [option]


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


def test_the_example_has_no_hint_that_srun_ignores():
    """Srun takes a --hint, also the job's, or a --cpu-bind."""
    site, _ = load_site(snapshot.PROJECT / "launch" / "site.example.yaml")
    given = {option.partition("=")[0] for option in (*site.sbatch, *site.srun)}
    assert "--cpu-bind" in given and "--hint" not in given


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x: 2020-09-09", "x: unknown key"),
        ("time: 2:00:00", "time=7200: must be text; put it in quotes"),
        ("cpus_per_task: 1e30", "must be from 1 to"),
        ("partition: ''", "must be one line of text"),
        ("3", "holds 3; must hold keys"),
        ("- a", "must hold keys"),
    ],
)
def test_yaml_that_is_no_site_is_one_line(tmp_path, text, says):
    with pytest.raises(UserError) as raised:
        load_site(site_file(tmp_path, text))
    assert says in str(raised.value) and "\n" not in str(raised.value)
