"""The report: Table 2, filter portraits, lines of methods, runs that lack things, damaged files."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from cat_lm import architectures
from cat_lm.data.opening import open_split
from cat_lm.io.files import write_json
from eval.common.filters import Filters, own_taps, read_filters
from eval.common.models import folder_sha256
from eval.common.runs import read_run, unigram_loss
from eval.report import table2
from eval.report.filters import filters_figure, views
from eval.report.page import _data_facts, _notes
from eval.report.parts import unlike
from eval.report.sections import _length_warning
from eval.zero_shot.tasks.table2 import COLUMNS as TASK_COLUMNS
from tests.finished_runs import checkpoint, finished_run, tiny_model
from tests.prepared_data import write_prepared
from tests.unit.calls import call_main

# What the paper underlines, column by column; bold is the best of each column.
SECOND = {
    "wikitext_ppl": "CAT, RoPE",
    "lambada_standard_ppl": "MH-CAT, no PE",
    "lambada_openai_ppl": "MH-CAT, no PE",
    "lambada_standard_acc": "MH-CAT, no PE",
    "lambada_openai_acc": "MH-CAT, no PE",
    "piqa": "CAT, RoPE",
    "hellaswag": "CAT, RoPE",
    "winogrande": "Pythia",
    "arc_easy": "Mamba (Gu & Dao, 2023)",
    "arc_challenge": "MH-CAT, no PE",
    "average": "MH-CAT, no PE",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_corpus) -> dict[str, Path]:
    """A finished run for every kind of convolution."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {"none": "pythia", "head": "cat", "multihead": "mh", "depthwise": "canon"}
    return {
        name: finished_run(
            folder / name, tiny_corpus, tiny_model(257, seed=3, conv_type=kind), conv_type=kind
        )
        for kind, name in kinds.items()
    }


@pytest.fixture
def run(runs, tmp_path) -> Path:
    """A run of its own for a test that changes it."""
    return shutil.copytree(runs["cat"], tmp_path / "cat")


def report(monkeypatch, capsys, *arguments: object) -> tuple[int, str]:
    from eval.report.__main__ import main

    code, _, error = call_main(main, monkeypatch, capsys, "eval.report", *arguments)
    return code, error


def zero_shot(run: Path, scale: float = 1.0, leave_out: str = "", limit: int | None = None) -> dict:
    """A result of eval.zero_shot; `scale` multiplies accuracies and divides perplexities."""
    tasks: dict = {}
    for index, (column, (task, metric)) in enumerate(TASK_COLUMNS.items()):
        value = 30.0 / scale if column.endswith("_ppl") else 0.02 * (index + 10) * scale
        found = tasks.setdefault(task, {"metrics": {}, "stderr": {}, "version": 1, "n": 5})
        found["metrics"][metric] = value
        found["stderr"][metric] = 0.0123
    tasks.pop(leave_out, None)
    model = {"label": "x", "sha256": folder_sha256(run / "model")}
    return {"model": model, "settings": {"limit": limit}, "tasks": tasks, "average": {}}


def sweep_row(run: Path, label: str, perplexity: float, **changes: object) -> dict:
    """A row of eval.length_sweep."""
    row = {"label": label, "method": "none", "length": 32, "training_length": 32, "tokens": 640}
    row |= {"perplexity": perplexity, "loss": 3.0, "bits_per_byte": 1.5, "standard_error": 0.1}
    row |= {"groups": 4, "group_kind": "documents", "tokens_sha256": "a" * 64}
    return row | {"model_sha256": folder_sha256(run / "model"), **changes}


def samples(run: Path) -> dict:
    """A result of eval.samples."""
    sample = {"prompt": "def f", "reference": "(x):", "continuation": "oo(y):"}
    options = {"max_new_tokens": 8, "seed": 0, "temperature": 0.8, "top_p": 0.95}
    return {**options, "model_sha256": folder_sha256(run / "model"), "samples": [sample]}


def change_weights(run: Path) -> None:
    """As if another step of the run were exported."""
    from safetensors.numpy import load_file, save_file

    path = run / "model/model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    save_file(tensors | {name: tensors[name] + 1}, path, {"format": "pt"})


def validations_end_with(run: Path, *losses: float | None) -> None:
    """Leave the first validation of a run's metrics, and these at its end."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in lines if "val_loss" in record].pop()
    lines.remove(last)
    for loss in losses:
        perplexity = 1e304 if loss is None else 2.0**loss  # as train.py has it of infinity
        values = {"val_loss": loss, "val_perplexity": perplexity, "val_bits_per_byte": loss}
        lines.append(last | values)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text)


def results(page: str) -> dict[str, str]:
    """The rows of the page's first table, by the runs' labels."""
    rows = re.findall(r"<tr><th>.*?</tr>", page.split("<h2>Results")[1].split("</table>")[0])
    return {re.search(r"(\w+)<small>", row)[1]: row for row in rows}


class TestTable2:
    def test_runs_of_the_papers_rivals_stand_above_its_rows(self, tiny_corpus, tmp_path):
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
        gla = architectures.get("gla")
        fields = gla.fields(gla.Section(**shape), 257, 32)
        model = gla.classes().causal_lm(gla.config_class()(**fields))
        run = finished_run(tmp_path / "gla", tiny_corpus, model, architecture="gla", **shape)
        write_json(run / "zero_shot/zero_shot.json", zero_shot(run))
        ours = table2.own_rows([read_run(run)])
        lines = table2.markdown(ours, table2.paper_rows()).splitlines()
        assert lines[2].startswith("| gla | this report | 30.000 |")
        assert any(line.startswith("| GLA (Yang et al., 2023)* | paper |") for line in lines)

    def test_marks_are_the_paper_s(self):
        rows = table2.paper_rows()
        marked = table2.marks(rows)
        for column, model in SECOND.items():
            second = [rows[i].model for (i, c), m in marked.items() if (c, m) == (column, "second")]
            assert second == [model], column
            (best,) = [i for (i, c), mark in marked.items() if (c, mark) == (column, "best")]
            values = [row.values[column] for row in rows if row.values[column] is not None]
            pick = min if column.endswith("_ppl") else max
            assert rows[best].values[column] == pick(values)

    def test_runs_and_paper_are_marked_apart_and_told_apart(
        self, runs, tmp_path, monkeypatch, capsys
    ):
        folders = [shutil.copytree(runs[name], tmp_path / name) for name in ("cat", "pythia")]
        for folder, scale in zip(folders, (1.0, 1.1), strict=True):
            write_json(folder / "zero_shot/zero_shot.json", zero_shot(folder, scale))
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *folders, "--out", out) == (0, "")
        text = (out / "table2.md").read_text(encoding="utf-8")
        lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
        average = 0.02 * sum(range(13, 20)) / 7
        assert lines["pythia"].endswith(f"**{1.1 * average:.3f}** |")
        assert lines["cat"].endswith(f"<u>{average:.3f}</u> |")
        assert "| this report |" in lines["cat"]
        assert "| paper |" in lines["Pythia"]
        assert lines["MH-CAT, RoPE"].endswith("**0.422** |")
        assert "GLA (Yang et al., 2023)*" in lines
        with open(out / "table2.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [row["source"] for row in rows] == ["this report"] * 2 + ["paper"] * 8
        assert float(rows[0]["wikitext_ppl"]) == 30.0
        assert float(rows[0]["piqa_stderr"]) == 0.0123
        page = (out / "index.html").read_text(encoding="utf-8")
        assert "Printed in the paper, not measured here" in page
        assert 'class="best"><span>0.422' in page
        assert "eval.zero_shot" not in page.split("How this was made")[0]
        summary = json.loads((out / "summary.json").read_text())
        assert summary["runs"][0]["zero_shot_average"] == pytest.approx(average)

    def test_missing_tasks_and_limits_are_said(self, run, tmp_path, monkeypatch, capsys):
        write_json(run / "zero_shot/zero_shot.json", zero_shot(run, leave_out="piqa", limit=40))
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, run, "--out", out)[0] == 0
        page = (out / "index.html").read_text(encoding="utf-8")
        assert f"python -m eval.zero_shot {run} --tasks table2" in page
        note = "Not whole tasks, by --limit: only the first 40 rows (cat) of each."
        assert note in page
        assert f"**{note}**" in (out / "table2.md").read_text(encoding="utf-8")
        line = (out / "table2.md").read_text(encoding="utf-8").splitlines()[2]
        assert line.count("–") == 2, "PIQA and the average"
        assert "**" not in line, "one run is neither best nor second"

    def test_runs_that_were_not_measured_alike_are_said(self, runs, tmp_path, monkeypatch, capsys):
        folders = [shutil.copytree(runs[name], tmp_path / name) for name in ("cat", "pythia")]

        def warned(**second: object) -> str:
            for folder, changes in zip(folders, ({}, second), strict=True):
                result = zero_shot(folder)
                result["model"] |= {"max_length": 1024, "dtype": "float32"} | changes
                rows = result["model"].pop("rows", "a")
                key = {"rows_sha256": rows, "definition_sha256": "d"}
                result["tasks"]["piqa"]["key"] = key
                write_json(folder / "zero_shot/zero_shot.json", result)
            out = tmp_path / "out"
            assert report(monkeypatch, capsys, *folders, "--out", out)[0] == 0
            with open(out / "table2.csv", encoding="utf-8") as file:
                row = list(csv.DictReader(file))[1]
            expected = {"max_length": 1024, "dtype": "float32"} | second
            assert (row["context"], row["dtype"]) == (
                str(expected["max_length"]),
                expected["dtype"],
            )
            text = (out / "table2.md").read_text(encoding="utf-8")
            lines = [line[2:-2] for line in text.splitlines() if line.startswith("**")]
            page = (out / "index.html").read_text(encoding="utf-8")
            assert all(line in page for line in lines)
            return " ".join(lines)

        assert warned() == ""
        length = "Not at one length, by --max-length: 512 tokens (pythia); 1,024 tokens (cat)."
        assert warned(max_length=512) == length
        assert (
            warned(dtype="bfloat16")
            == "Not in one arithmetic, by --dtype: bfloat16 (pythia); float32 (cat)."
        )
        assert warned(rows="b") == "Not of the same rows, or by another definition: piqa."


class TestFilters:
    def test_read_as_stored_and_shown_by_kind(self, runs):
        assert read_filters(runs["pythia"] / "model") is None
        shapes = {"cat": (2, 2, 4), "canon": (2, 2, 16, 4), "mh": (2, 4, 2, 2)}
        for name, shape in shapes.items():
            filters = read_filters(runs[name] / "model")
            assert list(filters.streams) == ["q", "k", "v"]
            assert filters.streams["q"].shape == shape
            assert len(views(filters)) == (1 if name == "cat" else 2)
            for view in views(filters):
                assert {v.shape[:2] for v in view.values.values()} == {(2, 2)}, "layers, heads"

    @pytest.mark.parametrize("kind", ["head", "multihead"])
    def test_keys_and_values_may_have_fewer_heads(self, kind):
        shapes = {"head": lambda h: (3, h, 5), "multihead": lambda h: (3, 5, h, h)}[kind]
        random = np.random.default_rng(0)
        streams = {s: random.normal(size=shapes(h)) for s, h in (("q", 4), ("k", 2), ("v", 2))}
        figure = filters_figure(Filters(kind, streams))
        panels = [axes for axes in figure.axes if axes.images and axes.get_title() in "qkv"]
        assert len(panels) == (3 if kind == "head" else 6)
        for axes in panels:
            heads = len(axes.images[0].get_array()) / 3
            assert heads == (4 if axes.get_title() == "q" else 2)
            assert axes.get_ylim() == (2.5, -0.5) and list(axes.get_yticks()) == [0, 1, 2]

    def test_multihead_view_is_of_the_right_pairs(self):
        taps = np.zeros((1, 3, 2, 2), dtype=np.float32)  # layers, W, H_out, H_in
        taps[0, 0] = np.eye(2)
        taps[0, 1, 0, 1], taps[0, 2, 0, 1] = 3.0, -4.0
        taps[0, 2, 1, 1] = 0.5
        filters = Filters("multihead", {"v": taps})
        own, pairs = views(filters)
        assert own.values["v"][0].tolist() == [[1, 0, 0], [1, 0, 0.5]]
        assert own.limit == 0.5
        assert pairs.values["v"][0, 0].tolist() == [1.0, 5.0], "out 0 reads 5 from head 1"
        assert pairs.values["v"][0, 1, 0] == 0.0
        assert pairs.limit == 5.0

    def test_depthwise_view_is_mean_and_spread_over_channels(self):
        taps = np.array([[[[1.0, 0.2], [1.0, 0.4]]]])  # one layer, one head, two channels
        mean, spread = views(Filters("depthwise", {"k": taps}))
        assert mean.values["k"][0, 0].tolist() == pytest.approx([1.0, 0.3])
        assert spread.values["k"][0, 0].tolist() == pytest.approx([0.0, 0.1])

    def test_window_of_one_and_every_width_can_be_drawn(self):
        for conv_type, shape in (("head", (2, 3, 1)), ("multihead", (2, 1, 3, 3))):
            filters = Filters(conv_type, {"q": np.ones(shape, dtype=np.float32)})
            assert own_taps(filters)["q"].shape == (2, 3, 1)
            for size in ((7.4, 3.7), (3.8, 3.3)):
                filters_figure(filters, size).canvas.draw()


class TestLengths:
    def test_methods_differ_by_line_and_runs_by_colour(self):
        from eval.common.style import run_colour
        from eval.length_sweep.figures import length_figure

        rows = [
            {
                **{"label": label, "method": method, "length": length, "perplexity": 20.0},
                **{"training_length": 32, "standard_error": None, "groups": 1},
            }
            for label, methods in (("a", ("none", "pi", "yarn")), ("b", ("none", "temperature")))
            for method in methods
            for length in (32, 64)
            if (method, length) != ("yarn", 64)  # a cell that did not fit into memory
        ]
        axes = length_figure(rows, order=["z", "a", "b"]).axes[0]
        lines = [
            line for line in axes.lines if len(line.get_xdata()) and line.get_marker() != "None"
        ]
        assert len(lines) == 5
        styles = [line.get_linestyle() for line in lines]
        assert len(set(styles[:3])) == 3
        assert [line.get_color() for line in lines] == [run_colour(1)] * 3 + [run_colour(2)] * 2

    def test_command_for_a_missing_sweep_is_complete(self, run, tmp_path, monkeypatch, capsys):
        from eval.common.runs import read_run

        assert report(monkeypatch, capsys, run, "--out", tmp_path / "out")[0] == 0
        page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
        data = read_run(run).config.data.path
        assert re.search(
            rf"python -m eval.length_sweep {run} --data {data} --lengths 16,32,64,128,256 "
            rf"--methods all --out {run}/eval",
            page,
        )

    def test_a_table_of_somebody_else_s_is_not_replaced(self, run, tmp_path, monkeypatch, capsys):
        out = tmp_path / "out"
        out.mkdir()
        (out / "table2.md").write_text("mine")
        code, said = report(monkeypatch, capsys, run, "--out", out)
        assert code == 2 and f"--out {out}: table2.md is not of an earlier run" in said
        assert [path.name for path in out.iterdir()] == ["table2.md"]
        assert (out / "table2.md").read_text() == "mine"


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
        sweep = {"text": "<i>d", "protocol": {"windows": "<i>e"}, "command": "<i>f", "rows": rows}
        write_json(run / "eval/length_sweep.json", sweep)
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
            ("zero_shot/zero_shot.json", "{}", "zero_shot.json: has no tasks"),
            (
                "zero_shot/zero_shot.json",
                '{"tasks": []}',
                "tasks is []: should be an object; make",
            ),
            (
                "zero_shot/zero_shot.json",
                '{"tasks": {"piqa": 3}}',
                "piqa: holds 3: should be an",
            ),
            (
                "zero_shot/zero_shot.json",
                '{"tasks": {"piqa": {"metrics": {"acc": "x"}}}}',
                'zero_shot.json, task piqa: metrics.acc is "x": should be a valid number',
            ),
            ("eval/length_sweep.json", '{"rows": ', "length_sweep.json: is not JSON"),
            ("eval/length_sweep.json", "{}", "length_sweep.json: has no rows"),
            ("eval/length_sweep.json", '{"rows": [{}]}', "length_sweep.json, row 1: has no label"),
            ("eval/samples.json", "3", "samples.json: holds 3, must be an object"),
            ("eval/samples.json", '{"samples": [{}]}', "samples.json: has no max_new_tokens"),
            (
                "eval/samples.json",
                '{"samples": [{}], "max_new_tokens": 1, "seed": 0, "temperature": 1, "top_p": 1}',
                "samples.json, sample 1: has no prompt",
            ),
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


class TestDivergedRuns:
    """The last validation is the final one, whatever came before it."""

    @pytest.fixture
    def pair(self, runs, tmp_path) -> list[Path]:
        return [shutil.copytree(runs[name], tmp_path / name) for name in ("cat", "pythia")]

    def test_an_earlier_validation_is_not_its_final_one(self, pair, tmp_path, monkeypatch, capsys):
        validations_end_with(pair[0], None)  # its first, 4.4, is lower than the other's last
        validations_end_with(pair[1], 4.75)
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *pair, "--out", out) == (0, "")
        page = (out / "index.html").read_text(encoding="utf-8")
        lines = results(page)
        assert "<td>n/a (diverged)</td><td>n/a</td><td>n/a</td>" in lines["cat"]
        assert 'class="best"' not in lines["cat"]
        assert '<td class="best">4.7500</td>' in lines["pythia"]
        assert "Diverged: cat. Lowest held-out loss: pythia, 4.750" in page
        summary = json.loads((out / "summary.json").read_text())["runs"]
        assert [row["diverged"] for row in summary] == [True, False]
        keys = ("val_loss", "val_perplexity", "val_bits_per_byte")
        assert [summary[0][key] for key in keys] == [None] * 3
        assert len(read_run(pair[0]).validation) == 1, "the curve keeps what is finite"

    def test_a_run_that_came_back_has_not_diverged(self, pair, tmp_path, monkeypatch, capsys):
        validations_end_with(pair[0], None, 4.25)
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *pair, "--out", out) == (0, "")
        page = (out / "index.html").read_text(encoding="utf-8")
        assert "4.2500" in results(page)["cat"] and "iverged" not in page

    def test_one_without_a_finite_loss_is_not_said_to_lack_a_validation(
        self, pair, tmp_path, monkeypatch, capsys
    ):
        validations_end_with(pair[0], None)
        assert report(monkeypatch, capsys, pair[0], "--out", tmp_path / "out") == (0, "")
        page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
        assert "Diverged: cat.</p>" in page and "No validation was made" not in page


def edit_config(run: Path, pattern: str, replacement: str) -> None:
    config = (run / "config.yaml").read_text()
    changed = re.sub(pattern, replacement, config)
    assert changed != config
    (run / "config.yaml").write_text(changed)


def edit_export(run: Path, **facts: object) -> None:
    path = run / "model/export.json"
    write_json(path, json.loads(path.read_text()) | facts)


class TestWhichData:
    """Losses are ranked where they are of the same data, as the runs recorded them."""

    @pytest.fixture
    def pair(self, runs, tmp_path) -> list[Path]:
        return [shutil.copytree(runs[name], tmp_path / name) for name in ("cat", "pythia")]

    @pytest.fixture
    def prepared(self, tiny_corpus) -> str:
        """The fingerprint of what the runs' folder holds today."""
        return json.loads((tiny_corpus / "manifest.json").read_text())["fingerprint"]

    def test_folder_prepared_again_between_two_runs(
        self, pair, prepared, tiny_corpus, tmp_path, monkeypatch, capsys
    ):
        validations_end_with(pair[1], 2.5)
        out = tmp_path / "out"
        for fingerprint in (prepared, "e" * 64):
            edit_export(pair[0], data_fingerprint=fingerprint)
            assert report(monkeypatch, capsys, *pair, "--out", out) == (0, "")
            page = (out / "index.html").read_text(encoding="utf-8")
            is_same = fingerprint == prepared
            assert ('<td class="best">2.5000</td>' in results(page)["pythia"]) is is_same
            assert ('class="best"' in page.split("</table>")[0]) is is_same
            assert ("Lowest held-out loss: pythia" in page) is is_same
            assert ("unigram" in page) is is_same
            assert ("No value is marked as the best" in page) is not is_same
            assert bool(re.search(r"each trained on \S+ tokens of ", page)) is is_same
        named = f"{'e' * 16} (cat); {prepared[:16]} (pythia)."
        assert f"Not trained on the same data, by fingerprint: {named}" in page
        assert f"<dt>data {tiny_corpus}</dt>" in page
        absent = f"fingerprint {'e' * 16}; not found in {tiny_corpus}"
        assert re.search(rf"<dt>data of cat</dt>\s*<dd>{absent}</dd>", page)

    def test_data_that_nothing_tells_are_unknown(self, pair):
        for run in pair:
            edit_config(run, "path: .*", "path: gone")
        found = [read_run(run) for run in pair]
        assert [run.data for run in found] == [None, None]
        said = "Not known to be trained on the same data, by fingerprint: unknown (cat, pythia)."
        assert unlike(found) == [said] and unigram_loss(found) is None
        assert _data_facts(found) == {"data of cat, pythia": "unknown"}
        assert unlike(found[:1]) == [], "of one run nothing is compared"
        edit_export(pair[0], data_fingerprint="e" * 64)
        one = [read_run(run) for run in pair]
        named = f"{'e' * 16} (cat); unknown (pythia)"
        assert unlike(one) == [said.replace("unknown (cat, pythia)", named)]

    def test_data_that_are_gone_are_known_by_the_export(self, pair):
        for run in pair:
            edit_config(run, "path: .*", f"path: gone/{run.name}")
            edit_export(run, data_fingerprint="e" * 64)
        found = [read_run(run) for run in pair]
        assert unlike(found) == [] and unigram_loss(found) is None

    def test_a_copy_elsewhere_has_the_unigram_model_s_loss(self, pair, prepared, tiny_corpus):
        edit_config(pair[0], "path: .*", "path: gone")
        edit_export(pair[0], data_fingerprint=prepared)
        found = [read_run(run) for run in pair]
        expected = json.loads((tiny_corpus / "manifest.json").read_text())["unigram_loss"]
        assert unlike(found) == [] and unigram_loss(found) == expected

    def test_without_a_record_in_the_export_the_newest_checkpoint_says(
        self, run, prepared, tiny_corpus
    ):
        assert read_run(run).data == prepared, "neither says anything"
        model = tiny_model(257)
        for step in (6, 12):
            checkpoint(run, model, tiny_corpus / "tokenizer", step)
        assert read_run(run).data == "f" * 64 and not read_run(run).manifests
        state = run / "checkpoints/step-00000012/state.json"
        state.write_text(state.read_text().replace("f" * 64, "d" * 64))
        assert read_run(run).data == "d" * 64
        state.write_text("x" * state.stat().st_size)  # damaged, and as long as the marker says
        assert read_run(run).data == "f" * 64
        state.write_text("{}")  # of another size than the marker says: no complete checkpoint
        assert read_run(run).data == "f" * 64
        shutil.rmtree(run / "model")
        assert read_run(run).data == "f" * 64

    def test_a_mixture_is_known_by_its_parts_and_shares(self, run, tmp_path):
        for number in range(3):
            documents = [[*range(10 * number + 1, 10 * number + 9), 0]] * 4
            write_prepared(tmp_path / f"part{number}", documents)
        shares = {str(tmp_path / f"part{number}"): 1.0 + number for number in range(3)}
        edit_config(run, r"( *)path: .*\n *mixture: null", rf"\1mixture: {json.dumps(shares)}")
        config = read_run(run).config
        trained = open_split(config.data, "train").fingerprint
        assert read_run(run).data == trained
        edit_export(run, data_fingerprint=trained)
        assert list(read_run(run).manifests) == list(shares)
        shutil.rmtree(tmp_path / "part1")
        assert read_run(run).data == trained and not read_run(run).manifests

    def test_other_context_lengths_are_said(self, pair, tmp_path, monkeypatch, capsys):
        edit_config(pair[1], "context_length: 32", "context_length: 1024")
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *pair, "--out", out) == (0, "")
        page = (out / "index.html").read_text(encoding="utf-8")
        assert "Not trained at one context length: 32 tokens (cat); 1,024 tokens (pythia)." in page
        assert 'class="best"' not in page.split("</table>")[0] and "Lowest held-out" not in page
        assert "equally many tokens" not in page

    def test_losses_of_more_and_of_less_held_out_text_are_not_ranked(self, pair):
        found = [read_run(run) for run in pair]
        assert unlike(found) == []
        edit_config(pair[1], r"(validation:\n.*\n *max_tokens): .*", r"\1: 64")
        edit_config(pair[0], r"(validation:\n.*\n *max_tokens): .*", r"\1: null")
        said = "Perhaps not scored on as much held-out text: no limit (cat); 64 tokens (pythia)."
        assert unlike([read_run(run) for run in pair]) == [said]
        # As many whole windows of 32 tokens.
        edit_config(pair[0], r"(validation:\n.*\n *max_tokens): .*", r"\1: 65")
        assert unlike([read_run(run) for run in pair]) == []
        edit_config(pair[0], r"mask_documents: .*", "mask_documents: true")
        said = "Documents of a window are not read alike: apart (cat); joined (pythia)."
        assert unlike([read_run(run) for run in pair]) == [said]

    def test_other_budgets_are_said(self, pair):
        budgets = "The runs were not trained on equally many tokens."
        assert budgets not in _notes([read_run(run) for run in pair])
        lines = (pair[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
        assert "val_loss" in lines[-1]
        # One was stopped before its last validation.
        (pair[0] / "metrics.jsonl").write_text("".join(lines[:-1]))
        notes = _notes([read_run(run) for run in pair])
        assert budgets in notes and notes[0].startswith("Best values are bold.")


class TestWhoseResults:
    """What is shown of a run was measured on the weights that it has."""

    @pytest.fixture
    def measured(self, run) -> Path:
        write_json(run / "zero_shot/zero_shot.json", zero_shot(run))
        rows = [sweep_row(run, "cat", 21.75)]
        write_json(run / "eval/length_sweep.json", {"text": "x", "rows": rows})
        write_json(run / "eval/samples.json", samples(run))
        return run

    def test_results_of_the_present_export_are_shown(self, measured, tmp_path, monkeypatch, capsys):
        assert report(monkeypatch, capsys, measured, "--out", tmp_path / "out") == (0, "")
        page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
        assert "21.75" in page and "oo(y):" in page and "12,3" not in page
        assert "other weights" not in page

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({}, ""),
            ({"length": 64}, ""),
            ({"stride": 8}, "The runs were scored in different windows."),
            ({"documents": "per-document"}, "The runs were scored in different windows."),
            ({"dtype": "bfloat16"}, "The runs were scored in different arithmetic (dtype)."),
            (
                {"stride": 8, "tokens_sha256": "b" * 64},
                "The runs were scored on different tokens and in different windows.",
            ),
        ],
    )
    def test_sweeps_that_cannot_be_compared_are_said(
        self, measured, runs, tmp_path, monkeypatch, capsys, change, said
    ):
        other = shutil.copytree(runs["mh"], tmp_path / "other")
        protocol = {"stride": 32, "documents": "concatenated", "dtype": "float32"}
        for run, more in ((measured, {}), (other, change)):
            row = sweep_row(run, run.name, 21.75) | protocol | more
            write_json(run / "eval/length_sweep.json", {"text": "x", "rows": [row]})
        assert report(monkeypatch, capsys, measured, other, "--out", tmp_path / "out") == (0, "")
        page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
        assert ("The runs were scored" in page) is bool(said) and said in page

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({}, ""),
            ({"dtype": "bfloat16"}, "in different arithmetic (dtype)"),
            ({"dtype": "bfloat16", "method": "none"}, "in different arithmetic (dtype)"),
            ({"factor": 2.0}, "with different scaling factors"),
            ({"temperature_scope": "rotary"}, "with different temperature scopes"),
            ({"factor": 2.0, "temperature_scope": "rotary", "method": "pi"}, ""),
            ({"dtype": "bfloat16", "factor": 2.0, "temperature_scope": "rotary", "length": 64}, ""),
            ({"dtype": None, "factor": None, "temperature_scope": None}, ""),
            (
                {"stride": 8, "dtype": "float16", "factor": 4.0},
                "in different windows, in different arithmetic (dtype) and with different scaling "
                "factors",
            ),
        ],
    )
    def test_other_arithmetic_and_scaling_are_said(self, change, said):
        row = {"length": 32, "method": "yarn", "tokens_sha256": "a", "stride": 32}
        row |= {"documents": "concatenated", "dtype": "float32", "factor": 1.0}
        row |= {"temperature_scope": "logits"}
        found = _length_warning([row, row | change])
        assert found == (f"The runs were scored {said}." if said else "")
        older = {key: value for key, value in row.items() if key not in change}
        if change.keys() <= {"dtype", "factor", "temperature_scope"}:
            assert _length_warning([older, row | change]) == ""

    def test_a_scope_does_nothing_without_a_temperature(self):
        row = {"length": 32, "tokens_sha256": "a"}
        for method, said in (("none", False), ("pi", False), ("temperature", True)):
            rows = [{**row, "method": method, "temperature_scope": s} for s in ("logits", "rotary")]
            assert bool(_length_warning(rows)) is said, method

    def test_rows_of_other_models_are_left_out_and_said(
        self, measured, runs, tmp_path, monkeypatch, capsys
    ):
        path = measured / "eval/length_sweep.json"
        values = json.loads(path.read_text())
        values["rows"] += [sweep_row(runs["mh"], "mh", 99.25)]
        write_json(path, values)
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, measured, "--out", out) == (0, "")
        summary = json.loads((out / "summary.json").read_text())
        assert [row["perplexity"] for row in summary["length_sweep"]] == [21.75]
        page = (out / "index.html").read_text(encoding="utf-8")
        assert "rows of other weights in the sweeps of cat (mh)" in page and "99.25" not in page

    def test_results_of_an_older_export_are_left_out_with_the_command(
        self, measured, tmp_path, monkeypatch, capsys
    ):
        change_weights(measured)
        (measured / "model" / "export.json").unlink()
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, measured, "--out", out) == (0, "")
        page = (out / "index.html").read_text(encoding="utf-8")
        todo = "\n".join(re.findall(r'<div class="todo">.*?</div>', page, re.DOTALL))
        assert todo.count("measured on other weights") == 3
        for module in ("zero_shot", "length_sweep", "samples"):
            assert todo.count(f"python -m eval.{module} {measured}") == 1
        assert "21.75" not in page and "oo(y):" not in page
        summary = json.loads((out / "summary.json").read_text())
        assert summary["runs"][0]["zero_shot_average"] is None and not summary["length_sweep"]
        assert not (out / "perplexity_by_length.png").exists()


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
            write_json(folder / "eval/length_sweep.json", {"text": "x", "rows": [row]})
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *folders, "--out", out) == (0, "")
        pictures = [(out / f"{n}.svg").read_text() for n in ("loss", "perplexity_by_length")]
        rows = json.loads((out / "summary.json").read_text())["length_sweep"]
        from eval.common.style import page_svg

        pictures.append(page_svg(position_figure(rows), "positions", "positions"))
        for picture in pictures:
            for name in names:
                assert f">{name}</text>" in picture
