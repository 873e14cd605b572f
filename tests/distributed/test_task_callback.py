"""Tasks of lm-evaluation-harness during training: the command's numbers, and training's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cat_lm.export import export_checkpoint
from eval.common.result_files import read_metrics
from eval.zero_shot.run import Settings, run
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import error_of, train
from tests.runs import records, run_values
from tests.zero_shot_rows import write_rows

TASKS = ["piqa", "winogrande", "lambada_openai"]


def with_tasks(ranks, data: str, folder: str, rows: str, how: dict[str, Any]) -> None:
    for name, tasks in (("plain", []), ("tasks", TASKS)):
        values = run_values(data, Path(folder) / name, max_steps=4, **how)
        values["model"]["tie_word_embeddings"] = bool(how)
        values["data"]["context_length"] = 64
        values["checkpoint"] |= {"every_steps": 2, "keep_last": 9}
        if tasks:
            values["validation"] |= {"tasks": tasks, "tasks_every_steps": 2, "tasks_dir": rows}
        train(ranks, values)


def numbers(run_folder: Path) -> list[tuple]:
    names = ("step", "loss", "grad_norm", "val_loss")
    found = read_metrics(run_folder / "metrics.jsonl")
    return [tuple(record.get(name) for name in names) for record in found]


@pytest.mark.parametrize(
    ("world_size", "how"), [(1, {}), (2, {"precision": "bf16", "zero_stage": 2})]
)
def test_scores_are_those_of_the_command_and_training_goes_on_as_before(
    world_size, how, tiny_corpus, tmp_path
):
    """In bf16 the command's batches, which are others than those of two ranks, round otherwise."""
    rows = write_rows(tmp_path / "rows")
    run_on_ranks(with_tasks, world_size, str(tiny_corpus), str(tmp_path), str(rows), how)
    assert numbers(tmp_path / "tasks") == numbers(tmp_path / "plain")
    found = {r["step"]: r for r in records(tmp_path / "tasks") if "tasks/piqa/acc" in r}
    assert sorted(found) == [2, 4]
    dtype = "bfloat16" if how else "float32"
    settings = Settings(data_dir=rows, device="cpu", bootstrap_iterations=0, dtype=dtype)
    rounding = 0.05 if how else 1e-4
    for step, record in found.items():
        saved = tmp_path / f"tasks/checkpoints/step-{step:08d}"
        model = export_checkpoint(saved, tmp_path / f"model-{step}")
        result = run(model, TASKS, tmp_path / f"out-{step}", settings)
        for name in TASKS:
            for metric, value in result["tasks"][name]["metrics"].items():
                assert record[f"tasks/{name}/{metric}"] == pytest.approx(value, rel=rounding), (
                    metric
                )
    log = (tmp_path / "tasks/train.log").read_text()
    assert "step 2: task piqa: acc " in log and "(5 of 5 rows scored; " in log


def refused(ranks, data: str, folder: str) -> list[str]:
    found = []
    for number, (task, rows) in enumerate((("piqqa", folder), ("piqa", folder + "/gone"))):
        values = run_values(data, Path(folder) / str(number))
        values["validation"] |= {"tasks": [task], "tasks_dir": rows}
        found.append(error_of(ranks, values))
    return found


def test_unknown_tasks_and_missing_rows_are_refused(tiny_corpus, tmp_path):
    ((task, rows),) = run_on_ranks(refused, 1, str(tiny_corpus), str(tmp_path))
    assert "piqqa" in task and "\n" not in task
    assert f"{tmp_path}/gone" in rows and "\n" not in rows
