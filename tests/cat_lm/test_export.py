"""Checkpoint to transformers folder and back: nothing is lost, made up, or replaced unasked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import cat_lm  # noqa: F401
from cat_lm import export
from cat_lm.core.errors import UserError
from cat_lm.core.files import checksum
from cat_lm.export import export_checkpoint, export_model, training_facts
from cat_lm.pretrained import conversion, loading
from cat_lm.pretrained.loading import load_model, load_tokenizer
from cat_lm.pretrained.record import read_record
from cat_lm.training.checkpoint.callback_state import to_stored_state, write_callback_states
from tests.calls import call_main
from tests.checkpoints import seal
from tests.commands import python
from tests.finished_runs import checkpoint, tiny_model


@pytest.fixture(scope="module")
def tokenizer_folder(tiny_corpus) -> Path:
    return tiny_corpus / "tokenizer"


def exported(model, tokenizer_folder: Path, out: Path, **options) -> Path:
    return export_model(model, load_tokenizer(tokenizer_folder), out, **options)


VARIANTS = {"cat": {}, "tied": {"tie_word_embeddings": True}}
VARIANTS |= {"maps": {"conv_type": "multihead", "conv_mixing": "maps"}}


@pytest.mark.parametrize("name", VARIANTS)
def test_export_keeps_every_bit_and_exports_again(name, tmp_path, tokenizer_folder):
    model = tiny_model(257, **VARIANTS[name])
    folder = checkpoint(tmp_path / "run", model, tokenizer_folder)
    first = export_checkpoint(tmp_path / "run", tmp_path / "first")
    stored = load_file(folder / "model/model.safetensors")
    loaded, report = AutoModelForCausalLM.from_pretrained(first, output_loading_info=True)
    assert not any(report.values()) and loaded.state_dict().keys() == stored.keys()
    assert all(torch.equal(w, stored[name]) for name, w in loaded.state_dict().items())
    # Its own file stays where it is when the library's class saves the model.
    loaded.save_pretrained(tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved/config.json").read_text())
    second = exported(load_model(first), tokenizer_folder, tmp_path / "second")
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert len({path.stat().st_mode & 0o777 for path in first.iterdir()}) == 1


def test_narrow_export_rounds_the_weights_and_says_so(tmp_path, tokenizer_folder):
    out = exported(tiny_model(257), tokenizer_folder, tmp_path / "out", dtype="bfloat16")
    stored = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    expected = tiny_model(257).state_dict()
    assert all(torch.equal(stored[name], expected[name].bfloat16()) for name in stored)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_tokenizer_and_generation_settings_come_along(tmp_path, tokenizer_folder):
    out = exported(tiny_model(257), tokenizer_folder, tmp_path / "out")
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


def test_card_gives_training_tokens_and_validation_loss(tmp_path, tokenizer_folder):
    run = tmp_path / "a-run"
    checkpoint(run, tiny_model(257), tokenizer_folder, step=12)
    lines = [{"step": step, "val_loss": loss} for step, loss in ((6, 4.5), (12, 3.25), (18, 1.0))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = (export_checkpoint(run, run / "model") / "README.md").read_text()
    assert "| training tokens | 3,072 |" in card
    assert "| held-out loss | 3.2500 |" in card, "the last one that the checkpoint had seen"


def test_newest_complete_checkpoint_is_taken(tmp_path, tokenizer_folder):
    run = tmp_path / "run"
    checkpoint(run, tiny_model(257, seed=1), tokenizer_folder, step=10)
    kept = checkpoint(run, tiny_model(257, seed=2), tokenizer_folder, step=20)
    (checkpoint(run, tiny_model(257, seed=3), tokenizer_folder, step=30) / "complete.json").unlink()
    for number, path in enumerate((run, run / "checkpoints", kept)):
        out = export_checkpoint(path, tmp_path / f"out-{number}")
        assert json.loads((out / "export.json").read_text())["step"] == 20


def test_averaged_weights_are_exported_on_request(tmp_path, tokenizer_folder):
    run, averaged = tmp_path / "run", tiny_model(257, seed=1)
    folder = checkpoint(run, tiny_model(257), tokenizer_folder)
    (run / "metrics.jsonl").write_text('{"step": 12, "val_loss": 1.5}\n')
    with pytest.raises(UserError, match=r"--ema: .* has no averaged weights; see train.ema_decay"):
        export_checkpoint(run, ema=True)
    state = {"ema": to_stored_state(dict(averaged.named_parameters()))}
    write_callback_states(folder, state)
    seal(folder)
    out = export_checkpoint(run, ema=True)
    found = load_model(out).state_dict()
    assert all(found[name].equal(weights) for name, weights in averaged.named_parameters())
    # The losses that are known are those of the other weights.
    assert out == run / "model_ema" and "held-out loss" not in (out / "README.md").read_text()
    assert "average" in json.loads((out / "export.json").read_text())


def test_failed_export_leaves_the_earlier_one(tmp_path, tokenizer_folder, monkeypatch):
    out = exported(tiny_model(257, seed=1), tokenizer_folder, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    other = tiny_model(257, seed=2)
    other_model = tiny_model(257, seed=3)
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: other_model)
    with pytest.raises(UserError, match="read back is not the one written"):
        exported(other, tokenizer_folder, out)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_stays_and_its_folder_is_replaced(tmp_path, tokenizer_folder):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "model")
    for seed in (1, 2):
        exported(tiny_model(257, seed=seed), tokenizer_folder, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "out"}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]
    assert (tmp_path / "out").is_symlink()


def test_tokenizer_larger_than_the_model_is_refused(tmp_path, tokenizer_folder):
    with pytest.raises(UserError, match="257 entries"):
        exported(tiny_model(200), tokenizer_folder, tmp_path / "out")


@pytest.mark.long
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


@pytest.mark.long
def test_command_says_what_it_wrote_and_nothing_else(tmp_path, tokenizer_folder, monkeypatch):
    """DeepSpeed, which accelerate imports when a model is saved, has a note on absent GPUs."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checkpoint(tmp_path / "run", tiny_model(257), tokenizer_folder)
    command = [sys.executable, "-m", "cat_lm.export", tmp_path / "run", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == f"exporting the newest checkpoint of {tmp_path / 'run'}\n"
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
    validated = {"step": 1, "val_loss": 2.0, "val_perplexity": 7.4, "val_bits_per_byte": 1.5}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(validated) + "\n")
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
    assert "held-out loss" in (plain / "README.md").read_text()
    card = (scaled / "README.md").read_text()
    assert "| extended beyond it by | yarn |" in card and "held-out loss" not in card
    with pytest.raises(UserError, match="does not exist for model scaled: it has none;"):
        length_sweep.sweep([scaled], [128], tmp_path / "b", text=text, methods=["pi"])
    with pytest.raises(UserError, match=r"--method temperature --factor 4: .* it has none, pi"):
        export_checkpoint(tmp_path / "run", tmp_path / "no", method="temperature", factor=4)


@pytest.fixture
def run(tmp_path, tokenizer_folder) -> Path:
    checkpoint(tmp_path / "run", tiny_model(257), tokenizer_folder)
    return tmp_path / "run"


@pytest.fixture
def out(tmp_path, tokenizer_folder) -> Path:
    """An earlier export."""
    tokenizer = load_tokenizer(tokenizer_folder)
    return export_model(tiny_model(257, seed=3), tokenizer, tmp_path / "out")


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder with their bytes."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}


def refused(monkeypatch, capsys, *arguments: object) -> str:
    code, out, err = call_main(export.main, monkeypatch, capsys, "export", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def test_record_lists_every_file_and_listed_files_are_replaced(run, out):
    record = json.loads((out / "export.json").read_text())
    assert record["program"] == "cat_lm.export" and next(iter(record)) == "format"
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert set(record["files"]) == names - {"export.json"}
    facts = {
        name: {"bytes": (out / name).stat().st_size}
        | {sum_: checksum(out / name, sum_) for sum_ in ("sha256", "xxh3_128")}
        for name in record["files"]
    }
    assert record["files"] == facts
    assert record["sha256"] == record["files"]["model.safetensors"]["sha256"]
    old = out / "old_tokenizer.model"
    old.write_bytes((out / "README.md").read_bytes())
    record["files"][old.name] = record["files"]["README.md"]
    (out / "export.json").write_text(json.dumps(record))
    before = contents(out)
    export_checkpoint(run, out)
    assert not old.exists() and contents(out)["model.safetensors"] != before["model.safetensors"]
    for _ in range(2):  # A run's own folder takes its model, and takes it again.
        assert export_checkpoint(run, run / "model") == run / "model"


KEPT = {
    "eval/results.json": ("mine", "holds eval/results.json, which is not of an earlier result"),
    "README.md": ("edited", "README.md was changed since it was exported"),
    "model.safetensors": ("trained further", "model.safetensors was changed since it was exported"),
    "export.json": ("{}", "is not empty and no earlier export"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_an_earlier_export_is_kept(run, out, name, monkeypatch, capsys):
    content, said = KEPT[name]
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text(content)
    before = contents(run.parent)
    assert said in refused(monkeypatch, capsys, run, out)
    assert contents(run.parent) == before


def test_places_that_cannot_be_written_are_refused(run, out, monkeypatch, capsys):
    record = json.loads((out / "export.json").read_text())
    del record["format"]
    (out / "export.json").write_text(json.dumps(record))
    (run.parent / "file").touch()
    before = contents(run.parent)
    for place, said in (
        (out, "export.json: has no format, must be 1: another version of cat_lm wrote it"),
        (run, "is not empty and no earlier export"),
        (run / "checkpoints/step-00000012", "is not empty and no earlier export"),
        (run.parent / ("x" * 300), "File name too long"),
        (run.parent / "file", "is a file"),
        ("", "is no path"),
    ):
        assert said in refused(monkeypatch, capsys, run, place)
    assert contents(run.parent) == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("state.json", "{}", "state.json: has no format"),
        ("state.json", '{"format": 1, "step": "12", "tokens": 1}', 'state.json: step is "12"'),
        ("run_config.yaml", "{", "run_config.yaml: not valid YAML"),
        ("run_config.yaml", "data: null", "run_config.yaml: has no model"),
        ("run_config.yaml", "model: {hidden_size: x}", "run_config.yaml: model.hidden_size is"),
        ("../../metrics.jsonl", "{broken}\n{}\n", "metrics.jsonl, line 1: is not JSON"),
        ("../../metrics.jsonl", '{"val_loss": 1}\n', "metrics.jsonl, line 1: step is null"),
        ("../../metrics.jsonl", "\udcff\n", "is not UTF-8 text"),
    ],
)
def test_what_a_checkpoint_knows_is_read_typed(run, name, content, said):
    step = run / "checkpoints" / "step-00000012"
    (step / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError) as error:
        training_facts(step)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_export_records_the_precision_of_its_run(run, tmp_path):
    file = run / "checkpoints" / "step-00000012" / "run_config.yaml"
    values = yaml.safe_load(file.read_text())
    values["train"]["precision"] = "bf16"
    file.write_text(yaml.safe_dump(values))
    seal(file.parent)
    assert read_record(export_checkpoint(run, tmp_path / "new")).precision == "bf16"


def test_a_line_cut_by_a_kill_is_left_out(run):
    lines = '{"step": 6, "val_loss": 4.5}\n{"step": 12, "val_lo'
    (run / "metrics.jsonl").write_text(lines)
    assert training_facts(run / "checkpoints" / "step-00000012")["val_loss"] == 4.5


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"family": "llama"}, "has head convolutions of q, k, v, which transformers' Llama does"),
        ({"position_embedding": "none"}, "has position_embedding='none'"),
        ({"attention_temperature": 0.5}, "has attention_temperature=0.5"),
        ({"qk_norm": "l2"}, "has qk_norm='l2'"),
        ({"canon": "C"}, "has canon='C'"),
    ],
    ids=str,
)
def test_what_the_library_does_not_have_is_refused(fields, said, tokenizer_folder, tmp_path):
    fields = {"conv_type": "head" if "family" in fields else "none"} | fields
    checkpoint(tmp_path / "run", tiny_model(257, **fields), tokenizer_folder)
    with pytest.raises(UserError, match=f"--library: the model {said}.*without --library"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", library=True)
    assert not (tmp_path / "out").exists()


def test_other_logits_are_no_export(tokenizer_folder, tmp_path, monkeypatch):
    checkpoint(tmp_path / "run", tiny_model(257, conv_type="none"), tokenizer_folder)
    monkeypatch.setattr(conversion, "logits_of", lambda model: torch.tensor([torch.nan]))
    with pytest.raises(UserError, match=r"--library: .* differ by nan"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", library=True)
