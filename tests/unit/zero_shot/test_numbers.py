"""The zero-shot command's numbers, against a few lines that know nothing of the harness."""

from __future__ import annotations

import math
import re

import pytest
import torch

from cat_lm.pretrained.loading import load_model, load_tokenizer
from eval.zero_shot.results import table
from eval.zero_shot.run import run
from eval.zero_shot.tasks import table2
from tests.unit.zero_shot.runs import CONTEXT, answers, settings
from tests.zero_shot_rows import ROWS, write_rows


@pytest.fixture(scope="module", params=["rope", "nope"])
def evaluated(request, models, rows, tmp_path_factory):
    """The table's tasks on a model; with the model and its tokenizer."""
    folder = models[request.param]
    result = run(folder, ["table2"], tmp_path_factory.mktemp("out"), settings(rows))
    return result, load_model(folder, device="cpu"), load_tokenizer(folder)


class TestNumbers:
    """Against a few lines that know nothing of the harness (R29)."""

    @staticmethod
    def score(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            log_probs = model(ids).logits[0].double().log_softmax(-1)
        rows = range(len(context) - 1, len(context) + len(continuation) - 1)
        greedy = [int(log_probs[row].argmax()) for row in rows]
        total = sum(log_probs[r, t].item() for r, t in zip(rows, continuation, strict=True))
        return total, greedy == continuation

    def test_accuracy(self, evaluated):
        result, model, tokenizer = evaluated
        right = []
        for row in ROWS["piqa"]:
            context = tokenizer.encode(f"Question: {row['goal']}\nAnswer:")
            choices = [tokenizer.encode(f" {row[key]}") for key in ("sol1", "sol2")]
            scores = [self.score(model, context, choice)[0] for choice in choices]
            right.append(scores.index(max(scores)) == row["label"])
        values = result["tasks"]["piqa"]
        assert values["metrics"]["acc"] == sum(right) / len(right)
        mean = sum(right) / len(right)
        error = math.sqrt(mean * (1 - mean) / (len(right) - 1))
        assert values["stderr"]["acc"] == pytest.approx(error)

    def test_normalised_accuracy(self, evaluated):
        result, model, tokenizer = evaluated
        right = []
        for row in ROWS["arc_challenge"]:
            context = tokenizer.encode(f"Question: {row['question']}\nAnswer:")
            texts = row["choices"]["text"]
            scores = [
                self.score(model, context, tokenizer.encode(f" {text}"))[0] / len(text)
                for text in texts
            ]
            label = row["choices"]["label"][scores.index(max(scores))]
            right.append(label == row["answerKey"])
        assert result["tasks"]["arc_challenge"]["metrics"]["acc_norm"] == sum(right) / len(right)

    def test_last_word(self, evaluated):
        result, model, tokenizer = evaluated
        found = []
        for row in ROWS["lambada_openai"]:
            context, word = row["text"].rsplit(" ", 1)
            ids = tokenizer.encode(context), tokenizer.encode(f" {word}")
            found.append(self.score(model, *ids))
        metrics = result["tasks"]["lambada_openai"]["metrics"]
        perplexity = math.exp(-sum(score for score, _ in found) / len(found))
        assert metrics["perplexity"] == pytest.approx(perplexity, rel=1e-4)
        assert metrics["acc"] == sum(greedy for _, greedy in found) / len(found)

    def test_word_perplexity_of_documents_longer_than_the_context(
        self, models, tmp_path, monkeypatch
    ):
        text = " ".join(ROWS["wikitext"][1]["page"] for _ in range(8))
        rows = write_rows(tmp_path / "rows", {"wikitext": [{"page": text}, {"page": "short one"}]})
        folder = models["nope"]
        result = run(folder, ["wikitext"], tmp_path, settings(rows, batch_size=3))
        model, tokenizer = load_model(folder, device="cpu"), load_tokenizer(folder)
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

        total, words = 0.0, 0
        for page in (text, "short one"):
            ids = tokenizer.encode(wikitext_detokenizer({"page": page}))
            stream = [tokenizer.eos_token_id, *ids]
            for begin in range(1, len(stream), CONTEXT):
                part = stream[begin : begin + CONTEXT]
                # The last window is filled up with what comes before it.
                context = stream[max(0, begin + len(part) - CONTEXT - 1) : begin]
                total += self.score(model, context, part)[0]
            words += len(re.split(r"\s+", page))
        assert len(stream) < CONTEXT < len(tokenizer.encode(text)) / 3
        expected = math.exp(-total / words)
        assert result["tasks"]["wikitext"]["metrics"]["word_perplexity"] == pytest.approx(
            expected, rel=1e-4
        )

    def test_narrow_log_probabilities_are_summed_in_fp32(self, models, rows, tmp_path):
        narrow = settings(rows, dtype="bfloat16", samples=True)
        result = run(models["rope"], ["piqa"], tmp_path, narrow)
        assert result["model"]["dtype"] == "bfloat16"
        found = torch.tensor([answer[0] for row in answers(tmp_path)["piqa"] for answer in row])
        rounded = found.bfloat16().to(found.dtype)
        assert len(found) >= 2 and (rounded != found).all()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_products_sum_in_fp32_when_the_dtype_is_given_too(self, models, rows, tmp_path, dtype):
        """Else `--dtype bfloat16` had other numbers on a GPU than auto, under one key."""
        matmul = torch.backends.cuda.matmul
        name = "allow_bf16_reduced_precision_reduction"
        before = getattr(matmul, name)
        setattr(matmul, name, True)
        try:
            run(models["rope"], ["piqa"], tmp_path, settings(rows, dtype=dtype, limit=1))
            assert getattr(matmul, name) is False
        finally:
            setattr(matmul, name, before)

    def test_result_file(self, evaluated, rows):
        result, model, _ = evaluated
        assert list(result["tasks"]) == list(table2.TASKS)
        for name, values in result["tasks"].items():
            assert values["n"] == values["rows"] == len(ROWS[name])
            assert values["version"] and values["tokens_per_second"] > 0
            assert list(values["data"]["files"]) == [f"{name}.jsonl"]
        about = result["model"]
        assert (about["max_length"], about["dtype"]) == (CONTEXT, "float32")
        assert about["parameters"] == model.num_parameters()
        assert about["prefix_token"]["id"] == 256
        assert {"torch", "transformers", "lm_eval", "datasets"} <= set(result["versions"])
        assert result["commit"] and result["command"] and result["date"]
        seven = [table2.columns(result["tasks"])[column] for column in table2.AVERAGED]
        assert result["average"]["value"] == pytest.approx(sum(seven) / 7)
        text = table(result)
        assert text.count("\n") == 17 and "average" in text.splitlines()[-1]
