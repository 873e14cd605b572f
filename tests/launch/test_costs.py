"""launch.doctor --ranks --device: its arithmetic, its checks and errors, its README.md's tables."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest

from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.training.devices import (
    ASSUMED_INTERCONNECT,
    DEVICES,
    device_by_option,
    known_device,
)
from launch.doctor import costs as equations
from launch.doctor.costs import (
    ASSUMED_MFU,
    HOST_SECONDS_A_LAYER,
    OVERLAP,
    STORAGE,
    Cluster,
    Run,
    communication_bytes,
    compute_costs,
)
from launch.doctor.findings import WIDTH
from launch.doctor.ranks import collect_findings
from tests.conftest import REPOSITORY

SMALL, MEDIUM, LARGE = (
    str(REPOSITORY / f"configs/pretrain/cat_rope{size}.yaml") for size in ("", "_1b4", "_7b")
)
PAGE = REPOSITORY / "launch/doctor/README.md"
GUIDE = REPOSITORY / "docs/pretrain_on_slurm.md"
H100 = device_by_option("h100")
EIGHT = "train.micro_batch_size=8"


@pytest.fixture(scope="module")
def run() -> Run:
    return Run.of(load_config(MEDIUM, [EIGHT]), 0)


def cluster(**changes) -> Cluster:
    return replace(Cluster(H100, 8, 4e14 / 989e12, 25.0), **changes)


def with_keys(run: Run, *overrides: str) -> Run:
    return replace(run, config=load_config(MEDIUM, [EIGHT, *overrides]))


# Equations


def test_configurations_without_convolutions_have_pythias_parameters():
    for name, parameters in (("base_1b4", 1_414_647_808), ("base_7b", 6_857_302_016)):
        config = load_config(REPOSITORY / f"configs/pretrain/{name}.yaml")
        assert Run.of(config, 0).parameters == parameters


def test_computing_is_flops_by_speed(run):
    one, many = (compute_costs(run, cluster(), gpus) for gpus in (1, 64))
    tokens = run.config.tokens_per_step
    assert one.compute_seconds == pytest.approx(tokens * run.flops_per_token / 4e14)
    assert one.compute_seconds == pytest.approx(64 * many.compute_seconds)
    assert one.exposed_seconds == one.communication_bytes == 0
    assert many.step_seconds == many.compute_seconds + many.exposed_seconds
    assert many.tokens_per_second == pytest.approx(tokens / many.step_seconds)
    assert many.total_seconds == pytest.approx(
        run.config.total_steps * many.step_seconds
        + many.checkpoints * many.checkpoint_seconds
        + many.validation_seconds
    )
    assert many.gpu_hours == pytest.approx(64 * 24 * many.days)
    # 143 validations of 10M tokens, a third of a step's work each token.
    work = 143 * 10**7 * run.flops_per_token / 3
    assert many.validation_seconds == pytest.approx(work / (64 * 4e14))
    again = compute_costs(with_keys(run, "train.activation_checkpointing=true"), cluster(), 64)
    assert again.compute_seconds == pytest.approx(4 / 3 * many.compute_seconds)


def test_no_step_is_shorter_than_its_launches(run, monkeypatch):
    """24 layers a micro-batch: one for each of 512 GPUs' steps, sixteen for 8 GPUs."""
    monkeypatch.setattr(equations, "HOST_SECONDS_A_LAYER", 5e-3)
    few, many = (compute_costs(run, cluster(), gpus) for gpus in (8, 512))
    assert (few.host_seconds, many.host_seconds) == pytest.approx((16 * 24 * 5e-3, 24 * 5e-3))
    assert many.is_host_bound and not few.is_host_bound
    assert many.step_seconds == many.host_seconds + many.exposed_seconds
    assert few.step_seconds == few.compute_seconds + few.exposed_seconds
    again = compute_costs(with_keys(run, "train.activation_checkpointing=true"), cluster(), 512)
    assert again.host_seconds == pytest.approx(4 / 3 * many.host_seconds)
    assert compute_costs(with_keys(run, "train.compile=true"), cluster(), 512).host_seconds == 0


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
def test_bytes_sent_are_deepspeeds(stage, precision, sent):
    """1,024 sequences on 8 GPUs, 8 at once: 16 micro-batches; a ring keeps an eighth at home."""
    keys = [EIGHT, f"train.zero_stage={stage}", f"train.precision={precision}"]
    config = load_config(MEDIUM, keys)
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
        staged = with_keys(run, f"train.zero_stage={stage}")
        overlaps = staged.config.deepspeed(16)["zero_optimization"]["overlap_comm"]
        assert overlaps == (OVERLAP[stage] > 0)
        cost = compute_costs(staged, cluster(), 16)
        return cost.exposed_seconds / cost.communication_seconds

    assert exposed(0) == exposed(1) == 1
    assert exposed(2) == exposed(3) == pytest.approx(0.5)
    monkeypatch.setattr(equations, "HOST_SECONDS_A_LAYER", 0.0)
    fast = compute_costs(with_keys(run, "train.zero_stage=3"), cluster(mfu=1e15), 16)
    assert fast.exposed_seconds == pytest.approx(fast.communication_seconds)


def test_devices_are_found_by_name():
    assert device_by_option("H100-PCIe").tflops == 756 and device_by_option("rtx_4090").link == 32
    assert known_device("NVIDIA H100 80GB HBM3") == H100
    assert known_device("NVIDIA GH200 480GB").name == "GH200"
    assert known_device("cpu") is None
    for number, device in enumerate(DEVICES):  # a name that holds another one comes before it
        assert not any(earlier.name in device.name for earlier in DEVICES[:number])
        assert device_by_option(device.name.lower().replace(" ", "-")) == device


# Sequences that ranks share


def shared_run(parts: int, *overrides: str) -> Run:
    keys = [f"train.sequence_parallel={parts}", "train.precision=bf16", EIGHT, *overrides]
    return Run.of(load_config(SMALL, [*keys, "train.global_batch_size=64"]), 32_000)


def test_shared_sequences_send_what_a_gpu_keeps_not():
    run = shared_run(4)
    found = compute_costs(run, cluster(), 32)
    assert (found.micro_batch_size, found.accumulation_steps) == (8, 1)
    # Of each of its tokens a GPU keeps a quarter of q, k, v and output in bf16, there and back.
    sent = 2 * 24 * (64 * 2048 / 32) * 4 * 1024 * 3 / 4 * 2
    assert equations.sequence_bytes(run, 32) == sent
    plain = communication_bytes(run.config, run.parameters, 32)
    assert found.communication_bytes == plain + sent
    seconds = plain / cluster().bandwidth(32) + sent / (equations.LINK_EFFICIENCY * 450e9)
    assert found.communication_seconds == pytest.approx(seconds)
    again = shared_run(4, "train.activation_checkpointing=true")
    assert equations.sequence_bytes(again, 32) == 1.5 * sent
    for gpus, near in ((6, "4 or 8"), (512, "256")):
        with pytest.raises(UserError, match=rf"groups of 4 .*; {near} GPUs can"):
            equations.with_fitting_micro_batch(run, gpus, None)


def test_auto_micro_batch_is_what_the_device_holds():
    run = shared_run(1, "train.micro_batch_size=auto")
    for gpus in (4, 64):
        found = compute_costs(run, cluster(), gpus)
        size, share = found.micro_batch_size, 64 // gpus
        assert size * found.accumulation_steps == share
        assert found.memory.total <= cluster().device.memory * 2**30
    assert size == 1
    small = replace(cluster().device, memory=found.memory.total * 1.1 / 2**30)
    assert compute_costs(run, cluster(device=small), 4).micro_batch_size == 1


@pytest.mark.parametrize(
    ("parts", "gpus", "seconds"),
    [
        (8, 32, 1 / 450),  # within nodes of 8
        (16, 16, 8 / 15 / 25),  # of 15 others 8 are on the other node
        (32, 64, 24 / 31 / 25),
        (6, 24, 4 / 5 / 25),  # 6 | 2 4 | 4 2 | 6: two have four others elsewhere
        (12, 24, 8 / 11 / 25),  # 8 4 | 4 8
        (3, 3, 1 / 450),
    ],
)
def test_what_crosses_nodes_goes_through_a_gpus_own_way_out(parts, gpus, seconds):
    """Of a byte to 450 GB/s within a node and 25 GB/s out of it, 70% of them reached."""
    found = cluster().exchange_seconds(parts, gpus) * equations.LINK_EFFICIENCY * 1e9
    assert found == pytest.approx(seconds)


def test_ranks_that_share_sequences_divide_the_batch(doctor):
    asked = (SMALL, "train.sequence_parallel=4", "train.micro_batch_size=2", "--ranks")
    out = " ".join(doctor(*asked, 64)[1].split())
    assert "16 a group of 4 ranks (512 tokens each), 2 at once, 8 micro-batches" in out
    code, out, _ = doctor(*asked, 26)
    assert code == 1 and "must divide the number of ranks, 26" in " ".join(out.split())


# The command


def test_one_number_of_ranks_has_its_facts_and_costs(doctor, tmp_path):
    path = tmp_path / "found.json"
    asked = ("--ranks", 64, "--device", "H100", "--mfu", 0.5, "--json", path)
    code, out, _ = doctor(LARGE, *asked)
    assert code == 0 and max(map(len, out.splitlines())) <= WIDTH, out
    assert "\nthis run can start on 64 ranks\n" in out
    words = " ".join(out.split())
    record = json.loads(path.read_text("utf-8"))
    assert record["page"] == out.splitlines() and record["can_train"]
    found = {f["name"]: f["value"] for f in record["findings"]}
    assert found["host_memory"] == 4 * found["parameters"], "the first rank alone builds it"
    # The last two, the next, and those of each 20,000th of 238,418 steps.
    kept = (2 + 1 + 11) * found["checkpoint"] / 2**30
    (cost,) = found["costs"]
    for said in (
        *("64 ranks on 8 nodes of 8 H100", "6,857,366,528 parameters", "238,418 steps"),
        "2048 sequences of 2048 a step: 32 a rank, 2 at once, 16 micro-batches",
        "note: data: data/pretraining-1t: no such folder",
        f"every 1,000 steps; up to {kept:,.1f} GiB at the end",
        "25.5 GiB of the first node while its first rank builds the model",
        "50% of 989 TFLOP/s (MFU; given by --mfu)",
        f" {cost['tokens_per_second']:,.0f} {cost['days']:.2f} {cost['gpu_hours']:,.0f} ",
    ):
        assert said in words, out
    assert found["accumulation"] == 16 and found["checkpoint"] == 12 * found["parameters"]
    work = 2**22 * found["flops_per_token"]
    assert cost["compute_seconds"] == pytest.approx(work / (64 * 0.5 * 989e12))


def test_several_numbers_are_a_table_with_marks(doctor, tmp_path):
    path = tmp_path / "costs.json"
    code, out, _ = doctor(MEDIUM, EIGHT, "--ranks", "8,256,512", "--device", "l4", "--json", path)
    assert code == 0
    found = {f["name"]: f["value"] for f in json.loads(path.read_text("utf-8"))["findings"]}
    assert [cost["gpus"] for cost in found["costs"]] == [8, 256, 512]
    assert "at most 1,024 ranks, with a sequence each; 128 with train.micro_batch_size=8" in out
    rows = {
        int(row[0]): row
        for line in out.splitlines()
        if (row := line.split())[:1] and row[0].isdigit()
    }
    assert [rows[gpus][3].endswith("!") for gpus in (8, 256, 512)] == [True, False, False]
    assert rows[256][1:3] == ["4", "1"], "the micro-batch that 256 GPUs leave"
    assert "train.py needs train.micro_batch_size set to it" in out
    assert "more than the device's 24 GiB; lower train.micro_batch_size=8" in out


def test_hosts_time_is_shown(doctor):
    rows = ("--ranks", "8,256", "--device", "h100")
    text = " ".join(doctor(SMALL, *rows)[1].split())
    layer = f"{HOST_SECONDS_A_LAYER * 1e3:.2g} ms to launch a layer's kernels"
    assert f"host ASSUMED: {layer}, {24e3 * HOST_SECONDS_A_LAYER:.0f} ms a micro-batch" in text
    assert re.search(r" 8 32 1 \S+ 0\.\d{3} 0\.\d{3} ", text), "8 GPUs have enough to compute"
    assert re.search(r" 256 1 1 \S+ \S+ 0\.\d{3}\* ", text) and "* the GPU waits for its" in text
    text = doctor(SMALL, *rows, "train.compile=true")[1]
    assert "not counted: train.compile=true launches fewer" in text and "*" not in text


def test_everything_wrong_with_a_number_at_once(doctor):
    asked = ("--ranks", 60, "--device", "l4", "train.zero_stage=0")
    code, out, _ = doctor(LARGE, *asked)
    assert code == 1
    broken = [line for line in out.splitlines() if line.startswith("BROKEN")]
    assert len(broken) == 3, out
    assert "BROKEN: ranks: --ranks 60: is not a multiple of --gpus-per-node 8" in broken[0]
    assert broken[1].startswith("BROKEN: batch: train.global_batch_size=2048 is not a multiple")
    assert broken[2].startswith("BROKEN: memory: about 1")
    assert out.splitlines()[-1] == "3 broken: this run cannot start on 60 ranks"
    code, out, _ = doctor(MEDIUM, "--ranks", 64, "--device", "h100", "train.precision=fp32")
    assert code == 0 and "note: speed: train.precision=fp32: only peaks in bf16 are known" in out


def test_real_data_are_read(doctor, tiny_corpus):
    asked = (REPOSITORY / "configs/quickstart.yaml", "--ranks", 2, "--gpus-per-node", 2)
    code, out, err = doctor(*asked, f"data.path={tiny_corpus}", "train.micro_batch_size=8")
    assert code == 0 and "note" not in out, out + err
    assert "epochs" in out and "2 ranks on 1 node\n" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--ranks", "64", "--device", "h1000"), "device 'h1000': is not known; known are b200,"),
        (("--ranks", "8,48", "--device", "h100"), "cannot be shared by 48 GPUs; 32 or 64 GPUs can"),
        (("--ranks", "2,4", "--device", "h100", "--gpus-per-node", "3"), "is not a multiple of"),
        (("--ranks", "8,9", "--device", "h100", "train.precision=fp32"), "train.peak_tflops=X"),
        (("--ranks", "8", "--device", "h100", "model.conv_windw=3"), "model.conv_window"),
        (("--ranks", "8,16"), "--ranks: several numbers are a table of costs: give --device"),
        (("--device", "h100"), "--device: says nothing without --ranks"),
        (("--ranks", "8", "--mfu", "0.5"), "--mfu: says nothing without --device"),
        (("--ranks", "8", "--device", "h100", "--mfu=0"), "--mfu: '0' must be"),
        (("--ranks", "8", "--device", "h100", "--interconnect=nan"), "--interconnect: 'nan' must"),
        (("--device", "h100", "--ranks", "8;16"), "'8;16' must be a whole number"),
        (("--device", "h100", "--ranks", "8,8"), "names a number twice"),
    ],
)
def test_wrong_input_is_one_line(doctor, arguments, named):
    code, out, err = doctor(SMALL, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err, err


SHIPPED = {path.stem for path in (REPOSITORY / "configs/pretrain").glob("*.yaml")}
SHIPPED -= {"base_recipe"}  # no model yet
FEW = {"cat_rope_7b", "mamba2", "mh_maps_rope"}


@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("names", [FEW, pytest.param(SHIPPED - FEW, marks=pytest.mark.long)])
def test_shipped_configurations_start_on_gpus_of_80_gb(ranks, names):
    """As they are; 512 ranks are more than the 256 sequences of the 370M models' batch."""
    started, refused = set(), {}
    for name in sorted(names):
        config = load_config(REPOSITORY / f"configs/pretrain/{name}.yaml")
        found, _ = collect_findings(config, [ranks], cluster(device=replace(H100, memory=79.0)))
        broken = [finding.problem for finding in found if finding.broken]
        if config.train.global_batch_size >= ranks:
            assert not broken, f"{name}: {broken}"
            started.add(name)
        else:
            (refused[name],) = broken
    assert started >= names & {"base_1b4", "base_7b", "cat_rope_1b4", "cat_rope_7b"}
    assert started == names or ranks == 512
    assert all("right would be 256 ranks" in problem for problem in refused.values())


def test_all_wrong_numbers_at_once(doctor):
    code, out, err = doctor(SMALL, "--ranks", "7,8,12,512", "--device", "h100")
    assert (code, out) == (2, "")
    wrong = [line.split(":")[0] for line in err.splitlines()[1:]]
    assert wrong == ["  --ranks 7", "  --ranks 12", "  --ranks 512"]


def test_guide_shows_what_the_command_prints(doctor, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    text = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ python -m launch\.doctor (.*)\n([^`]*)```", text)
    assert len(blocks) == 2
    for arguments, shown in blocks:
        code, out, _ = doctor(*shlex.split(arguments))
        assert code == 0 and shown == out, f"{GUIDE}: {arguments} now prints\n{out}"


def test_page_has_the_costs_of_larger_models(doctor):
    """Ranks, GiB, seconds a step, days and GPU-hours are the columns of the command's table."""
    text = PAGE.read_text(encoding="utf-8")
    part = text.partition("## What a run costs")[2].partition("\n## ")[0]
    models: list[tuple[str, list[list[str]]]] = []
    for line in re.findall(r"^\|(.+)\|$", part, re.MULTILINE)[2:]:
        name, *cells = (cell.strip() for cell in line.split("|"))
        if name:
            models.append((re.findall(r"`(.+)`", name)[0], []))
        models[-1][1].append(cells)
    assert [name for name, _ in models] == ["cat_rope_1b4.yaml", "cat_rope_7b.yaml"]
    for name, rows in models:
        path, ranks = REPOSITORY / "configs/pretrain" / name, ",".join(row[0] for row in rows)
        out = doctor(path, "--ranks", ranks, "--device", "h100")[1]
        printed = {row[0]: row for line in out.splitlines() if (row := line.split())}
        for row in rows:
            found = printed[row[0]]
            assert row == [found[0], found[3], found[5], *found[9:]], f"{name} now prints\n{out}"


def test_page_states_the_assumptions():
    page = PAGE.read_text(encoding="utf-8")
    assert f"| MFU | {ASSUMED_MFU:.2f} |" in page
    assert f"| {ASSUMED_INTERCONNECT:g} GB/s a GPU |" in page
    assert f"| {HOST_SECONDS_A_LAYER * 1e3:.2g} ms a layer and micro-batch |" in page
    assert f"| file system | {STORAGE:g} GB/s |" in page
