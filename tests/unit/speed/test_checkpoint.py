"""eval.speed checkpoint: it leaves its figures, and nothing in its scratch folder."""

from __future__ import annotations

import json
import sys

from tests.distributed.ranks import run_on_ranks


def measured(ranks, folder: str) -> dict:
    from pathlib import Path
    from unittest import mock

    from eval.speed.__main__ import main

    scratch = Path(folder) / "scratch"
    scratch.mkdir()
    tiny = ("--hidden-size", "32", "--layers", "2", "--heads", "2", "--vocab-size", "100")
    command = ["eval.speed", "checkpoint", *tiny, "--repeats", "2", "--scratch", str(scratch)]
    with (
        mock.patch.object(sys, "argv", [*command, "--device", "cpu", "--json", f"{folder}/r.json"]),
        mock.patch("cat_lm.training.distributed.start") as start,
    ):
        start.return_value.__enter__.return_value = ranks
        main()
    assert not list(scratch.iterdir())
    return json.loads(Path(folder, "r.json").read_text())


def test_every_part_leaves_its_figures(tmp_path):
    (record,) = run_on_ranks(measured, 1, str(tmp_path))
    assert record["bytes"] > 12 * record["parameters"] > 0
    for name in ("save", "load", "model", "resume"):
        assert len(record["seconds"][name]["all"]) == 2
