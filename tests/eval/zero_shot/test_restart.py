"""What the zero-shot command keeps, adds to, refuses and computes again."""

from __future__ import annotations

import csv
import functools
import json
import shutil
from typing import ClassVar

import datasets
import pytest

from cat_lm.core.errors import UserError
from eval.zero_shot import run as zero_shot_run
from eval.zero_shot.run import run
from eval.zero_shot.tasks import sources
from eval.zero_shot.tasks.catalog import Catalog
from eval.zero_shot.tasks.sources import LocalFolder
from tests.eval.zero_shot.calls import CONTEXT, FEW, read_result, settings
from tests.zero_shot_rows import ROWS, write_rows


@pytest.fixture
def evaluations(monkeypatch):
    """Names of the tasks that are really computed; one called `stop` interrupts before it."""
    seen, original = [], zero_shot_run.evaluate

    def evaluate(scorer, tasks, **options):
        if seen[:1] == ["stop"] and "winogrande" in tasks["tasks"]:
            raise KeyboardInterrupt
        seen.extend(tasks["tasks"])
        return original(scorer, tasks, **options)

    monkeypatch.setattr(zero_shot_run, "evaluate", evaluate)
    return seen


def test_interrupted_run_equals_a_whole_one(model, rows, tmp_path, evaluations):
    evaluations.append("stop")
    with pytest.raises(KeyboardInterrupt):
        run(model, FEW, tmp_path, settings(rows))
    partial = read_result(tmp_path)
    assert list(partial["tasks"]) == evaluations[1:] == ["lambada_openai", "piqa"]
    evaluations.clear()
    result = run(model, FEW, tmp_path, settings(rows))
    assert evaluations == ["winogrande", "wikitext"] and list(FEW) == list(result["tasks"])
    assert result["tasks"]["piqa"] == partial["tasks"]["piqa"]
    fresh = run(model, FEW, tmp_path / "fresh", settings(rows))
    for task in FEW:
        for kind in ("metrics", "stderr"):
            assert fresh["tasks"][task][kind] == result["tasks"][task][kind]


def test_everything_that_decides_numbers_makes_another_task(
    models, rows, tmp_path, evaluations, monkeypatch
):
    def computed(folder=models["rope"], rows=rows, **changes) -> bool:
        evaluations.clear()
        (tmp_path / "zero_shot.json").unlink(missing_ok=True)  # It holds one model's numbers.
        run(folder, ["piqa"], tmp_path, settings(rows, **changes))
        return bool(evaluations)

    assert computed() and not computed() and not computed(batch_size=2)
    assert computed(limit=3) and computed(max_length=100) and computed(dtype="bfloat16")
    assert computed(models["nope"])
    assert computed(samples=True) and not computed(samples=True)
    swapped = [row | {"label": 1 - row["label"]} for row in ROWS["piqa"]]
    assert computed(rows=write_rows(tmp_path / "other", {"piqa": swapped}))
    # A model may have a part of a plugin.
    monkeypatch.setattr(zero_shot_run.plugins, "describe", lambda: {"mine": "1.0, a"})
    assert computed() and not computed()
    monkeypatch.setattr(zero_shot_run.plugins, "describe", dict)
    assert not computed()


def test_generation_settings_are_of_generated_tasks_alone(model, rows, tmp_path, evaluations):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "export.json").unlink()  # It lists the export's files, and refuses changed ones.
    path = folder / "generation_config.json"
    as_exported = json.loads(path.read_text(encoding="utf-8"))
    asked = write_rows(tmp_path / "rows", {"arc_challenge_chat": ROWS["arc_challenge"][:1]})

    def computed(task: str, data, **values: object) -> bool:
        path.write_text(json.dumps(as_exported | values), encoding="utf-8")
        evaluations.clear()
        run(folder, [task], tmp_path / task, settings(data, max_length=900))
        return bool(evaluations)

    assert computed("arc_challenge_chat", asked) and computed("piqa", rows)
    assert not computed("arc_challenge_chat", asked, transformers_version="5.0")
    assert computed("arc_challenge_chat", asked, repetition_penalty=1.3)
    assert not computed("piqa", rows, repetition_penalty=1.3)


def test_another_tokenizer_is_refused_in_one_file(model, rows, tmp_path):
    folder, out = shutil.copytree(model, tmp_path / "model"), tmp_path / "out"
    run(folder, ["piqa"], out, settings(rows))
    changed = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = changed["model"]["vocab"]
    a, b = list(vocabulary)[10:12]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(changed), encoding="utf-8")
    (folder / "export.json").unlink()
    with pytest.raises(UserError, match="has results with the tokenizer"):
        run(folder, ["piqa"], out, settings(rows))


def test_slow_tokenizer_is_known_by_its_files(tmp_path):
    class Slow:
        is_fast = False
        special_tokens_map: ClassVar = {"eos_token": "</s>"}
        vocab_files_names: ClassVar = {"vocab_file": "spiece.model", "merges_file": "merges.txt"}

    hashes = {zero_shot_run._tokenizer_sha256(Slow(), tmp_path)}
    for name in ("spiece.model", "merges.txt", "added_tokens.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(name)
        hashes.add(zero_shot_run._tokenizer_sha256(Slow(), tmp_path))
    (tmp_path / "model.safetensors").write_text("no part of it")
    assert len(hashes) == 5 and zero_shot_run._tokenizer_sha256(Slow(), tmp_path) in hashes


def test_functions_of_a_definition_are_known_by_their_source(tmp_path, rows, model):
    """Their text has an address in it, which is another one in each process."""

    def key(**keywords) -> dict:
        task = Catalog(["piqa"]).load("piqa", LocalFolder(rows))
        task.config.process_docs = functools.partial(write_rows, **keywords)
        return zero_shot_run._key("piqa", task, model)

    assert key() == key() != key(folder="law")


def test_calls_add_to_one_file_under_one_setting(models, rows, tmp_path):
    model = models["rope"]
    both = run(model, ["piqa", "winogrande"], tmp_path, settings(rows))
    stored = read_result(tmp_path)
    result = run(model, ["arc_easy"], tmp_path, settings(rows, batch_size=1))
    assert list(result["tasks"]) == ["piqa", "winogrande", "arc_easy"]
    assert {name: result["tasks"][name] for name in both["tasks"]} == stored["tasks"]
    with open(tmp_path / "zero_shot.csv", encoding="utf-8", newline="") as file:
        assert {line["task"] for line in csv.DictReader(file)} == set(result["tasks"])
    written = (tmp_path / "zero_shot.json").read_bytes()
    for folder, changes, message in (
        (model, {"limit": 2}, "--limit none, this call has 2; use another --out"),
        (model, {"max_length": 100}, f"--max-length {CONTEXT}, this call has 100; use"),
        (model, {"dtype": "bfloat16"}, "--dtype float32, this call has bfloat16"),
        (model, {"bootstrap_iterations": 0}, "--bootstrap-iterations 20, this call has 0"),
        (models["nope"], {}, r"has results with the model [0-9a-f]{12}…, this call"),
    ):
        with pytest.raises(UserError, match=message):
            run(folder, ["piqa"], tmp_path, settings(rows, **changes))
    assert (tmp_path / "zero_shot.json").read_bytes() == written


def test_damaged_cells_are_computed_again_and_foreign_results_kept(
    model, rows, tmp_path, evaluations, capsys
):
    before = run(model, ["piqa"], tmp_path, settings(rows))
    (path,) = (tmp_path / "tasks").iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:50], json.dumps(json.loads(whole) | {"key": {}}).encode()):
        path.write_bytes(damaged)
        evaluations.clear()
        after = run(model, ["piqa"], tmp_path, settings(rows))
        assert f"{path}: damaged, is computed again" in capsys.readouterr().err
        assert evaluations == ["piqa"]
        assert after["tasks"]["piqa"]["metrics"] == before["tasks"]["piqa"]["metrics"]
    # A file that is no result, perhaps somebody's own of that name, is not replaced.
    result = tmp_path / "zero_shot.json"
    stored = json.loads(result.read_text(encoding="utf-8"))
    stored["tasks"]["arc_easy"] = {"metrics": 3}
    for damaged in (whole[:50], json.dumps(stored).encode(), b'{"format": 2}'):
        result.write_bytes(damaged)
        with pytest.raises(UserError, match=r"zero_shot\.json"):
            run(model, ["piqa"], tmp_path, settings(rows))
        assert result.read_bytes() == damaged


def test_revisions_of_the_hub_are_recorded(model, tmp_path, monkeypatch):
    asked = []

    def load_dataset(path, name=None, revision=None):
        asked.append((path, revision))
        rows = datasets.Dataset.from_list(ROWS["piqa"])
        return dict.fromkeys(("train", "validation", "test"), rows)

    monkeypatch.setattr(sources, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "newest_commit", lambda dataset, branch: f"{branch}-1")
    result = run(model, ["piqa"], tmp_path, settings(None))
    expected = {"dataset": "baber/piqa", "config": None, "split": "validation"}
    assert result["tasks"]["piqa"]["data"] == expected | {"revision": "main-1"}
    assert asked == [("baber/piqa", "main-1")]
    # The same rows from a file are the same task.
    local = run(model, ["piqa"], tmp_path, settings(write_rows(tmp_path / "rows")))
    assert local["tasks"]["piqa"]["key"] == result["tasks"]["piqa"]["key"]
    assert len(list((tmp_path / "tasks").iterdir())) == 1
