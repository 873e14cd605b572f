"""launch.plan: its arithmetic, its errors, measured records, and the tables of its README.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cat_lm.config import load_config
from cat_lm.training.devices import DEVICES, device_by_option, known_device
from launch.plan import __main__ as plan
from launch.plan.costs import (
    ASSUMED_MFU,
    HOST_SECONDS_A_LAYER,
    OVERLAP,
    Cluster,
    Run,
    communication_bytes,
    costs,
)
from tests.unit.calls import call_main

ROOT = Path(__file__).parents[2]
SMALL = str(ROOT / "configs/pretrain/cat_rope.yaml")
MEDIUM = str(ROOT / "configs/pretrain/cat_rope_1b4.yaml")
H100 = device_by_option("h100")


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command: its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        return call_main(plan.main, monkeypatch, capsys, "launch.plan", *arguments)

    return run


@pytest.fixture(scope="module")
def run() -> Run:
    return Run.of(load_config(MEDIUM), 0)


def cluster(**changes) -> Cluster:
    return replace(Cluster(H100, 8, 4e14, 25.0, 2.0), **changes)


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


def test_no_step_is_shorter_than_its_launches(run):
    """24 layers a micro-batch: one for each of 512 GPUs' steps, sixteen for 8 GPUs."""
    few, many = (costs(run, cluster(host_seconds=5e-3), gpus) for gpus in (8, 512))
    assert (few.host_seconds, many.host_seconds) == pytest.approx((16 * 24 * 5e-3, 24 * 5e-3))
    assert many.is_host_bound and not few.is_host_bound
    assert many.step_seconds == many.host_seconds + many.exposed_seconds
    assert few.step_seconds == few.compute_seconds + few.exposed_seconds
    config = load_config(MEDIUM, ["train.activation_checkpointing=true"])
    again = costs(replace(run, config=config), cluster(host_seconds=5e-3), 512)
    assert again.host_seconds == pytest.approx(4 / 3 * many.host_seconds)


def test_the_host_s_time_is_shown(command):
    rows = ("--gpus", "8,256", "--device", "h100")
    text = " ".join(command(SMALL, *rows)[1].split())
    layer = f"{HOST_SECONDS_A_LAYER * 1e3:.2g} ms to launch a layer's kernels"
    assert f"host ASSUMED: {layer}, {24e3 * HOST_SECONDS_A_LAYER:.0f} ms a micro-batch" in text
    assert re.search(r" 8 8 4 \S+ 0\.\d{3} ", text), "8 GPUs have enough to compute"
    assert re.search(r" 256 1 1 \S+ 0\.\d{3}\* ", text) and "* the GPU waits for its host" in text
    (step,) = re.findall(r"(?m)^step +(.*)", command(SMALL, "--gpus", 256, "--device", "h100")[1])
    assert re.match(r"0\.\d{3} s: launching 0\.\d{3} s \(the GPU computes 0\.014 s", step)
    text = command(SMALL, *rows, "train.compile=true")[1]
    assert "host         not counted: train.compile=true launches fewer" in text and "*" not in text


@pytest.mark.parametrize(
    ("tokens_per_second", "compiled", "words"),
    [
        (250_000.0, False, "host at most 0.34 ms to launch a layer's kernels, 8 ms a micro-batch"),
        (250_000.0, True, "host ASSUMED: "),  # of other launches than this run's
        (25_000.0, False, "host ASSUMED: "),  # a step that took longer says nothing of its host
    ],
)
def test_a_measured_step_bounds_its_host(command, tmp_path, tokens_per_second, compiled, words):
    measured = record()
    measured["case"] |= {"batch_size": 1, "compile": compiled}
    measured["results"]["cat"]["tokens_per_second"] = tokens_per_second
    path = tmp_path / "h100.json"
    path.write_text(json.dumps(measured), encoding="utf-8")
    code, out, err = command(SMALL, "--gpus", 256, "--device", "h100", "--measured", path)
    assert code == 0, err
    assert words in " ".join(out.split())
    bound = words.startswith("host at most")
    assert ("the measured step took no longer" in " ".join(out.split())) == bound


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


def test_communication_hides_where_deepspeed_overlaps_it(run):
    def exposed(stage: int) -> float:
        config = load_config(MEDIUM, [f"train.zero_stage={stage}"])
        overlaps = config.deepspeed(16)["zero_optimization"]["overlap_comm"]
        assert overlaps == (OVERLAP[stage] > 0)
        cost = costs(replace(run, config=config), cluster(), 16)
        return cost.exposed_seconds / cost.communication_seconds

    assert exposed(0) == exposed(1) == 1
    assert exposed(2) == exposed(3) == pytest.approx(0.5)
    config = load_config(MEDIUM, ["train.zero_stage=3"])
    fast = costs(replace(run, config=config), cluster(flops=1e30, host_seconds=0.0), 16)
    assert fast.exposed_seconds == pytest.approx(fast.communication_seconds)


def test_one_number_of_gpus(command, tmp_path):
    path = tmp_path / "plan.json"
    code, out, err = command(
        *(MEDIUM, "--gpus", 64, "--device", "H100", "train.max_tokens=30B"),
        *("--price-per-gpu-hour", 2, "--json", path),
    )
    assert (code, err) == (0, f"wrote {path}\n"), err
    assert max(map(len, out.splitlines())) <= 100
    assert f"ASSUMED, nothing was measured: {ASSUMED_MFU:.0%} of 989 TFLOP/s" in out
    record = json.loads(path.read_text(encoding="utf-8"))
    (cost,) = record["costs"]
    assert f"{cost['tokens_per_second']:,.0f} tokens/s" in out
    assert f"{cost['days']:.2f} days, {cost['gpu_hours']:,.0f} GPU-hours" in out
    assert cost["price"] == 2 * cost["gpu_hours"]
    assert record["config"]["train"]["max_tokens"] == 30 * 10**9
    assert "16 sequences a GPU and step: 8 at once, 2 micro-batches" in out
    assert "64 H100 in 8 nodes" in out and "fits, about" in out
    assert "1,024 GPUs, with a sequence each; 128 with train.micro_batch_size=8" in out


def test_marks_of_a_table(command):
    code, out, _ = command(
        MEDIUM, "--gpus", "8,256,512", "--device", "l4", "--price-per-gpu-hour", "1.5"
    )
    assert code == 0
    rows = {
        int(line.split()[0]): line.split()
        for line in out.splitlines()
        if line[:4].strip()[:1].isdigit()
    }
    assert [rows[gpus][3].endswith("!") for gpus in (8, 256, 512)] == [True, False, False]
    assert rows[256][1:3] == ["4", "1"], "the micro-batch that 256 GPUs leave"
    assert "train.py needs train.micro_batch_size set to it" in out
    assert "more than the device's 24 GiB; lower train.micro_batch_size=8" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--gpus", "64", "--device", "h1000"), "device 'h1000': is not known; known are b200,"),
        (("--gpus", "48", "--device", "h100"), "cannot be shared by 48 GPUs; 32 or 64 GPUs can"),
        (("--gpus", "512", "--device", "h100"), "cannot be shared by 512 GPUs; 256 GPUs can"),
        (("--gpus", "4", "--device", "h100", "--gpus-per-node", "3"), "is not a multiple of"),
        (("--gpus", "8", "--device", "h100", "train.precision=fp32"), "give train.peak_tflops=X"),
        (("--gpus", "8", "--device", "h100", "model.vocab_size=null"), "give model.vocab_size=N"),
        (("--gpus", "8", "--device", "h100", "--measured", "no.json"), "no.json: no such file"),
        (("--gpus", "8", "--device", "h100", "model.conv_windw=3"), "model.conv_window"),
    ],
)
def test_wrong_input_is_one_line(command, arguments, named):
    code, out, err = command(SMALL, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err, err


def test_all_wrong_numbers_at_once(command):
    code, out, err = command(SMALL, "--gpus", "7,8,12,512", "--device", "h100")
    assert (code, out) == (2, "")
    assert [line.split(":")[0] for line in err.splitlines()[1:]] == [
        "  --gpus 7",
        "  --gpus 12",
        "  --gpus 512",
    ]


@pytest.mark.parametrize("flag", ["--mfu", "--interconnect", "--storage", "--price-per-gpu-hour"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "x", "inf"])
def test_wrong_flags(command, flag, value):
    code, _, err = command(SMALL, "--gpus", "8", "--device", "h100", f"{flag}={value}")
    assert code == 2 and f"error: {flag}: '{value}' must be" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "'' must be a whole number; give a list such as 8,16,32"),
        ("8,,16", "'' must be a whole number"),
        ("8;16", "'8;16' must be a whole number"),
        ("0", "'0' must be from 1 to 1,048,576"),
        ("1000000000", "must be from 1 to 1,048,576"),
        ("8,8", "names a number twice"),
    ],
)
def test_wrong_numbers_of_gpus(command, value, said):
    code, _, err = command(SMALL, "--device", "h100", "--gpus", value)
    assert code == 2 and said in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/proc/x", "may not be written to"),
        ("/dev/full", "is no regular file"),
        (".", "is a folder"),
        ("", "is no path"),
        ("x" * 256, "longer than 255 bytes"),
        (f"{__file__}/x", "is a file; give a file in a folder"),
    ],
)
def test_where_the_numbers_go_is_checked_first(command, path, said):
    code, out, err = command("no.yaml", "--gpus", "8", "--device", "h100", "--json", path)
    assert (code, out) == (2, "") and said in err.splitlines()[-1]


def test_devices():
    assert device_by_option("H100-PCIe").tflops == 756 and device_by_option("rtx_4090").link == 32
    assert known_device("NVIDIA H100 80GB HBM3") == H100
    assert known_device("NVIDIA GH200 480GB").name == "GH200"
    assert known_device("cpu") is None
    for number, device in enumerate(DEVICES):  # a name that holds another one comes before it
        assert not any(earlier.name in device.name for earlier in DEVICES[:number])
        assert device_by_option(device.name.lower().replace(" ", "-")) == device


# Measured records


def record(**changes) -> dict:
    """What `eval.speed train --json` writes, as far as it is read."""
    size = {"layers": 24, "hidden_size": 2048, "heads": 16, "vocab_size": 50304, "window": 21}
    case = {"size": size | {"dtype": "bfloat16"}, "batch_size": 8, "context_length": 2048}
    return {
        "benchmark": "train",
        "date": "2026-01-01",
        "device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"},
        "case": case | {"optimizer": True, "compile": False},
        "results": {
            "pythia": {"model": "Pythia", "tokens_per_second": 9e9, "flops_per_step": 1.0},
            "cat": {
                "model": "CAT",
                "tokens_per_second": 50_000.0,
                "flops_per_step": 9.1e9 * 8 * 2048,
            },
        },
    } | changes


def case_in(dtype: str) -> dict:
    case = record()["case"]
    return case | {"size": case["size"] | {"dtype": dtype}}


def test_a_measured_record_decides_the_speed(command, tmp_path):
    path = tmp_path / "h100.json"
    path.write_text(json.dumps(record()), encoding="utf-8")
    arguments = (MEDIUM, "--gpus", 1, "--device", "h100", "--measured", path)
    code, out, err = command(*arguments, "--json", tmp_path / "plan.json")
    assert code == 0, err
    assert "measured on one NVIDIA H100 80GB HBM3 (h100.json, 2026-01-01): CAT, 50,000" in out
    assert "ASSUMED, nothing was measured" not in out and "carried over" not in out
    (cost,) = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["costs"]
    assert cost["tokens_per_second"] == pytest.approx(50_000, rel=2e-3)  # 9.1 is rounded
    code, out, _ = command(*arguments, "model.conv_window=4", "train.micro_batch_size=4")
    text = " ".join(out.split())
    assert "carried over to another case: window 21 there, 4 here; batch 8 there, 4 here" in text
    path.write_text(json.dumps(record(case=record()["case"] | {"optimizer": False})), "utf-8")
    assert "without the optimizer's update" in " ".join(command(*arguments)[1].split())


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("[]", "give a record of this version's"),
        ('{"benchmark": "conv"}', "give a record of this version's"),
        ("{", "is not JSON"),
        (record(case=record()["case"] | {"batch_size": 0}), "case.batch_size is 0"),
        (record(results={"cat": {"model": "CAT"}}), "has no results.cat.tokens_per_second"),
        (record(device={"name": "NVIDIA A100-SXM4-80GB"}), "was measured on NVIDIA A100"),
        (record(device={"type": "cpu", "name": "cpu"}), "was measured on cpu, not on --device H1"),
        (
            record(results={"pythia": record()["results"]["pythia"]}),
            "has no model like the configuration's (gpt_neox, head convolution of q, k, v, W=21; "
            "RoPE); it has pythia",
        ),
        (
            record(case=case_in("float32")),
            "was measured in float32, not in train.precision=bf16",
        ),
    ],
)
def test_records_that_do_not_fit(command, tmp_path, written, named):
    path = tmp_path / "record.json"
    path.write_text(written if isinstance(written, str) else json.dumps(written), "utf-8")
    code, _, err = command(MEDIUM, "--gpus", 8, "--device", "h100", "--measured", path)
    assert code == 2 and err.count("\n") == 1 and named in err, err


# The page


def test_the_page_shows_what_the_command_prints(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "launch/plan/README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ python -m launch\.plan (.*)\n([^`]*)```", page)
    assert len(blocks) == 4
    for arguments, shown in blocks:
        code, out, _ = command(*shlex.split(arguments))
        assert code == 0 and shown == out, f"launch/plan/README.md: {arguments} now prints\n{out}"


def test_the_page_states_the_assumptions():
    page = (ROOT / "launch/plan/README.md").read_text(encoding="utf-8")
    assert f"| MFU | {ASSUMED_MFU:.2f} |" in page
    assert f"| {plan.ASSUMED_INTERCONNECT:g} GB/s a GPU |" in page
    assert f"| {HOST_SECONDS_A_LAYER * 1e3:.2g} ms a layer and micro-batch |" in page
    assert f"| file system | {plan.ASSUMED_STORAGE:g} GB/s |" in page


def test_help_needs_no_torch():
    code = "import sys; sys.argv = ['plan', '--help']\nfrom launch.plan.__main__ import main\n"
    code += "try: main()\n"
    code += "except SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_gpus_are_parsed():
    arguments = plan.parser().parse_args(["a.yaml", "--device", "h100", "--gpus", "8, 16"])
    assert arguments.gpus == (8, 16)
