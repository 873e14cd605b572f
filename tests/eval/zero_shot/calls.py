"""What the tests of the zero-shot command share: settings, answers, the command in this process."""

from __future__ import annotations

import json
from pathlib import Path

from eval.zero_shot.settings import Settings
from tests.calls import call_main

CONTEXT = 160
FEW = ("lambada_openai", "piqa", "winogrande", "wikitext")


def settings(rows: Path | None, **changes) -> Settings:
    return Settings(**{"data_dir": rows, "device": "cpu", "bootstrap_iterations": 20} | changes)


def read_result(out: Path) -> dict:
    return json.loads((out / "zero_shot.json").read_text(encoding="utf-8"))


def answers(out: Path) -> dict[str, list]:
    """Return each task's rows' log-likelihoods and greedy flags, from the per-sample logs."""
    found = {}
    for path in sorted((out / "samples").glob("*.jsonl")):
        samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [sample["doc_id"] for sample in samples] == list(range(len(samples)))
        found[path.name.rsplit("-", 1)[0]] = [sample["filtered_resps"] for sample in samples]
    return found


def command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code, stdout and stderr."""
    from eval.zero_shot import __main__ as zero_shot

    for name in ("TQDM_DISABLE", "TOKENIZERS_PARALLELISM"):  # Later tests go without them.
        monkeypatch.setenv(name, "")
    return call_main(zero_shot.main, monkeypatch, capsys, "zero_shot", *arguments)
