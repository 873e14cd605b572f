"""What a study writes: tables, verdicts, and what may not be compared."""

from __future__ import annotations

import csv
import json
import math
import statistics
from typing import ClassVar

import pytest

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from eval.small_study.attention import attention_of
from eval.small_study.collect import _sums
from eval.small_study.figure import study_figure
from eval.small_study.plan import ROOT, SIZES, Job, Study
from tests.unit.imitated_study import Imitation
from tests.unit.small_study.calls import change_result, run_study


def test_results(arguments, tmp_path, monkeypatch, capsys):
    code, out, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--parallel", 2)
    assert code == 0, err
    assert "9 runs of 3 models" in out and "about" in out and "[9/9]" in out
    folder = tmp_path / "out"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["missing"] == [] and len(summary["rows"]) == 9 * 10
    assert summary["training_tokens"] == 716_800, "as configured"
    verdicts = {
        (pair["model"], pair["minus"]): pair["verdict"]
        for pair in summary["comparisons"]
        if pair["length"] == 128
    }
    assert verdicts == {
        ("cat_rope", "pythia"): "lower",
        ("canon_b", "pythia"): "unclear",
        ("canon_b", "cat_rope"): "higher",
    }
    by_document = [pair["document_error"] for pair in summary["comparisons"]]
    # Of 8 documents, ± 0.02 in turn: sqrt(8/7 * 8 * 0.02^2) / 8; 3 pairs, 2 lengths.
    assert by_document[:2] == pytest.approx([0, 0.02 / math.sqrt(7)], abs=1e-9)
    assert {pair["comparisons"] for pair in summary["comparisons"]} == {6}
    table = (folder / "small_study.md").read_text(encoding="utf-8")
    row = next(line for line in table.splitlines() if line.startswith("| CAT, RoPE | 1,000"))
    short, trained = (
        sum(math.exp(loss + 0.01 * seed) for seed in range(3)) / 3 for loss in (3.7, 3.8)
    )
    assert f"3.810 ± 0.010 | {short:.2f} ± 0.41 | {trained:.2f} ± " in row
    pair = "| CAT, RoPE | Pythia (RoPE) | -0.200 [-0.200, -0.200] | **lower** | -0.200"
    assert pair in table and "corrected for 6 comparisons" in table
    assert "| CAT, RoPE | pi+temperature |" in table
    with open(folder / "small_study.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 3 * 2 * 5
    for name in ("small_study.png", "small_study.svg", "report/index.html"):
        assert (folder / name).stat().st_size > 5000


def test_differences_of_differences_and_attention(arguments, tmp_path, monkeypatch, capsys):
    class Normed(Imitation):
        LOSS: ClassVar = {"pythia": 4.0, "qk_l2": 3.99, "cat_rope": 3.8, "cat_l2": 3.7}

    measured = []

    def imitated(study: Study, job: Job) -> dict[str, object]:
        measured.append(job.name)
        less = 0.1 + 1e-6 * (2 * job.seed - 1)  # the seeds' differences differ
        entropy = 0.5 + 0.1 * job.seed - less * (job.model == "cat_rope")
        layer = {"entropy": entropy, "largest_logit": 7.0}
        return layer | {"layers": [layer]}

    monkeypatch.setattr("eval.small_study.attention._measured", imitated)
    chosen = ["--question", "qk_norm", "--models", ",".join(Normed.LOSS), "--seeds", "0,1"]
    arguments = [*arguments[:4], *arguments[6:], *chosen, "--parallel", 1]
    assert run_study(monkeypatch, capsys, Normed(), *arguments)[0] == 0
    assert len(measured) == 8
    folder = tmp_path / "out"
    summary = json.loads((folder / "summary.json").read_text())
    pairs = {(p["model"], p["minus"]): p for p in summary["comparisons"] if p["length"] == 128}
    assert len(pairs) == 4 and {p["comparisons"] for p in pairs.values()} == {4}
    difference = pairs["cat_l2 − qk_l2", "cat_rope − pythia"]
    assert difference["mean"] == pytest.approx(-0.09) and difference["verdict"] == "lower"
    table = (folder / "small_study.md").read_text(encoding="utf-8")
    label = "| CAT, l2 norm after − Pythia, l2 norm of q and k | CAT, RoPE − Pythia (RoPE) |"
    assert f"{label} -0.090 [" in table
    assert "| CAT, RoPE | 0.450 ± 0.071 | 7.0 ± 0.0 |" in table
    # Of attention, too: a filter sharpens it here, within a norm it does not.
    sharper = {(p["model"], p["minus"]): p for p in summary["attention_comparisons"][:3]}
    assert {p["of"] for p in sharper.values()} == {"entropy"}
    assert {p["comparisons"] for p in sharper.values()} == {6}
    assert sharper["cat_rope", "pythia"]["mean"] == pytest.approx(-0.1)
    assert sharper["cat_rope", "pythia"]["verdict"] == "lower"
    assert sharper["cat_l2", "qk_l2"]["verdict"] == "unclear"
    assert "| CAT, RoPE | Pythia (RoPE) | -0.100 [-0.100, -0.100] | **lower** | +0" in table
    # Weights that were measured are not measured again.
    job = Job("cat_l2", 1, folder / "runs/cat_l2-seed1")
    study = Study(SIZES["cpu"], ("cat_l2",), (1,), folder, tmp_path, question="qk_norm")
    assert attention_of(study, job)["entropy"] == 0.6 and len(measured) == 8
    kept = job.folder / "attention.json"
    kept.write_text(kept.read_text().replace('"entropy": 0.6', '"entropy": 0.7'))
    with pytest.raises(UserError, match=r"attention\.json: damaged: was changed after"):
        attention_of(study, job)


def test_divergence_is_a_result(arguments, tmp_path, monkeypatch, capsys):
    code, out, err = run_study(
        monkeypatch, capsys, Imitation(diverges="cat_rope-seed0"), *arguments, "--seeds", "0,1"
    )
    assert code == 0, err
    assert "cat_rope-seed0: diverged" in out
    table = (tmp_path / "out/small_study.md").read_text(encoding="utf-8")
    assert "diverged in cat_rope-seed0" in table and "the seeds that are left are no" in table
    # The other seed is shown, and carries nothing, whichever side it is on.
    assert "| CAT, RoPE | Pythia (RoPE) | -0.200 (1 of 2) | unclear |" in table
    assert "| depthwise W=4, RoPE | CAT, RoPE | +0.201 (1 of 2) | unclear |" in table
    assert "| 3.810 (1 of 2) |" in table and "| 4.005 ± 0.007 |" in table
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    others = [p for p in summary["comparisons"] if "cat_rope" not in (p["model"], p["minus"])]
    assert others and all(p["low"] is not None and p["lost"] == 0 for p in others)


def test_a_loss_that_is_not_finite_leaves_no_word(arguments, tmp_path, monkeypatch, capsys):
    assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
    path = tmp_path / "out/runs/canon_b-seed2/eval/length_sweep.json"
    values = json.loads(path.read_text())
    for row in values["rows"]:
        if row["length"] == 1024:
            row |= {"loss": None, "perplexity": None, "document_nlls": None}
    write_json(path, values)
    assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    words = {
        (p["model"], p["minus"], p["length"]): (p["verdict"], p["n"], p["low"] is None)
        for p in summary["comparisons"]
    }
    assert words["canon_b", "cat_rope", 128] == ("higher", 3, False)
    assert words["canon_b", "cat_rope", 1024] == ("unclear", 2, True)
    assert words["cat_rope", "pythia", 1024] == ("lower", 3, False)


def test_a_lost_seed_of_a_sum_is_lost():
    full, lost = {"loss": 1.0, "document_nlls": [2.0]}, {"loss": None}
    assert _sums({0: full, 1: full, 2: lost}, {0: full, 1: lost}) == {
        0: {"loss": 2.0, "document_nlls": [4.0]},
        1: lost,
        2: lost,
    }
    assert _sums({0: full}, {}) == {}, "not finished yet"


def test_runs_of_two_precisions_are_not_compared(arguments, tmp_path, monkeypatch, capsys):
    assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")[0] == 0
    monkeypatch.setattr(Imitation, "precision", "bf16")
    again = Imitation()
    code, _, err = run_study(monkeypatch, capsys, again, *arguments, "--seeds", "0,1")
    assert (code, err.count("\n")) == (2, 1)
    assert "pythia-seed0 is trained in fp32, a trial of pythia in bf16, which are not" in err
    assert all("max_steps" in call for call in again.calls), "before anything is trained"
    # Where it came about all the same, two runs are named.
    change_result(tmp_path / "out/runs/cat_rope-seed0", precision="bf16")
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")
    assert (code, err.count("\n")) == (2, 1)
    assert "pythia-seed0 is trained in fp32, cat_rope-seed0 in bf16" in err


def test_runs_of_two_commits_are_told(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("eval.small_study.execute.commit", lambda: "a" * 40)
    assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")[0] == 0
    table = tmp_path / "out/small_study.md"
    assert f"Runs were trained by code of commit {'a' * 12}." in table.read_text()
    monkeypatch.setattr("eval.small_study.execute.commit", lambda: "b" * 40 + "+")
    assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0,1")[0] == 0
    said = f"by code of different commits: {'a' * 12}, {'b' * 12}+."
    assert said in table.read_text() and "machine" not in table.read_text()
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["trained_with"]["commit"] == ["a" * 40, "b" * 40 + "+"]
    assert summary["trained_with"]["precision"] == ["fp32"]
    change_result(tmp_path / "out/runs/pythia-seed0", commit=None)
    assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")[0] == 0
    assert f"different commits: unknown, {'a' * 12}." in table.read_text()


def test_runs_of_two_machines_are_told(arguments, tmp_path, monkeypatch, capsys):
    for name, seeds in (("one, 2 cores", "0"), ("another, 8 cores", "0,1")):
        monkeypatch.setattr("eval.small_study.execute.machine", lambda name=name: name)
        assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", seeds)[0] == 0
    assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "1")[0] == 0
    assert "machines" not in (tmp_path / "out/small_study.md").read_text()
    assert run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0,1")[0] == 0
    told = "different machines (one, 2 cores; another, 8 cores), so that tokens a second do not"
    assert told in (tmp_path / "out/small_study.md").read_text()


def test_a_sweep_of_other_weights_is_no_result(arguments, tmp_path, monkeypatch, capsys):
    arguments = [*arguments, "--seeds", "0"]
    assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
    write_json(
        tmp_path / "out/runs/pythia-seed0/model/config.json",
        {"model_type": "gpt_neox", "another": "export"},
    )
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
    assert code == 2 and "length_sweep.json: is of other weights than the export's" in err


def test_runs_scored_on_other_tokens_are_not_compared(arguments, tmp_path, monkeypatch, capsys):
    run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")
    path = tmp_path / "out/runs/pythia-seed0/eval/length_sweep.json"
    path.write_text(path.read_text().replace("a" * 64, "b" * 64))
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--seeds", "0")
    assert code == 2 and "scored on different tokens" in err


def test_a_picture_shows_which_models_have_lost_seeds():
    """Else the mean of those that are left stands beside those of all."""
    summary = json.loads((ROOT / "eval/records/variants_cpu.json").read_text())

    def shown() -> tuple[list[str], list[str], int]:
        losses, *lengths = study_figure(summary).axes
        names = [label.get_text() for label in losses.get_yticklabels()]
        hollow = [line for line in lengths[0].get_lines() if line.get_linestyle() == "None"]
        return names, [axes.get_title("left") for axes in lengths], len(hollow)

    names, titles, hollow = shown()
    assert not any("seeds" in text for text in (*names, *titles)) and not hollow
    lost = ("cat_rope", "pythia")
    for row in summary["rows"]:
        if (row["model"] == lost[0] and row["seed"] < 3) or (
            row["model"] == lost[1] and row["length"] == 1024 and row["seed"]
        ):
            row |= {"loss": None, "perplexity": None}
    names, titles, hollow = shown()
    assert [name for name in names if "seeds" in name] == ["CAT, RoPE (3 of 6 seeds)"]
    assert hollow == 2 and all("hollow: not of all seeds" in title for title in titles)


@pytest.mark.parametrize("record, method", [("filters", "yarn"), ("variants", "pi+temperature")])
def test_the_panel_beside_positions_as_trained_is_of_what_was_swept(record, method):
    """Of models without positions as they are, where those with are read by YaRN."""
    summary = json.loads((ROOT / f"eval/records/{record}_cpu.json").read_text())
    scaled = study_figure(summary).axes[2]
    for line, model in zip(scaled.get_lines(), summary["models"], strict=False):
        rope = model["position_embedding"] == "rope"
        read = method if rope else "temperature" if method != "yarn" else "none"
        expected = statistics.fmean(
            row["perplexity"]
            for row in summary["rows"]
            if (row["model"], row["length"], row["method"]) == (model["model"], 1024, read)
        )
        assert line.get_label() == model["label"] and line.get_ydata()[-1] == expected
