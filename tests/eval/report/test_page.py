"""The page: all kinds of runs, runs that lack things, damaged files, odd names."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from cat_lm.core.files import write_json
from eval.common.runs import read_run
from eval.common.style import page_svg
from eval.length_sweep.figures import position_figure
from tests.eval.report.results import report, samples, sweep, sweep_row, zero_shot

ZERO_SHOT = """{"format": 1, "model": {"sha256": "", "max_length": 1, "dtype": ""},
"settings": {"limit": null}, "tasks": %s}"""
SWEEP = '{"format": 1, "text": "", "protocol": {"windows": ""}, "rows": %s, "command": ""}'
SAMPLES = """{"format": 1, "max_new_tokens": 1, "seed": 0, "temperature": 1, "top_p": 1,
"model_sha256": "", "samples": %s}"""


def test_all_kinds_stand_on_one_page_without_a_network(runs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert report(monkeypatch, capsys, *runs.values(), "--out", out) == (0, "")
    page = (out / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(https?:|//)|@import|url\((?!#)", page.split("<svg")[0])
    assert not re.search(r"(src|href)=\"https?:|url\(http", page)
    for name in ("cat", "mh", "canon"):
        assert (out / f"filters_{name}.png").stat().st_size > 5000
        assert f"<h3>{name}</h3>" in page
    assert not (out / "filters_pythia.png").exists()
    assert re.search(r"multihead convolution of q, k, v, W=\d+; RoPE", page)
    referred = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", page))
    ids = [i for i in re.findall(r' id="([^"]+)"', page) if i in referred]
    assert referred and sorted(ids) == sorted(referred), "each is there once"


def test_names_and_texts_are_no_elements(run, tmp_path, monkeypatch, capsys):
    run = run.rename(tmp_path / 'cat <i>&"x')
    written = samples(run)
    written["samples"][0] |= {"prompt": "<i>a&", "reference": "<i>b", "continuation": "<i>c"}
    write_json(run / "eval/samples.json", written)
    swept = {"text": "<i>d", "protocol": {"windows": "<i>e"}, "command": "<i>f"}
    write_json(run / "eval/length_sweep.json", sweep(sweep_row(run, "x", 20.0)) | swept)
    write_json(run / "zero_shot/zero_shot.json", zero_shot(run))
    assert report(monkeypatch, capsys, run, "--title", "<i>g", "--out", tmp_path / "o")[0] == 0
    for name in ("index.html", "table2.html"):
        page = (tmp_path / "o" / name).read_text(encoding="utf-8")
        assert "<i>" not in page and "cat &lt;i&gt;&amp;&#34;x" in page
    page = (tmp_path / "o/index.html").read_text(encoding="utf-8")
    assert page.count("<h1>&lt;i&gt;g</h1>") == 1
    assert all(f"&lt;i&gt;{text}" in page for text in ("a&amp;", "b", "c", "d", "e", "f"))


def test_run_without_export_data_or_results_names_what_makes_them(
    run, tmp_path, monkeypatch, capsys
):
    data, out = read_run(run).config.data.path, tmp_path / "out"
    shutil.rmtree(run / "model")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"path: .*", "path: gone", config))
    assert report(monkeypatch, capsys, run, "--out", out) == (0, "")
    page = (out / "index.html").read_text()
    assert f"python -m cat_lm.export {run} {run}/model" in page and "unigram" not in page
    lengths = "--lengths 16,32,64,128,256 --methods all"
    assert f"eval.length_sweep {run} --data gone {lengths} --out {run}/eval" in page
    assert data not in page


DAMAGED = [
    ("zero_shot/zero_shot.json", "{", "zero_shot.json: is not JSON"),
    ("zero_shot/zero_shot.json", "{}", "zero_shot.json: has no format, must be 1"),
    ("zero_shot/zero_shot.json", ZERO_SHOT % '{"piqa": 3}', "tasks.piqa is 3: should be an"),
    ("eval/length_sweep.json", SWEEP % "[{}]", "length_sweep.json: has no rows.0.perplexity"),
    ("eval/samples.json", SAMPLES % "[{}]", "samples.json: has no samples.0.prompt"),
    ("model/export.json", "nothing", "export.json: is not JSON"),
    ("model/config.json", "{", "config.json: has 1 bytes, export.json lists"),
    ("model/model.safetensors", "short", "model.safetensors: has 5 bytes, export.json"),
    ("metrics.jsonl", "{\n{}\n", "metrics.jsonl, line 1: is not JSON"),
    ("metrics.jsonl", '{"step":5,"tokens":9}\n', "metrics.jsonl, line 1: has no loss"),
    ("metrics.jsonl", '{"step":5,"tokens":9,"val_loss":2}\n', "line 1: has no val_perplexity"),
    ("metrics.jsonl", '{"step":-1,"tokens":9,"loss":1}\n', "step is -1: should be greater"),
    ("config.yaml", "model: 3\n", "config.yaml: "),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_damaged_file_is_one_line(run, tmp_path, monkeypatch, capsys, name, content, message):
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text(content)
    code, err = report(monkeypatch, capsys, run, "--out", tmp_path / "out")
    assert code == 2 and message in err
    assert err.startswith("error: ") and (err.count("\n") == 1 or name == "config.yaml")
    assert not (tmp_path / "out/index.html").exists()


def test_odd_folders_and_outputs_are_one_line(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "table2.md").write_text("mine")
    for given, message in (
        ((tmp_path / "absent",), f"run {tmp_path / 'absent'}: has no config.yaml"),
        ((run / "model",), "has no config.yaml"),
        ((run, run), "two runs have this name"),
        ((run, "--out", "  "), "--out: '  ' is no path"),
        ((300 * "x",), "File name too long"),
        ((run,), f"--out {out}: table2.md is not of an earlier run"),
    ):
        code, err = report(monkeypatch, capsys, "--out", out, *given)
        assert (code, err.count("\n")) == (2, 1) and message in err
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("table2.md", "mine")]


def test_points_dollars_and_underscores_in_names_are_shown(runs, tmp_path, monkeypatch, capsys):
    names = ["lr0.003", "lr0.001", r"p$\frac$", "_hidden"]
    folders = [shutil.copytree(runs["cat"], tmp_path / name) for name in names]
    parts = [{"start": 1, "stop": 32, "tokens": 600, "loss": 3.0}]
    for folder, name in zip(folders, names, strict=True):
        row = sweep_row(folder, name, 20.0, positions=parts)
        write_json(folder / "eval/length_sweep.json", sweep(row))
    out = tmp_path / "out"
    assert report(monkeypatch, capsys, *folders, "--out", out) == (0, "")
    written = {path.name for path in out.glob("filters_*")}
    assert written == {f"filters_{name}.{end}" for name in names for end in ("png", "svg")}
    pictures = [(out / f"{n}.svg").read_text() for n in ("loss", "perplexity_by_length")]
    rows = json.loads((out / "summary.json").read_text())["length_sweep"]
    pictures.append(page_svg(position_figure(rows), "positions", "positions"))
    for picture in pictures:
        assert all(f">{name}</text>" in picture for name in names)
