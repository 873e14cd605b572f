"""What the zero-shot command keeps, adds to, refuses and computes again."""

from __future__ import annotations

import csv
import functools
import json
import shutil
from typing import ClassVar
from unittest.mock import Mock

import pytest

from cat_lm.core.errors import UserError
from eval.zero_shot import run as zero_shot_run
from eval.zero_shot.run import run
from eval.zero_shot.tasks.catalog import Catalog
from eval.zero_shot.tasks.sources import LocalFolder
from tests.unit.zero_shot.runs import CONTEXT, FEW, settings
from tests.zero_shot_rows import ROWS, write_rows


class TestRestart:
    @pytest.fixture
    def evaluations(self, monkeypatch):
        """Names of the tasks that are really computed."""
        seen, original = [], zero_shot_run.evaluate

        def evaluate(scorer, tasks, **options):
            seen.extend(tasks["tasks"])
            return original(scorer, tasks, **options)

        monkeypatch.setattr(zero_shot_run, "evaluate", evaluate)
        return seen

    def test_finished_tasks_are_kept(self, model, rows, tmp_path, monkeypatch, evaluations):
        counting = zero_shot_run.evaluate

        def stops(scorer, tasks, **options):
            if "winogrande" in tasks["tasks"]:
                raise KeyboardInterrupt
            return counting(scorer, tasks, **options)

        monkeypatch.setattr(zero_shot_run, "evaluate", stops)
        with pytest.raises(KeyboardInterrupt):
            run(model, FEW, tmp_path, settings(rows))
        partial = json.loads((tmp_path / "zero_shot.json").read_text(encoding="utf-8"))
        assert list(partial["tasks"]) == evaluations == ["lambada_openai", "piqa"]
        monkeypatch.setattr(zero_shot_run, "evaluate", counting)
        result = run(model, FEW, tmp_path, settings(rows))
        assert evaluations == list(FEW) == list(result["tasks"])
        assert result["tasks"]["piqa"] == partial["tasks"]["piqa"]
        fresh = run(model, FEW, tmp_path / "fresh", settings(rows))
        for task in FEW:
            assert fresh["tasks"][task]["metrics"] == result["tasks"][task]["metrics"]
            assert fresh["tasks"][task]["stderr"] == result["tasks"][task]["stderr"]

    def test_what_makes_a_task_another_one(self, models, rows, tmp_path, evaluations):
        def computed(folder=models["rope"], rows=rows, **changes) -> bool:
            evaluations.clear()
            (tmp_path / "zero_shot.json").unlink(missing_ok=True)  # else one model's alone
            run(folder, ["piqa"], tmp_path, settings(rows, **changes))
            return bool(evaluations)

        assert computed() and not computed()
        assert not computed(batch_size=2)
        assert computed(limit=3) and computed(max_length=100) and computed(dtype="bfloat16")
        assert computed(models["nope"])
        assert computed(samples=True) and not computed(samples=True)
        changed = [row | {"label": 1 - row["label"]} for row in ROWS["piqa"]]
        other = write_rows(tmp_path / "other", {"piqa": changed})
        assert computed(rows=other)
        assert not computed()

    def test_how_a_model_writes_is_of_tasks_that_it_writes_for(
        self, model, rows, tmp_path, evaluations
    ):
        folder = shutil.copytree(model, tmp_path / "model")
        # Without the list of the export's files, which refuses changed ones.
        (folder / "export.json").unlink()
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
        assert not computed("arc_challenge_chat", asked, repetition_penalty=1.3)
        assert not computed("piqa", rows, repetition_penalty=1.3)

    def test_another_tokenizer_is_another_task(self, model, rows, tmp_path, evaluations):
        """Whatever files it is in; a folder beside it is none."""
        from tokenizers import Tokenizer

        folder = shutil.copytree(model, tmp_path / "model")
        (folder / "tokenizer").mkdir()
        out = tmp_path / "out"
        run(folder, ["piqa"], out, settings(rows))
        changed = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = changed["model"]["vocab"]
        a, b = list(vocabulary)[10:12]
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
        (folder / "tokenizer.json").write_text(json.dumps(changed), encoding="utf-8")
        (folder / "export.json").unlink()  # it is no longer what was exported
        Tokenizer.from_file(str(folder / "tokenizer.json"))
        with pytest.raises(UserError, match=r"has results with the tokenizer [0-9a-f]{12}…, this"):
            run(folder, ["piqa"], out, settings(rows))
        assert len(evaluations) == 1

    def test_definitions_whose_functions_are_no_plain_ones_have_a_name(self, tmp_path):
        """MMLU-Pro's are `functools.partial` objects, without source and with an address."""
        row = {"question": "1+1?", "options": ["2", "3"], "answer": "A", "answer_index": 0}
        texts = {"cot_content": "A: Let's think step by step. 2.", "category": "math", "src": ""}
        rows = {name: [row | texts] * 6 for name in ("mmlu_pro_math", "mmlu_pro_math.validation")}
        folder = write_rows(tmp_path / "rows", rows)

        def key(change=None) -> dict:
            catalog = Catalog(["mmlu_pro_math"])
            task = catalog.load("mmlu_pro_math", LocalFolder(folder))
            made = task.config.process_docs
            task.config.process_docs = functools.partial(made.func, **(change or made.keywords))
            return zero_shot_run._key("mmlu_pro_math", task, folder)

        assert key() == key() != key({"subject": "law"})

    def test_slow_tokenizer_s_own_files_count(self, tmp_path):
        class Slow:
            is_fast = False
            special_tokens_map: ClassVar = {"eos_token": "</s>"}
            vocab_files_names: ClassVar = {
                "vocab_file": "spiece.model",
                "merges_file": "merges.txt",
            }

        hashes = {zero_shot_run._tokenizer_sha256(Slow(), tmp_path)}
        for name in ("spiece.model", "merges.txt", "added_tokens.json", "tokenizer_config.json"):
            (tmp_path / name).write_text(name)
            hashes.add(zero_shot_run._tokenizer_sha256(Slow(), tmp_path))
        assert len(hashes) == 5
        (tmp_path / "model.safetensors").write_text("no part of it")
        assert zero_shot_run._tokenizer_sha256(Slow(), tmp_path) in hashes

    def test_calls_add_to_one_file(self, model, rows, tmp_path):
        both = run(model, ["piqa", "winogrande"], tmp_path, settings(rows))
        stored = json.loads((tmp_path / "zero_shot.json").read_text(encoding="utf-8"))
        result = run(model, ["arc_easy"], tmp_path, settings(rows, batch_size=1))
        assert list(result["tasks"]) == ["piqa", "winogrande", "arc_easy"]
        assert {name: result["tasks"][name] for name in both["tasks"]} == stored["tasks"]
        written = (tmp_path / "zero_shot.json").read_bytes()
        with open(tmp_path / "zero_shot.csv", encoding="utf-8", newline="") as file:
            assert {line["task"] for line in csv.DictReader(file)} == set(result["tasks"])
        # A restart that ends at once does not shorten it.
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(zero_shot_run, "_compute", Mock(side_effect=KeyboardInterrupt))
            run(model, ["piqa", "lambada_openai"], tmp_path, settings(rows))
        tasks = json.loads((tmp_path / "zero_shot.json").read_bytes())["tasks"]
        assert list(tasks) == ["piqa", "winogrande", "arc_easy"]
        written = (tmp_path / "zero_shot.json").read_bytes()
        for changes, message in (
            ({"limit": 2}, "--limit none, this call has 2; use another --out"),
            ({"max_length": 100}, f"--max-length {CONTEXT}, this call has 100; use"),
            ({"dtype": "bfloat16"}, "--dtype float32, this call has bfloat16"),
            ({"bootstrap_iterations": 0}, "--bootstrap-iterations 20, this call has 0"),
        ):
            with pytest.raises(UserError, match=message):
                run(model, ["piqa"], tmp_path, settings(rows, **changes))
        assert (tmp_path / "zero_shot.json").read_bytes() == written

    def test_a_dtype_that_is_none_of_ours_is_one_line(self, model, rows, tmp_path):
        folder = shutil.copytree(model, tmp_path / "model")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for dtype in ("float8_e4m3", "nonsense", 3, [1]):
            text = json.dumps(config | {"dtype": dtype})
            (folder / "config.json").write_text(text, encoding="utf-8")
            with pytest.raises(UserError, match=r"config\.json: dtype is .*should be one of"):
                run(folder, ["piqa"], tmp_path / "out", settings(rows))

    def test_other_weights_are_refused(self, models, rows, tmp_path):
        run(models["rope"], ["piqa"], tmp_path, settings(rows))
        with pytest.raises(UserError, match=r"has results with the model [0-9a-f]{12}…, this call"):
            run(models["nope"], ["arc_easy"], tmp_path, settings(rows))

    def test_sources_of_plugins_count(self, model, rows, tmp_path, monkeypatch, evaluations):
        """A model may have a part of theirs."""

        def computed(code: str | None) -> bool:
            evaluations.clear()
            (tmp_path / "zero_shot.json").unlink(missing_ok=True)
            used = {} if code is None else {"mine": f"my_package 1.0, {code}"}
            monkeypatch.setattr(zero_shot_run.plugins, "describe", lambda: used)
            result = run(model, ["piqa"], tmp_path, settings(rows))
            assert result["tasks"]["piqa"]["key"].get("plugins", {}) == used
            return bool(evaluations)

        assert computed(None) and computed("a") and computed("b")
        assert not computed("a") and not computed(None)
        monkeypatch.setattr(zero_shot_run.plugins, "describe", lambda: {"mine": "b"})
        with pytest.raises(UserError, match=r"the plugins none, this call has \{'m"):
            run(model, ["arc_easy"], tmp_path, settings(rows))

    def test_damaged_files_are_computed_again(self, model, rows, tmp_path, evaluations, capsys):
        before = run(model, ["piqa"], tmp_path, settings(rows))
        (path,) = (tmp_path / "tasks").iterdir()
        whole = path.read_bytes()
        keyless = json.loads(whole) | {"key": {}}
        for damaged in (whole[:50], b"[]", b"\xff", json.dumps(keyless).encode()):
            path.write_bytes(damaged)
            evaluations.clear()
            capsys.readouterr()
            after = run(model, ["piqa"], tmp_path, settings(rows))
            assert f"{path}: damaged, is computed again" in capsys.readouterr().err
            assert evaluations == ["piqa"]
            assert after["tasks"]["piqa"]["metrics"] == before["tasks"]["piqa"]["metrics"]
        # What is no result, perhaps somebody's own file of that name, is not replaced.
        result = tmp_path / "zero_shot.json"
        stored = json.loads(result.read_text(encoding="utf-8"))
        for damaged in (whole[:50], b"[]", b"\xff"):
            result.write_bytes(damaged)
            with pytest.raises(UserError, match=r"zero_shot\.json"):
                run(model, ["piqa"], tmp_path, settings(rows))
            assert result.read_bytes() == damaged
        stored["tasks"]["arc_easy"] = {"metrics": 3}
        result.write_text(json.dumps(stored), encoding="utf-8")
        with pytest.raises(UserError, match=r"zero_shot\.json: .*move it away, or give another"):
            run(model, ["piqa"], tmp_path, settings(rows))

    def test_results_of_another_version_are_refused(self, model, rows, tmp_path):
        run(model, ["piqa"], tmp_path, settings(rows))
        for path in (*(tmp_path / "tasks").iterdir(), tmp_path / "zero_shot.json"):
            written = json.loads(path.read_text(encoding="utf-8"))
            assert written.pop("format") == 1
            path.write_text(json.dumps(written), encoding="utf-8")
            said = f"{path.name}: has no format, must be 1: another version"
            with pytest.raises(UserError, match=said):
                run(model, ["piqa"], tmp_path, settings(rows))
            assert json.loads(path.read_text(encoding="utf-8")) == written
