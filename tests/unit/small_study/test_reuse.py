"""Trainings that are taken over from other studies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cat_lm.config import load_config
from cat_lm.core.folders import make_temporary
from cat_lm.training.checkpoint import step_folders
from eval.small_study.execute import (
    ORIGIN,
    last_loss,
)
from eval.small_study.plan import Job
from eval.small_study.progress import Estimate, measure
from tests.unit.imitated_study import Imitation
from tests.unit.small_study.calls import Shifted, change_result, last_loss_of, run_study


@pytest.fixture
def earlier(long_corpus, tmp_path, monkeypatch, capsys) -> Path:
    """Return a finished study of two models with rates chosen, each run with its checkpoint."""
    monkeypatch.setattr("eval.small_study.reuse._precision", lambda _: "fp32")
    monkeypatch.setattr("cat_lm.training.checkpoint.complete_checkpoints", step_folders)
    monkeypatch.setattr("eval.small_study.execute.commit", lambda: "a" * 40)
    out = tmp_path / "earlier"
    call = ["--data", long_corpus, "--out", out, "--models", "pythia,cat_rope"]
    call += ["--documents", 4, "--seeds", "0,1,2,3,4,5,6", "--rates", "1e-3,3e-3,1e-2"]
    assert run_study(monkeypatch, capsys, Imitation(), *call)[0] == 0
    for folder in (*out.glob("runs/*"), *out.glob("tuning/*")):
        steps = load_config(folder / "config.yaml").total_steps
        (folder / f"checkpoints/step-{steps:08d}").mkdir(parents=True)
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            last = {"val_loss": last_loss_of(folder), "val_perplexity": 2.0}
            last |= {"step": steps, "tokens": 1, "val_bits_per_byte": 1.0}
            file.write(json.dumps(last) + "\n")
    monkeypatch.setattr("eval.small_study.execute.commit", lambda: "b" * 40)
    return out


@pytest.fixture
def reusing(arguments, earlier) -> list[object]:
    """Return the call of another question, with one model more."""
    call = [*arguments[:4], "--question", "canon", "--models", "pythia,cat_rope,kv_shift"]
    return [*call, "--documents", 4, "--rates", "1e-3,3e-3,1e-2", "--reuse", earlier]


def test_trainings_of_another_question_are_taken_over(
    reusing, earlier, tmp_path, monkeypatch, capsys
):
    (tmp_path / "out/runs/cat_rope-seed0").mkdir(parents=True)  # begun here: goes on here
    make_temporary(cut := tmp_path / "out/runs/pythia-seed0.copy")
    (cut / "pythia-seed0").mkdir()
    (cut / "pythia-seed0/config.yaml").write_text("cut short")
    code, out, err = run_study(monkeypatch, capsys, imitation := Shifted(), *reusing)
    assert code == 0, err
    # Three seeds and three rates of two models, but for the run that was begun.
    assert "\n11 trainings of other studies are taken over" in out
    folder = tmp_path / "out"
    runs = (*folder.glob("runs/*"), *folder.glob("tuning/*"))
    found = {run.name: (run / ORIGIN).is_file() for run in runs}
    assert found == {
        **{f"{m}-lr{r}": True for m in ("pythia", "cat_rope") for r in (1e-3, 3e-3, 0.01)},
        **{f"kv_shift-lr{rate}": False for rate in (1e-3, 3e-3, 0.01)},
        **{f"pythia-seed{seed}": True for seed in range(3)},
        **{f"cat_rope-seed{seed}": seed > 0 for seed in range(3)},
        **{f"kv_shift-seed{seed}": False for seed in range(3)},
    }
    for run in runs:
        own = last_loss(Job("", 0, run)) == last_loss_of(run)
        assert own == found[run.name], "of the training there, or made here"
    assert sum("eval.length_sweep" in one for one in imitation.calls) == 9, "measured here"
    cell = json.loads((folder / "runs/pythia-seed0/study.json").read_text())
    assert (cell["reused"], cell["commit"]) == (str(earlier), "a" * 40)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["trained_with"]["reused"] == [str(earlier), None]
    said = f"Trainings that are the same there were taken over from {earlier}."
    assert said in (folder / "small_study.md").read_text()
    assert run_study(monkeypatch, capsys, again := Shifted(), *reusing)[0] == 0
    assert again.calls == []
    # From there, a third study names where they were trained.
    third = [*reusing[:2], "--out", tmp_path / "third", *reusing[4:-1], folder]
    assert run_study(monkeypatch, capsys, Shifted(), *third)[0] == 0
    cell = json.loads((tmp_path / "third/runs/pythia-seed0/study.json").read_text())
    assert (cell["reused"], cell["commit"]) == (str(earlier), "a" * 40)


def test_an_estimate_knows_what_is_taken_over(reusing, monkeypatch, capsys):
    found = []

    def measured(*given: object) -> Estimate:
        found.append(measure(*given))
        return found[-1]

    monkeypatch.setattr("eval.small_study.progress.measure", measured)
    assert run_study(monkeypatch, capsys, Shifted(), *reusing, "--estimate")[0] == 0
    names = {job.name for job in found[0].taken_over}
    ends = (*(f"lr{rate}" for rate in (1e-3, 3e-3, 0.01)), *(f"seed{seed}" for seed in range(3)))
    assert names == {f"{model}-{end}" for model in ("pythia", "cat_rope") for end in ends}


def test_where_a_training_is_from_outlives_a_failed_sweep(
    reusing, earlier, tmp_path, monkeypatch, capsys
):
    failing = Shifted(fails="eval.length_sweep .*pythia-seed0")
    assert run_study(monkeypatch, capsys, failing, *reusing)[0] == 2
    code, _, err = run_study(monkeypatch, capsys, Shifted(), *reusing)
    assert code == 0, err
    cell = json.loads((tmp_path / "out/runs/pythia-seed0/study.json").read_text())
    assert (cell["reused"], cell["commit"]) == (str(earlier), "a" * 40)


def test_a_copy_that_fails_is_one_line(reusing, tmp_path, monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "No space left on device")])

    monkeypatch.setattr("shutil.copytree", full)
    code, _, err = run_study(monkeypatch, capsys, Shifted(), *reusing)
    assert code == 2 and "Traceback" not in err
    assert "error: pythia-lr0.001: copying it from another study: not all of it" in err
    assert not (tmp_path / "out/tuning/pythia-lr0.001").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--tokens", "1M"], "has no finished training that is asked for here"),
        (["--rates", "1e-4,2e-4,4e-4"], "has no finished training that is asked for here"),
        (["--models", "canon_b"], "has no finished training that is asked for here"),
        (["--out", "earlier"], "is the study's own folder"),
        (["--reuse", "nowhere"], "nowhere: is no folder of a study, having no settings.json"),
    ],
)
def test_a_study_that_has_nothing_of_it_is_refused(
    arguments, earlier, tmp_path, monkeypatch, capsys, change, said
):
    option, value = change
    value = tmp_path / value if option in ("--out", "--reuse") else value
    call = [*arguments, "--seeds", "7", "--rates", "1e-3,3e-3,1e-2", "--reuse", earlier]
    if option == "--out":
        call += ["--models", "pythia,cat_rope"]
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *call, option, value)
    assert code == 2 and said in err and err.count("\n") == 1
    assert not (tmp_path / "out/settings.json").exists()


def test_a_training_that_is_not_the_same_is_made_again(
    arguments, earlier, tmp_path, monkeypatch, capsys
):
    def change(run: str, old: str, new: str) -> None:
        path = earlier / "runs" / run / "config.yaml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    change("pythia-seed0", "lr: 0.003", "lr: 0.004")
    change("pythia-seed1", "seed: 1", "seed: 3")
    change("pythia-seed2", "precision: fp32", "precision: bf16")
    change("pythia-seed3", "min_lr: 0.0003", "min_lr: 0.0")
    shutil.rmtree(earlier / "runs/pythia-seed4/checkpoints")
    change_result(earlier / "runs/pythia-seed5", diverged=True)
    call = [*arguments, "--seeds", "0,1,2,3,4,5,6", "--rates", "1e-3,3e-3,1e-2"]
    call += ["--reuse", earlier]
    assert run_study(monkeypatch, capsys, Imitation(), *call)[0] == 0
    runs = tmp_path / "out/runs"
    assert [(runs / f"cat_rope-seed{n}" / ORIGIN).is_file() for n in range(7)] == [True] * 7
    assert [(runs / f"pythia-seed{n}" / ORIGIN).is_file() for n in range(6)] == [False] * 6
    assert (runs / "pythia-seed6" / ORIGIN).is_file()


def test_a_study_with_more_runs_that_choose_rates_takes_over_those_that_chose(
    reusing, tmp_path, monkeypatch, capsys
):
    more = [*reusing, "--tuning-seeds", "2"]
    code, out, err = run_study(monkeypatch, capsys, Shifted(), *more)
    assert code == 0, err
    assert "and 18 that choose rates" in out
    assert "\n12 trainings of other studies are taken over" in out
    taken = {path.parent.name for path in (tmp_path / "out/tuning").glob(f"*/{ORIGIN}")}
    assert taken == {f"{m}-lr{r}" for m in ("pythia", "cat_rope") for r in (1e-3, 3e-3, 0.01)}
    assert len([*(tmp_path / "out/tuning").glob("*-seed1001/study.json")]) == 9
