"""How long a study will take."""

from __future__ import annotations

import json
import re

import pytest

from eval.small_study.plan import SIZES, Study
from eval.small_study.progress import Estimate, Progress, reading_cost
from eval.small_study.questions import MODELS
from tests.unit.imitated_study import Imitation
from tests.unit.small_study.calls import run_study


def test_the_last_run_has_no_more_threads_than_the_first(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(4)})
    arguments = [*arguments, "--seeds", "0"]
    assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
    (tmp_path / "out/runs/pythia-seed0/study.json").unlink()
    code, out, _ = run_study(monkeypatch, capsys, Imitation(), *arguments)
    assert code == 0 and "1 to do" in out and "4 at a time, 1 threads each" in out
    trained = json.loads((tmp_path / "out/summary.json").read_text())["trained_with"]
    assert (trained["threads"], trained["parallel"]) == ([1], [4])
    # Two at a time is another speed, which the page says.
    (tmp_path / "out/runs/pythia-seed0/study.json").unlink()
    assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--parallel", 2)[0] == 0
    table = (tmp_path / "out/small_study.md").read_text()
    assert "Runs had different numbers of threads (2, 1)" in table


def test_reading_far_costs_attention_more(tmp_path):
    def cost(model: str, question: str = "variants") -> float:
        study = Study(SIZES["cpu"], (model,), (0,), tmp_path, tmp_path, question=question)
        return reading_cost(study, study.config(study.jobs()[0]))

    assert cost("pythia", "length") > cost("pythia") > 1.1
    # A recurrence reads every token at the same cost.
    assert cost("gated_deltanet") == pytest.approx(1.0)
    for model in MODELS:
        assert 1 - 1e-9 <= cost(model) < 8


def test_an_estimate_divides_by_the_runs_that_there_are(tmp_path):
    jobs = Study(SIZES["cpu"], ("pythia",), (0, 1, 2), tmp_path, tmp_path).jobs()
    estimate = Estimate({"pythia": 60.0}, {"pythia": 20.0}, {}, {})
    assert "about 60 s for all" in estimate.text(jobs[:1], 4)
    assert "about 90 s for all" in estimate.text(jobs, 2)
    assert "about 90 s for all, up to 20 s more" in estimate.text(jobs, 2, ["pythia"] * 2)


def test_an_estimate_leaves_out_trainings_that_are_taken_over(tmp_path):
    study = Study(SIZES["cpu"], ("pythia",), (0, 1, 2), tmp_path, tmp_path, rates=(1e-3, 3e-3))
    jobs, (one, other) = study.jobs(), study.tuning_jobs()
    seconds = ({"pythia": number} for number in (60.0, 20.0, 10.0, 5.0))
    estimate = Estimate(*seconds, frozenset({jobs[0], one}))
    assert [*map(estimate.of, (*jobs, one, other))] == [10, 60, 60, 5, 20]
    # What was foreseen to be trained at another rate than was chosen is trained here.
    assert estimate.seconds_of(jobs[0], False) == 60


def test_what_is_left_is_corrected_by_runs_of_both_kinds(tmp_path, monkeypatch):
    """Runs as fast as estimated leave what was estimated, taken over or not."""
    study = Study(SIZES["cpu"], ("pythia",), (0, 1, 2), tmp_path, tmp_path, rates=(1e-3, 3e-3))
    jobs, (tuned, _) = study.jobs(), study.tuning_jobs()
    seconds = ({"pythia": number} for number in (60.0, 20.0, 10.0, 5.0))
    estimate = Estimate(*seconds, frozenset({*jobs[:2], tuned}))
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr("eval.small_study.progress._loss", lambda _: "a loss")
    with Progress([tuned, *jobs], [tuned, *jobs], estimate, study) as progress:
        now += 5
        progress.finished(tuned, {"seconds": 5, "diverged": False, "reused": "there"})
        assert progress.remaining() == 10 + 10 + 60
        now += 10
        progress.finished(jobs[0], {"seconds": 10, "diverged": False, "reused": "there"})
        assert progress.remaining() == 10 + 60
        now += 60  # at another rate than was foreseen, so that it was trained here
        progress.finished(jobs[1], {"seconds": 60, "diverged": False, "reused": None})
        assert progress.remaining() == 60


def test_estimate_starts_nothing(arguments, tmp_path, monkeypatch, capsys):
    imitation = Imitation()
    code, out, _ = run_study(monkeypatch, capsys, imitation, *arguments, "--estimate")
    assert code == 0 and re.search(r"about \d+ (s|min|h)", out)
    assert all("train.max_steps=" in call for call in imitation.calls)
    assert not (tmp_path / "out/runs").exists()


def test_estimate_of_a_finished_study_changes_nothing(arguments, tmp_path, monkeypatch, capsys):
    arguments = [*arguments, "--seeds", "0"]
    assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files if path.name != ".lock"}
    code, out, _ = run_study(monkeypatch, capsys, third := Imitation(), *arguments, "--estimate")
    assert code == 0 and "0 to do" in out and third.calls == []
    assert {path: path.stat().st_mtime_ns for path in before} == before
    more = ("--tokens", "8K", "--estimate")
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, *more)
    assert code == 2 and "holds a study with another configs." in err
