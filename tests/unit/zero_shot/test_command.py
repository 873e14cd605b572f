"""The zero-shot command line: runs, bad input, batches that fit."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from cat_lm.export import export_model
from cat_lm.pretrained.loading import load_tokenizer
from eval.zero_shot.results import table
from tests.finished_runs import finished_run, tiny_model
from tests.unit.zero_shot.runs import CONTEXT, command
from tests.zero_shot_rows import ROWS, write_rows


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

    def test_a_diverged_model_gets_no_accuracy(
        self, tmp_path, tiny_corpus, rows, monkeypatch, capsys
    ):
        """Of choices that are all NaN the harness takes the first, which is often right."""
        model = tiny_model(257, max_position_embeddings=CONTEXT)
        with torch.no_grad():
            model.base_model.final_layer_norm.weight.fill_(3e38)  # finite, and its logits are not
        folder = export_model(model, load_tokenizer(tiny_corpus / "tokenizer"), tmp_path / "model")
        chats = {"arc_challenge_chat": ROWS["arc_challenge"]}
        data = write_rows(tmp_path / "rows", {**ROWS, **chats})
        tasks = "piqa,wikitext,arc_challenge_chat"
        given = (folder, "--out", tmp_path / "out", "--data-dir", data, "--max-length", 900)
        code, out, err = command(monkeypatch, capsys, *given, "--tasks", tasks)
        assert (code, out) == (2, "")
        last = err.splitlines()[-1]
        assert "3 of 3 tasks failed: task piqa: 10 of 10 log-likelihoods are not finite: " in last
        assert "--dtype" in last and "task wikitext: 5 of 5 log-likelihoods" in last
        assert "task arc_challenge_chat: the model's scores of the next token are not" in last
        assert not list((tmp_path / "out").rglob("*piqa*"))

    def test_prefetch_on_several_ranks_is_refused(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr("eval.zero_shot.tasks.prefetch.prefetch", None)
        code, _, err = command(monkeypatch, capsys, "--prefetch", tmp_path, "--tasks", "piqa")
        assert code == 2 and err.startswith("error: --prefetch: one process writes")

    def test_batch_of_a_cpu_counts_what_a_container_may_take(self, model, monkeypatch):
        from eval.zero_shot import harness_model as zero_shot_model

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
            (["--limit", "0"], "--limit: '0' must be from 1 to"),
            (["--limit", "1.5"], "--limit: '1.5' must be a whole number"),
            (["--batch-size", "0"], "--batch-size: '0' must be from 1 to"),
            (["--batch-size", "many"], "--batch-size: 'many' must be a whole number"),
            (["--max-length", "1"], "--max-length: '1' must be from 2 to"),
            (["--max-length", "1" + 30 * "0"], "must be from 2 to"),
            (["--bootstrap-iterations", "-1"], "--bootstrap-iterations: '-1' must be from 0 to"),
            (["--bootstrap-iterations", "10000000"], "must be from 0 to 100,000"),
            (["--data-dir", " "], "--data-dir: ' ' is no path"),
            (["--out", ""], "--out: '' is no path"),
            (["--out", "/proc/x"], "--out /proc/x: /proc may not be written to"),
            (["--prefetch", "/proc/x"], "--prefetch /proc/x: /proc may not be written to"),
            (["--device", "meta"], "--device meta: cannot be used"),
            (["--nonsense"], "unrecognized arguments: --nonsense; see python -m eval.zero_shot"),
            (["--tasks", ","], "--tasks: names no task"),
            (["--tasks", "helaswag"], "--tasks helaswag: unknown; did you mean"),
            (["--data-dir", "nowhere"], "--data-dir nowhere: no such folder"),
            (["--tasks", "wikitext", "--max-length", "1", "--limit", "0"], "--max-length: "),
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
        (copy / "export.json").unlink()
        assert "weights and config.json do not fit: missing keys" in error(copy)

    def test_out_may_be_left_out_only_for_runs(self, model, rows, monkeypatch, capsys):
        code, _, err = command(monkeypatch, capsys, model, "--data-dir", rows)
        assert code == 2 and err.startswith("error: --out: missing")
