"""The zero-shot command line: runs, tasks that cannot be done, bad input, batches that fit."""

from __future__ import annotations

import csv
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from cat_lm.export import export_model
from cat_lm.pretrained.loading import load_model, load_tokenizer
from eval.zero_shot.results import table
from tests.eval.zero_shot.calls import CONTEXT, command, read_result
from tests.finished_runs import finished_run, tiny_model
from tests.zero_shot_rows import ROWS, write_rows


def test_impossible_tasks_do_not_end_the_others(model, tmp_path, monkeypatch, capsys):
    rows = write_rows(tmp_path / "rows", {**ROWS, "arc_challenge_chat": ROWS["arc_challenge"]})
    given = [model, "--out", tmp_path / "out", "--data-dir", rows, "--max-length", 12]
    tasks = "hellaswag, winogrande,wikitext ,arc_challenge_chat"
    code, out, err = command(monkeypatch, capsys, *given, "--tasks", tasks)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("error: 3 of 4 tasks failed: task hellaswag: a continuation of ")
    assert "task arc_challenge_chat: its answers leave no room in a context of 12" in last
    assert last.endswith(f"the 1 others are in {tmp_path / 'out'}")
    assert list(read_result(tmp_path / "out")["tasks"]) == ["wikitext"]


def test_diverged_model_gets_no_accuracy(tmp_path, tiny_corpus, monkeypatch, capsys):
    """Of choices that are all NaN the harness takes the first, which is often right."""
    model = tiny_model(257, max_position_embeddings=CONTEXT)
    with torch.no_grad():
        model.base_model.final_layer_norm.weight.fill_(3e38)  # finite, and its logits are not
    folder = export_model(model, load_tokenizer(tiny_corpus / "tokenizer"), tmp_path / "model")
    data = write_rows(tmp_path / "rows", {**ROWS, "arc_challenge_chat": ROWS["arc_challenge"]})
    given = (folder, "--out", tmp_path / "out", "--data-dir", data, "--max-length", 900)
    tasks = "piqa,wikitext,arc_challenge_chat"
    code, out, err = command(monkeypatch, capsys, *given, "--tasks", tasks)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert "3 of 3 tasks failed: task piqa: 10 of 10 log-likelihoods are not finite: " in last
    assert "--dtype" in last and "task wikitext: 5 of 5 log-likelihoods" in last
    assert "task arc_challenge_chat: the model's scores of the next token are not" in last
    assert not list((tmp_path / "out").rglob("*piqa*"))


def test_batch_on_a_cpu_fits_into_free_memory(model, monkeypatch):
    from eval.zero_shot import harness_model

    parts, sizes = (load_model(model, device="cpu"), load_tokenizer(model)), []
    for rows in (0, 3, 1000):
        free = 4 * 3 * 4 * CONTEXT * 257 * rows
        monkeypatch.setattr(harness_model, "free_bytes", lambda device, free=free: free)
        scorer = harness_model.Scorer(*parts, batch_size=None, max_length=None)
        sizes.append(scorer.batch_size_per_gpu)
    assert sizes == [1, 3, 8]


def test_run_folder_gets_the_results(tmp_path, tiny_corpus, rows, monkeypatch, capsys):
    model = tiny_model(257, max_position_embeddings=CONTEXT)
    folder = finished_run(tmp_path / "run", tiny_corpus, model)
    arguments = (folder, "--tasks", "winogrande", "--data-dir", rows, "--limit", 2)
    code, out, err = command(monkeypatch, capsys, *arguments)
    assert code == 0, err
    result = read_result(folder / "zero_shot")
    assert result["model"]["label"] == "run" and out == table(result) + "\n"
    assert "winogrande: acc" in err and "(2 of 5 rows scored, 3 left out by --limit; " in err
    assert "bootstrapping" not in out + err
    with open(folder / "zero_shot/zero_shot.csv", encoding="utf-8", newline="") as file:
        (line,) = csv.DictReader(file)
    assert float(line["value"]) == result["tasks"]["winogrande"]["metrics"]["acc"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit: '0' must be from 1 to"),
        (["--batch-size", "many"], "--batch-size: 'many' must be a whole number"),
        (["--max-length", "1"], "--max-length: '1' must be from 2 to"),
        (["--bootstrap-iterations", "10000000"], "must be from 0 to 100,000"),
        (["--data-dir", " "], "--data-dir: ' ' is no path"),
        (["--out", "/proc/x"], "--out /proc/x: /proc may not be written to"),
        (["--prefetch", "/proc/x"], "--prefetch /proc/x: /proc may not be written to"),
        (["--device", "cuda:77"], "--device cuda:77: cannot be used"),
        (["--nonsense"], "unrecognized arguments: --nonsense; see python -m eval.zero_shot"),
        (["--max-lenght=9"], "unrecognized arguments: --max-lenght=9; did you mean --max-length?"),
        (["--tasks", ","], "--tasks: names no task"),
        (["--tasks", "helaswag"], "--tasks helaswag: unknown; did you mean"),
        (["--data-dir", "nowhere"], "--data-dir nowhere: no such folder"),
        (["--include-path", "nowhere"], "--include-path nowhere: no such folder"),
        (["--include-path", "broken"], "broken/x.yaml: is no definition: while parsing"),
        (["--max-length", "8"], "task hellaswag: a continuation of"),
        (["--tasks", "arc_easy", "--data-dir", "piqa"], "piqa/arc_easy.jsonl: missing"),
    ],
)
def test_bad_arguments_are_one_line(model, rows, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "piqa", {"piqa": ROWS["piqa"]})
    write_rows(tmp_path / "broken", {}).joinpath("x.yaml").write_text("task: [a")
    given = [model, "--out", tmp_path / "out", "--data-dir", rows, "--tasks", "hellaswag"]
    code, out, err = command(monkeypatch, capsys, *given, *arguments)
    assert (code, out) == (2, "")
    # In this process tqdm may be imported before the command silences the harness's bars.
    lines = [line for line in err.splitlines() if "it/s]" not in line and line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
    assert not (tmp_path / "out/zero_shot.json").exists()


def test_prefetch_on_several_ranks_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = command(monkeypatch, capsys, "--prefetch", tmp_path, "--tasks", "piqa")
    assert code == 2 and err.startswith("error: --prefetch: one process writes")


def test_unusable_models_are_one_line(model, rows, tmp_path, monkeypatch, capsys):
    def error(folder, *out) -> str:
        given = ("--tasks", "piqa", "--data-dir", rows, *out)
        code, said, err = command(monkeypatch, capsys, folder, *given)
        assert (code, said, err.count("\n")) == (2, "", 1)
        assert not (tmp_path / "out").exists()
        return err

    assert error(model).startswith("error: --out: missing")
    out = ("--out", tmp_path / "out")
    assert "no such folder" in error(tmp_path / "absent", *out)
    assert "not a model folder" in error(rows, *out)
    copy = shutil.copytree(model, tmp_path / "copy")
    for file in copy.glob("token*"):
        file.unlink()
    assert "tokenizer" in (message := error(copy, *out)) and "missing" in message
    # A missing weight would give a number of random weights.
    copy = shutil.copytree(model, tmp_path / "partial")
    weights = load_file(copy / "model.safetensors")
    weights.pop(next(name for name in weights if name.endswith("filter")))
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    (copy / "export.json").unlink()
    assert "weights and config.json do not fit: missing keys" in error(copy, *out)
    copy = shutil.copytree(model, tmp_path / "narrow")
    text = (copy / "config.json").read_text(encoding="utf-8")
    (copy / "config.json").write_text(text.replace('"float32"', '"float8_e4m3"'), encoding="utf-8")
    (copy / "export.json").unlink()
    assert "config.json: dtype is " in (said := error(copy, *out)) and "should be one of" in said
