"""The page: all kinds of runs, runs that lack things, damaged files, odd names."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from cat_lm.core.files import write_json
from tests.eval.report.results import report, samples, sweep, sweep_row, zero_shot

ZERO_SHOT = """{"format": 1, "model": {"sha256": "", "max_length": 1, "dtype": ""},
"settings": {"limit": null}, "tasks": %s}"""
SWEEP = '{"format": 1, "text": "", "protocol": {"windows": ""}, "rows": %s, "command": ""}'
SAMPLES = """{"format": 1, "max_new_tokens": 1, "seed": 0, "temperature": 1, "top_p": 1,
"model_sha256": "", "samples": %s}"""


class TestPage:
    def test_all_kinds_on_one_page_without_a_network(self, runs, tmp_path, monkeypatch, capsys):
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *runs.values(), "--out", out) == (0, "")
        page = (out / "index.html").read_text(encoding="utf-8")
        assert not re.search(r"(src|href)=\"(https?:|//)|@import|url\((?!#)", page.split("<svg")[0])
        assert not re.search(r"(src|href)=\"https?:|url\(http", page)
        assert "color-scheme: light;" in page
        for name in ("cat", "mh", "canon"):
            assert (out / f"filters_{name}.png").stat().st_size > 5000
            assert f"<h3>{name}</h3>" in page
        assert not (out / "filters_pythia.png").exists()
        assert re.search(r"multihead convolution of q, k, v, W=\d+; RoPE", page)
        referred = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", page))
        ids = [i for i in re.findall(r' id="([^"]+)"', page) if i in referred]
        assert referred and sorted(ids) == sorted(referred), "each is there once"

    def test_names_and_texts_are_no_elements(self, run, tmp_path, monkeypatch, capsys):
        run = run.rename(tmp_path / 'cat <i>&"x')
        written = samples(run)
        written["samples"][0] |= {"prompt": "<i>a&", "reference": "<i>b", "continuation": "<i>c"}
        write_json(run / "eval/samples.json", written)
        rows = [sweep_row(run, "x", 20.0)]
        swept = {"text": "<i>d", "protocol": {"windows": "<i>e"}, "command": "<i>f"}
        write_json(run / "eval/length_sweep.json", sweep(*rows) | swept)
        write_json(run / "zero_shot/zero_shot.json", zero_shot(run))
        assert report(monkeypatch, capsys, run, "--title", "<i>g", "--out", tmp_path / "o")[0] == 0
        for name in ("index.html", "table2.html"):
            page = (tmp_path / "o" / name).read_text(encoding="utf-8")
            assert "<i>" not in page and "cat &lt;i&gt;&amp;&#34;x" in page
        page = (tmp_path / "o/index.html").read_text(encoding="utf-8")
        assert page.count("<h1>&lt;i&gt;g</h1>") == 1
        for text in ("a&amp;", "b", "c", "d", "e", "f"):
            assert f"&lt;i&gt;{text}" in page

    def test_a_run_that_only_began_is_shown(self, run, tmp_path, monkeypatch, capsys):
        shutil.rmtree(run / "model")
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, run, "--out", out) == (0, "")
        assert f"python -m cat_lm.export {run} {run}/model" in (out / "index.html").read_text()

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("zero_shot/zero_shot.json", "{", "zero_shot.json: is not JSON"),
            ("zero_shot/zero_shot.json", "[]", "zero_shot.json: holds [], must be an object"),
            ("zero_shot/zero_shot.json", "{}", "zero_shot.json: has no format, must be 1"),
            (
                "zero_shot/zero_shot.json",
                ZERO_SHOT % "[]",
                "tasks is []: should be an object; make",
            ),
            (
                "zero_shot/zero_shot.json",
                ZERO_SHOT % '{"piqa": 3}',
                "tasks.piqa is 3: should be an",
            ),
            (
                "zero_shot/zero_shot.json",
                ZERO_SHOT % '{"piqa": {"metrics": {"acc": "x"}}}',
                'zero_shot.json: tasks.piqa.metrics.acc is "x": should be a valid number',
            ),
            ("eval/length_sweep.json", '{"rows": ', "length_sweep.json: is not JSON"),
            ("eval/length_sweep.json", "{}", "length_sweep.json: has no format, must be 1"),
            (
                "eval/length_sweep.json",
                SWEEP % "[{}]",
                "length_sweep.json: has no rows.0.perplexity",
            ),
            ("eval/samples.json", "3", "samples.json: holds 3, must be an object"),
            ("eval/samples.json", '{"samples": [{}]}', "samples.json: has no format, must be 1"),
            ("eval/samples.json", SAMPLES % "[{}]", "samples.json: has no samples.0.prompt"),
            ("model/export.json", "nothing", "export.json: is not JSON"),
            ("model/config.json", "{", "config.json: has 1 bytes, export.json lists"),
            ("model/model.safetensors", "short", "model.safetensors: has 5 bytes, export.json"),
            ("metrics.jsonl", "{\n{}\n", "metrics.jsonl, line 1: is not JSON"),
            ("metrics.jsonl", "5\n", "metrics.jsonl, line 1: holds 5, must be an object"),
            ("metrics.jsonl", '{"step":5}\n', "metrics.jsonl, line 1: has no tokens"),
            ("metrics.jsonl", '{"step":5,"tokens":9}\n', "metrics.jsonl, line 1: has no loss"),
            (
                "metrics.jsonl",
                '{"step":5,"tokens":9,"loss":"x"}\n',
                'metrics.jsonl, line 1: loss is "x": should be a valid number',
            ),
            (
                "metrics.jsonl",
                '{"step":5,"tokens":9,"val_loss":2}\n',
                "metrics.jsonl, line 1: has no val_perplexity",
            ),
            ("metrics.jsonl", b"\xff\n", "metrics.jsonl: is not UTF-8 text (byte 0)"),
            ("metrics.jsonl", '{"step":-1,"tokens":9,"loss":1}\n', "step is -1: should be greater"),
            ("metrics.jsonl", '{"a":' + "[" * 9000 + "\n{}\n", "line 1: is nested too deeply"),
            ("eval/length_sweep.json", "[" * 9000, "length_sweep.json: is nested too deeply"),
            ("config.yaml", "model: 3\n", "config.yaml: "),
        ],
    )
    def test_damaged_files_are_one_line(
        self, run, tmp_path, monkeypatch, capsys, name, content, message
    ):
        (run / name).parent.mkdir(exist_ok=True)
        content = content if isinstance(content, bytes) else content.encode()
        (run / name).write_bytes(content)
        code, err = report(monkeypatch, capsys, run, "--out", tmp_path / "out")
        assert code == 2
        assert message in err
        assert err.startswith("error: ") and (err.count("\n") == 1 or name == "config.yaml")
        assert not (tmp_path / "out/index.html").exists()

    def test_folders_that_are_no_run_are_one_line(self, run, tmp_path, monkeypatch, capsys):
        for folder in (tmp_path, tmp_path / "absent", run / "model"):
            code, err = report(monkeypatch, capsys, folder, "--out", tmp_path / "out")
            assert (code, err.count("\n")) == (2, 1)
            assert f"run {folder}: has no config.yaml" in err


class TestNames:
    def test_a_point_in_a_name_does_not_cut_it(self, runs, tmp_path, monkeypatch, capsys):
        folders = [shutil.copytree(runs["cat"], tmp_path / f"lr0.{n}") for n in ("003", "001")]
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *folders, "--out", out) == (0, "")
        names = {path.name for path in out.glob("filters_*")}
        assert names == {f"filters_lr0.{n}.{end}" for n in ("003", "001") for end in ("png", "svg")}

    def test_dollars_and_underscores_are_shown_as_they_are(
        self, runs, tmp_path, monkeypatch, capsys
    ):
        from eval.length_sweep.figures import position_figure

        names = [r"p$\frac$", "_hidden"]
        folders = [shutil.copytree(runs["pythia"], tmp_path / name) for name in names]
        parts = [{"start": 1, "stop": 32, "tokens": 600, "loss": 3.0}]
        for folder, name in zip(folders, names, strict=True):
            row = sweep_row(folder, name, 20.0, positions=parts)
            write_json(folder / "eval/length_sweep.json", sweep(row))
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *folders, "--out", out) == (0, "")
        pictures = [(out / f"{n}.svg").read_text() for n in ("loss", "perplexity_by_length")]
        rows = json.loads((out / "summary.json").read_text())["length_sweep"]
        from eval.common.style import page_svg

        pictures.append(page_svg(position_figure(rows), "positions", "positions"))
        for picture in pictures:
            for name in names:
                assert f">{name}</text>" in picture
