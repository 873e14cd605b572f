"""launch.doctor: what it finds, that it finds all that is wrong at once, and its exit codes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from cat_lm.config import load_config
from cat_lm.ops.runtime import triton_launch
from cat_lm.training.estimate import num_parameters
from cat_lm.training.preflight import facts
from launch.doctor import __main__ as program
from launch.doctor import machine, run
from launch.doctor.findings import LABEL, WIDTH, Finding, run_check
from tests.checkpoints import step_folder
from tests.conftest import REPOSITORY

FINE = Finding("device", "CPU of a test", "cpu", {"cores": 2})
NOTE = Finding("compiler", "none", "compiler", None, "no C++ compiler; install one")
BROKEN = Finding("packages", "torch missing", "torch", None, "torch is missing", broken=True)


@pytest.fixture
def only(monkeypatch):
    """Replaces the checks of a machine by given findings."""

    def use(*findings: Finding) -> None:
        monkeypatch.setattr(machine, "ALL", (lambda: iter(findings),))

    return use


def problems(findings) -> dict[str, str]:
    return {finding.name: finding.problem for finding in findings if finding.problem}


def test_this_machine_can_train(doctor, tmp_path):
    """Every check runs here, and all tests run here, so training can."""
    path = tmp_path / "doctor.json"
    code, out, err = doctor("--json", path)
    assert (code, out.splitlines()[-1]) == (0, "training can run here"), out
    assert err == f"wrote {path}\n"
    words = (line[LABEL:].split() for line in out.splitlines() if len(line) > WIDTH)
    assert all(len(of_line) == 1 for of_line in words), out  # a path is not cut
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["can_train"] is True and record["config"] is None
    assert record["page"] == out.splitlines()
    found = {finding["name"]: finding for finding in record["findings"]}
    assert found["torch"]["text"].startswith(torch.__version__)
    for conv_type in ("head", "depthwise", "multihead"):
        for dtype in ("float32", "bfloat16"):
            value = found[f"{conv_type} cpu"]["value"][dtype]
            assert value["backend"] in ("cpu", "reference") and value["reason"] and value["runs"]
    topics = {finding["topic"] for finding in record["findings"]}
    expected = ("python", "packages", "device", "compiler", "optional", "attention", "deepspeed")
    assert topics >= {*expected, "space", "convolutions"}


def test_exit_code_and_page(doctor, only):
    only(FINE, NOTE)
    assert doctor()[:2] == (
        0,
        f"{'device':<{LABEL}}CPU of a test\n{'compiler':<{LABEL}}none\n"
        "note: compiler: no C++ compiler; install one\ntraining can run here\n",
    )
    only(FINE, NOTE, BROKEN, replace(BROKEN, name="numpy", problem="numpy is missing"))
    code, out, _ = doctor()
    assert code == 1
    assert out.splitlines()[-4:] == [
        "BROKEN: packages: torch is missing",
        "BROKEN: packages: numpy is missing",
        "note: compiler: no C++ compiler; install one",
        "2 broken: training cannot run here",
    ]


def test_failing_check_is_a_finding():
    def some_check():
        yield FINE
        raise ZeroDivisionError("by\nzero")

    first, second = run_check(some_check)
    assert first == FINE
    assert second.topic == "some check" and second.broken
    assert second.problem == "the check failed with ZeroDivisionError: by zero"


def test_packages_out_of_range_and_missing_are_broken(monkeypatch):
    real = machine._installed
    changed = {"transformers": "4.57.1", "deepspeed": None, "tokenizers": "0.24.0"}
    monkeypatch.setattr(machine, "_installed", lambda name: changed.get(name, real(name)))
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.10.9")
    found = [*machine.packages(), *machine.python()]
    advice = problems(found)
    assert set(advice) == {*changed, "python"}
    assert all(finding.broken == (finding.name in advice) for finding in found)
    assert advice["transformers"].startswith("transformers 4.57.1 is outside ")
    assert "install: pip install 'transformers" in advice["transformers"]
    assert advice["deepspeed"].startswith("deepspeed is missing; install it: pip install 'deepsp")


def test_package_that_does_not_import_is_found(monkeypatch, tmp_path):
    """DeepSpeed, which training needs, is broken then; an optional one is a note."""
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    (tmp_path / "deepspeed.py").write_text("import os; os._exit(7)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(machine, "OPTIONAL", {"flash-attn": "flash_attn"})
    (found,) = machine.optional()
    assert not found.broken
    assert found.problem.endswith("does not import: ImportError: undefined symbol: _ZN3c10")
    (found,) = machine.deepspeed()
    assert found.broken and found.problem == "DeepSpeed does not import: exit code 7"


def test_no_compiler_driver_or_space_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine, "_output_of", lambda *_: "580.10\n580.10")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    usage = type("usage", (), {"free": 2**28})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    found = [*machine.compiler(), *machine.device(), *machine.space()]
    said = problems(found)
    assert "no C++ compiler (c++, g++, clang++)" in said["compiler"]
    assert "the driver 580.10 shows a GPU" in said["driver"]
    assert "only 0.25 GiB disk are free" in said["disk"]
    assert not any(finding.broken for finding in found)


@pytest.mark.skipif(not triton_launch.INSTALLED, reason="triton is not installed")
@pytest.mark.parametrize(
    ("version", "capability", "problem", "suspected"),
    [
        ("12.8", (9, 0), None, True),
        ("12.9.86", (9, 0), "there is no C compiler", True),
        ("13.1", (9, 0), None, False),
        ("12.8", (8, 0), None, False),
        ("12.8", None, None, False),
    ],
)
def test_triton_is_tried_on_a_gpu(version, capability, problem, suspected, monkeypatch):
    """Its assembler is suspected on Hopper."""
    import triton.backends.nvidia.compiler as compiler

    tool = type("tool", (), {"path": "/opt/ptxas", "version": version})
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: tool)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(capability is not None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(facts, "why_no_kernel", lambda device: problem)
    *kernel, ptxas = machine.triton()
    assert ptxas.text == f"{version}, /opt/ptxas" and not ptxas.broken
    assert ("TRITON_PTXAS_PATH" in (ptxas.problem or "")) == suspected
    assert [(f.problem, f.broken) for f in kernel] == [(problem, bool(problem))] * bool(capability)


# A run


@pytest.fixture
def run_file(tiny_corpus, tmp_path) -> list[str]:
    """The quickstart's configuration on the tests' data: arguments of the command."""
    values = (f"data.path={tiny_corpus}", f"train.output_dir={tmp_path / 'run'}")
    return [str(REPOSITORY / "configs" / "quickstart.yaml"), *values, "train.precision=fp32"]


def test_run_is_looked_at(doctor, only, run_file):
    only(FINE)
    code, out, err = doctor(*run_file)
    assert (code, err) == (0, ""), out
    assert "train tokens" in out and "validation tokens" in out
    assert "head convolution of q, k, v (W=21)" in out and "fp32: asked for" in out
    config = load_config(run_file[0], [*run_file[1:], "model.hidden_size=8192"])
    found = {finding.name: finding for finding in run.run_model(config)}
    assert found["parameters"].value > 4e9  # without weights


def test_backend_of_recurrences_is_named():
    keys = ["model.vocab_size=50", "train.mixer_backend=torch", "train.precision=fp32"]
    config = load_config(REPOSITORY / "configs/pretrain/gla.yaml", keys)
    *_, found = run.run_backends(config)
    assert found.text.startswith("gated linear attention: torch") and found.problem is None


def test_disk_holds_all_checkpoints_that_are_there_at_once(run_file, tmp_path, monkeypatch):
    """Three where two are kept; each that is there needs none."""
    more = ["train.max_steps=400", "checkpoint.every_steps=100", "checkpoint.keep_every_steps=100"]
    config = load_config(run_file[0], [*run_file[1:], *more, "model.vocab_size=257"])
    one = 12 * num_parameters(config, 257)
    for saved, needed in ((0, 3), (1, 2), (2, 1), (3, 1)):
        if saved:
            step_folder(tmp_path / "run", 100 * saved)
        for free, broken in ((needed * one, False), (needed * one - 1, True)):
            usage = type("usage", (), {"free": free})
            monkeypatch.setattr(run.shutil, "disk_usage", lambda _, found=usage: found)
            (found,) = [f for f in run.run_output(config) if f.name == "checkpoint"]
            assert found.broken is broken and found.value == one, (saved, free)
    assert "keep_every_steps=100 keeps up to 4 for good" in found.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash attention and triton may serve there")
def test_all_that_is_wrong_with_a_run_at_once(only, run_file, tmp_path):
    only(FINE)
    (tmp_path / "file").write_text("")
    config = load_config(
        run_file[0],
        [
            *run_file[1:],
            f"data.path={tmp_path / 'nowhere'}",
            f"train.output_dir={tmp_path / 'file' / 'run'}",
            "model.attn_implementation=flash_attention_2",
            "train.conv_backend=triton",
        ],
    )
    found = program.collect_findings(config)
    assert all(finding.broken for finding in found if finding.problem)
    wrong = problems(found)
    assert set(wrong) == {"run_data", "run_model", "convolutions", "run_output"}
    assert "nowhere: no such folder" in wrong["run_data"]
    assert wrong["run_model"].startswith("model: ")
    assert wrong["convolutions"].startswith("train.conv_backend=triton: ")
    assert "give a folder" in wrong["run_output"] or "may not be" in wrong["run_output"]


def test_trackers_are_installed_and_logged_in(run_file, tmp_path, monkeypatch):
    config = load_config(run_file[0], [*run_file[1:], "logging.wandb_project=cats"])
    spec = run.importlib.util.find_spec
    there = lambda name: name == "wandb" or spec(name)  # noqa: E731
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    wrong = problems(run.run_trackers(config))
    assert wrong["tensorboard"] == (
        "logging.tensorboard=true: tensorboard is not installed; pip install -e '.'"
    )
    assert wrong["wandb"] == (
        "logging.wandb_project=cats: wandb is not installed; pip install -e '.[wandb]'"
    )
    monkeypatch.setattr(run.importlib.util, "find_spec", there)
    *_, found = run.run_trackers(config)
    assert found.broken and "no login for api.wandb.ai" in found.problem
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x")
    assert [f.text for f in run.run_trackers(config)] == [
        "tensorboard",
        "wandb: logged in to api.wandb.ai",
    ]
    monkeypatch.setenv("WANDB_MODE", "offline")
    *_, found = run.run_trackers(config)
    assert (found.text, found.problem) == ("wandb: offline (WANDB_MODE)", None)


def test_bad_configuration_is_one_line(doctor, only, run_file):
    only(FINE)
    for arguments, named in (
        (["nowhere.yaml"], "configuration file nowhere.yaml: no such file"),
        ([*run_file, "model.conv_windw=3"], "nearest known one is model.conv_window"),
        (["--ranks", 8], "needs a run's configuration"),
    ):
        code, out, err = doctor(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1 and named in err
