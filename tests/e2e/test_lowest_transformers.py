"""The lower end of the supported transformers: the model's tests, run with that version.

setup.cfg's lowest transformers, huggingface-hub and tokenizers go into a folder that stands before
the environment's packages, with what they need and the environment lacks; torch stays.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch.doctor.machine import requirements
from launch.environment import find_reason

ROOT = Path(__file__).resolve().parents[2]
LOWERED = ("transformers", "huggingface-hub", "tokenizers")
# Where the model meets transformers: its classes, files, caches and `generate`.
TESTS = {
    "cat_lm/model/test_compile.py": ("test_a_captured_training_step_has_no_mask",),
    "cat_lm/model/test_configuration.py": ("test_configuration_survives",),
    "cat_lm/model/test_decoding.py": ("test_crop", "test_generate"),
    "contracts/test_model_identity.py": ("test_parts_that_change_nothing", "test_recurrent"),
    "contracts/test_model_saving.py": ("test_folder_holds",),
    # But not the reset of caches: at 5.17 that of transformers' own kept its length.
    "contracts/test_model_decoding.py": (
        *("test_parts_equal", "test_rows_of_a_cache", "test_drafted", "test_padded_prompts"),
        *("test_generation_with_a_cache", "test_static_generation"),
    ),
}
# transformers' own Mamba-2 gives other logits at 5.17 with several groups, and the same with one.
NOT_EQUAL = (
    "tests/contracts/test_model_identity.py::test_recurrent_families_are_the_librarys[mamba2]"
)


pytestmark = pytest.mark.nightly


def lowest(name: str) -> str:
    return re.search(r">=([\d.]+)", requirements()[name])[1]


def install(folder: Path, packages: list[str]) -> None:
    """Installs `packages` into `folder`, and nothing that they need."""
    command = [sys.executable, "-m", "pip", "install", "--target", str(folder), "--no-deps"]
    done = subprocess.run([*command, *packages], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return
    reason = find_reason(done.stdout + done.stderr)
    if "cannot be reached" in reason:
        pytest.skip(f"{', '.join(packages)} cannot be installed: {reason}")
    pytest.fail(f"{', '.join(packages)} cannot be installed: {reason}")


def lacking(folder: Path) -> list[str]:
    """What the packages in `folder` need that neither it nor the environment has."""
    there = {d.name.lower().replace("_", "-") for d in metadata.distributions(path=[str(folder)])}
    needed = []
    for distribution in metadata.distributions(path=[str(folder)]):
        for text in distribution.requires or []:
            requirement = Requirement(text)
            name = requirement.name.lower().replace("_", "-")
            if name in there or (
                requirement.marker and not requirement.marker.evaluate({"extra": ""})
            ):
                continue
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                version = None
            if version is None or version not in requirement.specifier:
                needed.append(f"{name}{requirement.specifier}")
    return sorted(set(needed))


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Variables under which Python imports the lowest supported versions."""
    folder = tmp_path_factory.mktemp("lowest")
    packages = [f"{name}=={lowest(name)}" for name in LOWERED]
    while packages:
        install(folder, packages)
        packages = lacking(folder)
    path = os.pathsep.join([str(folder), str(ROOT)])
    single = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | single


def python(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def test_the_lowest_versions_are_what_is_imported(environment):
    code = f"from importlib.metadata import version; print(*map(version, {LOWERED!r}))"
    expected = [lowest(name) for name in LOWERED]
    found = python(environment, "-c", code).split()
    assert [found[: len(expected)] for found, expected in zip(found, expected, strict=True)] == (
        expected
    )
    code = "import transformers; print(transformers.__version__)"
    assert python(environment, "-c", code).startswith(lowest("transformers"))


def test_the_model(environment):
    """Equality with GPT-NeoX, saving, decoding and transformers' generate."""
    files = [f"tests/{name}" for name in TESTS]
    names = [name for group in TESTS.values() for name in group]
    options = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "--deselect", NOT_EQUAL)
    out = python(environment, *options, *files, "-k", " or ".join(names))
    assert [name for name in names if not re.search(rf"::{name}.* PASSED", out)] == []
