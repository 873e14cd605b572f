"""The zero-shot command's numbers: those of a few lines that know nothing of the harness.

What decides a task's answers: not the batch, and of a context that is cut, its end.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from cat_lm.pretrained.loading import load_model, load_tokenizer
from eval.zero_shot import run as zero_shot_run
from eval.zero_shot.results import table
from eval.zero_shot.run import run
from eval.zero_shot.tasks import table2
from tests.eval.zero_shot.calls import CONTEXT, FEW, answers, settings
from tests.zero_shot_rows import ROWS, write_rows


@pytest.fixture(scope="module", params=["rope", "nope"])
def evaluated(request, models, rows, tmp_path_factory):
    """The table's tasks on a model; with the model and its tokenizer."""
    folder = models[request.param]
    result = run(folder, ["table2"], tmp_path_factory.mktemp("out"), settings(rows))
    return result, load_model(folder, device="cpu"), load_tokenizer(folder)


def score(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        log_probs = model(ids).logits[0].double().log_softmax(-1)
    rows = range(len(context) - 1, len(context) + len(continuation) - 1)
    greedy = [int(log_probs[row].argmax()) for row in rows]
    total = sum(log_probs[r, t].item() for r, t in zip(rows, continuation, strict=True))
    return total, greedy == continuation


def share(right: list[bool]) -> float:
    return sum(right) / len(right)


def test_accuracies_and_perplexities_are_plain_ones(evaluated):
    result, model, tokenizer = evaluated
    tasks, encode = result["tasks"], tokenizer.encode
    right = []
    for row in ROWS["piqa"]:
        choices = [encode(f" {row[key]}") for key in ("sol1", "sol2")]
        context = encode(f"Question: {row['goal']}\nAnswer:")
        scores = [score(model, context, choice)[0] for choice in choices]
        right.append(scores.index(max(scores)) == row["label"])
    mean = share(right)
    assert tasks["piqa"]["metrics"]["acc"] == mean
    error = math.sqrt(mean * (1 - mean) / (len(right) - 1))
    assert tasks["piqa"]["stderr"]["acc"] == pytest.approx(error)
    right = []
    for row in ROWS["arc_challenge"]:
        context = encode(f"Question: {row['question']}\nAnswer:")
        texts = row["choices"]["text"]
        scores = [score(model, context, encode(f" {text}"))[0] / len(text) for text in texts]
        label = row["choices"]["label"][scores.index(max(scores))]
        right.append(label == row["answerKey"])
    assert tasks["arc_challenge"]["metrics"]["acc_norm"] == share(right)
    found = []
    for row in ROWS["lambada_openai"]:
        context, word = row["text"].rsplit(" ", 1)
        found.append(score(model, encode(context), encode(f" {word}")))
    metrics = tasks["lambada_openai"]["metrics"]
    perplexity = math.exp(-sum(each for each, _ in found) / len(found))
    assert metrics["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert metrics["acc"] == share([greedy for _, greedy in found])


def test_word_perplexity_of_documents_longer_than_the_context(models, tmp_path):
    text = " ".join(ROWS["wikitext"][1]["page"] for _ in range(8))
    rows = write_rows(tmp_path / "rows", {"wikitext": [{"page": text}, {"page": "short one"}]})
    folder = models["nope"]
    result = run(folder, ["wikitext"], tmp_path, settings(rows, batch_size=3))
    model, tokenizer = load_model(folder, device="cpu"), load_tokenizer(folder)
    total, words = 0.0, 0
    for page in (text, "short one"):
        ids = tokenizer.encode(wikitext_detokenizer({"page": page}))
        stream = [tokenizer.eos_token_id, *ids]
        for begin in range(1, len(stream), CONTEXT):
            part = stream[begin : begin + CONTEXT]
            # The last window is filled up with what comes before it.
            context = stream[max(0, begin + len(part) - CONTEXT - 1) : begin]
            total += score(model, context, part)[0]
        words += len(re.split(r"\s+", page))
    assert len(stream) < CONTEXT < len(tokenizer.encode(text)) / 3
    found = result["tasks"]["wikitext"]["metrics"]["word_perplexity"]
    assert found == pytest.approx(math.exp(-total / words), rel=1e-4)


def test_narrow_log_probabilities_are_summed_in_fp32(models, rows, tmp_path):
    narrow = settings(rows, dtype="bfloat16", samples=True)
    result = run(models["rope"], ["piqa"], tmp_path, narrow)
    assert result["model"]["dtype"] == "bfloat16"
    found = torch.tensor([answer[0] for row in answers(tmp_path)["piqa"] for answer in row])
    assert len(found) >= 2 and (found.bfloat16().to(found.dtype) != found).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_sum_in_fp32_when_the_dtype_is_given(models, rows, tmp_path, monkeypatch, dtype):
    """Else `--dtype bfloat16` had other numbers on a GPU than auto, under one key."""
    matmul, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    before = getattr(matmul, name)
    setattr(matmul, name, True)
    try:
        run(models["rope"], ["piqa"], tmp_path, settings(rows, dtype=dtype, limit=1))
        assert getattr(matmul, name) is False
    finally:
        setattr(matmul, name, before)


def test_result_describes_model_rows_and_versions(evaluated):
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
    seven = [table2.columns(result["tasks"])[column] for column in table2.AVERAGED]
    assert result["average"]["value"] == pytest.approx(sum(seven) / 7)
    text = table(result)
    assert text.count("\n") == 17 and "average" in text.splitlines()[-1]


def flat(value) -> list[float]:
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", ["rope", "nope"])
def test_answers_do_not_depend_on_the_batch(models, rows, tmp_path, name):
    found = []
    for size in (1, 8):
        out = tmp_path / str(size)
        result = run(models[name], FEW, out, settings(rows, batch_size=size, samples=True))
        accuracies = {
            (task, metric): value
            for task, values in result["tasks"].items()
            for metric, value in values["metrics"].items()
            if metric.startswith("acc")
        }
        found.append((answers(out), accuracies))
    (one, right), (eight, as_right) = found
    assert right == as_right and len(right) == 4 and set(one) == set(FEW)
    for task in FEW:
        assert flat(one[task]) == pytest.approx(flat(eight[task]), rel=1e-5, abs=1e-4)


CHAT = "arc_challenge_chat"


def chat(model, folder, questions, **changes) -> tuple[list, dict]:
    """Return the generated answers to questions, and the task's values."""
    rows = [{**ROWS["arc_challenge"][0], "question": question} for question in questions]
    asked = settings(write_rows(folder / "rows", {CHAT: rows}), samples=True, **changes)
    result = run(model, [CHAT], folder / "out", asked)
    return answers(folder / "out")[CHAT], result["tasks"][CHAT]


def test_generated_answers_do_not_depend_on_the_batch(model, tmp_path):
    """Generation pads on the left."""
    questions = [f"What do {count} cats see? " * count for count in (1, 2, 3)]
    texts = []
    for size in (1, 3):
        how = {"batch_size": size, "max_length": 900}
        found, values = chat(model, tmp_path / str(size), questions, **how)
        texts.append(found)
        assert set(values["metrics"]) == {"exact_match,remove_whitespace"}
    assert texts[0] == texts[1] and len(texts[0]) == 3


def test_cut_contexts_keep_their_ends_and_are_counted(model, rows, tmp_path):
    """Two long questions that differ in their beginnings alone get one answer."""
    ending = "What do two cats see at night? " * 30
    questions = [f"{animal} {ending}" for animal in ("A bird", "The dog", "Seven")] + ["What?"]
    how = {"batch_size": 4, "max_length": 600}
    texts, counts = chat(model, tmp_path / "long", questions, **how)
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert (counts["truncated"], counts["requests"], counts["n"]) == (3, 4, 4)
    # Requests of log-likelihoods, with and without a limit: all rows are scored or left out.
    for limit in (None, 2):
        changes = {"limit": limit, "max_length": 24}
        out = tmp_path / str(limit)
        result = run(model, ["piqa", "lambada_openai"], out, settings(rows, **changes))
        assert result["settings"]["limit"] == limit
        for name, values in result["tasks"].items():
            assert values["n"] == min(limit or 5, 5)
            assert values["n"] + sum(values["left_out"].values()) == len(ROWS[name])
            assert values["requests"] == values["n"] * (2 if name == "piqa" else 1)
            assert 0 < values["truncated"] <= values["requests"]
    assert run(model, ["piqa"], tmp_path, settings(rows))["tasks"]["piqa"]["truncated"] == 0


def test_row_without_an_answer_is_an_error(model, rows, tmp_path, monkeypatch):
    original = zero_shot_run.evaluate

    def forgets_one(scorer, tasks, **options):
        found = original(scorer, tasks, **options)
        for request in tasks["tasks"]["piqa"].instances[:2]:
            request.resps.clear()
        return found

    monkeypatch.setattr(zero_shot_run, "evaluate", forgets_one)
    with pytest.raises(RuntimeError, match="task piqa: 4 of 5 rows were scored"):
        run(model, ["piqa"], tmp_path, settings(rows))
    assert not (tmp_path / "zero_shot.json").exists()
