"""Runs that fail, and records that are damaged."""

from __future__ import annotations

import pytest

from tests.unit.imitated_study import Imitation
from tests.unit.small_study.calls import run_study


def test_failures_are_kept_apart_and_tried_again(arguments, monkeypatch, capsys):
    arguments = [*arguments, "--seeds", "0,1"]
    imitation = Imitation(fails="length_sweep.*cat_rope-seed1")
    code, _, err = run_study(monkeypatch, capsys, imitation, *arguments)
    assert code == 2
    log = arguments[3] / "runs/cat_rope-seed1/study.log"
    line = f"cat_rope-seed1: sweep ended with code 1, see {log}: ValueError: no such thing\n"
    assert line in err
    assert "1 of 6 runs failed, the others are kept" in err
    assert sum("length_sweep" in c and "cat_rope-seed1" in c for c in imitation.calls) == 2
    # What there is is told.
    table = (arguments[3] / "small_study.md").read_text(encoding="utf-8")
    assert "Not finished: cat_rope-seed1." in table and "3.800 (1 of 2)" in table
    pair = "| CAT, RoPE | Pythia (RoPE) | -0.200 (1 of 2) | one seed |"
    assert pair in table
    again = Imitation()
    code, out, err = run_study(monkeypatch, capsys, again, *arguments)
    assert code == 0, err
    assert "6 runs of 3 models" in out and "1 to do" in out
    trained = [call for call in again.calls if "max_steps" not in call and "train.py" in call]
    assert len(trained) == 1 and "cat_rope-seed1" in trained[0]
    assert run_study(monkeypatch, capsys, third := Imitation(), *arguments)[0] == 0
    assert third.calls == [], "nothing is left to do"


def test_nothing_is_written_where_all_failed(arguments, tmp_path, monkeypatch, capsys):
    failing = Imitation(fails="-m cat_lm.export")
    code, _, err = run_study(monkeypatch, capsys, failing, *arguments, "--seeds", "0")
    assert code == 2 and "3 of 3 runs failed" in err.splitlines()[-1]
    assert not (tmp_path / "out/summary.json").exists()


def test_a_failed_run_is_tried_once_more(arguments, monkeypatch, capsys):
    class Recovers(Imitation):
        def __call__(self, workers, given, log):
            if any("export" in call and "canon_b-seed0" in call for call in self.calls):
                self.fails = ""
            return super().__call__(workers, given, log)

    imitation = Recovers(fails="export .*canon_b-seed0")
    code, out, err = run_study(monkeypatch, capsys, imitation, *arguments, "--seeds", "0")
    assert code == 0 and "canon_b-seed0: export ended with code 1" in err
    assert "once more: canon_b-seed0" in out
    assert "export" in imitation.calls[-2] and "canon_b-seed0" in imitation.calls[-1]


def test_the_log_of_a_failed_trial_stays_and_is_named(arguments, tmp_path, monkeypatch, capsys):
    failing = Imitation(fails="max_steps.*canon_b|canon_b.*max_steps")
    code, _, err = run_study(monkeypatch, capsys, failing, *arguments)
    log = tmp_path / "out/trial/canon_b.log"
    assert code == 2 and f"see {log}: ValueError: no such thing" in err.splitlines()[-1]
    assert log.is_file()
    assert run_study(monkeypatch, capsys, failing, *arguments)[0] == 2
    assert log.is_file(), "that of the next call, which failed too"
    assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
    assert not log.parent.exists()


def test_a_folder_of_trials_that_is_not_ours_is_kept(arguments, tmp_path, monkeypatch, capsys):
    thesis = tmp_path / "out/trial/thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
    assert code == 2 and f"{thesis.parent}: stands where temporary files go" in err
    assert thesis.read_text() == "years of work"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("settings.json", "[]", "settings.json: holds [], must be an object; remove"),
        ("settings.json", '{"configs": []}', "settings.json: has no format, must be 1"),
        ("settings.json", '{"format": 1, "data_fingerprint": ""}', "holds a study with another "),
        ("runs/pythia-seed0/study.json", "{", "study.json: damaged: is not JSON"),
        (
            "runs/pythia-seed0/study.json",
            "{}",
            "has no format, must be 1: another version of cat_lm wrote it; delete it",
        ),
        ("runs/pythia-seed0/study.json", '{"format": 1}', "damaged: was changed after"),
        ("runs/pythia-seed0/metrics.jsonl", b"\xff\n", "metrics.jsonl: is not UTF-8"),
        ("runs/pythia-seed0/eval/length_sweep.json", '{"rows": [3]}', "json: has no format, must"),
    ],
)
def test_damaged_records_are_one_line(
    arguments, tmp_path, monkeypatch, capsys, name, content, message
):
    arguments = [*arguments, "--seeds", "0"]
    assert run_study(monkeypatch, capsys, Imitation(), *arguments)[0] == 0
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "out" / name).write_bytes(content)
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
    assert (code, err.count("\n")) == (2, 1) and message in err
