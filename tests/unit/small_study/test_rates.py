"""Rates: chosen on a seed that is not reported, widened at the edge."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil

import pytest

from eval.small_study.execute import (
    Workers,
    complete_run,
    last_loss,
    unfinished,
)
from eval.small_study.plan import SIZES, TUNING_SEED, Job, Study
from eval.small_study.tune import known, tuned
from tests.unit.imitated_study import Imitation
from tests.unit.small_study.calls import run_study


def test_rates_are_chosen_on_a_seed_that_is_not_reported(arguments, tmp_path, monkeypatch, capsys):
    arguments = [*arguments, "--seeds", "0,1", "--rates", "1e-3,1e-2,3e-3", "--parallel", 1]
    code, out, err = run_study(monkeypatch, capsys, first := Imitation(), *arguments)
    assert code == 0, err
    assert "6 runs of 3 models and 9 that choose rates" in out
    calls = [call for call in first.calls if "train.py" in call and "max_steps" not in call]
    assert len(calls) == 15
    tuning, reported = calls[:9], calls[9:]
    assert all(f"train.seed={TUNING_SEED}" in call for call in tuning)
    assert not any("max_tokens" in call for call in [*tuning, *reported]), "as configured"
    assert all("lr=0.003 optimizer.min_lr=0.0003 " in f"{call} " for call in reported)
    assert not any("tuning" in call for call in first.calls if "train.py" not in call)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert {row["seed"] for row in summary["rows"]} == {0, 1}
    chosen = summary["models"][0]["tuned"]
    assert (chosen["edge"], list(chosen["losses"])) == ("", ["0.001", "0.003", "0.01"])
    table = (tmp_path / "out/small_study.md").read_text(encoding="utf-8")
    assert "| validation loss at rate | 0.001 | 0.003 | 0.01 |" in table
    assert "| Pythia (RoPE) | 4.477 | **4.000** | 4.523 |" in table
    assert "numbers are conditional on the rates chosen" in table
    # Begun again, nothing is left; without rates it is another study.
    assert run_study(monkeypatch, capsys, again := Imitation(), *arguments)[0] == 0
    assert again.calls == []
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments[:-4])
    assert code == 2 and ".optimizer.lr ([0.001, 0.003, 0.01], now 0.003)" in err
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "1000")
    assert code == 2 and "--seeds 1000: chooses the rates" in err


def test_seeds_of_one_model_have_one_rate(arguments, tmp_path, monkeypatch, capsys):
    """Also where the runs that chose it were removed, and made again with another outcome."""
    given = [*arguments, "--models", "pythia", "--rates", "1e-3,3e-3,1e-2"]
    assert run_study(monkeypatch, capsys, Imitation(), *given, "--seeds", "0")[0] == 0
    shutil.rmtree(tmp_path / "out/tuning")
    monkeypatch.setattr(Imitation, "best_rate", 1e-2)
    again = Imitation()
    code, _, err = run_study(monkeypatch, capsys, again, *given, "--seeds", "0,1")
    assert (code, err.count("\n")) == (2, 1)
    assert "pythia-seed0 is trained at a rate of 0.003, and 0.01 is the one that is chosen" in err
    assert not any("seed=1 " in call for call in again.calls), "before others are trained"
    shutil.rmtree(tmp_path / "out/runs/pythia-seed0")
    assert run_study(monkeypatch, capsys, Imitation(), *given, "--seeds", "0,1")[0] == 0


class TwoMinds(Imitation):
    """The first tuning seed has a rate best by 0.01, which the second finds worse by 0.1."""

    def validation(self, config) -> float:
        lower = config.optimizer.lr == (1e-2 if config.train.seed == TUNING_SEED else 3e-3)
        return 4.0 - lower * (0.01 if config.train.seed == TUNING_SEED else 0.1)


def test_the_mean_of_several_seeds_chooses_a_rate(arguments, tmp_path, monkeypatch, capsys):
    given = [*arguments, "--models", "pythia", "--rates", "1e-3,3e-3,1e-2,3e-2"]
    code, _, err = run_study(monkeypatch, capsys, TwoMinds(), *given)
    assert code == 0, err
    one = json.loads((tmp_path / "out/summary.json").read_text())
    assert one["models"][0]["rate"] == 1e-2 and one["tuning_seeds"] == [1000]
    more = ["--tuning-seeds", "2", "--out", tmp_path / "two"]
    code, out, err = run_study(monkeypatch, capsys, two := TwoMinds(), *given, *more)
    assert code == 0, err
    assert "3 runs of 1 models and 8 that choose rates" in out
    calls = [call for call in two.calls if "train.py" in call and "/trial/" not in call]
    for seed in (1000, 1001):
        assert sum(f"train.seed={seed} " in call for call in calls) == 4
    summary = json.loads((tmp_path / "two/summary.json").read_text())
    found = summary["models"][0]
    assert found["rate"] == 3e-3 and summary["tuning_seeds"] == [1000, 1001]
    assert found["tuned"]["runs"]["0.01"] == [3.99, 4.0]
    assert found["tuned"]["losses"]["0.003"] == pytest.approx(3.95)
    table = (tmp_path / "two/small_study.md").read_text(encoding="utf-8")
    assert "| Pythia (RoPE) | 4.000 | **3.950** | 3.995 | 4.000 |" in table
    assert "Each is of 2 runs of seeds 1000 to 1001, their mean, on" in table
    # The number of seeds is part of what a folder was chosen by.
    code, _, err = run_study(monkeypatch, capsys, TwoMinds(), *given, "--tuning-seeds", "2")
    assert code == 2 and "another tuning_seeds (1, now 2)" in err
    code, _, err = run_study(monkeypatch, capsys, TwoMinds(), *given, *more, "--seeds", "5,1001")
    assert code == 2 and "--seeds 1001: chooses the rates" in err
    code, _, err = run_study(monkeypatch, capsys, TwoMinds(), *arguments, "--tuning-seeds", "2")
    assert code == 2 and "--tuning-seeds: chooses among --rates" in err


def test_a_rate_at_which_one_of_the_seeds_diverges_is_not_chosen(tmp_path, monkeypatch):
    imitation = Imitation(diverges="lr0.003-seed1001")
    monkeypatch.setattr(Workers, "process", lambda *args: imitation(*args))
    values = {"rates": (1e-3, 3e-3, 1e-2), "tuning_seeds": 2}
    study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path, **values)
    workers = Workers(study, 1, 1)
    found = tuned(study, lambda jobs: [complete_run(workers, j) for j in unfinished(jobs)])
    assert found["pythia"].losses[3e-3] == math.inf and found["pythia"].rate != 3e-3
    assert math.isfinite(found["pythia"].runs[3e-3][0]), "the control: the other seed does well"


@pytest.mark.parametrize(
    ("best", "tried", "edge"),
    [
        (1.5e-2, [0.001, 0.003, 0.01, 0.0333], ""),
        (1.0, [0.001, 0.003, 0.01, 0.0333, 0.111], ">="),
        (1e-5, [0.000111, 0.000333, 0.001, 0.003, 0.01], "<="),
    ],
)
def test_a_best_rate_at_the_edge_is_widened_and_marked(tmp_path, monkeypatch, best, tried, edge):
    imitation = Imitation()
    monkeypatch.setattr(Imitation, "best_rate", best)
    monkeypatch.setattr(Workers, "process", lambda *args: imitation(*args))
    rates = (1e-3, 3e-3, 1e-2)
    study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path, rates=rates)
    workers = Workers(study, 1, 1)
    run = lambda jobs: [complete_run(workers, job) for job in unfinished(jobs)]  # noqa: E731
    found = tuned(study, run)["pythia"]
    assert (list(found.losses), found.edge) == (tried, edge)
    assert found.rate == {"": 0.01, ">=": tried[-1], "<=": tried[0]}[edge]
    assert len(imitation.calls) == len(tried), "each is trained once"


def test_a_rate_that_diverges_is_not_chosen(tmp_path, monkeypatch):
    imitation = Imitation(diverges="lr0.003")
    monkeypatch.setattr(Workers, "process", lambda *args: imitation(*args))
    rates = (1e-3, 3e-3, 1e-2)
    study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path, rates=rates)
    workers = Workers(study, 1, 1)
    found = tuned(study, lambda jobs: [complete_run(workers, j) for j in unfinished(jobs)])
    assert found["pythia"].losses[3e-3] == math.inf and found["pythia"].rate != 3e-3


def test_a_training_that_ends_in_no_number_is_not_credited_with_an_earlier_one(tmp_path):
    job = Job("pythia", TUNING_SEED, tmp_path, 1e-2)
    lines = [{"step": 1, "tokens": 8, "loss": 5.0}]
    values = {"val_perplexity": None, "val_bits_per_byte": None}
    lines += [{"step": n, "tokens": 8, "val_loss": x, **values} for n, x in ((1, 3.0), (2, 2))]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_loss(job) == 2
    lines.append({"step": 3, "tokens": 9, "val_loss": None, **values})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_loss(job) is None
    path.write_text(json.dumps(lines[0]) + "\n")
    assert last_loss(job) is None, "never validated"


def test_a_widened_run_that_is_gone_is_made_again(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Imitation, "best_rate", 1.5e-2)
    arguments = [*arguments, "--seeds", "0", "--rates", "1e-3,3e-3,1e-2"]
    code, out, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
    assert code == 0, err
    assert re.search("for all, up to .* more where best rates are at the end", out)
    gone = tmp_path / "out/tuning/pythia-lr0.0333/study.json"
    gone.unlink()
    code, out, err = run_study(monkeypatch, capsys, again := Imitation(), *arguments)
    assert code == 0, err
    assert "3 runs of 3 models and 12 that choose rates" in out and "1 to do" in out
    assert sum("/tuning/pythia-lr0.0333" in call for call in again.calls) == 1
    assert gone.is_file()


def test_the_runs_that_choose_rates_are_known_as_far_as_those_before_them_are_done(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Imitation, "best_rate", 1.0)
    imitation = Imitation()
    monkeypatch.setattr(Workers, "process", lambda *args: imitation(*args))
    rates = (1e-3, 3e-3, 1e-2)
    study = Study(SIZES["cpu"], ("pythia", "canon_b"), (0,), tmp_path, tmp_path, rates=rates)
    assert known(dataclasses.replace(study, rates=())) == ([], [])
    jobs, more = known(study)
    assert len(jobs) == 6 and more == ["pythia"] * 2 + ["canon_b"] * 2
    for job in study.tuning_jobs()[:3]:
        complete_run(Workers(study, 1, 1), job)
    jobs, more = known(study)
    assert [job.rate for job in jobs[:4]] == [1e-3, 3e-3, 1e-2, 0.0333]
    assert len(jobs) == 7 and more == ["pythia"] + ["canon_b"] * 2
    tuned(study, lambda jobs: [complete_run(Workers(study, 1, 1), j) for j in unfinished(jobs)])
    jobs, more = known(study)
    assert (len(jobs), more) == (10, []) and not unfinished(jobs)


def test_models_whose_rates_fail_do_not_hold_the_others_up(
    arguments, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Imitation, "best_rate", 1.5e-2)
    arguments = [*arguments, "--seeds", "0,1", "--rates", "1e-3,3e-3,1e-2"]
    failing = Imitation(fails="tuning/canon_b-lr0.003 ")
    code, _, err = run_study(monkeypatch, capsys, failing, *arguments)
    # Nine runs at the rates given, two at one beyond them, two models and two seeds.
    assert code == 2 and "1 of 15 runs failed, the others are kept" in err
    tries = sum("tuning/canon_b-lr0.003 " in call for call in failing.calls)
    assert tries == 2, "not again where other models' lists are widened"
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["missing"] == ["canon_b-seed0", "canon_b-seed1"]
    assert [model["seeds"] for model in summary["models"]] == [[0, 1], [0, 1], []]
    table = (tmp_path / "out/small_study.md").read_text(encoding="utf-8")
    assert "Not finished: canon_b-seed0, canon_b-seed1." in table
    assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
