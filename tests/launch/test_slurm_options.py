"""The site's file, time limits and lead signals."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.core.errors import UserError
from launch.slurm import snapshot
from launch.slurm.options import Options, Site, load_site, seconds_of

NUMBER = st.integers(0, 99)


@given(NUMBER, NUMBER, NUMBER, st.integers(1, 99))
def test_time_limits_are_read_as_slurm_reads_them(days, hours, minutes, seconds):
    day, hour = 86400 * days, 3600 * hours
    assert seconds_of(f"{seconds}") == 60 * seconds
    assert seconds_of(f"{minutes}:{seconds}") == 60 * minutes + seconds
    assert seconds_of(f"{hours}:{minutes}:{seconds}") == hour + 60 * minutes + seconds
    assert seconds_of(f"{days}-{seconds}") == day + 3600 * seconds
    assert seconds_of(f"{days}-{hours}:{seconds}") == day + hour + 60 * seconds
    assert seconds_of(f"{days}-{hours}:{minutes}:{seconds}") == day + hour + 60 * minutes + seconds


@pytest.mark.parametrize(
    ("time", "lead"), [(None, 300), ("UNLIMITED", 300), ("10:00", 300), ("1", 30)]
)
def test_lead_is_at_most_half_the_limit(time, lead):
    assert Options(nodes=1, time=time).with_site(Site()).lead == lead


def site_file(folder: Path, text: str) -> Path:
    path = folder / "site.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("partion: gpu", "partion: unknown key; the nearest known one is partition"),
        ("gpu_request: tres", "gpu_request is"),
        ("cpus_per_task: none", "must be a whole number"),
        ("cpus_per_task: 1e30", "must be from 1 to"),
        ("- a", "must hold keys such as"),
        ("a: [", "not valid YAML"),
        ("sbatch: [nodes]", "must be one long option"),
        ("sbatch: ['-N 2']", "must be one long option"),
        ("srun: [mpi]", "must be one argument"),
        ('srun: ["--a\\n b"]', "must be one argument"),
        ("time: 2:00:00", "time is 7200: must be one line of text, in quotes"),
        ("partition: ''", "must be one line of text"),
        ("env: {A: 1}", "env.A is 1"),
        ("env: {A-B: x}", "is no name of an environment variable"),
        ("setup: module load x", "setup is"),
        # What the script rests on, in all its forms: sbatch lets the site's lines win.
        *(
            (f"sbatch: ['--{name}']", "launch.slurm sets this one itself")
            for name in (
                *("nodes=2", "time=10", "tasks-per-node=3", "outp=x.log", "no-requ", "wait"),
            )
        ),
    ],
)
def test_site_error_names_the_key(tmp_path, text, says):
    with pytest.raises(UserError) as error:
        load_site(site_file(tmp_path, text))
    assert says in str(error.value) and "site.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "option",
    [
        *("--time-min=10", "--ntasks-per-socket=2", "--wait-all-nodes=1", "--hold"),
        *('--comment="by -N2"', "--hint=nomultithread", "--nodelist=n1"),
    ],
)
def test_options_that_only_look_like_the_scripts_own_are_the_sites(tmp_path, option):
    assert load_site(site_file(tmp_path, f"sbatch: ['{option}']"))[0].sbatch == [option]


def test_site_file_is_looked_for_in_three_places(tmp_path, monkeypatch):
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


def test_command_line_wins_over_the_site(place):
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


def test_example_is_a_valid_site_and_names_every_key():
    example = snapshot.PROJECT / "launch" / "site.example.yaml"
    site, _ = load_site(example)
    text = example.read_text(encoding="utf-8")
    missing = [key for key in Site.model_fields if f"{key}:" not in text]
    assert missing == [] and set(yaml.safe_load(text)) <= set(Site.model_fields)
    # Srun ignores a --hint, also the job's, beside a --cpu-bind.
    given = {option.partition("=")[0] for option in (*site.sbatch, *site.srun)}
    assert "--cpu-bind" in given and "--hint" not in given
