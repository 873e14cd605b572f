"""The report's command, and what it reads of a run, written and changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cat_lm.core.files import write_json
from eval.common.models import folder_sha256
from eval.zero_shot.tasks.table2 import COLUMNS as TASK_COLUMNS
from tests.calls import call_main

KEY = {"rows_sha256": "a", "definition_sha256": "d"}


def report(monkeypatch, capsys, *arguments: object) -> tuple[int, str]:
    from eval.report.__main__ import main

    code, _, error = call_main(main, monkeypatch, capsys, "eval.report", *arguments)
    return code, error


def zero_shot(run: Path, scale: float = 1.0, leave_out: str = "", limit: int | None = None) -> dict:
    """A result of eval.zero_shot; `scale` multiplies accuracies and divides perplexities."""
    tasks: dict = {}
    for index, (column, (task, metric)) in enumerate(TASK_COLUMNS.items()):
        value = 30.0 / scale if column.endswith("_ppl") else 0.02 * (index + 10) * scale
        new = {"metrics": {}, "stderr": {}, "version": 1, "n": 5, "key": KEY}
        found = tasks.setdefault(task, new)
        found["metrics"][metric] = value
        found["stderr"][metric] = 0.0123
    tasks.pop(leave_out, None)
    model = {"label": "x", "sha256": folder_sha256(run / "model")}
    model |= {"max_length": 1024, "dtype": "float32"}
    settings = {"limit": limit}
    return {"format": 1, "model": model, "settings": settings, "tasks": tasks, "average": {}}


def sweep(*rows: dict) -> dict:
    """Return a result of eval.length_sweep."""
    protocol = {"windows": "moving on by their whole length"}
    return {"format": 1, "text": "x", "protocol": protocol, "rows": rows, "command": "a command"}


def sweep_row(run: Path, label: str, perplexity: float, **changes: object) -> dict:
    """A row of eval.length_sweep."""
    row = {"label": label, "method": "none", "length": 32, "training_length": 32, "tokens": 640}
    row |= {"perplexity": perplexity, "loss": 3.0, "bits_per_byte": 1.5, "standard_error": 0.1}
    row |= {"groups": 4, "group_kind": "documents", "tokens_sha256": "a" * 64}
    row |= {"document_count": 4, "stride": 32, "documents": "concatenated", "dtype": "float32"}
    row |= {"factor": 1.0, "temperature_scope": "logits", "positions": []}
    return row | {"model_sha256": folder_sha256(run / "model"), **changes}


def samples(run: Path) -> dict:
    """A result of eval.samples."""
    sample = {"prompt": "def f", "reference": "(x):", "continuation": "oo(y):"}
    options = {"max_new_tokens": 8, "seed": 0, "temperature": 0.8, "top_p": 0.95}
    return {
        "format": 1,
        **options,
        "model_sha256": folder_sha256(run / "model"),
        "samples": [sample],
    }


def change_weights(run: Path) -> None:
    """As if another step of the run were exported."""
    from safetensors.numpy import load_file, save_file

    path = run / "model/model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    save_file(tensors | {name: tensors[name] + 1}, path, {"format": "pt"})


def validations_end_with(run: Path, *losses: float | None) -> None:
    """Leave the first validation of a run's metrics, and these at its end."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in lines if "val_loss" in record].pop()
    lines.remove(last)
    for loss in losses:
        perplexity = 1e304 if loss is None else 2.0**loss  # as train.py has it of infinity
        values = {"val_loss": loss, "val_perplexity": perplexity, "val_bits_per_byte": loss}
        lines.append(last | values)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text)


def results(page: str) -> dict[str, str]:
    """The rows of the page's first table, by the runs' labels."""
    rows = re.findall(r"<tr><th>.*?</tr>", page.split("<h2>Results")[1].split("</table>")[0])
    return {re.search(r"(\w+)<small>", row)[1]: row for row in rows}


def edit_config(run: Path, pattern: str, replacement: str) -> None:
    config = (run / "config.yaml").read_text()
    changed = re.sub(pattern, replacement, config)
    assert changed != config
    (run / "config.yaml").write_text(changed)


def edit_export(run: Path, **facts: object) -> None:
    path = run / "model/export.json"
    write_json(path, json.loads(path.read_text()) | facts)
