"""Checkpoint to transformers folder and back: nothing lost, nothing made up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cat_lm.core.errors import UserError
from cat_lm.export import export_checkpoint, export_model
from cat_lm.pretrained.loading import load_model, load_tokenizer
from tests.commands import python
from tests.finished_runs import checkpoint, tiny_model
from tests.unit.calls import call_main

VARIANTS = {
    "cat": {},
    "pythia": {"conv_type": "none"},
    "no-positions": {"position_embedding": "none"},
    "values-only": {"conv_streams": "v"},
    "tied": {"tie_word_embeddings": True},
    "maps": {"conv_type": "multihead", "conv_mixing": "maps"},
    "depthwise": {"conv_type": "depthwise", "conv_activation": "silu"},
}


@pytest.fixture(scope="module")
def tokenizer_folder(tiny_corpus) -> Path:
    return tiny_corpus / "tokenizer"


@pytest.fixture(params=VARIANTS, ids=list(VARIANTS))
def model(request):
    return tiny_model(257, **VARIANTS[request.param])


def export(model, tokenizer_folder: Path, out: Path, **options) -> Path:
    return export_model(model, load_tokenizer(tokenizer_folder), out, **options)


def test_export_of_a_checkpoint_keeps_every_bit(tmp_path, tokenizer_folder, model):
    folder = checkpoint(tmp_path / "run", model, tokenizer_folder)
    out = export_checkpoint(tmp_path / "run", tmp_path / "model")
    stored = load_file(folder / "model/model.safetensors")
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.state_dict().keys() == stored.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    inputs = torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (loaded(inputs).logits - model(inputs).logits).abs().max()
    assert difference <= 1e-5


def test_export_reload_export_is_bit_equal(tmp_path, tokenizer_folder, model):
    first = export(model, tokenizer_folder, tmp_path / "first")
    second = export(load_model(first), tokenizer_folder, tmp_path / "second")
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_narrow_export_rounds_the_weights_and_says_so(tmp_path, tokenizer_folder):
    out = export(tiny_model(257), tokenizer_folder, tmp_path / "out", dtype="bfloat16")
    stored = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    expected = tiny_model(257).state_dict()
    assert all(torch.equal(stored[name], expected[name].bfloat16()) for name in stored)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_file_has_the_format_that_transformers_asks_for(tmp_path, tokenizer_folder):
    out = export(tiny_model(257), tokenizer_folder, tmp_path / "out")
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    modes = {path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert len(modes) == 1, "every file has the permissions of a newly made one"


def test_tokenizer_and_generation_settings_come_along(tmp_path, tokenizer_folder):
    out = export(tiny_model(257), tokenizer_folder, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "caf\u00e9 \U0001f600\n\tx"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings["eos_token_id"] == tokenizer.eos_token_id == 256


def test_texts_start_with_what_started_documents(tmp_path, tokenizer_folder):
    """Evaluations put the start token before a text; Mistral's own was never trained on."""
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(65)
    out = export_model(tiny_model(257), tokenizer, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).bos_token_id == 256
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["bos_token_id"] == 256


def test_card_tells_training_tokens_and_validation_loss(tmp_path, tokenizer_folder):
    run = tmp_path / "a-run"
    checkpoint(run, tiny_model(257), tokenizer_folder, step=12)
    lines = [{"step": step, "val_loss": loss} for step, loss in ((6, 4.5), (12, 3.25), (18, 1.0))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = (export_checkpoint(run, run / "model") / "README.md").read_text()
    assert "# a-run" in card
    assert "| training tokens | 3,072 |" in card
    assert "| training context length | 32 |" in card
    assert "| held-out loss | 3.2500 |" in card, "the last one that the checkpoint had seen"


def test_newest_complete_checkpoint_is_taken(tmp_path, tokenizer_folder):
    run = tmp_path / "run"
    checkpoint(run, tiny_model(257, seed=1), tokenizer_folder, step=10)
    kept = checkpoint(run, tiny_model(257, seed=2), tokenizer_folder, step=20)
    (checkpoint(run, tiny_model(257, seed=3), tokenizer_folder, step=30) / "complete.json").unlink()
    for number, path in enumerate((run, run / "checkpoints", kept)):
        out = export_checkpoint(path, tmp_path / f"out-{number}")
        assert json.loads((out / "export.json").read_text())["step"] == 20


def test_earlier_export_is_replaced_anything_else_is_not(tmp_path, tokenizer_folder):
    out = export(tiny_model(257, seed=1), tokenizer_folder, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    export(tiny_model(257, seed=2), tokenizer_folder, out)
    assert (out / "model.safetensors").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and no earlier export"):
        export(tiny_model(257), tokenizer_folder, foreign)
    assert (foreign / "chapter.txt").read_text() == "mine"


def test_failed_export_leaves_the_earlier_one(tmp_path, tokenizer_folder, monkeypatch):
    out = export(tiny_model(257, seed=1), tokenizer_folder, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    other = tiny_model(257, seed=2)
    monkeypatch.setattr("cat_lm.export.load_model", lambda *_, **__: tiny_model(257, seed=3))
    with pytest.raises(UserError, match="read back is not the one written"):
        export(other, tokenizer_folder, out)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_stays_and_its_folder_is_replaced(tmp_path, tokenizer_folder):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "model")
    for seed in (1, 2):
        export(tiny_model(257, seed=seed), tokenizer_folder, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "out"}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]
    assert (tmp_path / "out").is_symlink()


def test_all_files_and_folders_are_on_disk_before_the_rename(
    tmp_path, tokenizer_folder, monkeypatch
):
    synced, tokenizer = set(), load_tokenizer(tokenizer_folder)
    fsync, replace = os.fsync, os.replace

    def save(folder, really=tokenizer.save_pretrained):
        really(folder)
        (folder / "templates").mkdir()
        (folder / "templates" / "chat.jinja").write_text("{{ messages }}")

    def replaced(source, target):
        if target == tmp_path / "out":
            made = {source, *source.rglob("*")}
            assert len(made) > 6
            assert {path.stat().st_ino for path in made} <= synced
        replace(source, target)

    monkeypatch.setattr(tokenizer, "save_pretrained", save)
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "replace", replaced)
    out = export_model(tiny_model(257), tokenizer, tmp_path / "out")
    assert tmp_path.stat().st_ino in synced
    assert (out / "templates" / "chat.jinja").is_file()


@pytest.mark.parametrize("damage", ["missing", "unexpected"])
def test_weights_that_do_not_fit_are_an_error(tmp_path, tokenizer_folder, damage):
    out = export(tiny_model(257), tokenizer_folder, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    name = "gpt_neox.layers.1.attention.convolution.k_filter"
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name.replace("k_filter", "x_filter")] = tensors[name].clone()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "export.json").unlink()
    with pytest.raises(UserError, match=damage):
        load_model(out)


def test_tokenizer_larger_than_the_model_is_refused(tmp_path, tokenizer_folder):
    with pytest.raises(UserError, match="257 entries"):
        export(tiny_model(200), tokenizer_folder, tmp_path / "out")


def test_command_refuses_what_is_no_checkpoint(tmp_path, tokenizer_folder):
    untagged = checkpoint(tmp_path / "untagged", tiny_model(257), tokenizer_folder)
    (untagged / "complete.json").unlink()
    cut = checkpoint(tmp_path / "cut", tiny_model(257), tokenizer_folder)
    weights = cut / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path in (tmp_path / "absent", untagged, tmp_path / "cut"):
        result = python("-m", "cat_lm.export", path, tmp_path / "out")
        assert result.returncode == 2, result.stderr
        assert result.stderr.count("\n") == 1
        assert str(path) in result.stderr
        assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(tmp_path, tokenizer_folder):
    """A limit on the size of files stands for the full disk: the weights do not fit, others do."""
    run = tmp_path / "run"
    checkpoint(run, tiny_model(257), tokenizer_folder)

    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))"
    code += "\nfrom cat_lm.export import main; main()"
    result = python("-c", code, run, tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"error: OUT {tmp_path / 'out'}: cannot be written: ")
    assert "File too large" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_command_says_what_it_wrote_and_nothing_else(tmp_path, tokenizer_folder, monkeypatch):
    """DeepSpeed, which accelerate imports when a model is saved, has a note on absent GPUs."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checkpoint(tmp_path / "run", tiny_model(257), tokenizer_folder)
    command = [sys.executable, "-m", "cat_lm.export", tmp_path / "run", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert re.fullmatch(r".*/out: [\d,]+ parameters in float32, read back.*\n", result.stdout)


@pytest.mark.long
def test_export_needs_no_deepspeed(tmp_path, tokenizer_folder):
    checkpoint(tmp_path / "run", tiny_model(257), tokenizer_folder)
    code = "import sys; sys.modules['deepspeed'] = None\nfrom cat_lm.export import main; main()"
    paths = [str(tmp_path / "run"), str(tmp_path / "out")]
    result = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("scope", ["logits", "rotary"])
def test_scaled_export_is_the_sweep_s_model(tmp_path, tokenizer_folder, monkeypatch, scope):
    """config.json alone makes transformers read what the sweep measured."""
    from eval.length_sweep import sweep as length_sweep

    monkeypatch.setattr(length_sweep, "_draw", lambda rows, out: None)
    checkpoint(tmp_path / "run", tiny_model(257, rotary_pct=0.5), tokenizer_folder)
    plain = export_checkpoint(tmp_path / "run", tmp_path / "plain")
    options = {"method": "yarn", "factor": 4, "temperature_scope": scope}
    scaled = export_checkpoint(tmp_path / "run", tmp_path / "scaled", **options)
    text = tmp_path / "text.txt"
    text.write_text("The dog saw a bird near the house. " * 10, encoding="utf-8")
    sweeps = [
        length_sweep.sweep([plain], [128], tmp_path / "a", text=text, methods=["yarn"], factor=4)
        if scope == "logits"
        else length_sweep.sweep(
            [plain], [128], tmp_path / "a", text=text, methods=["yarn"], temperature_scope=scope
        ),
        length_sweep.sweep([scaled], [128], tmp_path / "b", text=text),
        length_sweep.sweep([plain], [128], tmp_path / "c", text=text),
    ]
    asked, stored, unscaled = (rows[0] for rows in sweeps)
    assert stored["loss"] == asked["loss"] != unscaled["loss"]
    assert stored["training_length"] == asked["training_length"] == 32
    config = json.loads((scaled / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    assert config["rope_parameters"]["original_max_position_embeddings"] == 32
    assert "| read beyond it by | yarn |" in (scaled / "README.md").read_text()
    with pytest.raises(UserError, match="does not exist for model scaled: it has none;"):
        length_sweep.sweep([scaled], [128], tmp_path / "b", text=text, methods=["pi"])
    with pytest.raises(UserError, match=r"--method temperature --factor 4: .* it has none, pi"):
        export_checkpoint(tmp_path / "run", tmp_path / "no", method="temperature", factor=4)


@pytest.mark.parametrize("method", [(), ("--method", "pi", "--factor", "4")])
def test_temperature_scope_without_a_temperature(tmp_path, monkeypatch, capsys, method):
    from cat_lm import export

    given = [str(tmp_path), str(tmp_path / "out"), "--temperature-scope", "rotary", *method]
    code, _, error = call_main(export.main, monkeypatch, capsys, "export", *given)
    assert code == 2
    assert error.startswith("error: --temperature-scope rotary: does nothing with --method ")
    assert error.count("\n") == 1
