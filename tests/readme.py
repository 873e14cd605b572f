"""The commands of the READMEs, and a folder in which a user runs them."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

from tests.conftest import REPOSITORY

ROOMS = ("cat_lm", "configs", "data_prep", "eval", "launch", "tests")

FRONT = REPOSITORY / "README.md"
READMES = [
    FRONT,
    *sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("README.md")),
    # Pages whose commands and links are checked as those of READMEs are.
    *(REPOSITORY / "eval/recall" / name for name in ("mixers.md", "protocol.md")),
    REPOSITORY / "docs/reproduce.md",
]
# Guides also name files that a run writes.
GUIDES = [path for path in sorted((REPOSITORY / "docs").glob("*.md")) if path not in READMES]


def blocks(language: str, readme: Path = FRONT) -> list[str]:
    """The blocks of code in `language` of a README."""
    text = readme.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def user_checkout(folder: Path) -> Path:
    """Makes `folder` a checkout as a user has it, with `my_text` beside it."""
    for name in (*ROOMS[:-1], "train.py"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "my_text").mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in ("argparse", "ast", "datetime", "decimal", "inspect", "tarfile", "typing"):
        source = library / f"{module}.py"
        if module in ("datetime", "decimal"):
            source = library / f"_py{module}.py"
            source = source if source.exists() else library / f"{module}.py"
        shutil.copy(source, folder / "my_text" / f"{module}.txt")
    return folder
