"""One run of the small study through its real commands, and what a second call does."""

from __future__ import annotations

import json

from tests.commands import python


def test_one_run_from_start_to_table(long_corpus, tmp_path):
    out = tmp_path / "out"
    call = ["-m", "eval.small_study", "--data", long_corpus, "--out", out]
    call += ["--models", "cat_rope", "--seeds", "3", "--tokens", "16384"]
    call += ["--documents", "4"]
    first = python(*call)
    assert first.returncode == 0, first.stderr
    assert "1 runs of 1 models" in first.stdout
    assert "[1/1] cat_rope-seed3: held-out loss" in first.stdout
    summary = json.loads((out / "summary.json").read_text())
    methods = {row["method"] for row in summary["rows"]}
    assert methods == {"none", "pi+temperature"}
    assert {row["length"] for row in summary["rows"]} == {64, 128, 256, 512, 1024}
    assert 0 < summary["cells"][0]["loss"]["mean"] < 6
    assert len(summary["commands"]["cat_rope-seed3"]) == 3
    run = out / "runs/cat_rope-seed3"
    before = (run / "metrics.jsonl").stat().st_mtime_ns
    second = python(*call)
    assert second.returncode == 0, second.stderr
    assert "0 to do" in second.stdout
    assert (run / "metrics.jsonl").stat().st_mtime_ns == before
