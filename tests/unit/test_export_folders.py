"""Where an export goes and what it reads: nothing that is not its own is touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from cat_lm import export
from cat_lm.core.errors import UserError
from cat_lm.core.files import checksum
from cat_lm.export import export_checkpoint, export_model, training_facts
from cat_lm.pretrained.loading import load_tokenizer
from cat_lm.pretrained.record import read_record
from tests.checkpoints import seal
from tests.finished_runs import checkpoint, tiny_model
from tests.unit.calls import call_main


@pytest.fixture(scope="module")
def tokenizer_folder(tiny_corpus) -> Path:
    return tiny_corpus / "tokenizer"


@pytest.fixture
def run(tmp_path, tokenizer_folder) -> Path:
    checkpoint(tmp_path / "run", tiny_model(257), tokenizer_folder)
    return tmp_path / "run"


@pytest.fixture
def out(tmp_path, tokenizer_folder) -> Path:
    """An earlier export."""
    tokenizer = load_tokenizer(tokenizer_folder)
    return export_model(tiny_model(257, seed=3), tokenizer, tmp_path / "out")


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """All that is below a folder: files with their bytes, links with their targets."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        is_file = path.is_file() and not path.is_symlink()
        found[name] = os.readlink(path) if path.is_symlink() else None
        found[name] = path.read_bytes() if is_file else found[name]
    return found


def facts(path: Path) -> dict[str, object]:
    sums = {name: checksum(path, name) for name in ("sha256", "xxh3_128")}
    return {"bytes": path.stat().st_size, **sums}


def refused(monkeypatch, capsys, *arguments: object) -> str:
    code, out, err = call_main(export.main, monkeypatch, capsys, "export", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def test_the_record_lists_every_file(out):
    record = json.loads((out / "export.json").read_text())
    assert record["program"] == "cat_lm.export"
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert set(record["files"]) == names - {"export.json"}
    for name, file in record["files"].items():
        assert file == facts(out / name)
    assert record["sha256"] == record["files"]["model.safetensors"]["sha256"]


@pytest.mark.parametrize("name", ["eval/results.json", "chat_template.txt"])
def test_an_export_with_files_of_a_user_is_not_replaced(run, out, name, monkeypatch, capsys):
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    before = contents(out)
    assert f"holds {name}, which is not of an earlier result" in refused(
        monkeypatch, capsys, run, out
    )
    assert contents(out) == before and {p.name for p in out.parent.iterdir()} == {"run", "out"}


def test_a_listed_file_that_is_no_longer_written_goes(run, out):
    old = out / "old_tokenizer.model"
    old.write_text("of an earlier version")
    record = json.loads((out / "export.json").read_text())
    record["files"][old.name] = facts(old)
    (out / "export.json").write_text(json.dumps(record))
    export_checkpoint(run, out)
    assert not old.exists()


@pytest.mark.parametrize(
    "record",
    ["{}", "[]", "{", '{"program": "another"}', '{"program": "cat_lm.export", "files": {}}', ""],
)
def test_another_export_json_proves_nothing(run, tmp_path, monkeypatch, capsys, record):
    theirs = tmp_path / "theirs"
    (theirs / "sub").mkdir(parents=True)
    (theirs / "thesis.tex").write_text("mine")
    (theirs / "export.json").write_text(record)
    before = contents(tmp_path)
    assert str(theirs) in refused(monkeypatch, capsys, run, theirs)
    assert contents(tmp_path) == before


def test_export_of_another_version_is_kept(run, out, monkeypatch, capsys):
    record = json.loads((out / "export.json").read_text())
    assert next(iter(record)) == "format" and record.pop("format") == 1
    (out / "export.json").write_text(json.dumps(record))
    before = contents(out)
    said = "export.json: has no format, must be 1: another version of cat_lm wrote it"
    assert said in refused(monkeypatch, capsys, run, out)
    assert contents(out) == before


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", "config.json"])
def test_what_was_changed_since_is_not_lost(run, out, monkeypatch, capsys, name):
    (out / name).write_text("edited, or trained further")
    before = contents(out)
    assert f"{name} was changed since it was exported" in refused(monkeypatch, capsys, run, out)
    assert contents(out) == before


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "run/checkpoints/step-00000012", "."])
def test_folders_that_hold_checkpoints_are_kept(run, monkeypatch, capsys, place):
    before = contents(run.parent)
    said = refused(monkeypatch, capsys, run, run.parent / place)
    assert "is not empty and no earlier export" in said and contents(run.parent) == before


def test_a_run_folder_takes_its_model(run):
    assert export_checkpoint(run, run / "model") == run / "model"
    assert export_checkpoint(run, run / "model") == run / "model"


def test_places_where_no_folder_can_be(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    before = contents(tmp_path)
    for place, said in (
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "file", "is a file"),
        ("", "is no path"),
    ):
        assert said in refused(monkeypatch, capsys, run, place)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("state.json", "{}", "state.json: has no format"),
        ("state.json", "[]", "state.json: holds"),
        ("state.json", '{"format": 1, "step": "12", "tokens": 1}', 'state.json: step is "12"'),
        (
            "state.json",
            '{"format": 1, "step": 12, "tokens": 1, "data": null}',
            "state.json: data is null",
        ),
        ("run_config.yaml", "{", "run_config.yaml: not valid YAML"),
        ("run_config.yaml", "data: null", "run_config.yaml: has no model"),
        ("run_config.yaml", "3", "run_config.yaml: holds 3"),
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


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_a_run_computed_in_is_in_its_export(run, precision, tmp_path):
    file = run / "checkpoints" / "step-00000012" / "run_config.yaml"
    values = yaml.safe_load(file.read_text())
    values["train"]["precision"] = precision
    file.write_text(yaml.safe_dump(values))
    seal(file.parent)
    assert read_record(export_checkpoint(run, tmp_path / "new")).precision == precision


def test_a_line_cut_by_a_kill_is_left_out(run):
    lines = '{"step": 6, "val_loss": 4.5}\n{"step": 12, "val_lo'
    (run / "metrics.jsonl").write_text(lines)
    assert training_facts(run / "checkpoints" / "step-00000012")["val_loss"] == 4.5
