"""The length sweep's numbers: those of plain loops, over the same tokens at every length."""

from __future__ import annotations

import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from cat_lm.core.errors import UserError
from cat_lm.export import export_model
from cat_lm.pretrained.loading import load_model, load_tokenizer, model_config
from eval.length_sweep.options import Options
from eval.length_sweep.sweep import sweep
from eval.length_sweep.text import sweep_streams
from eval.length_sweep.token_stream import text_stream
from tests.eval.length_sweep.calls import DOCUMENTS, TEXT
from tests.finished_runs import CONTEXT, tiny_model


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


class TestNumbers:
    def test_numbers_are_a_plain_loop_s(self, models, text, tmp_path, length=50):
        (row, longer) = sweep([models["cat"]], [length, 100], tmp_path / "out", text=text)
        assert (row["tokens"], row["tokens_sha256"]) == (longer["tokens"], longer["tokens_sha256"])
        assert (row["label"], row["training_length"]) == ("cat", CONTEXT)
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
        (folder / "export.json").unlink()  # it is no longer what was exported
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
        with pytest.raises(UserError, match="too short for length 2000: the longest document has"):
            small = {"documents": "per-document", "min_document_tokens": 50}
            sweep([models["cat"]], [2000], tmp_path / "c", data=tiny_corpus, **small)

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

    def test_another_tokenizer_scores_an_end_where_the_first_does(self, models, tmp_path):
        """One document fits, whose end is scored; one is cut, after which no end comes."""
        folder = export_model(tiny_model(300), merging_tokenizer(), tmp_path / "merging")
        path = tmp_path / "two.txt"
        path.write_text(f"{DOCUMENTS[3]}=={DOCUMENTS[0]}", encoding="utf-8")
        subjects = [
            SimpleNamespace(folder=place, label=place.name, config=model_config(place))
            for place in (models["cat"], folder)
        ]
        part = {"min_document_tokens": 100, "max_document_tokens": 120, "document_separator": "=="}
        asked = Options(lengths=(32,), text=path, documents="per-document", **part)
        bytes_, merged = sweep_streams(subjects, asked)
        assert bytes_.scored == len(DOCUMENTS[3]) + 1 + 120
        parts = [merged.tokens[start : stop + 1].tolist() for start, stop in merged.spans]
        end, encode = merged.eod_id, merging_tokenizer().encode
        assert parts == [[end, *encode(DOCUMENTS[3]), end], [end, *encode(DOCUMENTS[0][:120])]]
        assert merged.num_bytes == len(DOCUMENTS[3]) + 120 == bytes_.num_bytes

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
            # Finite, as weights that are not are refused; its logits are not.
            model.get_output_embeddings().weight.copy_(
                torch.full_like(model.get_output_embeddings().weight, 3e38)
            )
        folder = export_model(model, load_tokenizer(models["cat"]), tmp_path / "diverged")
        rows = sweep([folder, models["pythia"]], [32], tmp_path / "out", text=text)
        assert rows[0]["loss"] is None
        assert rows[0]["positions"][0]["loss"] is None
        assert rows[1]["loss"] > 0
