"""The README's commands, and a folder in which a user runs them."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's blocks of code in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def user_checkout(folder: Path) -> Path:
    """Makes `folder` a checkout as a user has it, with `my_text` beside it."""
    for name in ("cat_lm", "configs", "data_prep", "eval", "launch", "train.py"):
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
