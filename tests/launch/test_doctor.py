"""launch.doctor: what it finds, that it finds all that is wrong at once, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cat_lm.config import load_config
from cat_lm.ops.runtime import triton_launch
from cat_lm.training.estimate import num_parameters
from cat_lm.training.preflight import facts
from launch.doctor import __main__ as doctor
from launch.doctor import machine, run_config
from launch.doctor.findings import Finding, guarded
from tests.calls import call_main
from tests.checkpoints import step_folder

REPOSITORY = Path(__file__).parents[2]
FINE = Finding("device", "CPU of a test", "cpu", {"cores": 2})
NOTE = Finding("compiler", "none", "compiler", None, "no C++ compiler; install one")
BROKEN = Finding("packages", "torch missing", "torch", None, "torch is missing", broken=True)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command: its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        return call_main(doctor.main, monkeypatch, capsys, "launch.doctor", *arguments)

    return run


@pytest.fixture
def only(monkeypatch):
    """Replaces the checks of a machine by given findings."""

    def use(*findings: Finding) -> None:
        monkeypatch.setattr(machine, "ALL", (lambda: iter(findings),))

    return use


def problems(findings) -> dict[str, str]:
    return {finding.name: finding.problem for finding in findings if finding.problem}


def test_this_machine(command, tmp_path):
    """Every check runs here, and all tests run here, so training can."""
    path = tmp_path / "doctor.json"
    code, out, err = command("--json", path)
    assert (code, out.splitlines()[-1]) == (0, "training can run here"), out
    assert err == f"wrote {path}\n"
    words = (line[doctor.LABEL :].split() for line in out.splitlines() if len(line) > doctor.WIDTH)
    assert all(len(of_line) == 1 for of_line in words), out  # a path is not cut
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["can_train"] is True and record["config"] is None
    found = {finding["name"]: finding for finding in record["findings"]}
    assert not any(finding["broken"] for finding in record["findings"])
    assert found["torch"]["text"].startswith(torch.__version__)
    for conv_type in ("head", "depthwise", "multihead"):
        for dtype in ("float32", "bfloat16"):
            value = found[f"{conv_type} cpu"]["value"][dtype]
            assert value["backend"] in ("cpu", "reference") and value["reason"] and value["runs"]
    topics = {finding["topic"] for finding in record["findings"]}
    expected = ("python", "packages", "device", "compiler", "optional", "attention", "deepspeed")
    assert topics >= {*expected, "space", "convolutions"}


def test_exit_code_and_screen(command, only):
    only(FINE, NOTE)
    code, out, _ = command()
    assert code == 0
    assert out.splitlines() == [
        f"{'device':<{doctor.LABEL}}CPU of a test",
        f"{'compiler':<{doctor.LABEL}}none",
        "note: compiler: no C++ compiler; install one",
        "training can run here",
    ]
    only(FINE, NOTE, BROKEN, replace(BROKEN, name="numpy", problem="numpy is missing"))
    code, out, _ = command()
    assert code == 1
    assert out.splitlines()[-4:] == [
        "BROKEN: packages: torch is missing",
        "BROKEN: packages: numpy is missing",
        "note: compiler: no C++ compiler; install one",
        "2 broken: training cannot run here",
    ]


def test_a_failing_check_is_a_finding():
    def some_check():
        yield FINE
        raise ZeroDivisionError("by\nzero")

    first, second = guarded(some_check)
    assert first == FINE
    assert second.topic == "some check" and second.broken
    assert second.problem == "the check failed with ZeroDivisionError: by zero"


# Checks


def test_ranges_are_those_of_setup_cfg():
    assert machine.requirements()["transformers"] == ">=5.17,<6"
    assert machine.requirements("eval")["lm-eval"].startswith(">=0.4")


def test_packages_out_of_range_and_missing(monkeypatch):
    real = machine._installed
    changed = {"transformers": "4.57.1", "deepspeed": None, "tokenizers": "0.24.0"}
    monkeypatch.setattr(machine, "_installed", lambda name: changed.get(name, real(name)))
    found = list(machine.packages())
    assert set(problems(found)) == set(changed)
    assert all(finding.broken == (finding.name in changed) for finding in found)
    advice = problems(found)
    assert advice["transformers"] == (
        "transformers 4.57.1 is outside >=5.17,<6; install: pip install 'transformers>=5.17,<6'"
    )
    assert advice["deepspeed"].startswith("deepspeed is missing; install it: pip install 'deepsp")


def test_what_training_does_not_import_is_a_note(monkeypatch):
    """A run starts where those packages are away."""
    assert set(machine.NEEDED_ELSEWHERE) <= set(machine.requirements())
    hidden = [*machine.NEEDED_ELSEWHERE, "PIL"]
    # All of training; what is only imported in a function, too.
    code = (
        f"import importlib, pkgutil, sys\nsys.modules.update(dict.fromkeys({hidden}))\n"
        "import train, deepspeed, cat_lm.data.opening, cat_lm.data.remote, cat_lm.training as all\n"
        "for found in pkgutil.walk_packages(all.__path__, all.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        "import tensorboard.summary.writer.record_writer"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=machine.ROOT, check=False)
    assert done.returncode == 0
    monkeypatch.setattr(machine, "_installed", lambda name: None)
    found = {finding.name: finding for finding in machine.packages()}
    assert {name for name, it in found.items() if not it.broken} == set(machine.NEEDED_ELSEWHERE)
    assert "datasets is missing, which data_prep and eval need; inst" in found["datasets"].problem
    monkeypatch.setattr(machine, "_installed", lambda name: "0.0.1")
    assert all(it.broken for it in machine.packages() if it.name in machine.NEEDED_ELSEWHERE)


@pytest.mark.parametrize(("version", "right"), [("3.11.2", True), ("3.10.9", False)])
def test_python(monkeypatch, version, right):
    monkeypatch.setattr(machine.platform, "python_version", lambda: version)
    (finding,) = machine.python()
    assert finding.broken is not right


def test_optional_package_that_does_not_import(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {finding.name: finding for finding in machine.optional()}
    broken = found["flash-attn"]
    assert not broken.broken
    assert broken.problem.endswith("does not import: ImportError: undefined symbol: _ZN3c10")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("raise RuntimeError('no CUDA_HOME')", "RuntimeError: no CUDA_HOME"),
        ("import os; os._exit(7)", "exit code 7"),
    ],
)
def test_deepspeed_that_ends_the_interpreter(monkeypatch, tmp_path, module, reason):
    (tmp_path / "deepspeed.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = machine.deepspeed()
    assert finding.broken and finding.problem == f"DeepSpeed does not import: {reason}"


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    (finding,) = machine.compiler()
    assert "no C++ compiler (c++, g++, clang++)" in finding.problem and not finding.broken


def test_driver_without_a_torch_that_sees_it(monkeypatch):
    monkeypatch.setattr(machine, "_output_of", lambda *_: "580.10\n580.10")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = [finding for finding in machine.device() if finding.problem]
    assert "the driver 580.10 shows a GPU" in found.problem and not found.broken


@pytest.mark.parametrize("problem", [None, "there is no C compiler"])
def test_a_kernel_is_launched_on_a_gpu(problem, monkeypatch):
    monkeypatch.setattr(triton_launch, "INSTALLED", True)
    monkeypatch.setattr(facts, "why_no_kernel", lambda device: problem)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(machine.kernels()) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (finding,) = machine.kernels()
    assert (finding.problem, finding.broken) == (problem, problem is not None)
    assert finding.value is (problem is None) and bool(finding.text) == finding.value


@pytest.mark.skipif(not triton_launch.INSTALLED, reason="triton is not installed")
@pytest.mark.parametrize(
    ("version", "capability", "suspected"),
    [
        ("12.8", (9, 0), True),
        ("12.9.86", (9, 0), True),
        ("13.1", (9, 0), False),
        ("12.8", (8, 0), False),
        ("12.8", None, False),
    ],
)
def test_ptxas_is_reported_and_suspected_on_hopper(version, capability, suspected, monkeypatch):
    import triton.backends.nvidia.compiler as compiler

    tool = type("tool", (), {"path": "/opt/ptxas", "version": version})
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: tool)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(capability is not None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    (finding,) = machine.ptxas()
    assert finding.text == f"{version}, /opt/ptxas" and not finding.broken
    assert ("TRITON_PTXAS_PATH" in (finding.problem or "")) == suspected


def test_little_space(monkeypatch):
    usage = type("usage", (), {"free": 2**28})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    assert "only 0.25 GiB disk are free" in problems(machine.space())["disk"]


# A run


@pytest.fixture
def run_file(tiny_corpus, tmp_path) -> list[str]:
    """The quickstart's configuration on the tests' data: arguments of the command."""
    values = (f"data.path={tiny_corpus}", f"train.output_dir={tmp_path / 'run'}")
    return [str(REPOSITORY / "configs" / "quickstart.yaml"), *values, "train.precision=fp32"]


def test_run(command, only, run_file, tmp_path):
    only(FINE)
    code, out, err = command(*run_file)
    assert (code, err) == (0, ""), out
    assert "train tokens" in out and "validation tokens" in out
    assert "head convolution of q, k, v (W=21)" in out and "fp32: asked for" in out


def test_disk_for_all_checkpoints_that_are_there_at_once(only, run_file, tmp_path, monkeypatch):
    """Three where two are kept; each that is there needs none."""
    more = ["train.max_steps=400", "checkpoint.every_steps=100", "checkpoint.keep_every_steps=100"]
    config = load_config(run_file[0], [*run_file[1:], *more, "model.vocab_size=257"])
    one = 12 * num_parameters(config, 257)
    for saved, needed in ((0, 3), (1, 2), (2, 1), (3, 1)):
        if saved:
            step_folder(tmp_path / "run", 100 * saved)
        for free, broken in ((needed * one, False), (needed * one - 1, True)):
            usage = type("usage", (), {"free": free})
            monkeypatch.setattr(run_config.shutil, "disk_usage", lambda _, found=usage: found)
            (found,) = [f for f in run_config.run_output(config) if f.name == "checkpoint"]
            assert found.broken is broken and found.value == one, (saved, free)
    assert "keep_every_steps=100 keeps up to 4 for good" in found.text


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
    if torch.cuda.is_available():
        pytest.skip("flash attention and triton may serve on a GPU")
    found = doctor.examine(config)
    assert all(finding.broken for finding in found if finding.problem)
    wrong = problems(found)
    assert set(wrong) == {"run_data", "run_model", "run_convolutions", "output_dir"}
    assert "nowhere: no such folder" in wrong["run_data"]
    assert wrong["run_model"].startswith("model: ")
    assert wrong["run_convolutions"].startswith("train.conv_backend=triton: ")
    assert "give a folder" in wrong["output_dir"] or "may not be" in wrong["output_dir"]


def test_model_is_looked_at_without_weights(run_file):
    config = load_config(run_file[0], [*run_file[1:], "model.hidden_size=8192"])
    found = {finding.name: finding for finding in run_config.run_model(config)}
    assert found["parameters"].value > 4e9


def test_bad_configuration(command, only, run_file):
    only(FINE)
    for arguments, named in (
        (["nowhere.yaml"], "configuration file nowhere.yaml: no such file"),
        ([*run_file, "model.conv_windw=3"], "nearest known one is model.conv_window"),
    ):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1 and named in err
