"""Records of steps, estimates, and the schedule: parts of training that need no engine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.counts import flops_per_token, meta_model
from cat_lm.model import CatConfig
from cat_lm.training.engine import _check_compiler
from cat_lm.training.estimate import memory_per_rank
from cat_lm.training.metrics import Metrics, drop_later_records, finite_numbers
from cat_lm.training.schedule import learning_rate
from tests.runs import run_values


def config(**optimizer) -> RunConfig:
    values = run_values("unused", "unused", max_steps=100)
    values["optimizer"] = {"lr": 1.0, **optimizer}
    return RunConfig.model_validate(values)


def rates(c: RunConfig) -> list[float]:
    return [learning_rate(c, step) for step in range(1, c.total_steps + 1)]


def test_cosine_follows_its_warmup():
    found = rates(config(warmup_steps=10, initial_lr=0.1, min_lr=0.1))
    assert found[0] == pytest.approx(0.19) and found[9] == 1.0  # linear from 0.1, then the peak
    assert found[54] == pytest.approx(0.55)  # half way between peak and floor
    assert found[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(found[9:]))


def test_wsd_is_constant_before_its_decay():
    assert set(rates(config(schedule="constant"))) == {1.0}
    found = rates(config(schedule="wsd", warmup_steps=4, decay_steps=20, min_lr=0.2))
    assert found[3] == found[79] == 1.0
    assert found[89] == pytest.approx(0.6) and found[-1] == pytest.approx(0.2)
    assert config(warmup_tokens=1000).steps_of("warmup") == 4  # 8 x 32 tokens a step


def lines_of(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(1, 9), st.text(max_size=20))
def test_records_after_the_checkpoint_and_a_cut_line_are_dropped(validated, up_to, text):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        steps = [{"step": s, "loss": 1.0} for s in range(1, 9)]
        steps += [{"step": s, "val_loss": 1.0} for s in range(1, 9) if validated[s - 1]]
        path.write_text(lines_of(steps) + json.dumps({"step": 9, "text": text})[:-1])
        kept = [record for record in steps if record["step"] <= up_to]
        last = max((record["step"] for record in kept if "val_loss" in record), default=0)
        assert drop_later_records(path, up_to_step=up_to) == last
        assert path.read_text() == lines_of(kept)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{broken}", "line 2: is not JSON"),
        (b"[1]", "line 2: holds [1], must be an object"),
        (b'{"loss": 1.0}', "line 2: step is null, must be the number of a step"),
        (b"\xff", "is not UTF-8 text"),
    ],
)
def test_record_that_is_none_raises_user_error(tmp_path, line, said):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match="metrics") as raised:
        drop_later_records(path, up_to_step=2)
    assert said in str(raised.value) and path.read_bytes() == before


def test_metrics_hold_no_number_that_json_has_not(tmp_path):
    metrics = Metrics(tmp_path, recorded_step=0)
    record = {"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5}
    metrics.write(record)
    metrics.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}
    assert finite_numbers(record) == {"lr": 0.5}


def test_lost_records_of_a_resumed_run_are_said(tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    for _ in range(2):
        Metrics(tmp_path, recorded_step=7, say=said.append).close()
        assert said == [f"{path}: is gone, and with it the records of steps 1 to 7"]


def test_compiling_needs_a_compiler_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"no C\+\+ compiler"):
        _check_compiler(torch.device("cpu"))
    _check_compiler(torch.device("cuda"))


def test_flops_of_the_paper_model():
    """The model has 24 layers of width 1024 with 16 heads, over rows of 2,048 tokens."""
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 16, "intermediate_size": 4096}

    def cost(**changes) -> float:
        return flops_per_token(meta_model(CatConfig(**sizes, **changes)), 2048)

    matrices = 24 * 12 * 1024**2 + 32_000 * 1024
    plain = cost(conv_type="none")
    assert plain == 6 * matrices + 12 * 24 * 2048 * 1024
    cat = cost(conv_type="head", conv_window=21)
    assert cat - plain == 6 * 21 * 3 * 24 * 1024  # each tap of each channel, however many share it


def test_memory_shrinks_with_stages_and_ranks():
    values = run_values("unused", "unused", precision="bf16")

    def memory(stage: int, ranks: int, parameters: int = 10**9):
        values["train"]["zero_stage"] = stage
        return memory_per_rank(RunConfig.model_validate(values), parameters, ranks, 257)

    for stage, ranks, bytes_ in ((1, 1, 18), (1, 8, 7.5), (2, 8, 4), (3, 8, 18 / 8)):
        assert memory(stage, ranks).states / 10**9 == pytest.approx(bytes_, abs=0.1)
    plain = memory(2, 4).states
    values["train"]["ema_decay"] = 0.9
    assert memory(2, 4).states - plain == pytest.approx(1e9)
    # The engine gives every rank all weights (2 bytes each) before DeepSpeed partitions them.
    many, few = (memory(3, ranks, 10**11) for ranks in (512, 4))
    assert many.total == pytest.approx(2e11) and "micro" not in many.advice
    assert few.total > few.states > 2e11
