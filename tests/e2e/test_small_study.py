"""One run of the small study through its real commands, and what a second call does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from eval.small_study import __main__ as small_study
from eval.small_study.execute import Workers
from tests.commands import Command


def forked(workers: Workers, arguments: list[str], log: Path) -> int:
    """In the place of `Workers.process`, whose interpreters would take most of the time."""
    log.parent.mkdir(parents=True, exist_ok=True)
    return Command(*arguments, log=log, OMP_WAIT_POLICY="PASSIVE").wait()


def test_one_run_from_start_to_table(long_corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    call = ["small_study", "--data", str(long_corpus), "--out", str(out)]
    call += ["--models", "cat_rope", "--seeds", "3", "--tokens", "16384"]
    call += ["--documents", "4"]
    monkeypatch.setattr(Workers, "process", forked)
    monkeypatch.setattr(sys, "argv", call)

    def said() -> str:
        try:
            small_study.main()
        except SystemExit as end:
            assert not end.code, capsys.readouterr().err
        return capsys.readouterr().out

    first = said()
    assert "1 runs of 1 models" in first
    assert "[1/1] cat_rope-seed3: held-out loss" in first
    summary = json.loads((out / "summary.json").read_text())
    methods = {row["method"] for row in summary["rows"]}
    assert methods == {"none", "pi+temperature"}
    assert {row["length"] for row in summary["rows"]} == {64, 128, 256, 512, 1024}
    assert 0 < summary["cells"][0]["loss"]["mean"] < 6
    assert len(summary["commands"]["cat_rope-seed3"]) == 3
    run = out / "runs/cat_rope-seed3"
    before = (run / "metrics.jsonl").stat().st_mtime_ns
    assert "0 to do" in said()
    assert (run / "metrics.jsonl").stat().st_mtime_ns == before

    # Another question takes the training over: its step is not made again, its lengths are.
    other = tmp_path / "other"
    call += ["--out", str(other), "--question", "filters", "--reuse", str(out)]
    assert "[1/1] cat_rope-seed3: held-out loss" in said()
    again = other / "runs/cat_rope-seed3"
    assert (again / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    weights = [folder / "model/model.safetensors" for folder in (run, again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    summary = json.loads((other / "summary.json").read_text())
    assert {row["method"] for row in summary["rows"]} == {"none", "yarn"}
    assert summary["trained_with"]["reused"] == [str(out)]
