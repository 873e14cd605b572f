"""Parts of the training program that need no engine: schedule, ranks, records, estimates."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from signal import SIG_DFL, SIG_IGN, SIGHUP, SIGINT, SIGTERM, SIGUSR1
from types import SimpleNamespace

import pytest
import torch

import train
from cat_lm import architectures
from cat_lm.config import RunConfig
from cat_lm.core.errors import (
    REQUEUE_EXIT_CODE,
    TemporaryError,
    UserError,
    command,
    file_error,
    shared_error,
)
from cat_lm.counts import flops_per_token, meta_model
from cat_lm.model import CatConfig, CatForCausalLM
from cat_lm.training import distributed, launcher
from cat_lm.training.building import build_model
from cat_lm.training.engine import _check_compiler
from cat_lm.training.estimate import memory_per_rank
from cat_lm.training.metrics import Metrics, keep_records
from cat_lm.training.schedule import learning_rate
from cat_lm.training.watchdog import StopSignal
from tests.cat_lm.model.attention_entries import entries  # noqa: F401
from tests.runs import run_values


def config(**optimizer) -> RunConfig:
    values = run_values("unused", "unused", max_steps=100)
    values["optimizer"] = {"lr": 1.0, **optimizer}
    return RunConfig.model_validate(values)


def rates(c: RunConfig) -> list[float]:
    return [learning_rate(c, step) for step in range(1, c.total_steps + 1)]


def test_cosine_with_warmup():
    found = rates(config(warmup_steps=10, initial_lr=0.1, min_lr=0.1))
    assert found[0] == pytest.approx(0.19) and found[9] == 1.0  # linear from 0.1, then the peak
    assert found[54] == pytest.approx(0.55)  # half way between peak and floor
    assert found[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(found[9:]))


def test_constant_and_wsd():
    assert set(rates(config(schedule="constant"))) == {1.0}
    found = rates(config(schedule="wsd", warmup_steps=4, decay_steps=20, min_lr=0.2))
    assert found[3] == found[79] == 1.0
    assert found[89] == pytest.approx(0.6) and found[-1] == pytest.approx(0.2)


def test_lengths_in_tokens_are_rounded_up():
    c = config(warmup_tokens=1000)  # 8 x 32 tokens a step
    assert c.steps_of("warmup") == 4


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n[003-004,9],m1", "n003"),
        ("gpu-12,gpu-14", "gpu-12"),
        ("rack[1-2]-ib,z", "rack1-ib"),
        ("single", "single"),
    ],
)
def test_ranks_meet_at_the_first_slurm_host(nodelist, host, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    for name, value in {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "62082",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_STEP_NODELIST": nodelist,
    }.items():
        monkeypatch.setenv(name, value)
    assert launcher.join_launcher() == (3, 1, 4)
    assert os.environ["MASTER_ADDR"] == host and os.environ["MASTER_PORT"] == "22001"


def test_ranks_without_a_meeting_point_are_an_error(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT"):
        launcher.join_launcher()


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "abc"), ("WORLD_SIZE", "0"), ("RANK", "7"), ("MASTER_PORT", "99999")],
)
def test_wrong_variables_of_a_launcher_are_one_line(name, value, monkeypatch):
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "12000"}
    for key, text in {**good, name: value}.items():
        monkeypatch.setenv(key, text)
    with pytest.raises(UserError, match=f"{name}={value}: a launcher sets it to a number from"):
        launcher.join_launcher()


def test_ranks_that_do_not_all_meet_may_be_started_again():
    """The launcher is told so by the code; wrong input would have 2."""
    code = (
        "from cat_lm.core.errors import command\n"
        "from cat_lm.training import distributed\n"
        "@command\n"
        "def main():\n"
        "    with distributed.start(timeout_minutes=0.01):\n"
        "        pass\n"
        "main()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == REQUEUE_EXIT_CODE, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: rank 0 on ") and "Traceback" not in done.stderr
    assert f"2 ranks were started and did not all meet at 127.0.0.1:{port} (" in line


@pytest.mark.parametrize(
    ("seen", "local_rank", "number", "variable"),
    [
        (8, 3, 3, "3"),
        (1, 3, 0, "0"),  # a task that sees its own GPU only
        (1, 0, 0, "0"),
        (2, 3, None, "3"),
    ],
)
def test_a_rank_s_gpu(seen, local_rank, number, variable, monkeypatch):
    """DeepSpeed reads LOCAL_RANK as the device's number."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    if number is None:
        with pytest.raises(UserError, match="local rank 3 has no GPU of its own: this node shows"):
            distributed._own_device(local_rank)
    else:
        device = distributed._own_device(local_rank)
        assert chosen == [device] == [torch.device("cuda", number)]
    assert os.environ["LOCAL_RANK"] == variable


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "a"}, {"PYTORCH_ALLOC_CONF": "a"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "b"}, {"PYTORCH_CUDA_ALLOC_CONF": "b"}),
    ],
)
def test_gpu_memory_is_allocated_in_blocks_that_grow(given, expected, monkeypatch):
    """Unless somebody said otherwise, under the setting's new name or its old one."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, given.get(name, ""))  # restored afterwards
        if name not in given:
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["train.py", "no-such.yaml"])
    with pytest.raises(SystemExit):
        train.main()
    assert {k: v for k, v in os.environ.items() if k.endswith("_ALLOC_CONF")} == expected


@pytest.mark.parametrize("duplicate", [True, False])
def test_ranks_that_share_a_gpu_are_one_line(duplicate, monkeypatch):
    said = "NCCL error in: ncclUtils.hpp, invalid usage\nLast error:\n"
    said += "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000"
    error = torch.distributed.DistBackendError(said if duplicate else "NCCL error: unhandled")

    def refused(*arguments):
        raise error

    monkeypatch.setattr(distributed, "join_launcher", lambda: (1, 1, 2))
    monkeypatch.setattr(distributed, "_start_deepspeed", refused)
    expected = (UserError, "rank 1 on .*: another rank has the same GPU; .*start one rank per GPU")
    kind, words = expected if duplicate else (torch.distributed.DistBackendError, "unhandled")
    with pytest.raises(kind, match=words), distributed.start():
        pass


def test_a_batch_script_itself_is_one_rank(monkeypatch):
    """It has the job's variables, but only srun starts the job's tasks."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    for name, value in {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert launcher.world_size() == 1 and launcher.join_launcher() == (0, 0, 1)


def test_records_after_the_checkpoint_and_cut_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {s}, "loss": 1.0}}\n' for s in range(1, 8)) + '{"step": 8,')
    assert keep_records(path, up_to_step=5) == 0
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]
    assert keep_records(tmp_path / "absent.jsonl", up_to_step=5) == 0
    validated = "".join(f'{{"step": {s}, "val_loss": 1.0}}\n' for s in (2, 4, 6))
    path.write_text(path.read_text() + validated)
    assert keep_records(path, up_to_step=5) == 4


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{broken}", "line 2: is not JSON"),
        (b"[1]", "line 2: holds [1], must be an object"),
        (b'{"loss": 1.0}', "line 2: step is null, must be the number of a step"),
        (b'{"step": "2"}', 'line 2: step is "2", must be'),
        (b"\xff", "is not UTF-8 text"),
    ],
)
def test_records_that_are_none_are_named(tmp_path, line, said):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match="metrics") as raised:
        keep_records(path, up_to_step=2)
    assert said in str(raised.value) and path.read_bytes() == before


def test_metrics_hold_no_number_that_json_has_not(tmp_path):
    c = config()
    metrics = Metrics(tmp_path, c, recorded_step=0)
    metrics.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5})
    metrics.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}


def test_tensorboard_and_missing_wandb(tmp_path):
    values = run_values("unused", "unused")
    values["logging"] = {"tensorboard": True}
    metrics = Metrics(tmp_path, RunConfig.model_validate(values), recorded_step=0)
    metrics.write({"step": 1, "loss": 2.0})
    metrics.close()
    assert list((tmp_path / "tensorboard").iterdir())
    values["logging"]["wandb_project"] = "p"
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=r"cat_lm\[wandb\]"):
            Metrics(tmp_path, RunConfig.model_validate(values), recorded_step=0)


def test_signals_end_with_their_code_and_a_second_interrupt_at_once(capfd):
    handlers = {number: signal.getsignal(number) for number in (SIGTERM, SIGUSR1, SIGHUP, SIGINT)}
    try:
        stop = StopSignal()
        assert stop.agreed_exit_code((), alone=True) == 0 and stop.votes() == (0, 0)
        os.kill(os.getpid(), SIGTERM)
        assert stop.agreed_exit_code((), alone=True) == REQUEUE_EXIT_CODE
        assert stop.votes() == (1, 0)
        with pytest.raises(KeyboardInterrupt):  # there is no step yet to wait for
            os.kill(os.getpid(), SIGINT)
        stop.catch_interrupts()
        os.kill(os.getpid(), SIGINT)
        assert stop.votes() == (1, 0)  # the first signal decides
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), SIGINT)
        assert "SIGTERM received" in capfd.readouterr().err
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("before", "code"), [(SIG_DFL, REQUEUE_EXIT_CODE), (SIG_IGN, 0)])
def test_a_closed_terminal_is_as_term_unless_nohup_keeps_it_off(before, code, capfd):
    handlers = {number: signal.getsignal(number) for number in (SIGTERM, SIGUSR1, SIGHUP)}
    try:
        signal.signal(SIGHUP, before)
        stop = StopSignal()
        assert signal.getsignal(SIGHUP) is not SIG_DFL  # of which this process would die
        os.kill(os.getpid(), SIGHUP)
        assert stop.agreed_exit_code((), alone=True) == code
        assert ("SIGHUP received" in capfd.readouterr().err) == bool(code)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("votes", "code"), [((0.0, 0.0), 0), ((3.0, 0.0), REQUEUE_EXIT_CODE), ((3.0, 1.0), 130)]
)
def test_ranks_agree_on_their_votes_alone(votes, code):
    """Not on what one of them has heard since: the others would go on."""
    handlers = {number: signal.getsignal(number) for number in (SIGTERM, SIGUSR1, SIGHUP)}
    try:
        stop = StopSignal()
        stop.request()
        assert stop.agreed_exit_code(votes, alone=False) == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("key=1: must be 2"), 2, "error: key=1: must be 2"),
        (
            OSError(errno.ENOSPC, "No space left on device", "a/b"),
            2,
            "error: a/b: the disk is full",
        ),
        (OSError(errno.ENOSPC, "No space left"), 2, "error: standard output: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), 2, "error: a: no permission"),
        (OSError(errno.ESTALE, "Stale file handle", "a"), 75, "error: a: Stale file handle"),
        (OSError(errno.ESTALE, "Stale file handle"), 75, "error: OSError: Stale file handle"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 75, "error: ConnectionResetError: "),
        (TemporaryError("not all ranks met"), 75, "error: not all ranks met"),
        (shared_error("a: Stale file handle", temporary=True), 75, "error: a: Stale"),
        (file_error("a: gone", OSError(errno.EIO, "x")), 75, "error: a: gone"),
        (file_error("a: gone", OSError(errno.ENOENT, "x")), 2, "error: a: gone"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_commands_end_in_one_line(error, code, line, capsys):
    @command
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert printed.startswith(line) and len(printed.splitlines()) == 1


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_stream_on_a_full_disk_changes_no_exit_code(full):
    body = "print('x')" if full == "stdout" else "raise UserError('y')"
    code = f"""
from cat_lm.core.errors import UserError, command

@command
def main():
    {body}

main()
"""
    with open("/dev/full", "w") as stream:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: stream}
        done = subprocess.run([sys.executable, "-c", code], **streams, text=True)
    assert done.returncode == 2
    if full == "stdout":
        assert done.stderr == "error: standard output: the disk is full\n"


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

    def states(stage: int, ranks: int) -> float:
        values["train"]["zero_stage"] = stage
        parameters = 10**9
        memory = memory_per_rank(RunConfig.model_validate(values), parameters, ranks, 257)
        return memory.states / parameters

    assert states(1, 1) == pytest.approx(18, abs=0.1)
    assert states(1, 8) == pytest.approx(6 + 12 / 8, abs=0.1)
    assert states(2, 8) == pytest.approx(2 + 16 / 8, abs=0.1)
    assert states(3, 8) == pytest.approx(18 / 8, abs=0.1)


def test_zero_3_begins_with_the_whole_model():
    """The engine gives every rank all weights (2 bytes each) before DeepSpeed partitions them."""
    config = RunConfig.model_validate(run_values("unused", "unused", precision="bf16"))
    config = config.model_copy(update={"train": config.train.model_copy(update={"zero_stage": 3})})
    many, few = (memory_per_rank(config, 10**11, ranks, 257) for ranks in (512, 4))
    assert many.total == pytest.approx(2e11) and "micro" not in many.advice
    assert few.total > few.states > 2e11


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
MODEL_KEYS = {
    "hidden_size": {"hidden_size": 48},
    "num_hidden_layers": {"num_hidden_layers": 3},
    "num_attention_heads": {"num_attention_heads": 4},
    "intermediate_size": {"intermediate_size": 24},
    "vocab_size": {"vocab_size": 99},
    "rotary_pct": {"rotary_pct": 0.5},
    "rope_theta": {"rope_theta": 500.0},
    "rope_parameters": {"rope_parameters": YARN | {"attention_factor": 1.0}},
    "attention_temperature": {"attention_temperature": 0.9},
    "temperature_scope": {"temperature_scope": "rotary", "attention_temperature": 0.9},
    "position_embedding": {"position_embedding": "none"},
    "conv_type": {"conv_type": "depthwise"},
    "conv_window": {"conv_window": 3},
    "conv_streams": {"conv_streams": "v"},
    "conv_mixing": {"conv_mixing": "maps", "conv_type": "multihead"},
    "conv_activation": {"conv_activation": "silu", "conv_type": "depthwise"},
    "conv_init": {"conv_init": "uniform"},
    "conv_filter": {"conv_filter": "ssm", "conv_state": 2, "conv_window": 21},
    "conv_state": {"conv_filter": "ssm", "conv_state": 4, "conv_window": 21},
    "conv_norm": {"conv_norm": "l1"},
    "conv_rank": {"conv_rank": 2},
    "qk_norm": {"qk_norm": "l2"},
    "qk_norm_place": {"qk_norm_place": "before", "qk_norm": "rms"},
    "canon": {"canon": "ACD"},
    "canon_window": {"canon_window": 2, "canon": "A"},
    "canon_init": {"canon_init": "zero", "canon": "A"},
    "use_parallel_residual": {"use_parallel_residual": False},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "layer_norm_eps": {"layer_norm_eps": 1e-3},
    "hidden_dropout": {"hidden_dropout": 0.3},
    "attention_dropout": {"attention_dropout": 0.3},
    "attn_implementation": {"attn_implementation": "eager"},
    "attention": {"attention": "sigmoid"},
    "attention_options": {"attention": "sigmoid", "attention_options": {"offset": 3.0}},
    "score_transform": {"score_transform": "decay"},
    "score_options": {"score_transform": "decay", "score_options": {"start": 2.0}},
    "value_transform": {"value_transform": "box"},
    "value_options": {"value_transform": "box", "value_options": {"width": 5}},
}
# What else is another value than the default where a key says nothing without the others.
WITHOUT = {"conv_filter": {"conv_state": 0}, "conv_state": {"conv_state": 2}}


def test_the_list_of_model_keys_is_whole():
    section = architectures.get("gpt_neox").Section
    assert MODEL_KEYS.keys() == section.model_fields.keys() - {"architecture"}


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("key", MODEL_KEYS)
def test_every_model_key_changes_the_model(key):
    """No key that is accepted and does nothing: weights, outputs or the way to them differ."""

    def model(changes: dict) -> CatForCausalLM:
        values = run_values("unused", "unused")
        values["model"] |= {"hidden_dropout": 0.0} | changes
        built = build_model(RunConfig.model_validate(values), vocab_size=50)
        generator = torch.Generator().manual_seed(1)
        for parameter in built.parameters():  # away from identity filters and zero biases
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        return built.train()

    def outputs(built: CatForCausalLM) -> torch.Tensor:
        torch.manual_seed(0)
        return built(torch.arange(24)[None], use_cache=False).logits

    companions = {k: v for k, v in MODEL_KEYS[key].items() if k != key}
    companions |= WITHOUT.get(key, {})
    usual, changed = model(companions), model(MODEL_KEYS[key])
    if key == "attn_implementation":
        assert changed.config._attn_implementation == "eager"
    else:
        first, second = outputs(usual), outputs(changed)
        assert first.shape != second.shape or not torch.allclose(first, second, atol=1e-3)


@pytest.mark.parametrize(("temporary", "code"), [(False, 2), (True, 75)])
@pytest.mark.parametrize(("rank", "printed"), [("0", "error: no data\n"), ("1", "")])
def test_what_all_ranks_share_is_said_once(rank, printed, temporary, code, monkeypatch, capfd):
    def fails():
        raise shared_error("no data", temporary)

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        command(fails)()
    assert ended.value.code == code and capfd.readouterr().err == printed


def test_lost_records_of_a_resumed_run_are_said(tmp_path):
    config = SimpleNamespace(logging=SimpleNamespace(tensorboard=False, wandb_project=None))
    path, said = tmp_path / "metrics.jsonl", []
    Metrics(tmp_path, config, recorded_step=7, say=said.append).close()
    assert said == [f"{path}: is gone, and with it the records of steps 1 to 7"]
    Metrics(tmp_path, config, recorded_step=7, say=said.append).close()
    assert len(said) == 1
