"""The length sweep: its numbers, its protocol, what it stores, and what it refuses."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from cat_lm.errors import UserError
from cat_lm.export import export_model
from cat_lm.pretrained import load_model, load_tokenizer
from eval import length_sweep, length_sweep_cells, memory
from eval.length_sweep import COLUMNS, parser, sweep
from eval.length_sweep_cells import checked_scaling
from eval.streams import split_documents, split_stream, text_stream
from tests.finished_runs import CONTEXT, tiny_model

TEXT = "The dog saw a bird near the house. Caf\u00e9 7!\n" * 12
DOCUMENTS = (
    "A cat sat.\n" * 13,
    "No.",
    "Seven trees near 12 houses! " * 9,
    "The bird heard it. " * 6,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_corpus) -> dict[str, Path]:
    """CAT, Pythia and CAT without positions, exported."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = load_tokenizer(tiny_corpus / "tokenizer")
    changes = {"cat": {}, "pythia": {"conv_type": "none"}, "nope": {"position_embedding": "none"}}
    return {
        name: export_model(
            tiny_model(257, seed=seed, rotary_pct=0.5, **fields), tokenizer, folder / name
        )
        for seed, (name, fields) in enumerate(changes.items())
    }


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Pictures take longer than the rest of a test; the one test about them undoes this."""
    monkeypatch.setattr(length_sweep, "_draw", lambda rows, out: None)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def documents(tmp_path) -> Path:
    path = tmp_path / "documents.txt"
    path.write_text("\n===\n".join(DOCUMENTS), encoding="utf-8")
    return path


def command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Runs the command in this process; its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["length_sweep", *map(str, arguments)])
    code = 0
    try:
        importlib.import_module("eval.length_sweep").main()
    except SystemExit as exit_:
        code = exit_.code or 0
    output = capsys.readouterr()
    return code, output.out, output.err


def merging_tokenizer():
    """A byte-level BPE tokenizer that learned a few merges from `TEXT`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def plain_loss(model, ids: list[int], length: int) -> float:
    """The sum of nats over ids[1:], in windows of `length`, in a few lines."""
    total = 0.0
    for start in range(0, len(ids) - 1, length):
        window = torch.tensor(ids[start : start + length + 1])
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return total


class TestStreams:
    def test_every_byte_of_a_text_is_scored(self, models):
        stream = text_stream([TEXT], load_tokenizer(models["cat"]), "text")
        assert stream.tokens[0] == 256
        assert stream.tokens[1:].tolist() == list(TEXT.encode())
        assert stream.num_bytes == len(TEXT.encode())
        assert stream.num_words == len(re.split(r"\s+", TEXT))

    def test_special_tokens_in_a_text_are_text(self, models):
        stream = text_stream(["a<|endoftext|>b"], load_tokenizer(models["cat"]), "text")
        assert stream.tokens[1:].tolist() == list(b"a<|endoftext|>b")

    @pytest.mark.parametrize("separator", [r"\n(=+)\n", r"(\n)(=)+(\n)", r"\n=+\n|(x)"])
    def test_groups_of_a_separator_are_no_documents(self, separator):
        parts = split_documents("\n===\n".join(DOCUMENTS), separator)
        assert parts == list(DOCUMENTS)

    def test_documents_of_a_text(self, models):
        parts = split_documents("\n===\n".join(DOCUMENTS), r"\n=+\n")
        assert parts == list(DOCUMENTS)
        tokenizer = load_tokenizer(models["cat"])
        stream = text_stream(parts, tokenizer, "text")
        assert stream.num_documents == 4
        assert stream.texts(tokenizer) == parts
        assert stream.num_bytes == sum(map(len, DOCUMENTS))
        assert stream.num_words == sum(len(re.split(r"\s+", part)) for part in DOCUMENTS)
        long = stream.whole_documents(120, None, tokenizer)
        assert long.texts(tokenizer) == [DOCUMENTS[0], DOCUMENTS[2]]
        assert long.tokens[0] == 256
        assert stream.whole_documents(120, 200, tokenizer).texts(tokenizer) == [DOCUMENTS[0]]
        assert stream.whole_documents(120, 130, tokenizer).texts(tokenizer) == [DOCUMENTS[0][:130]]

    def test_split_has_the_manifest_s_bytes_and_a_part_of_it_its_own(self, tiny_corpus, models):
        tokenizer = load_tokenizer(models["cat"])
        whole = split_stream(tiny_corpus, tokenizer)
        assert whole.num_bytes == (whole.tokens != whole.eod_id).sum()
        part = split_stream(tiny_corpus, tokenizer, max_tokens=500)
        assert len(part.tokens) == 501
        assert part.num_bytes == (part.tokens[1:] != part.eod_id).sum()
        assert part.tokens.tolist() == whole.tokens[:501].tolist()
        assert whole.cut(300, tokenizer).num_bytes == (whole.tokens[1:301] != 256).sum()

    def test_long_documents_of_a_split(self, tiny_corpus, models):
        tokenizer = load_tokenizer(models["cat"])
        texts = [t for t in split_stream(tiny_corpus, tokenizer).texts(tokenizer) if len(t) >= 199]
        stream = split_stream(tiny_corpus, tokenizer, document_tokens=200)
        assert stream.texts(tokenizer)[1:] == texts[-stream.num_documents + 1 :]
        assert stream.tokens[0] == stream.tokens[-1] == 256
        with pytest.raises(UserError, match="no document has 100000 tokens, the longest has"):
            split_stream(tiny_corpus, tokenizer, document_tokens=100_000)


class TestNumbers:
    def test_same_tokens_at_every_length_and_for_every_model(self, models, text, tmp_path):
        folders = [models["cat"], models["pythia"]]
        rows = sweep(folders, [16, 64, 100], tmp_path / "out", text=text)
        scored = len(TEXT.encode()) // 100 * 100
        assert len(rows) == 6
        assert {(row["tokens"], row["tokens_sha256"]) for row in rows} == {
            (scored, rows[0]["tokens_sha256"])
        }
        assert [row["label"] for row in rows] == ["cat"] * 3 + ["pythia"] * 3
        assert {row["training_length"] for row in rows} == {CONTEXT}

    @pytest.mark.parametrize("length", [50, 64])
    def test_numbers_are_a_plain_loop_s(self, models, text, tmp_path, length):
        (row,) = sweep([models["cat"]], [length], tmp_path / "out", text=text)
        ids = [256, *TEXT.encode()[: row["tokens"]]]
        total = plain_loss(load_model(models["cat"]), ids, length)
        content = TEXT.encode()[: row["tokens"]].decode()
        assert row["loss"] == pytest.approx(total / row["tokens"], rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(total / row["tokens"]), rel=1e-4)
        assert row["bits_per_byte"] == pytest.approx(total / np.log(2) / row["bytes"], rel=1e-5)
        words = len(re.split(r"\s+", content))
        assert row["words"] == words
        assert row["word_perplexity"] == pytest.approx(np.exp(total / words), rel=1e-3)
        assert sum(part["tokens"] for part in row["positions"]) == row["tokens"]

    @pytest.mark.parametrize(
        ("method", "changes"),
        [
            ("pi", {"rope_type": "linear", "factor": 2.0}),
            ("pi+temperature", {"rope_type": "linear", "factor": 2.0}),
            ("yarn", {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0}),
        ],
    )
    def test_scaled_numbers_are_those_of_a_saved_configuration(
        self, models, text, tmp_path, method, changes
    ):
        """config.json alone, read by transformers' own loading, gives the sweep's number."""
        (row,) = sweep([models["cat"]], [64], tmp_path / "out", text=text, methods=[method])
        folder = shutil.copytree(models["cat"], tmp_path / "scaled")
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] |= changes
        if method == "yarn":
            config["rope_parameters"]["original_max_position_embeddings"] = CONTEXT
        if method != "pi":
            config["attention_temperature"] = 1 / (0.1 * math.log(2) + 1) ** 2
        (folder / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        total = plain_loss(model, [256, *TEXT.encode()[: row["tokens"]]], 64)
        assert row["loss"] == pytest.approx(total / row["tokens"], rel=1e-6)
        # And the sweep reads such a folder as it is.
        (again,) = sweep([folder], [64], tmp_path / "again", text=text)
        assert again["loss"] == pytest.approx(row["loss"], rel=1e-6)
        assert again["rope_type"] == changes["rope_type"]

    def test_rotary_scope_is_stock_transformers(self, models, text, tmp_path):
        out = tmp_path / "out"
        options = {"text": text, "methods": ["yarn"], "temperature_scope": "rotary"}
        (row,) = sweep([models["pythia"]], [64], out, **options)
        values = json.loads((models["pythia"] / "config.json").read_text())
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": CONTEXT}
        values["rope_parameters"] |= yarn
        stock = GPTNeoXForCausalLM.from_pretrained(
            models["pythia"],
            config=GPTNeoXConfig(**{k: v for k, v in values.items() if k != "model_type"}),
            key_mapping={},
        ).eval()
        total = plain_loss(stock, [256, *TEXT.encode()[: row["tokens"]]], 64)
        assert row["loss"] == pytest.approx(total / row["tokens"], rel=1e-6)
        assert row["attention_factor"] == pytest.approx(0.1 * math.log(2) + 1)
        assert row["attention_temperature"] == 1
        (whole,) = sweep([models["pythia"]], [64], out, text=text, methods=["yarn"])
        assert whole["attention_factor"] == 1
        assert abs(whole["loss"] - row["loss"]) > 1e-4, "the temperature reached all channels"

    def test_stock_pythia_folder_has_all_methods(self, models, text, tmp_path):
        """A folder of model type gpt_neox is swept as the same model with a temperature."""
        cat = load_model(models["pythia"])
        names = GPTNeoXConfig().to_dict().keys() - {"model_type", "architectures"}
        values = {k: v for k, v in cat.config.to_dict().items() if k in names}
        stock = GPTNeoXForCausalLM(GPTNeoXConfig(**values)).eval()
        stock.load_state_dict(cat.state_dict())
        stock.save_pretrained(tmp_path / "stock")
        load_tokenizer(models["pythia"]).save_pretrained(tmp_path / "stock")
        options = {"text": text, "methods": ["all"]}
        rows = sweep([models["pythia"], tmp_path / "stock"], [64], tmp_path / "out", **options)
        assert [row["method"] for row in rows] == ["none", "pi", "pi+temperature", "yarn"] * 2
        ours, theirs = ([row["loss"] for row in rows[i : i + 4]] for i in (0, 4))
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert len({round(loss, 6) for loss in ours}) == 4

    def test_stride_gives_more_context_and_scores_the_same_tokens(self, models, text, tmp_path):
        rows = [
            sweep(
                [models["cat"]], [8, 32], tmp_path / "out", text=text, stride=stride, max_tokens=100
            )
            for stride in (None, 8, 1)
        ]
        assert {row["tokens_sha256"] for pair in rows for row in pair} == {
            rows[0][0]["tokens_sha256"]
        }
        assert [[row["stride"] for row in pair] for pair in rows] == [[8, 32], [8, 8], [1, 1]]
        assert rows[0][0]["loss"] == rows[1][0]["loss"], "a stride of the length is none"
        model, ids = load_model(models["cat"]), [256, *TEXT.encode()[: rows[2][1]["tokens"]]]
        total = 0.0
        for stop in range(1, len(ids)):
            window = torch.tensor(ids[max(0, stop - 32) : stop])
            with torch.no_grad():
                total -= model(window[None]).logits[0, -1].log_softmax(-1)[ids[stop]].item()
        assert rows[2][1]["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)

    def test_documents_one_by_one(self, models, documents, tmp_path):
        (row,) = sweep(
            [models["cat"]],
            [100],
            tmp_path / "out",
            text=documents,
            document_separator=r"\n===\n",
            documents="per-document",
        )
        assert row["document_count"] == row["groups"] == 3
        assert row["group_kind"] == "documents"
        model, total, long = load_model(models["cat"]), 0.0, [d for d in DOCUMENTS if len(d) > 9]
        for number, document in enumerate(long):
            ids = [256, *document.encode()] + [256] * (number < 2)
            # The last window reaches back so that it is full.
            cut = (len(ids) - 1) // 100 * 100
            total += plain_loss(model, ids[: cut + 1], 100)
            if rest := len(ids) - 1 - cut:
                last = torch.tensor(ids[-101:])
                with torch.no_grad():
                    logits = model(last[None, :-1]).logits[0].log_softmax(-1)
                total -= logits[range(100), last[1:]][-rest:].sum().item()
        assert row["tokens"] == sum(map(len, long)) + 2
        assert row["loss"] == pytest.approx(total / row["tokens"], rel=1e-5)
        assert row["words"] == sum(len(re.split(r"\s+", document)) for document in long)

    def test_concatenated_windows_may_be_longer_than_any_document(
        self, models, documents, tiny_corpus, tmp_path
    ):
        options = {"text": documents, "document_separator": r"\n===\n"}
        (row,) = sweep([models["cat"]], [500], tmp_path / "a", **options)
        ids = [256]
        for document in DOCUMENTS:
            ids += [*document.encode(), 256]
        total = plain_loss(load_model(models["cat"]), ids[:501], 500)
        assert row["loss"] == pytest.approx(total / 500, rel=1e-5)
        assert row["document_count"] == row["groups"] == 4
        (row,) = sweep([models["cat"]], [2000], tmp_path / "b", data=tiny_corpus)
        assert row["tokens"] % 2000 == 0
        with pytest.raises(UserError, match="no document has 2000 tokens"):
            sweep(
                [models["cat"]], [2000], tmp_path / "c", data=tiny_corpus, documents="per-document"
            )
        with pytest.raises(UserError, match="too short for length 200: the longest document has"):
            small = {"documents": "per-document", "min_document_tokens": 50, "max_tokens": 150}
            sweep([models["cat"]], [200], tmp_path / "c", data=tiny_corpus, **small)

    def test_model_with_another_tokenizer_gets_the_same_text(
        self, models, tmp_path, documents, tiny_corpus
    ):
        tokenizer = merging_tokenizer()
        model = export_model(tiny_model(len(tokenizer)), tokenizer, tmp_path / "merging")
        for mode in ("concatenated", "per-document"):
            options = {"text": documents, "document_separator": r"\n===\n", "documents": mode}
            rows = sweep([models["cat"], model], [32], tmp_path / "out", **options)
            assert rows[0]["tokens"] > 1.2 * rows[1]["tokens"]
            for name in ("bytes", "words", "document_count"):
                assert rows[0][name] == rows[1][name]
        with pytest.raises(UserError, match="another tokenizer than the model's; use --text"):
            sweep([model], [32], tmp_path / "out", data=tiny_corpus)

    @pytest.mark.parametrize("mode", ["concatenated", "per-document"])
    def test_length_that_another_tokenizer_s_tokens_never_fill(self, models, tmp_path, text, mode):
        """The byte model's windows of the text are long enough, the merging one's are not."""
        tokenizer = merging_tokenizer()
        merging = export_model(tiny_model(len(tokenizer)), tokenizer, tmp_path / "merging")
        count = len(text_stream([TEXT], tokenizer, "text").tokens) - 1
        assert count < 512 < len(TEXT.encode())
        options = {"text": text, "documents": mode}
        with pytest.raises(UserError, match=r"model merging: .*: too short for length 512"):
            sweep([models["cat"], merging], [64, 512], tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
        sweep([merging, models["cat"]], [64, 128], tmp_path / "out", **options)

    def test_diverged_model_has_no_number_and_breaks_nothing(self, models, text, tmp_path):
        model = load_model(models["cat"])
        with torch.no_grad():
            model.get_output_embeddings().weight.fill_(float("nan"))
        folder = export_model(model, load_tokenizer(models["cat"]), tmp_path / "diverged")
        rows = sweep([folder, models["pythia"]], [32], tmp_path / "out", text=text)
        assert rows[0]["loss"] is None
        assert rows[0]["positions"][0]["loss"] is None
        assert rows[1]["loss"] > 0


class TestScaling:
    def test_factor_is_the_length_s_and_1_is_the_baseline(self, models, text, tmp_path):
        out = tmp_path / "out"
        rows = sweep([models["cat"]], [16, 32, 128], out, text=text, methods=["all"])
        by_cell = {(row["method"], row["length"]): row for row in rows}
        for method in ("pi", "pi+temperature", "yarn"):
            assert [by_cell[method, n]["factor"] for n in (16, 32, 128)] == [1, 1, 4]
            for length in (16, 32):
                assert by_cell[method, length]["loss"] == by_cell["none", length]["loss"]
        assert len(list((out / "cells").iterdir())) == 3 + 3, "a baseline is computed once"
        assert by_cell["yarn", 128]["original_length"] == CONTEXT
        assert by_cell["yarn", 128]["rope_factor"] == 4
        logits = (0.1 * math.log(4) + 1) ** 2
        assert 1 / by_cell["yarn", 128]["attention_temperature"] == pytest.approx(logits)

    def test_fixed_factor_and_training_length(self, models, text, tmp_path):
        options = {"text": text, "methods": ["pi"]}
        fixed = sweep([models["cat"]], [16, 64], tmp_path / "a", factor=2, **options)
        assert [row["rope_factor"] for row in fixed] == [2, 2]
        told = sweep([models["cat"]], [16, 64], tmp_path / "b", training_length=8, **options)
        assert [row["rope_factor"] for row in told] == [2, 8]
        assert fixed[0]["loss"] == told[0]["loss"]

    def test_sets_of_methods_take_what_exists_for_each_model(self, models, text, tmp_path):
        folders, out = [models["cat"], models["nope"]], tmp_path / "out"
        rows = sweep(folders, [64], out, text=text, methods=["all"])
        found = [(row["label"], row["method"]) for row in rows]
        assert found == [
            *(("cat", method) for method in ("none", "pi", "pi+temperature", "yarn")),
            *(("nope", method) for method in ("none", "temperature")),
        ]
        assert rows[-1]["rope_type"] is None
        assert rows[-1]["loss"] != rows[-2]["loss"]
        rows = sweep(folders, [64], out, text=text, methods=["paper"])
        assert [row["method"] for row in rows] == ["none", "pi+temperature", "none", "temperature"]

    def test_scaling_that_is_lost_on_the_way_is_an_error(self, models):
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
        fields = {"rope_parameters": yarn | {"attention_factor": 1.0}}
        with pytest.raises(RuntimeError, match="has rope_type default, not yarn"):
            checked_scaling(load_model(models["cat"]), fields)
        with pytest.raises(RuntimeError, match=r"attention_temperature 1\.0, not 0\.8"):
            checked_scaling(load_model(models["nope"]), {"attention_temperature": 0.8})

    def test_help_names_the_methods(self):
        from cat_lm.model.rope_scaling import NOPE_METHODS, ROPE_METHODS, TEMPERATURE_SCOPES

        text = " ".join(parser().format_help().split())
        assert ",".join(ROPE_METHODS) in text
        assert ",".join(NOPE_METHODS) in text
        assert "{" + ",".join(TEMPERATURE_SCOPES) + "}" in text


class TestFiles:
    def test_files_hold_the_rows(self, models, tiny_corpus, tmp_path, monkeypatch):
        monkeypatch.undo()
        out = tmp_path / "out"
        folders = [models["cat"], models["pythia"]]
        rows = sweep(folders, [32, 64], out, data=tiny_corpus, max_tokens=300)
        stored = json.loads((out / "length_sweep.json").read_text())
        names = (*COLUMNS, "positions")
        assert stored["rows"] == [{name: row[name] for name in names} for row in rows]
        assert stored["rows"][0]["tokens"] == 256
        assert stored["rows"][0]["group_kind"] == "documents"
        assert {"text", "protocol", "command", "date", "versions", "machine"} <= stored.keys()
        with open(out / "length_sweep.csv", encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        assert [float(row["perplexity"]) for row in table] == [r["perplexity"] for r in rows]
        for name in ("length_sweep", "loss_by_position"):
            assert (out / f"{name}.png").stat().st_size > 5000
            assert "training length" in (out / f"{name}.svg").read_text()

    def test_finished_cells_are_not_computed_again(self, models, text, tmp_path, monkeypatch):
        out = tmp_path / "out"
        folders = list(models.values())
        before = sweep(folders, [16, 64], out, text=text, methods=["all"])
        with monkeypatch.context() as patch:
            patch.setattr(length_sweep_cells, "load_model", None)  # would fail when called
            assert sweep(folders, [16, 64], out, text=text, methods=["all"]) == before
            changes = (
                {"stride": 8},
                {"documents": "per-document", "min_document_tokens": 64},
                {"methods": ["yarn"], "factor": 3.0},
                {"methods": ["yarn"], "temperature_scope": "rotary"},
                {"methods": ["yarn"], "training_length": 16},
                {"dtype": "bfloat16"},
                {"max_tokens": 200},
            )
            for change in changes:
                if change.get("documents"):
                    # One document is the same either way, but another protocol.
                    change["max_tokens"] = before[0]["tokens"]
                with pytest.raises(TypeError):
                    sweep([models["cat"]], [16, 64], out, text=text, **change)

    def test_damaged_cells_are_computed_again(self, models, text, tmp_path, capsys):
        out = tmp_path / "out"
        before = sweep([models["cat"]], [16], out, text=text)
        (path,) = (out / "cells").iterdir()
        whole = path.read_bytes()
        values = json.loads(whole)
        for damaged in (
            whole[:100],
            b"",
            b"{}",
            b"[]",
            b"\xff\xfe",
            json.dumps({k: v for k, v in values.items() if k != "positions"}).encode(),
            json.dumps(values | {"length": 17}).encode(),
        ):
            path.write_bytes(damaged)
            capsys.readouterr()
            after = sweep([models["cat"]], [16], out, text=text)
            assert f"{path}: damaged, is computed again" in capsys.readouterr().err
            assert after[0]["loss"] == before[0]["loss"]
            assert json.loads(path.read_bytes()).keys() == values.keys()

    def test_interrupted_sweep_goes_on_where_it_stopped(self, models, text, tmp_path, monkeypatch):
        out = tmp_path / "out"
        compute, calls = length_sweep_cells.Cells._compute, []

        def stops_after_two(self, *arguments):
            if len(calls) == 2:
                raise KeyboardInterrupt
            calls.append(arguments)
            return compute(self, *arguments)

        monkeypatch.setattr(length_sweep_cells.Cells, "_compute", stops_after_two)
        folders = [models["cat"], models["nope"]]
        with pytest.raises(KeyboardInterrupt):
            sweep(folders, [16, 32], out, text=text)
        assert len(json.loads((out / "length_sweep.json").read_text())["rows"]) == 2
        counted = []
        monkeypatch.setattr(
            length_sweep_cells.Cells,
            "_compute",
            lambda self, *arguments: counted.append(1) or compute(self, *arguments),
        )
        assert len(sweep(folders, [16, 32], out, text=text)) == 4
        assert len(counted) == 2

    def test_other_weights_are_another_cell(self, models, text, tmp_path):
        folder = shutil.copytree(models["cat"], tmp_path / "model")
        (before,) = sweep([folder], [32], tmp_path / "out", text=text)
        tokenizer = load_tokenizer(folder)
        export_model(tiny_model(257, seed=9), tokenizer, folder)
        (after,) = sweep([folder], [32], tmp_path / "out", text=text)
        assert before["perplexity"] != after["perplexity"]


class TestBadInput:
    def test_bad_input_is_one_line(self, models, text, documents, tmp_path, monkeypatch, capsys):
        cat, nope = models["cat"], models["nope"]
        base = ("--out", tmp_path / "out", "--lengths")
        bytes_ = len(TEXT.encode())
        per_document = ("--documents", "per-document")
        rotary = ("--temperature-scope", "rotary")
        broken = ('{"step": 1', "[]", '{"context_length": "x"}')
        damaged = [shutil.copytree(cat, tmp_path / f"damaged{number}") for number in range(3)]
        for folder, content in zip(damaged, broken, strict=True):
            (folder / "export.json").write_text(content)
        (tmp_path / "bare").mkdir()
        shutil.copy(cat / "config.json", tmp_path / "bare")
        no_tokenizer = shutil.copytree(cat, tmp_path / "no_tokenizer")
        for path in no_tokenizer.glob("tokenizer*"):
            path.unlink()
        for arguments, message in (
            ((cat, "--text", text, *base, bytes_ + 1), f"it has {bytes_} tokens"),
            ((cat, "--text", text, *base, "64", "--max-tokens", "60"), "--max-tokens is 60"),
            ((cat, "--text", text, *base, "900", *per_document), f"the longest has {bytes_}"),
            ((cat, "--text", text, *base, "64", "--methods", "ntk"), "known: none, pi,"),
            (
                (cat, nope, "--text", text, *base, "64", "--methods", "none,yarn"),
                "model nope, a model without positions: it has none, temperature;",
            ),
            (
                (cat, "--text", text, *base, "64", "--methods", "temperature"),
                "rotary positions: it has none, pi, pi+temperature, yarn;",
            ),
            (
                (nope, "--text", text, *base, "64", "--methods", "temperature", *rotary),
                "nothing is rotated",
            ),
            ((cat, "--text", text, *base, "64", "--factor", "0.5"), "--factor 0.5: must be at"),
            ((cat, "--text", text, *base, "64", "--factor", "2"), "--factor 2: does nothing with"),
            ((cat, "--text", text, *base, "64", *rotary), "--temperature-scope rotary: does noth"),
            (
                (cat, "--text", text, *base, "64", *rotary, "--methods", "none, pi"),
                "--temperature-scope rotary: does nothing with --methods none,pi;",
            ),
            ((cat, nope, cat, "--text", text, *base, "64"), f"model {cat}: given twice"),
            *(
                ((folder, "--text", text, *base, "64"), f"{folder / 'export.json'}: damaged")
                for folder in damaged
            ),
            ((cat, "--text", text, *base, "64", "--stride", "0"), "--stride 0: must be at least"),
            ((cat, "--text", text, *base, "64", "--min-document-tokens", "9"), "only with --doc"),
            (
                (cat, "--text", documents, *base, "64", "--document-separator", "("),
                "--document-separator '(': no regular",
            ),
            ((cat, "--text", tmp_path / "no.txt", *base, "8"), "no.txt: no such file"),
            ((cat, "--data", tmp_path, *base, "8"), "no manifest.json"),
            ((tmp_path, "--text", text, *base, "8"), "not a model folder"),
            ((tmp_path / "bare", "--text", text, *base, "8"), "has config.json but no weights"),
            ((no_tokenizer, "--text", text, *base, "8"), "no tokenizer.json"),
            ((cat, "--text", text, *base, "8", "--device", "cuda:77"), "--device cuda:77"),
        ):
            code, _, err = command(monkeypatch, capsys, *arguments)
            assert code == 2, arguments
            assert message in err
            assert err.count("\n") == 1, err
        assert not (tmp_path / "out").exists()

    def test_missing_weight_gives_no_number(self, models, text, tmp_path, monkeypatch, capsys):
        from safetensors.torch import load_file, save_file

        folder = shutil.copytree(models["cat"], tmp_path / "model")
        weights = load_file(folder / "model.safetensors")
        del weights["gpt_neox.final_layer_norm.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        arguments = ("--text", text, "--out", tmp_path / "out", "--lengths", 64)
        code, out, err = command(monkeypatch, capsys, folder, *arguments, "--methods", "none,yarn")
        assert (code, out) == (2, "")
        assert "missing keys gpt_neox.final_layer_norm.weight" in err

    def test_length_that_does_not_fit_is_named_and_the_others_kept(
        self, models, text, tmp_path, monkeypatch, capsys
    ):
        estimate = memory.forward_bytes(load_model(models["cat"]), 8, 64)
        monkeypatch.setattr(memory, "free_bytes", lambda device: estimate)
        arguments = (models["cat"], models["pythia"], "--text", text, "--out", tmp_path / "out")
        options = ("--lengths", "32,64,128", "--batch-tokens", 512)
        monkeypatch.setattr(
            memory,
            "forward_bytes",
            lambda model, rows, length: estimate + (length > 64),
        )
        code, out, err = command(monkeypatch, capsys, *arguments, *options)
        assert code == 2
        assert out == ""
        assert "cat, none: length 128: a batch of 4 does not fit into memory (about" in err
        last = err.splitlines()[-1]
        assert last.startswith("error: did not fit into memory: cat none 128, pythia none 128 ")
        rows = json.loads((tmp_path / "out/length_sweep.json").read_text())["rows"]
        assert [row["length"] for row in rows] == [32, 64] * 2

    def test_allocation_that_fails_is_the_same_line(self, models, text, tmp_path, monkeypatch):
        from cat_lm.model.modeling import CatModel

        forward = CatModel.forward

        def fails_when_long(self, input_ids, **options):
            if input_ids.shape[1] > 64:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
            return forward(self, input_ids, **options)

        monkeypatch.setattr(CatModel, "forward", fails_when_long)
        with pytest.raises(UserError, match=r"cat none 128 \(label.*; the 1 others are in"):
            sweep([models["cat"]], [64, 128], tmp_path / "out", text=text)


class TestMemory:
    def test_estimate_grows_linearly_but_for_eager_attention(self, models):
        model = load_model(models["cat"])
        fixed = memory.forward_bytes(model, 1, 0)
        sizes = [memory.forward_bytes(model, 1, length) - fixed for length in (1000, 2000)]
        assert sizes[1] == 2 * sizes[0]
        model.set_attn_implementation("eager")
        assert memory.forward_bytes(model, 1, 2000) - fixed > 3.5 * sizes[1]

    def test_container_s_limit_counts(self, tmp_path):
        for name, content in (
            ("memory.max", "1000000"),
            ("memory.current", "700000"),
            ("memory.stat", "anon 500000\nactive_file 100000\ninactive_file 50000"),
        ):
            (tmp_path / name).write_text(content + "\n")
        assert memory._group_limit(tmp_path) == 450_000
        (tmp_path / "memory.max").write_text("max\n")
        assert memory._group_limit(tmp_path) is None
        assert memory.free_bytes(torch.device("cpu")) > 0


def test_harness_rolling_perplexity_agrees(models):
    """On one document longer than the context, whose length is no multiple of it."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from eval.perplexity import score_tokens

    model, tokenizer = load_model(models["cat"], device="cpu"), load_tokenizer(models["cat"])
    stream = text_stream([TEXT], tokenizer, "text")
    for length in (32, 100, 1000):
        harness = HFLM(
            pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=1, backend="causal"
        )
        request = Instance("loglikelihood_rolling", {}, (TEXT,), 0)
        (theirs,) = harness.loglikelihood_rolling([request], disable_tqdm=True)
        units = {"num_bytes": stream.num_bytes, "num_words": stream.num_words}
        ours = score_tokens(model, stream.tokens, length, **units)
        assert ours.nll == pytest.approx(-float(theirs), rel=1e-5)
        words = len(re.split(r"\s+", TEXT))
        assert ours.word_perplexity == pytest.approx(math.exp(-float(theirs) / words), rel=1e-4)


def test_scores_are_plain_values(models):
    """What goes into a cell's file is what json reads back."""
    from eval.perplexity import score_tokens

    stream = text_stream([TEXT], load_tokenizer(models["cat"]), "text")
    score = score_tokens(load_model(models["cat"]), stream.tokens, 64, num_bytes=1, num_words=1)
    values = dataclasses.asdict(score)
    assert json.loads(json.dumps(values)) == values
