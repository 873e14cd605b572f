"""The image's recipe, as far as it can be checked where no engine builds it."""

from __future__ import annotations

import re

from launch.doctor.machine import PYTHONS
from tests.conftest import REPOSITORY

TEXT = (REPOSITORY / "launch" / "Dockerfile").read_text(encoding="utf-8")


def test_image_has_a_supported_python_and_no_versions_of_its_own():
    (version,) = re.findall(r"^FROM python:(3\.\d+)-", TEXT, re.M)
    assert PYTHONS.specifier.contains(version)
    # The installer's pins are those of requirements.txt, which its fingerprint covers.
    assert "RUN bash launch/environment.sh" in TEXT
    assert not re.search(r"[=<>]=|pip install", TEXT)


def test_image_copies_what_the_installation_reads():
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.M) for word in line.split()]
    assert all((REPOSITORY / name).exists() for name in copied), copied
    installer = (REPOSITORY / "launch" / "environment.py").read_text(encoding="utf-8")
    for name in re.findall(r'"((?:requirements|setup|pyproject)\.\w+)"', installer):
        assert name in copied
    files = (REPOSITORY / "setup.cfg").read_text(encoding="utf-8")
    for name in re.findall(r"^(?:long_description = file:|license_files =) (\S+)", files, re.M):
        assert name in copied
