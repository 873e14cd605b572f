"""launch.doctor --ranks --device: its arithmetic, its errors, and the tables of its README.md."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from cat_lm.config import load_config
from cat_lm.training.devices import (
    DEVICES,
    device_by_option,
    known_device,
)
from launch.doctor import __main__ as doctor
from launch.doctor import costs as equations
from launch.doctor.costs import (
    HOST_SECONDS_A_LAYER,
    OVERLAP,
    Cluster,
    Run,
    communication_bytes,
    costs,
)
from tests.calls import call_main

ROOT = Path(__file__).parents[2]
SMALL = str(ROOT / "configs/pretrain/cat_rope.yaml")
MEDIUM = str(ROOT / "configs/pretrain/cat_rope_1b4.yaml")
H100 = device_by_option("h100")


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command: its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        return call_main(doctor.main, monkeypatch, capsys, "launch.doctor", *arguments)

    return run


@pytest.fixture(scope="module")
def run() -> Run:
    return Run.of(load_config(MEDIUM), 0)


def cluster(**changes) -> Cluster:
    return replace(Cluster(H100, 8, 4e14, 25.0), **changes)


def test_pythias_shapes():
    """Without convolutions the configurations have the parameters that Pythia reports."""
    for name, parameters in (("base_1b4", 1_414_647_808), ("base_7b", 6_857_302_016)):
        found = Run.of(load_config(ROOT / f"configs/pretrain/{name}.yaml"), 0).parameters
        assert found == parameters
        assert (
            load_config(ROOT / f"configs/pretrain/cat_rope_{name[5:]}.yaml").train.zero_stage == 1
        )


def test_computing_is_flops_by_speed(run):
    one, many = (costs(run, cluster(), gpus) for gpus in (1, 64))
    tokens = run.config.tokens_per_step
    assert one.compute_seconds == pytest.approx(tokens * run.flops_per_token / 4e14)
    assert one.compute_seconds == pytest.approx(64 * many.compute_seconds)
    assert one.exposed_seconds == one.communication_bytes == 0
    assert many.step_seconds == many.compute_seconds + many.exposed_seconds
    assert many.tokens_per_second == pytest.approx(tokens / many.step_seconds)
    steps = run.config.total_steps
    assert many.total_seconds == pytest.approx(
        steps * many.step_seconds
        + many.checkpoints * many.checkpoint_seconds
        + many.validation_seconds
    )
    assert many.gpu_hours == pytest.approx(64 * 24 * many.days)
    # 143 validations of 10M tokens, a third of a step's work each token.
    work = 143 * 10**7 * run.flops_per_token / 3
    assert many.validation_seconds == pytest.approx(work / (64 * 4e14))


def test_checkpointing_computes_the_forward_pass_twice(run):
    config = load_config(MEDIUM, ["train.activation_checkpointing=true"])
    again = costs(replace(run, config=config), cluster(), 8)
    assert again.compute_seconds == pytest.approx(4 / 3 * costs(run, cluster(), 8).compute_seconds)


def test_no_step_is_shorter_than_its_launches(run, monkeypatch):
    """24 layers a micro-batch: one for each of 512 GPUs' steps, sixteen for 8 GPUs."""
    monkeypatch.setattr(equations, "HOST_SECONDS_A_LAYER", 5e-3)
    few, many = (costs(run, cluster(), gpus) for gpus in (8, 512))
    assert (few.host_seconds, many.host_seconds) == pytest.approx((16 * 24 * 5e-3, 24 * 5e-3))
    assert many.is_host_bound and not few.is_host_bound
    assert many.step_seconds == many.host_seconds + many.exposed_seconds
    assert few.step_seconds == few.compute_seconds + few.exposed_seconds
    config = load_config(MEDIUM, ["train.activation_checkpointing=true"])
    again = costs(replace(run, config=config), cluster(), 512)
    assert again.host_seconds == pytest.approx(4 / 3 * many.host_seconds)


def test_the_host_s_time_is_shown(command):
    rows = ("--ranks", "8,256", "--device", "h100")
    text = " ".join(command(SMALL, *rows)[1].split())
    layer = f"{HOST_SECONDS_A_LAYER * 1e3:.2g} ms to launch a layer's kernels"
    assert f"host ASSUMED: {layer}, {24e3 * HOST_SECONDS_A_LAYER:.0f} ms a micro-batch" in text
    assert re.search(r" 8 8 4 \S+ 0\.\d{3} ", text), "8 GPUs have enough to compute"
    assert re.search(r" 256 1 1 \S+ 0\.\d{3}\* ", text) and "* the GPU waits for its host" in text
    one = ("--ranks", 256, "--device", "h100", "train.micro_batch_size=1")
    (step,) = re.findall(r"(?m)^step +(.*)", command(SMALL, *one)[1])
    assert re.match(r"0\.\d{3} s: launching 0\.\d{3} s \(the GPU computes 0\.014 s", step)
    text = command(SMALL, *rows, "train.compile=true")[1]
    assert "not counted: train.compile=true launches fewer" in text and "*" not in text


@pytest.mark.parametrize(
    ("stage", "precision", "sent"),
    [
        (0, "bf16", 8),
        (1, "bf16", 10),
        (1, "fp32", 12),
        (2, "bf16", 16 * 8 + 2),
        (3, "bf16", 16 * (4 + 4)),
    ],
)
def test_bytes_sent(stage, precision, sent):
    """1,024 sequences on 8 GPUs, 8 at once: 16 micro-batches; a ring keeps an eighth at home."""
    config = load_config(MEDIUM, [f"train.zero_stage={stage}", f"train.precision={precision}"])
    assert communication_bytes(config, 1000, 8) == pytest.approx(1000 * sent * 7 / 8)
    assert communication_bytes(config, 1000, 1) == 0
    config = load_config(MEDIUM, ["train.gradient_communication=bf16"])  # of ZeRO-1
    assert communication_bytes(config, 1000, 8) == pytest.approx(1000 * 6 * 7 / 8)


def test_bandwidth_within_and_between_nodes():
    assert cluster().bandwidth(8) == pytest.approx(0.7 * 450e9)
    assert cluster().bandwidth(16) == pytest.approx(0.7 * 200e9)  # eight ways out of 25 GB/s
    assert cluster(interconnect=400.0).bandwidth(16) == pytest.approx(0.7 * 450e9)
    assert cluster(gpus_per_node=1).bandwidth(16) == pytest.approx(0.7 * 25e9)


def test_communication_hides_where_deepspeed_overlaps_it(run, monkeypatch):
    def exposed(stage: int) -> float:
        config = load_config(MEDIUM, [f"train.zero_stage={stage}"])
        overlaps = config.deepspeed(16)["zero_optimization"]["overlap_comm"]
        assert overlaps == (OVERLAP[stage] > 0)
        cost = costs(replace(run, config=config), cluster(), 16)
        return cost.exposed_seconds / cost.communication_seconds

    assert exposed(0) == exposed(1) == 1
    assert exposed(2) == exposed(3) == pytest.approx(0.5)
    config = load_config(MEDIUM, ["train.zero_stage=3"])
    monkeypatch.setattr(equations, "HOST_SECONDS_A_LAYER", 0.0)
    fast = costs(replace(run, config=config), cluster(flops=1e30), 16)
    assert fast.exposed_seconds == pytest.approx(fast.communication_seconds)


def test_marks_of_a_table(command, tmp_path):
    path = tmp_path / "costs.json"
    code, out, _ = command(MEDIUM, "--ranks", "8,256,512", "--device", "l4", "--json", path)
    assert code == 0
    found = {f["name"]: f["value"] for f in json.loads(path.read_text("utf-8"))["findings"]}
    assert [cost["gpus"] for cost in found["costs"]] == [8, 256, 512]
    assert f"{found['costs'][1]['tokens_per_second']:,.0f}" in out
    assert "at most 1,024 ranks, with a sequence each; 128 with train.micro_batch_size=8" in out
    rows = {
        int(line.split()[0]): line.split()
        for line in out.splitlines()
        if line[:5].strip()[:1].isdigit()
    }
    assert [rows[gpus][3].endswith("!") for gpus in (8, 256, 512)] == [True, False, False]
    assert rows[256][1:3] == ["4", "1"], "the micro-batch that 256 GPUs leave"
    assert "train.py needs train.micro_batch_size set to it" in out
    assert "more than the device's 24 GiB; lower train.micro_batch_size=8" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--ranks", "64", "--device", "h1000"), "device 'h1000': is not known; known are b200,"),
        (("--ranks", "8,48", "--device", "h100"), "cannot be shared by 48 GPUs; 32 or 64 GPUs can"),
        (("--ranks", "8,512", "--device", "h100"), "cannot be shared by 512 GPUs; 256 GPUs can"),
        (("--ranks", "2,4", "--device", "h100", "--gpus-per-node", "3"), "is not a multiple of"),
        (("--ranks", "8,9", "--device", "h100", "train.precision=fp32"), "train.peak_tflops=X"),
        (("--ranks", "8", "--device", "h100", "model.conv_windw=3"), "model.conv_window"),
        (("--ranks", "8,16"), "--ranks: several numbers are a table of costs: give --device"),
        (("--device", "h100"), "--device: says nothing without --ranks"),
        (("--ranks", "8", "--mfu", "0.5"), "--mfu: says nothing without --device"),
        (("--ranks", "8;16", "--device", "h100"), "'8;16' must be a whole number"),
        (("--ranks", "0", "--device", "h100"), "'0' must be from 1 to 1,048,576"),
        (("--ranks", "8,8", "--device", "h100"), "names a number twice"),
        (("--ranks", "8", "--device", "h100", "--mfu=nan"), "--mfu: 'nan' must be"),
        (("--ranks", "8", "--device", "h100", "--interconnect=0"), "--interconnect: '0' must be"),
    ],
)
def test_wrong_input_is_one_line(command, arguments, named):
    code, out, err = command(SMALL, *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ") and named in err, err


def test_all_wrong_numbers_are_named_at_once(command):
    code, _, err = command(SMALL, "--ranks", "7,8,12", "--device", "h100")
    named = [line.split(":")[0] for line in err.splitlines()[1:]]
    assert (code, named) == (2, ["  --ranks 7", "  --ranks 12"])


def test_devices():
    assert device_by_option("H100-PCIe").tflops == 756 and device_by_option("rtx_4090").link == 32
    assert known_device("NVIDIA H100 80GB HBM3") == H100
    assert known_device("NVIDIA GH200 480GB").name == "GH200"
    assert known_device("cpu") is None
    for number, device in enumerate(DEVICES):  # a name that holds another one comes before it
        assert not any(earlier.name in device.name for earlier in DEVICES[:number])
        assert device_by_option(device.name.lower().replace(" ", "-")) == device


def test_readme_shows_what_the_command_prints(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "launch/doctor/README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ python -m launch\.doctor (.*)\n([^`]*)```", page)
    assert len(blocks) == 4
    for arguments, shown in blocks:
        code, out, _ = command(*shlex.split(arguments))
        assert code == 0 and shown == out, f"launch/doctor/README.md: {arguments} now prints\n{out}"
