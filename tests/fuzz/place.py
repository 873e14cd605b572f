"""A place where cases run: files are laid out anew for each, and what changed is judged."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch

from hypothesis import settings
from hypothesis import strategies as st

from tests.damages import Damage, damages
from tests.fuzz.lines import OddLine, config_keys, described, odd_lines
from tests.fuzz.server import ENVIRONMENT, REPOSITORY, Ended, Server, own_all
from tests.fuzz.targets import TARGETS, Target
from tests.fuzz.verdict import Surroundings, failure_type, failures, snapshot

EVIDENCE = REPOSITORY / "runs/fuzz"
# Two levels up from the command's folder is still inside.
INSIDE = "a/b/case"
# Where a command may leave what it likes.
_OWN = ("home", "tmp", "cache")


class Files(dict[str, bytes]):
    """Contents of files by their names, which no report shows."""

    def __repr__(self) -> str:
        return "files"


class Place:
    """The folder of a case, and the files of which each case gets what it needs.

    Attributes:
        here: the working folder of commands.
        entries: contents of files by their names below `here`.
    """

    def __init__(self, server: Server, entries: dict[str, bytes] | None = None) -> None:
        self._server = server
        self._root = server.scratch / "place"
        self.here = self._root / INSIDE
        self.stranger = self._root / "stranger"
        self.entries = Files(entries or {})

    def cases(self, target: Target) -> st.SearchStrategy[Damage | OddLine]:
        """Return the strategy of what may be odd about a call."""
        keys = config_keys() if "config.yaml" in target.line else ()
        odd = odd_lines(target.line, described(target), keys)
        if not target.files:
            return odd
        return damages(self.entries, target.files.split(), self.stranger) | odd

    def check(self, target: Target, odd: Damage | OddLine | None = None, *limits: float) -> Ended:
        """Run a command on a damaged file or with an odd word.

        Raises:
            AssertionError: it did not end as verdict.py demands. Each cause has a type.
        """
        self.lay_out()
        damaged, line, outputs = "", target.line, [f"{INSIDE}/{o}" for o in target.outputs.split()]
        if isinstance(odd, Damage):
            odd.apply(self.here)
            damaged = odd.name
        elif odd is not None:
            line = odd.words
            path = os.path.normpath(self.here / odd.value)
            # A value may name what is to be written, but nothing that is there.
            if not os.path.lexists(path) and not str(self.here).startswith(path):
                outputs.append(os.path.relpath(path, self._root))
        words, before = target.words(line), snapshot(self._root, _OWN)
        ended = self.run(words, target.stdin, *limits)
        around = Surroundings(
            *(self._root, before, snapshot(self._root, _OWN), outputs),
            damaged=damaged and f"{INSIDE}/{damaged}",
            guarded=bool(damaged) and any(fnmatch(damaged, p) for p in target.guarded.split()),
        )
        found = failures(ended, target.codes, around)
        if odd is None and not found and ended.code != target.usual:
            found = [f"exit code: {ended.code}, though nothing is odd"]
        if found:
            kept = self._keep(target, f"{'; '.join(found)}\n{odd}\n$ python {shlex.join(words)}")
            how = f"code {ended.code}: {ended.stderr[-3000:]}\n{kept}"
            raise failure_type(f"{target.name}: {found[0]}")(f"{odd}\n{how}")
        return ended

    def run(self, words: Sequence[str], *limits: object) -> Ended:
        """Run `python WORDS` in the working folder; the limits are those of Server.run."""
        own_all(self._root)
        return self._server.run(words, self.here, self._environment(), *limits)

    def lay_out(self) -> None:
        """Write all files anew, and files of others around and between them."""
        shutil.rmtree(self._root, ignore_errors=True)
        for name in _OWN:
            (self._root / name).mkdir(parents=True)
        files = {self.here / name: content for name, content in self.entries.items()}
        files[self.stranger / "thesis.txt"] = b"ten years of work\n"
        for folder in ("../..", ".", "model", "run/checkpoints/step-00000777"):
            files[self.here / folder / "precious.txt"] = b"a user's own notes\n"
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _keep(self, target: Target, how: str) -> str:
        """Keep the files of a target's last failure, unless the examples are the fixed ones."""
        if settings.default.database is None or target not in TARGETS:
            return ""
        folder = EVIDENCE / target.name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.here, folder / "case", symlinks=True)
        (folder / "how.txt").write_text(f"{how}\n", encoding="utf-8", errors="backslashreplace")
        return f"its files, and the command: {folder}"

    def _environment(self) -> dict[str, str]:
        """Return a command's: that of the server, with folders of its own."""
        folders = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "HF_HOME": "cache"}
        own = {name: str(self._root / folder) for name, folder in folders.items()}
        return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), **ENVIRONMENT, **own}
