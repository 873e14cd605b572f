"""The commit that checkpoints and results name: of the code that runs, and of no other."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cat_lm.core import plugins


def checkout_at(folder: Path) -> Path:
    """Make a repository of one commit, with a file in it."""
    (folder / "cat_lm/core").mkdir(parents=True)
    (folder / "cat_lm/core/plugins.py").write_text("one")
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "one")):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return folder


@pytest.fixture
def runs_in(monkeypatch, tmp_path):
    """Return the call that lets the code run in a folder."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))

    def there(folder: Path) -> str | None:
        (folder / "cat_lm/core").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(plugins, "__file__", str(folder / "cat_lm/core/plugins.py"))
        return plugins.commit()

    return there


def test_checkout_has_its_commit_and_says_what_is_changed(runs_in, tmp_path):
    checkout = checkout_at(tmp_path / "checkout")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert runs_in(checkout) == head and len(head) == 40
    (checkout / "notes.txt").write_text("not tracked")
    assert runs_in(checkout) == head
    (checkout / "cat_lm/core/plugins.py").write_text("two")
    assert runs_in(checkout) == f"{head}+"
    assert runs_in(tmp_path / "unpacked") is None
    assert runs_in(checkout / ".venv/lib/python3/site-packages") is None, "it only lies there"


def test_copy_has_the_commit_that_was_copied(runs_in, tmp_path):
    """It may lie in a checkout, whose own commit is another one by now."""
    copy = checkout_at(tmp_path / "checkout") / "runs/mine/slurm/code"
    assert runs_in(copy) is None
    for found, dirty, said in (("abc", False, "abc"), ("abc", True, "abc+"), (None, None, None)):
        record = json.dumps({"format": 1, "commit": found, "dirty": dirty})
        (copy.parent / "code.json").write_text(record, encoding="utf-8")
        assert runs_in(copy) == said
    (copy.parent / "code.json").write_text("no JSON")
    assert runs_in(copy) is None
