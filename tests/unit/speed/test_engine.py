"""eval.speed engine: a run's own steps, and their memory beside the estimate."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from cat_lm.errors import UserError
from cat_lm.training.distributed import Ranks
from eval.speed.__main__ import main
from eval.speed.model.engine import engine_speed
from tests.distributed.ranks import run_on_ranks
from tests.runs import run_values


def measured(ranks, folder: str) -> dict:
    config, record = Path(folder) / f"{ranks.rank}.yaml", Path(folder) / f"{ranks.rank}.json"
    config.write_text(yaml.safe_dump(run_values("absent", "unused")))
    command = [
        "eval.speed",
        "engine",
        str(config),
        "train.global_batch_size=4",
        "model.vocab_size=50",
    ]
    with (
        mock.patch.object(sys, "argv", [*command, "--repeats", "3", "--json", str(record)]),
        mock.patch("cat_lm.training.distributed.start") as start,
    ):
        start.return_value.__enter__.return_value = ranks
        main()
    return json.loads(record.read_text())


def test_the_record(tmp_path):
    (record,) = run_on_ranks(measured, 1, str(tmp_path))
    assert record["ranks"] == 1
    assert record["tokens_per_step"] == 4 * 32 and record["model"]["vocab_size"] == 50
    assert len(record["step_seconds"]["all"]) == 3
    seconds = record["step_seconds"]["median"]
    host = record["host_seconds"]["all"]
    assert len(host) == 3 and min(host) > 0, "of this process, in CPU time"
    assert record["tokens_per_second"] == pytest.approx(128 / seconds)
    assert record["flops_per_step"] > 6 * 128 * (record["parameters"] - 50 * 32) > 0
    assert record["mfu"] is None and record["peak_flops"] is None
    memory = record["memory"]
    # Weights, gradients and two moments in fp32, and what torch takes when it is first used.
    assert memory["measured_bytes"] > 0 and memory["reserved_bytes"] is None
    assert memory["estimated_bytes"] > 16 * record["parameters"]
    assert sum(memory["estimated_parts"].values()) == pytest.approx(memory["estimated_bytes"])
    assert not (tmp_path / "unused").exists() and not Path("unused").exists()


def measured_by_both(ranks, folder: str) -> tuple[bool, bool]:
    """(whether this rank printed, whether it wrote a record); both take the steps."""
    given = {"RANK": str(ranks.rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(ranks.rank)}
    with mock.patch.dict(os.environ, given), mock.patch("builtins.print") as told:
        try:
            record = measured(ranks, folder)
        except FileNotFoundError:
            record = None
    assert record is None or record["ranks"] == 2
    to_stdout = [call for call in told.call_args_list if "file" not in call.kwargs]
    return bool(to_stdout), record is not None


def test_of_two_ranks_the_first_tells(tmp_path):
    assert run_on_ranks(measured_by_both, 2, str(tmp_path)) == [(True, True), (False, False)]


def vocabularies(ranks, data: str, folder: str) -> list:
    """Give the record's vocabulary by the data's; and what is said where one rank has no data."""
    config, found = Path(folder) / f"{ranks.rank}.yaml", []
    for path in (data, data if ranks.is_first else "absent"):
        config.write_text(yaml.safe_dump(run_values(path, "unused")))
        with mock.patch("cat_lm.training.distributed.start") as start:
            start.return_value.__enter__.return_value = ranks
            try:
                found.append(engine_speed(config, (), 1)["model"]["vocab_size"])
            except UserError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_vocabulary_is_that_of_the_data(world_size, tiny_corpus, tmp_path):
    results = run_on_ranks(vocabularies, world_size, str(tiny_corpus), str(tmp_path))
    size = json.loads((tiny_corpus / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    for found, again in results:
        assert found == size
        if world_size == 1:
            assert again == size
        else:  # on both alike: none waits for the other
            assert again.startswith("model.vocab_size: is left to data.path=absent, which must be")
            assert again.endswith("; or give model.vocab_size=N") and "\n" not in again


def test_without_data_the_vocabulary_is_asked_for(command):
    with mock.patch("cat_lm.training.distributed.start") as start:
        start.return_value.__enter__.return_value = Ranks(0, 0, 1, torch.device("cpu"))
        start.return_value.__exit__.return_value = False
        code, _, _, said = command("engine", "configs/quickstart.yaml", "data.path=absent")
    assert code == 2 and said.count("\n") == 1
    assert "error: model.vocab_size: is left to data.path=absent" in said


def test_a_wrong_configuration_is_one_line(command):
    code, _, _, err = command("engine", "configs/quickstart.yaml", "model.hidden_sise=3")
    assert code == 2 and "model.hidden_sise: unknown key" in err
