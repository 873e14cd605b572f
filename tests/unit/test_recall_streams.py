"""The ablation of streams: its grid, its small language model, its table."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cat_lm.core.errors import UserError
from cat_lm.core.files import finite
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.data.opening import open_corpus
from cat_lm.mixers import Setting, make_mixer
from cat_lm.model.context import Context
from cat_lm.model.streams.pipeline import StreamPipeline
from eval.common.comparison import t_quantile
from eval.common.grids import cells, execution
from eval.common.grids.tuning import Choice
from eval.recall.grids import streams
from eval.recall.grids.plan import Run
from eval.recall.show import streams as page
from eval.recall.train.held_out import held_out, over_documents
from eval.recall.train.language import LanguageCell, _rate


@pytest.fixture(scope="module")
def cell(tiny_corpus: Path) -> LanguageCell:
    fingerprint = open_corpus(tiny_corpus, "train").fingerprint
    documents = open_corpus(tiny_corpus, "validation").num_documents
    return LanguageCell(
        *(str(tiny_corpus), fingerprint, "cat", 32, 32, 1, 60, 1e-2),
        batch_size=8,
        documents=documents,
        document_tokens=100,
    )


def test_a_small_language_model_learns_and_is_repeatable(cell, tiny_corpus):
    record = cell.run("cpu", quiet=True)
    unigram = open_corpus(tiny_corpus, "train").manifest["unigram_loss"]
    assert record["loss"] < unigram - 0.3
    assert record == {**cell.run("cpu", quiet=True), "seconds": record["seconds"]}
    split = open_corpus(tiny_corpus, "validation")
    sizes = [split.document(i)[1] - split.document(i)[0] for i in range(split.num_documents)]
    assert record["documents"]["tokens"] == [min(n - 1, 100) for n in sizes]
    assert record["tokens_scored"] == sum(record["documents"]["tokens"])
    assert math.isclose(
        sum(record["documents"]["nats"]) / record["tokens_scored"], record["loss"], rel_tol=1e-4
    )
    assert 0 < record["standard_error"] < 0.5
    other = dataclasses.replace(cell, seed=1).run("cpu", quiet=True)
    assert other["loss"] != record["loss"]
    with pytest.raises(UserError, match="changed since"):
        dataclasses.replace(cell, fingerprint="0" * 64).run("cpu")


def test_a_rate_is_chosen_by_documents_that_are_not_scored(cell, tiny_corpus):
    corpus = open_corpus(tiny_corpus, "validation")
    kept = dataclasses.replace(cell, documents=corpus.num_documents - 3, choosing_documents=3)
    sizes = [corpus.document(i)[1] - corpus.document(i)[0] for i in range(corpus.num_documents)]
    predicted = [min(n - 1, 100) for n in sizes]
    record = dataclasses.replace(kept, steps=2).run("cpu", quiet=True)
    assert record["documents"]["tokens"] == predicted[3:]  # of all there are but the first
    assert record["validation"]["tokens_scored"] == sum(predicted[:3])
    # What is reported decides nothing.
    assert kept.score(record) == -record["validation"]["loss"] != -record["loss"]
    assert kept.score(record | {"loss": 0.0}) == kept.score(record)
    assert kept.tested_rows == 4 * corpus.num_documents and kept.timed().choosing_documents == 0
    assert "validation" not in dataclasses.replace(cell, steps=2).run("cpu", quiet=True)
    assert kept.key() == {**cell.key(), "documents": kept.documents, "choosing_documents": 3}
    more = dataclasses.replace(kept, documents=corpus.num_documents - 2)
    with pytest.raises(UserError, match=r"are to be scored and 3 others choose rates; prepare it"):
        more.run("cpu")


def test_the_rate_rises_over_a_tenth_and_falls_to_a_tenth():
    rates = [_rate(step, 100) for step in range(1, 101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and math.isclose(rates[-1], 0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_held_out_rows_are_the_starts_of_documents(tiny_corpus):
    corpus = open_corpus(tiny_corpus, "validation")
    found = held_out(corpus, 3, 10, 4)
    for number in range(3):
        start, stop = corpus.document((2 * number + 1) * corpus.num_documents // 6)
        text = corpus.tokens(start, min(stop, start + 11)).tolist()
        rows = found.documents == number
        labels = found.labels[rows].flatten()
        assert labels[labels != IGNORE_INDEX].tolist() == text[1:]
        inputs = found.inputs[rows].flatten()
        assert inputs[labels != IGNORE_INDEX].tolist() == text[:-1]
    with pytest.raises(UserError, match=r"has \d+ documents, 9,999 are to be scored; .*--valid"):
        held_out(corpus, 9_999, 10, 4)


def test_a_short_document_ends_with_its_eod_and_one_without_text_counts_nothing():
    tokens = np.array([5, 9, 9, 6, 7, 8, 9])  # documents 5 EOD; EOD; 6 7 8 EOD
    ends = [(0, 2), (2, 3), (3, 7)]
    corpus = SimpleNamespace(
        name="small",
        num_documents=3,
        eod_id=9,
        document=lambda i: ends[i],
        tokens=lambda start, stop: tokens[start:stop],
    )
    found = held_out(corpus, 3, 8, 2)
    assert found.inputs.tolist() == [[5, 9], [9, 9], [6, 7], [8, 9]]
    ignored = IGNORE_INDEX
    assert found.labels.tolist() == [[9, ignored], [ignored, ignored], [7, 8], [9, ignored]]
    assert found.documents.tolist() == [0, 1, 2, 2]
    first, rest = (
        held_out(corpus, n, 8, 2, among) for n, among in ((1, range(1)), (2, range(1, 3)))
    )
    assert first.inputs.tolist() + rest.inputs.tolist() == found.inputs.tolist()
    assert rest.documents.tolist() == [0, 1, 1]
    with pytest.raises(UserError, match=r"small: 1 documents .* have no token to predict; prepare"):
        held_out(corpus, 1, 8, 2, range(1, 2))


def test_the_error_over_documents_is_that_of_their_ratio():
    nats, tokens = [10.0, 30.0, 20.0], [10, 10, 10]
    found = over_documents(nats, tokens)
    assert found["loss"] == 2 and found["tokens_scored"] == 30
    assert found["standard_error"] == pytest.approx(1 / math.sqrt(3))  # of 1, 3 and 2
    assert over_documents([3.0], [2])["standard_error"] is None


def tiny(scale: str) -> streams.Scale:
    return dataclasses.replace(streams.SCALES[scale], documents=4, choosing=2)


def test_the_grid_compares_like_with_like(tiny_corpus):
    for scale in map(tiny, streams.SCALES):
        places = streams.plan(scale, [str(tiny_corpus)])
        names = {(p.run.row, p.run.column, p.run.line) for p in places}
        assert len(names) == len(places) == 2 * 8 * (8 + 2 + 5 + 2)
        for place in places:
            run, cell = place.run, place.run.cell
            options = make_mixer(cell.mixer).options
            assert (options.heads, options.activation) == (2, "none")
            assert getattr(options, "dropout", 0.0) == 0.0 and not getattr(options, "bias", False)
            assert getattr(options, "position", "none") == "none"
            assert getattr(options, "expand_v", 1.0) == 1.0
            assert options.shared_kv == run.line.startswith("K = V")
            subset = run.line.removeprefix("K = V, ").removesuffix(", W = 2")
            assert (options.streams or "none") == subset
            assert cell.layers == 1 or run.row != streams.RECALL
            if subset != "none":
                assert options.init == "identity"
                assert options.window == (2 if run.line.endswith("W = 2") else 4)
                assert run.column.endswith(f", {options.conv_type}")
        starts = {p.run.cell.mixer for p in places if p.run.line == "none"}
        assert len(starts) == 4  # the same whatever the filters would be
    assert all(
        len(s.rates) == 3 == len(s.text_rates) for n, s in streams.SCALES.items() if n != "smoke"
    )
    assert streams.SCALES["cpu"].documents >= 200 <= streams.SCALES["paper"].documents
    assert all(scale.choosing > 0 for scale in streams.SCALES.values())
    texts = [p.run.cell for p in places if p.run.row != streams.RECALL]
    assert {(cell.documents, cell.choosing_documents) for cell in texts} == {(4, 2)}


def test_every_model_of_the_grid_starts_as_the_one_without_filters():
    x = torch.randn(2, 9, 16)
    for mixer in streams.MIXERS.values():
        for kind in streams.CONV_TYPES:
            for line in streams.LINES:
                base = streams.Line("none", shared_kv=line.shared_kv)
                found = []
                for each in (line, base):
                    torch.manual_seed(0)
                    mixed = make_mixer(streams.specification(mixer, kind, each))
                    found.append(mixed.build(Setting(16)).train())
                filtered, plain = found
                state = {k: v for k, v in filtered.state_dict().items() if "filter" not in k}
                plain.load_state_dict(state)
                outputs = filtered(x, Context()), plain(x, Context())
                torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("line", streams.LINES, ids=lambda line: line.name)
@pytest.mark.parametrize("name", streams.SUMS)
def test_what_holds_by_algebra(name, line):
    """Exchanging two keys' values changes no answer where neither k nor v has a filter."""
    torch.manual_seed(0)
    specification = streams.specification(streams.MIXERS[name], "depthwise", line)
    layer = make_mixer(specification).build(Setting(16)).eval()
    for module in layer.modules():  # trained filters are no identity
        if isinstance(module, StreamPipeline):
            for filters in module.filters().values():
                torch.nn.init.normal_(filters)
    tokens = torch.randn(1, 12, 16)  # four keys with their values, three others, a query
    swapped = tokens[:, [0, 3, 2, 1, *range(4, 12)]]
    answers = [layer(row, Context())[:, -1] for row in (tokens, swapped)]
    equal = torch.allclose(*answers, rtol=1e-4, atol=1e-6)
    assert equal == (line.streams in ("none", "q"))


def test_no_model_is_trained_for_less_because_it_learns_sooner():
    for scale in streams.SCALES.values():
        assert {place.run.cell.stop_above for place in streams.plan(scale, [])} == {None}


def test_data_that_do_not_fit_are_one_line(tiny_corpus, tmp_path):
    few = dataclasses.replace(streams.SCALES["smoke"], documents=200)
    with pytest.raises(UserError, match=r"--data .*: its validation split has \d+ documents, 200"):
        streams.plan(few, [str(tiny_corpus)])
    there = open_corpus(tiny_corpus, "validation").num_documents
    few = dataclasses.replace(few, documents=there - 2, choosing=2)
    streams.plan(few, [str(tiny_corpus)])
    with pytest.raises(UserError, match=r"are to be scored and 3 others choose rates"):
        streams.plan(dataclasses.replace(few, choosing=3), [str(tiny_corpus)])
    with pytest.raises(UserError, match="no such folder"):
        streams.plan(tiny("smoke"), ["nowhere"])
    with pytest.raises(UserError, match="there is another folder of this name"):
        streams.plan(tiny("smoke"), [str(tiny_corpus), str(tiny_corpus)])


def test_rows_and_columns_are_chosen_by_their_names(tiny_corpus):
    """Those chosen alone, in the page's order, with the runs that they have among all."""
    scale, texts = tiny("smoke"), [str(tiny_corpus)]
    every = streams.plan(scale, texts)
    text, columns = f"text: {tiny_corpus.name}", ("DeltaNet, head", "softmax attention, head")
    found = streams.plan(scale, texts, (text,), columns)
    assert found == [p for p in every if p.run.row == text and p.run.column in columns]
    assert [*dict.fromkeys(p.run.column for p in found)] == [*reversed(columns)]
    assert streams.plan(scale, texts, (), ()) == every
    with pytest.raises(UserError, match=r"^--rows 'text: b': choose among MQAR; text: "):
        streams.plan(scale, texts, ("text: b",))
    with pytest.raises(
        UserError, match=r"^--columns 'DeltaNet': choose among softmax attention, h"
    ):
        streams.plan(scale, texts, (), ("DeltaNet",))


def row_of(row: str, mixer: str, line: str, seed: int, value: float, choice: Choice) -> tuple:
    """A run, a record of it and its choice; of text with two documents."""
    record = {"accuracy": value}
    if row != streams.RECALL:
        nats = {"nats": [10 * value - 1, 10 * value + 1], "tokens": [10, 10]}
        record = {"accuracy": 0.0, "loss": value, "standard_error": 0.1, "documents": nats}
    return Run(row, mixer, line, SimpleNamespace(seed=seed)), record, choice


def summarised(values: dict[tuple[str, str, str], tuple[float, ...]], choice: Choice) -> tuple:
    return streams.summary(
        [
            row_of(*place, seed, value, choice)
            for place, of_seeds in values.items()
            for seed, value in enumerate(of_seeds)
        ]
    )


@pytest.fixture
def lines() -> list[dict]:
    """Recall by one mixer and text by another, three seeds."""
    choice = Choice(1e-2, {1e-2: 0.5, 1e-3: 0.25, 3e-2: 0.375}, False)
    edge = Choice(3e-2, {1e-2: -2.5, 3e-2: -2.25}, True)
    values = {
        (streams.RECALL, "softmax attention, head", "none"): (0.125, 0.125, 0.125),
        (streams.RECALL, "softmax attention, head", "k"): (0.875, 1.0, 1.0),
        (streams.RECALL, "softmax attention, head", "K = V, none"): (0.125, 0.25, 0.125),
        (streams.RECALL, "softmax attention, head", "K = V, k"): (1.0, 1.0, 1.0),
        ("text: a", "DeltaNet, head", "none"): (2.5, 2.6, 2.7),
        ("text: a", "DeltaNet, head", "k"): (2.0, 2.1, 2.2),
        ("text: a", "DeltaNet, head", "v"): (2.4, 2.7, 2.6),
    }
    return streams.summary(
        [
            row_of(*place, seed, value, choice if place[0] == streams.RECALL else edge)
            for place, of_seeds in values.items()
            for seed, value in enumerate(of_seeds)
        ]
    )[0]


def test_lines_differ_from_the_same_without_filters(lines):
    found = {(x["row"], x["streams"]): x for x in lines}
    k = found["text: a", "k"]
    assert (k["mean"], k["min"], k["max"]) == pytest.approx((2.1, 2.0, 2.2))
    assert k["runs"] == {"0": 2.0, "1": 2.1, "2": 2.2} and k["rate"] == 0.03
    less = k["less_no_filters"]
    assert less["mean"] == pytest.approx(-0.5) and less["verdict"] == "lower"
    # Two lines with filters, and k less v: all of the task.
    assert less["comparisons"] == 3 and less["document_error"] == pytest.approx(0, abs=1e-9)
    assert found["text: a", "v"]["less_no_filters"]["verdict"] == "unclear"
    shared = found[streams.RECALL, "K = V, k"]["less_no_filters"]
    assert shared["mean"] == pytest.approx(1 - 0.5 / 3)  # against K = V without filters
    assert shared["comparisons"] == 4  # two lines with filters, k and none less the same of K = V
    assert [x["streams"] for x in lines if x["less_no_filters"] is None] == [
        *("none", "K = V, none", "none")
    ]
    assert [x["streams"] for x in lines if x["by_algebra"]] == ["none", "K = V, none"]


@pytest.fixture
def sums() -> tuple[list[dict], list[dict]]:
    """Text by softmax and linear attention; losses of lines that are compared, and of one more."""
    softmax = {"none": (4.0, 4.1), "k": (3.5, 3.7), "q": (3.9, 4.0), "k, W = 2": (3.5, 3.6)}
    linear = {"none": (5.0, 5.2), "k": (3.0, 3.4), "v": (4.0, 4.2), "K = V, k": (3.25, 3.5)}
    return summarised(
        {
            ("text: a", f"{mixer} attention, head", name): of_seeds
            for mixer, of_line in (("softmax", softmax), ("linear", linear))
            for name, of_seeds in of_line.items()
        },
        Choice(1e-2, {}, False),
    )


def test_contrasts_that_were_fixed_are_made_of_what_is_there(sums):
    lines, contrasts = sums
    found = {(x["mixer"], x["contrast"]): x for x in contrasts}
    softmax, linear, both = (
        *("softmax attention, head", "linear attention, head"),
        "linear − softmax, head",
    )
    means = {key: x["mean"] for key, x in found.items()}
    assert means == {
        (softmax, "k less q"): pytest.approx(-0.35),
        (softmax, "k, W = 2 less k"): pytest.approx(-0.05),
        (linear, "k less v"): pytest.approx(-0.9),
        (linear, "k less K = V, k"): pytest.approx(-0.175),
        # (3 − 5) − (3.5 − 4) and (3.4 − 5.2) − (3.7 − 4.1): the gain of one less that of the other
        (both, "k less none"): pytest.approx(-1.45),
    }
    half = t_quantile(1 - 0.025 / 10, 1) * 0.05  # seeds of -1.5 and -1.4; 5 filtered lines beside
    gain = found[both, "k less none"]
    assert gain["high"] - gain["mean"] == pytest.approx(half)
    assert {x["comparisons"] for x in contrasts} == {10}
    of_lines = [x["less_no_filters"] for x in lines if x["less_no_filters"]]
    assert len(of_lines) == 5 and {x["comparisons"] for x in of_lines} == {10}


def test_documents_of_all_sides_make_the_error_of_a_contrast():
    """Two documents of ten tokens; the gains differ in the first alone."""
    values = {"softmax": (4.0, 4.0), "linear": (4.0, 4.0)}
    rows = []
    for mixer, of in values.items():
        for name, seed in itertools.product(("none", "k"), range(2)):
            place = ("text: a", f"{mixer} attention, head", name)
            run, record, choice = row_of(*place, seed, of[seed], Choice(1e-2, {}, False))
            if (mixer, name) == ("linear", "k"):
                record["documents"] = {"nats": [29.0, 41.0], "tokens": [10, 10]}
                record["loss"] = 3.5
            rows.append((run, record, choice))
    _, (gain,) = streams.summary(rows)
    # Sums of −10 and 0 nats in ten tokens each: their mean −0.5, each 0.5 from it.
    assert gain["mean"] == -0.5 and gain["documents"] == 2
    assert gain["document_error"] == pytest.approx(0.5)


def test_contrasts_have_tables_of_their_own(sums):
    text = "\n".join(page._contrasts(sums[1]))
    within, between = text.split("text: a: one line less another")[1].split("text: a: what filters")
    assert "| contrast | softmax attention, head | linear attention, head |" in within
    assert re.search(r"\| k less q \| -0\.350 \[-\d+\.\d+, \+\d+\.\d+\] \| – \|", within)
    assert re.search(r"\| k less none \| -1\.450 \[", between) and "k less q" not in between
    one = {("text: a", "DeltaNet, head", name): (2.0, 2.5) for name in ("none", "k", "v")}
    lines, contrasts = summarised(one, Choice(1e-2, {}, False))
    assert "| k less v | +0.000 [+0.000, +0.000] |" in page.tables(lines, contrasts)
    assert "contrast" not in page.tables(lines, [])


def test_the_contrasts_are_of_lines_and_mixers_of_the_grid():
    names = {line.name for line in streams.LINES}
    asked = [line.name for pair in (*streams.CONTRASTS, streams.GAINS) for line in pair]
    assert {*asked} <= names and all(a != b for a, b in streams.CONTRASTS)
    assert tuple(line.name for line in streams.CONTRASTS[0]) == ("k", "q")
    assert {*streams.SUMS} < {*streams.MIXERS}


def test_the_page_has_every_number_in_its_place(lines):
    recall, text = page.tables(lines, []).split("text: a: loss on held-out documents")
    assert "| convolved | softmax attention, head |" in recall
    assert "| none | 0.125 (0.125 to 0.125); 0 † |" in recall and "by algebra" in recall
    assert "| k | 0.958 (0.875 to 1.000); 2 |" in recall
    assert "on the edge of what was tried in 0 of 4." in recall
    assert "| k | 2.100 (2.000 to 2.200) |" in text and "by algebra" not in text
    assert "in 3 of 3: DeltaNet, head, none: 0.03; DeltaNet, head, k: 0.03" in text
    assert re.search(r"\| k \| -0\.500 \[-0\.500, -0\.500\] lower \|", text)
    assert re.search(r"\| v \| -0\.033 \[-\d\.\d+, \+\d\.\d+\] \|", text)
    assert "corrected for the task's 3 comparisons" in text
    rows = list(csv.DictReader(io.StringIO(page.csv_text(lines))))
    assert len(rows) == len(lines)
    assert [float(row["mean"]) for row in rows] == [line["mean"] for line in lines]
    assert [row["verdict"] for row in rows][4:] == ["", "lower", "unclear"]


def test_one_seed_and_one_rate_are_told_without_intervals():
    choice = Choice(1e-2, {}, False)
    place = ("text: a", "DeltaNet, head")
    rows = [row_of(*place, "none", 0, 2.5, choice), row_of(*place, "k", 0, 2.25, choice)]
    told = page.tables(*streams.summary(rows))
    assert "| k | -0.250 |" in told and "One learning rate was run." in told


def test_a_run_that_diverged_says_nothing_and_leaves_the_rest():
    """Its loss is NaN, its rate's score −∞; the page is told, the JSON is JSON."""
    choice, place = (
        Choice(1e-2, {1e-2: -2.5, 3e-2: -math.inf}, False),
        ("text: a", "DeltaNet, head"),
    )
    losses = {"none": (2.5, 2.6), "k": (math.nan, 2.1)}
    found, _ = summarised({(*place, name): of for name, of in losses.items()}, choice)
    assert found[1]["less_no_filters"]["verdict"] == "unclear"
    assert "| k | -0.500 (1 of 2 seeds) |" in page.tables(found, [])
    page.draw(found)
    held = json.loads(json.dumps(finite(found), allow_nan=False))
    assert held[0]["rates_tried"] == {"0.01": -2.5, "0.03": None} and held[1]["mean"] is None


def test_the_picture_has_a_panel_for_each_task_with_every_run_and_its_mean(lines):
    drawn = {}
    for axes in page.draw(lines).axes:
        task = axes.get_title(loc="left")
        drawn[task] = sorted(y for dots in axes.collections for y in dots.get_offsets()[:, 1])
        expected = [x for x in lines if x["row"] == task]
        assert drawn[task] == pytest.approx(sorted(y for x in expected for y in x["runs"].values()))
        means = {marks.get_label(): list(marks.get_ydata()) for marks in axes.lines}
        assert means == {
            mixer: [x["mean"] for x in expected if x["mixer"] == mixer]
            for mixer in dict.fromkeys(x["mixer"] for x in lines)
        }
    assert list(drawn) == [streams.RECALL, "text: a"] and all(drawn.values())


def test_the_study_runs_and_goes_on(tiny_corpus, tmp_path, monkeypatch, capsys):
    """Few models: the study's own way through rates, seeds, records and pages."""
    monkeypatch.setattr(streams, "LINES", (streams.Line("none"), streams.Line("k")))
    monkeypatch.setattr(streams, "save_figure", lambda drawing, path: path.write_text("drawn"))
    monkeypatch.setattr(streams, "MIXERS", {"DeltaNet": streams.MIXERS["DeltaNet"]})
    small = {"examples": 64, "text_rates": (1e-3, 3e-3), "text_steps": 2}
    scale = dataclasses.replace(tiny("smoke"), **small)
    monkeypatch.setitem(streams.SCALES, "smoke", scale)
    ran = []

    def in_this_process(groups, out, device, workers):
        for run in (run for group in groups for run in group):
            ran.append(run.cell)
            cells.run(out, run.cell, device, quiet=True)

    monkeypatch.setattr(execution, "execute", in_this_process)
    monkeypatch.setattr(execution, "hours_by_mixer", lambda groups, device: {"deltanet": 0.1})
    texts, how = [str(tiny_corpus)], execution.Execution()
    estimate = dataclasses.replace(how, estimate_only=True)
    assert streams.ablation("smoke", texts, tmp_path, estimate) is None and not ran
    alone = streams.ablation("smoke", [], tmp_path, how)["lines"]
    assert {line["row"] for line in alone} == {streams.RECALL}
    record = streams.ablation("smoke", texts, tmp_path, how)
    again = [line for line in record["lines"] if line["row"] == streams.RECALL]
    assert again == alone  # a text beside it changes nothing, nor its intervals
    of_each = [line["less_no_filters"] for line in record["lines"] if line["less_no_filters"]]
    assert {x["comparisons"] for x in of_each} == {2} and len(of_each) == 4
    text = [x for x in record["lines"] if x["row"].startswith("text: ")]
    assert all(len(x["runs"]) == 2 and len(x["rates_tried"]) >= 2 for x in text)
    columns = [f"DeltaNet, {kind}" for kind in streams.CONV_TYPES]
    head, depthwise = (
        next(x for x in text if (x["mixer"], x["streams"]) == (column, "none"))
        for column in columns
    )
    assert head["runs"] == depthwise["runs"]
    assert len(set(ran)) == len(ran)
    assert {x["contrast"] for x in record["contrasts"]} == set()  # one filtered line of one mixer
    for name in ("streams.json", "streams.md", "streams.csv", "streams"):
        assert (tmp_path / name).stat().st_size > 0
    ran.clear()
    found = streams.ablation("smoke", texts, tmp_path, how)["lines"]
    assert [x for x in found if x["row"] != streams.RECALL] == text
    assert not ran
    told = (tmp_path / "streams.md").read_text()
    assert told.startswith("# streams, at smoke scale\n\n`") and "Not run" not in told
    assert "Runs ended between" in told
    chosen = streams.ablation("smoke", texts, tmp_path, how, 2, (streams.RECALL,), columns[:1])
    assert not ran and chosen["not_run"] == [text[0]["row"], columns[1]]
    assert f"Not run: {text[0]['row']}; {columns[1]}." in (tmp_path / "streams.md").read_text()
    assert {(x["row"], x["mixer"]) for x in chosen["lines"]} == {(streams.RECALL, columns[0])}
    assert {x["less_no_filters"]["comparisons"] for x in chosen["lines"][1:]} == {1}
    more = streams.ablation("smoke", texts, tmp_path, how, seeds=3)
    assert {cell.seed for cell in ran} == {2} and len(more["lines"][0]["runs"]) == 3
