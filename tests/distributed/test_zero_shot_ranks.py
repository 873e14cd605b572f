"""Zero-shot on two gloo ranks: the answers of one rank, in the order of the rows (R28)."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from cat_lm.export import export_model
from cat_lm.pretrained.loading import load_tokenizer
from eval.zero_shot.run import Settings, run
from tests.commands import Command
from tests.finished_runs import tiny_model
from tests.zero_shot_rows import ROWS, write_rows

TASKS = ("lambada_openai", "hellaswag", "winogrande", "wikitext")


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_corpus) -> Path:
    tokenizer = load_tokenizer(tiny_corpus / "tokenizer")
    model = tiny_model(257, max_position_embeddings=160)
    return export_model(model, tokenizer, tmp_path_factory.mktemp("models") / "cat")


def on_two_ranks(*arguments: object) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each rank of one command."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        Command(
            *("-m", "eval.zero_shot", *arguments), apart=True,
            RANK=str(rank), LOCAL_RANK=str(rank), **shared,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [(rank.wait(300), rank.said(0), rank.said(1)) for rank in ranks]


def samples(out: Path, task: str) -> list[dict]:
    (path,) = (out / "samples").glob(f"{task}-*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_two_ranks_answer_as_one(model, tmp_path):
    rows = write_rows(tmp_path / "rows")
    settings = Settings(data_dir=rows, device="cpu", batch_size=1, samples=True, max_length=45)
    alone = run(model, TASKS, tmp_path / "one", settings)
    names = ("--tasks", ",".join(TASKS), "--data-dir", rows, "--device", "cpu", "--samples")
    names += ("--max-length", 45)
    arguments = (model, *names, "--out", tmp_path / "two", "--batch-size", 3)
    (code, table, said), (other_code, silence, _) = on_two_ranks(*arguments)
    assert code == other_code == 0, said
    assert table.count("task ") == 1 and silence == ""  # one rank speaks
    together = json.loads((tmp_path / "two/zero_shot.json").read_text(encoding="utf-8"))
    assert together["settings"]["ranks"] == 2
    for name in TASKS:
        one, two = alone["tasks"][name], together["tasks"][name]
        assert one["n"] == two["n"] == 5  # an odd number: the ranks have unequal shares
        assert one["key"] == two["key"]
        # What the harness repeats, so that all ranks have as many requests, is counted once.
        for count in ("rows", "left_out", "requests", "truncated"):
            assert one[count] == two[count], (name, count)
        for kind in ("metrics", "stderr"):
            for metric, value in one[kind].items():
                # The bootstrapped errors agree only if the rows come in the same order.
                expected = None if value is None else pytest.approx(value, rel=1e-4)
                assert two[kind][metric] == expected, (name, metric)
        logs = samples(tmp_path / "one", name), samples(tmp_path / "two", name)
        for a, b in zip(*logs, strict=True):
            assert a["doc_id"] == b["doc_id"] and a["doc_hash"] == b["doc_hash"]
            assert a.get("acc") == b.get("acc")
    assert alone["tasks"]["hellaswag"]["truncated"] > 0
    # Rank 0 alone decides what is finished.
    (_, again, said), (_, silence, _) = on_two_ranks(*arguments)
    assert said.count("finished before") == len(TASKS)
    assert again == table and silence == ""


def test_error_of_one_rank_is_said_by_the_first(model, tmp_path):
    """The row whose answer does not fit is rank 1's; both ranks go on with the next task."""
    rows = [{"text": "a dog saw a cat"} for _ in range(4)]
    rows[3] = {"text": "a dog saw a " + 20 * "bird"}
    folder = write_rows(tmp_path / "rows", {"lambada_openai": rows, "piqa": ROWS["piqa"]})
    names = ("--tasks", "lambada_openai,piqa", "--max-length", 60)
    given = (model, *names, "--data-dir", folder, "--device", "cpu", "--out", tmp_path / "out")
    ranks = on_two_ranks(*given)
    assert all(code != 0 for code, _, _ in ranks)
    said = "".join(words for _, _, words in ranks)
    # No process waited for one that had gone.
    assert "RuntimeError" not in said and "gloo" not in said.lower()
    message = "error: 1 of 2 tasks failed: task lambada_openai: rank 1: a continuation of 81 tokens"
    assert said.count(message) == 1, said
    stored = json.loads((tmp_path / "out/zero_shot.json").read_text(encoding="utf-8"))
    assert list(stored["tasks"]) == ["piqa"]
