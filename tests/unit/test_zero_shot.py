"""The zero-shot command on small models: numbers, batches, ranks, restarts, bad input."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import datasets
import lm_eval.tasks
import pytest
import torch
from safetensors.torch import load_file, save_file

from cat_lm.errors import UserError
from cat_lm.export import export_model
from cat_lm.pretrained import load_model, load_tokenizer
from eval import zero_shot_run
from eval.tasks import sources, table2
from eval.zero_shot_results import table
from eval.zero_shot_run import Settings, run
from tests.finished_runs import finished_run, tiny_model
from tests.zero_shot_rows import ROWS, write_rows

REPOSITORY = Path(__file__).parents[2]
CONTEXT = 160
SPLITS = ("train", "validation", "test")
FEW = ("lambada_openai", "piqa", "winogrande", "wikitext")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_corpus) -> dict[str, Path]:
    """CAT with and without rotary positions, exported with the tokenizer `bytes`."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = load_tokenizer(tiny_corpus / "tokenizer")

    def export(name, **changes):
        model = tiny_model(257, max_position_embeddings=CONTEXT, **changes)
        return export_model(model, tokenizer, folder / name)

    return {"rope": export("rope"), "nope": export("nope", position_embedding="none")}


@pytest.fixture
def model(models) -> Path:
    return models["rope"]


def settings(rows: Path | None, **changes) -> Settings:
    return Settings(**{"data_dir": rows, "device": "cpu", "bootstrap_iterations": 20} | changes)


def answers(out: Path) -> dict[str, list]:
    """Task -> every row's log-likelihoods and greedy flags, from the per-sample logs."""
    found = {}
    for path in sorted((out / "samples").glob("*.jsonl")):
        samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [sample["doc_id"] for sample in samples] == list(range(len(samples)))
        found[path.name.rsplit("-", 1)[0]] = [sample["filtered_resps"] for sample in samples]
    return found


def flat(value) -> list[float]:
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


def command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Runs the command in this process; its exit code, stdout and stderr."""
    from eval import zero_shot

    monkeypatch.setattr(sys, "argv", ["zero_shot", *map(str, arguments)])
    code = 0
    try:
        zero_shot.main()
    except SystemExit as exit_:
        code = exit_.code or 0
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.fixture(scope="module", params=["rope", "nope"])
def evaluated(request, models, rows, tmp_path_factory):
    """The table's tasks on a model; with the model and its tokenizer."""
    folder = models[request.param]
    result = run(folder, ["table2"], tmp_path_factory.mktemp("out"), settings(rows))
    return result, load_model(folder, device="cpu"), load_tokenizer(folder)


class TestNumbers:
    """Against a few lines that know nothing of the harness (R29)."""

    @staticmethod
    def score(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            log_probs = model(ids).logits[0].double().log_softmax(-1)
        rows = range(len(context) - 1, len(context) + len(continuation) - 1)
        greedy = [int(log_probs[row].argmax()) for row in rows]
        total = sum(log_probs[r, t].item() for r, t in zip(rows, continuation, strict=True))
        return total, greedy == continuation

    def test_accuracy(self, evaluated):
        result, model, tokenizer = evaluated
        right = []
        for row in ROWS["piqa"]:
            context = tokenizer.encode(f"Question: {row['goal']}\nAnswer:")
            choices = [tokenizer.encode(f" {row[key]}") for key in ("sol1", "sol2")]
            scores = [self.score(model, context, choice)[0] for choice in choices]
            right.append(scores.index(max(scores)) == row["label"])
        values = result["tasks"]["piqa"]
        assert values["metrics"]["acc"] == sum(right) / len(right)
        mean = sum(right) / len(right)
        error = math.sqrt(mean * (1 - mean) / (len(right) - 1))
        assert values["stderr"]["acc"] == pytest.approx(error)

    def test_normalised_accuracy(self, evaluated):
        result, model, tokenizer = evaluated
        right = []
        for row in ROWS["arc_challenge"]:
            context = tokenizer.encode(f"Question: {row['question']}\nAnswer:")
            texts = row["choices"]["text"]
            scores = [
                self.score(model, context, tokenizer.encode(f" {text}"))[0] / len(text)
                for text in texts
            ]
            label = row["choices"]["label"][scores.index(max(scores))]
            right.append(label == row["answerKey"])
        assert result["tasks"]["arc_challenge"]["metrics"]["acc_norm"] == sum(right) / len(right)

    def test_last_word(self, evaluated):
        result, model, tokenizer = evaluated
        found = []
        for row in ROWS["lambada_openai"]:
            context, word = row["text"].rsplit(" ", 1)
            ids = tokenizer.encode(context), tokenizer.encode(f" {word}")
            found.append(self.score(model, *ids))
        metrics = result["tasks"]["lambada_openai"]["metrics"]
        perplexity = math.exp(-sum(score for score, _ in found) / len(found))
        assert metrics["perplexity"] == pytest.approx(perplexity, rel=1e-4)
        assert metrics["acc"] == sum(greedy for _, greedy in found) / len(found)

    def test_word_perplexity_of_documents_longer_than_the_context(
        self, models, tmp_path, monkeypatch
    ):
        text = " ".join(ROWS["wikitext"][1]["page"] for _ in range(8))
        rows = write_rows(tmp_path / "rows", {"wikitext": [{"page": text}, {"page": "short one"}]})
        folder = models["nope"]
        result = run(folder, ["wikitext"], tmp_path, settings(rows, batch_size=3))
        model, tokenizer = load_model(folder, device="cpu"), load_tokenizer(folder)
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

        total, words = 0.0, 0
        for page in (text, "short one"):
            ids = tokenizer.encode(wikitext_detokenizer({"page": page}))
            stream = [tokenizer.eos_token_id, *ids]
            for begin in range(1, len(stream), CONTEXT):
                part = stream[begin : begin + CONTEXT]
                # The last window is filled up with what comes before it.
                context = stream[max(0, begin + len(part) - CONTEXT - 1) : begin]
                total += self.score(model, context, part)[0]
            words += len(re.split(r"\s+", page))
        assert len(stream) < CONTEXT < len(tokenizer.encode(text)) / 3
        expected = math.exp(-total / words)
        assert result["tasks"]["wikitext"]["metrics"]["word_perplexity"] == pytest.approx(
            expected, rel=1e-4
        )

    def test_result_file(self, evaluated, rows):
        result, model, _ = evaluated
        assert list(result["tasks"]) == list(table2.TASKS)
        for name, values in result["tasks"].items():
            assert values["n"] == values["rows"] == len(ROWS[name])
            assert values["version"] and values["tokens_per_second"] > 0
            assert list(values["data"]["files"]) == [f"{name}.jsonl"]
        about = result["model"]
        assert (about["max_length"], about["dtype"]) == (CONTEXT, "float32")
        assert about["parameters"] == model.num_parameters()
        assert about["prefix_token"]["id"] == 256
        assert {"torch", "transformers", "lm_eval", "datasets"} <= set(result["versions"])
        assert result["commit"] and result["command"] and result["date"]
        seven = [table2.columns(result["tasks"])[column] for column in table2.AVERAGED]
        assert result["average"]["value"] == pytest.approx(sum(seven) / 7)
        text = table(result)
        assert text.count("\n") == 17 and "average" in text.splitlines()[-1]


class TestBatches:
    def test_answers_do_not_depend_on_the_batch(self, models, rows, tmp_path):
        """R28 on one rank; tests/distributed has two."""
        for name, folder in models.items():
            for size in (1, 8):
                out = tmp_path / f"{name}-{size}"
                run(folder, FEW, out, settings(rows, batch_size=size, samples=True))
            one, eight = answers(tmp_path / f"{name}-1"), answers(tmp_path / f"{name}-8")
            assert set(one) == set(FEW)
            for task in FEW:
                assert flat(one[task]) == pytest.approx(flat(eight[task]), rel=1e-5, abs=1e-4)
            accuracies = [
                {
                    (task, metric): value
                    for task, values in json.loads(
                        (tmp_path / f"{name}-{size}/zero_shot.json").read_text(encoding="utf-8")
                    )["tasks"].items()
                    for metric, value in values["metrics"].items()
                    if metric.startswith("acc")
                }
                for size in (1, 8)
            ]
            assert accuracies[0] == accuracies[1] and len(accuracies[0]) == 4

    def test_generated_answers_do_not_depend_on_the_batch(self, model, tmp_path):
        """Any other task of the harness; generation pads on the left."""
        rows = [
            row | {"question": row["question"] * (1 + i)}
            for i, row in enumerate(ROWS["arc_challenge"])
        ]
        folder = write_rows(tmp_path / "rows", {"arc_challenge_chat": rows})
        texts = []
        for size in (1, 3):
            changes = {"batch_size": size, "samples": True, "max_length": 900, "limit": 3}
            out = tmp_path / str(size)
            result = run(model, ["arc_challenge_chat"], out, settings(folder, **changes))
            texts.append(answers(out)["arc_challenge_chat"])
            metrics = result["tasks"]["arc_challenge_chat"]["metrics"]
            assert set(metrics) == {"exact_match,remove_whitespace"}
        assert texts[0] == texts[1] and len(texts[0]) == 3

    def test_context_is_cut_from_the_left_and_counted(self, model, rows, tmp_path):
        result = run(model, ["piqa"], tmp_path / "short", settings(rows, max_length=24))
        values = result["tasks"]["piqa"]
        assert (values["truncated"], result["model"]["max_length"]) == (10, 24)
        whole = run(model, ["piqa"], tmp_path / "whole", settings(rows))
        assert whole["tasks"]["piqa"]["truncated"] == 0

    def test_limit(self, model, rows, tmp_path):
        result = run(model, ["piqa"], tmp_path, settings(rows, limit=2))
        values = result["tasks"]["piqa"]
        assert (values["n"], values["rows"], result["settings"]["limit"]) == (2, 5, 2)
        assert result["average"]["value"] is None


class TestHub:
    def test_revisions_are_recorded(self, model, tmp_path, monkeypatch):
        asked = []

        def load_dataset(path, name=None, revision=None):
            asked.append((path, revision))
            return {split: datasets.Dataset.from_list(ROWS["piqa"]) for split in SPLITS}

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
        Tokenizer.from_file(str(folder / "tokenizer.json"))
        with pytest.raises(UserError, match=r"has results with the tokenizer [0-9a-f]{12}…, this"):
            run(folder, ["piqa"], out, settings(rows))
        assert len(evaluations) == 1

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

    def test_other_weights_are_refused(self, models, rows, tmp_path):
        run(models["rope"], ["piqa"], tmp_path, settings(rows))
        with pytest.raises(UserError, match=r"has results with the model [0-9a-f]{12}…, this call"):
            run(models["nope"], ["arc_easy"], tmp_path, settings(rows))

    def test_damaged_files_are_computed_again(self, model, rows, tmp_path, evaluations, capsys):
        before = run(model, ["piqa"], tmp_path, settings(rows))
        (path,) = (tmp_path / "tasks").iterdir()
        whole = path.read_bytes()
        keyless = json.loads(whole) | {"key": {}}
        for damaged in (whole[:50], b"{}", b"[]", b"\xff", json.dumps(keyless).encode()):
            path.write_bytes(damaged)
            (tmp_path / "zero_shot.json").write_bytes(damaged)
            evaluations.clear()
            capsys.readouterr()
            after = run(model, ["piqa"], tmp_path, settings(rows))
            assert f"piqa: {path}: damaged, is computed again" in capsys.readouterr().err
            assert evaluations == ["piqa"]
            assert after["tasks"]["piqa"]["metrics"] == before["tasks"]["piqa"]["metrics"]
        stored = json.loads((tmp_path / "zero_shot.json").read_text(encoding="utf-8"))
        stored["tasks"]["arc_easy"] = {"metrics": 3}
        (tmp_path / "zero_shot.json").write_text(json.dumps(stored), encoding="utf-8")
        assert list(run(model, ["piqa"], tmp_path, settings(rows))["tasks"]) == ["piqa"]
        assert "task arc_easy: damaged, is left out" in capsys.readouterr().err


class TestCommand:
    def test_impossible_tasks_do_not_end_the_others(
        self, model, rows, tmp_path, monkeypatch, capsys
    ):
        given = [model, "--out", tmp_path / "out", "--data-dir", rows, "--max-length", 12]
        # Blanks in the list are none of the names.
        tasks = "hellaswag, winogrande,wikitext ,arc_challenge_chat"
        row = write_rows(tmp_path / "more", {"arc_challenge_chat": ROWS["arc_challenge"]})
        given[4] = shutil.copytree(rows, row, dirs_exist_ok=True)
        code, out, err = command(monkeypatch, capsys, *given, "--tasks", tasks)
        assert (code, out) == (2, "")
        last = err.splitlines()[-1]
        assert last.startswith("error: 3 of 4 tasks failed: task hellaswag: a continuation of ")
        assert "task arc_challenge_chat: its answers leave no room in a context of 12" in last
        assert last.endswith(f"the 1 others are in {tmp_path / 'out'}")
        result = json.loads((tmp_path / "out/zero_shot.json").read_text(encoding="utf-8"))
        assert list(result["tasks"]) == ["wikitext"]

    def test_prefetch_on_several_ranks_is_refused(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr("eval.tasks.prefetch.prefetch", None)
        code, _, err = command(monkeypatch, capsys, "--prefetch", tmp_path, "--tasks", "piqa")
        assert code == 2 and err.startswith("error: --prefetch: one process writes")

    def test_batch_of_a_cpu_counts_what_a_container_may_take(self, model, monkeypatch):
        from eval import zero_shot_model

        sizes = []
        for rows in (0, 3, 1000):
            free = 4 * 3 * 4 * CONTEXT * 257 * rows
            monkeypatch.setattr(zero_shot_model, "free_bytes", lambda device, free=free: free)
            options = {"dtype": "float32", "device": "cpu", "batch_size": None, "max_length": None}
            sizes.append(zero_shot_model.Scorer(model, **options).batch_size_per_gpu)
        assert sizes == [1, 3, 8]

    def test_run_folder(self, tmp_path, tiny_corpus, rows, monkeypatch, capsys):
        model = tiny_model(257, max_position_embeddings=CONTEXT)
        folder = finished_run(tmp_path / "run", tiny_corpus, model)
        arguments = (folder, "--tasks", "winogrande", "--data-dir", rows, "--limit", 2)
        code, out, err = command(monkeypatch, capsys, *arguments)
        assert code == 0, err
        result = json.loads((folder / "zero_shot/zero_shot.json").read_text(encoding="utf-8"))
        assert result["model"]["label"] == "run"
        assert out == table(result) + "\n"
        assert "winogrande: acc" in err and "bootstrapping" not in out + err
        with open(folder / "zero_shot/zero_shot.csv", encoding="utf-8", newline="") as file:
            (line,) = csv.DictReader(file)
        assert float(line["value"]) == result["tasks"]["winogrande"]["metrics"]["acc"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--limit", "0"], "--limit 0: must be at least 1"),
            (["--batch-size", "0"], "--batch-size 0: must be auto or a number"),
            (["--batch-size", "many"], "--batch-size many: must be auto or a number"),
            (["--max-length", "1"], "--max-length 1: must be at least 2"),
            (["--tasks", ","], "--tasks: names no task"),
            (["--tasks", "helaswag"], "--tasks helaswag: unknown; did you mean"),
            (["--data-dir", "nowhere"], "--data-dir nowhere: no such folder"),
            (["--tasks", "wikitext", "--max-length", "1", "--limit", "0"], "--limit 0"),
            (["--device", "cuda:77"], "--device cuda:77: cannot be used"),
            (["--max-length", "8"], "task hellaswag: a continuation of"),
        ],
    )
    def test_bad_arguments(self, model, rows, tmp_path, monkeypatch, capsys, arguments, message):
        given = [model, "--out", tmp_path / "out", "--data-dir", rows, "--tasks", "hellaswag"]
        code, out, err = command(monkeypatch, capsys, *given, *arguments)
        assert (code, out) == (2, "")
        # Bars of the harness, which the command silences before anything has imported tqdm.
        lines = [line for line in err.splitlines() if "it/s]" not in line and line]
        assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
        assert not (tmp_path / "out/zero_shot.json").exists()

    def test_missing_data_names_the_file(self, model, tmp_path, monkeypatch, capsys):
        folder = write_rows(tmp_path / "rows", {"piqa": ROWS["piqa"]})
        given = [model, "--out", tmp_path / "out", "--data-dir", folder]
        assert command(monkeypatch, capsys, *given, "--tasks", "piqa")[0] == 0
        before = (tmp_path / "out/zero_shot.json").read_bytes()
        code, _, err = command(monkeypatch, capsys, *given, "--tasks", "piqa,arc_easy")
        assert code == 2 and f"{folder / 'arc_easy.jsonl'}: missing" in err
        assert (tmp_path / "out/zero_shot.json").read_bytes() == before

    def test_bad_models(self, model, rows, tmp_path, monkeypatch, capsys):
        def error(folder) -> str:
            given = ("--tasks", "piqa", "--data-dir", rows, "--out", tmp_path / "out")
            code, out, err = command(monkeypatch, capsys, folder, *given)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert not (tmp_path / "out").exists()
            return err

        assert "no such folder" in error(tmp_path / "absent")
        assert "not a model folder" in error(rows)
        copy = shutil.copytree(model, tmp_path / "copy")
        for file in copy.glob("token*"):
            file.unlink()
        assert "tokenizer" in (message := error(copy)) and "missing" in message
        # Never a number from random weights (R2).
        copy = shutil.copytree(model, tmp_path / "partial")
        weights = load_file(copy / "model.safetensors")
        weights.pop(next(name for name in weights if name.endswith("filter")))
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
        assert "weights and config.json do not fit: missing keys" in error(copy)

    def test_out_may_be_left_out_only_for_runs(self, model, rows, monkeypatch, capsys):
        code, _, err = command(monkeypatch, capsys, model, "--data-dir", rows)
        assert code == 2 and err.startswith("error: --out: missing")


class TestOtherProcesses:
    def test_no_network_is_used(self, model, rows, tmp_path):
        """R27: with --data-dir every try to open a connection would fail the command."""
        code = f"""
import runpy, socket, sys
class Blocked(socket.socket):
    def connect(self, *_): raise AssertionError("a connection was opened")
    connect_ex = connect
socket.socket = Blocked
socket.getaddrinfo = Blocked.connect
sys.argv = ["zero_shot", {str(model)!r}, "--data-dir", {str(rows)!r}, "--out", "out"]
runpy.run_module("eval.zero_shot", run_name="__main__", alter_sys=True)
"""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {"PYTHONPATH": str(REPOSITORY), "HF_HOME": str(tmp_path / "empty")}
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        assert len(result.stderr.splitlines()) == len(table2.TASKS), result.stderr
        assert result.stdout.startswith("task ") and "of 7 accuracies" in result.stdout
        tasks = json.loads((tmp_path / "out/zero_shot.json").read_text(encoding="utf-8"))["tasks"]
        assert list(tasks) == list(table2.TASKS)

    def test_the_harness_own_command_gives_the_same_numbers(self, model, rows, tmp_path):
        """`lm_eval --model hf --model_args pretrained=DIR`, cat_lm being installed."""
        hooks = importlib.metadata.entry_points(group="torch.backends")
        if "cat_lm" not in hooks.names:
            pytest.skip("cat_lm is not installed here")
        stock = Path(lm_eval.tasks.__file__).parent
        folders = {"piqa": ("piqa", "validation"), "lambada_openai": ("lambada", "test")}
        for name, (folder, split) in folders.items():
            definition = {
                "include": str(stock / folder / f"{name}.yaml"),
                "task": f"local_{name}",
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {split: str(rows / f"{name}.jsonl")}},
                "training_split": None,
            }
            (tmp_path / f"{name}.yaml").write_text(json.dumps(definition), encoding="utf-8")
        program = Path(sys.executable).with_name("lm_eval")
        arguments = ["--model", "hf", "--model_args", f"pretrained={model}", "--device", "cpu"]
        arguments += ["--tasks", "local_piqa,local_lambada_openai", "--include_path", tmp_path]
        subprocess.run(
            [program, *arguments, "--output_path", tmp_path / "harness.json"],
            check=True,
            cwd=tmp_path,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
            timeout=300,
        )
        (path,) = tmp_path.rglob("harness*.json")
        theirs = json.loads(path.read_text(encoding="utf-8"))["results"]
        ours = run(model, list(folders), tmp_path / "out", settings(rows))["tasks"]
        for name in folders:
            for metric, value in ours[name]["metrics"].items():
                expected = theirs[f"local_{name}"][f"{metric},none"]
                assert value == pytest.approx(expected, rel=1e-6), (name, metric)
