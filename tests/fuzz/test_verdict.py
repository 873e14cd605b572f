"""What commands do wrong is found, and the strategies reach what they should."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from tests.damages import damages
from tests.fuzz import verdict
from tests.fuzz.lines import OddLine, described, odd_lines
from tests.fuzz.place import Place
from tests.fuzz.targets import BY_NAME, Target
from tests.fuzz.test_commands import FEW, server  # noqa: F401 (a fixture)

STEP = "run/checkpoints/step-00000001"
ENTRIES = {"in.bin": b"as made", "neighbour.txt": b"not yours"}
ENTRIES |= {f"{STEP}/{name}": name.encode() for name in ("weights", "complete.json")}
END = "import sys; sys.stderr.write({!r}); sys.exit({})"
# What a command does, and how the name of the rule begins that it breaks, if any.
DEEDS = {
    "fine": ("open('out', 'w').write('done')", ""),
    "keyless": ("{}['step']", "traceback: KeyError"),
    "another code": ("raise SystemExit(3)", "exit code: 3"),
    "silent": (END.format("", 2), "message: 0 lines"),
    "two errors": (END.format("error: one\nerror: two\n", 2), "message: 2 lines"),
    "two lines": (END.format("error: in.bin: broken:\nSee above\n", 2), "message: several"),
    "refusal": (END.format("error: in.bin: damaged\n", 2), "exit code: 2, though nothing is odd"),
    "loop": ("def loop():\n while True: pass\nloop()", "hang: in "),
    "wait": ("import time; time.sleep(1000)", "hang: in "),
    "eat": ("taken = []\nwhile True: taken.append(b'x' * 2**24)", "memory: in "),
    "ask": ("input('run the code? ')", "traceback: EOFError"),
    "prompt": ("print('run the code? [y/N]')", "prompt: "),
    "leave": ("import subprocess; subprocess.Popen(['sleep', '1000'])", "left behind: "),
    "delete": ("import os; os.unlink('neighbour.txt')", "outside: deleted a/b/case/neighbour.txt"),
    "change": ("open('in.bin', 'w').write('more')", "outside: changed a/b/case/in.bin"),
    "escape": ("open('../../x', 'w')", "outside: created a/x"),
    "precious": ("import os; os.unlink('run/checkpoints/step-00000777/precious.txt')", "outside: "),
    "lose": (f"import os; os.unlink('{STEP}/weights')", "lost checkpoint: a whole one"),
    "nonsense": ("import os; os.mkdir('out'); open('out/x.json', 'w').write('[NaN]')", "nonsense:"),
}
LIMITS = (1.0, 200 * 2**20)


def fake(deed: str) -> Target:
    command = shlex.join(["-c", DEEDS[deed][0]])
    return Target("fake", command, "in.bin", "in.bin", "out run")


@pytest.fixture(scope="module")
def place(server):  # noqa: F811
    return Place(server, ENTRIES)


@pytest.mark.long
@pytest.mark.parametrize("deed", DEEDS)
def test_what_a_command_does_wrong_is_found(place, deed):
    broken = DEEDS[deed][1]
    if not broken:
        assert place.check(fake(deed), None, *LIMITS).code == 0
        return
    with pytest.raises(AssertionError) as raised:
        place.check(fake(deed), None, *LIMITS)
    assert raised.type.__name__.startswith(f"fake: {broken}"), raised.value


@pytest.mark.long
@FEW
@given(data=st.data())
def test_damage_may_be_refused_and_not_accepted(place, data):
    damage = data.draw(damages(place.entries, ["in.bin"], place.stranger))
    assert place.check(fake("refusal"), damage).code == 2
    with pytest.raises(AssertionError) as raised:
        place.check(fake("fine"), damage)
    assert raised.type.__name__ == "fake: accepted damage: a/b/case/in.bin"


LINE = ("run", "--lengths", "16,32", "--print", "a.b=1", "--", "--seed", "3")


@given(odd=odd_lines(LINE, {"--lengths": True, "--print": False, "--x": True, "run": False}, ()))
def test_one_word_of_a_line_is_odd(odd):
    assert odd.words[0] == "run" and "--print" in odd.words and "--" in odd.words
    assert any(odd.value in word for word in odd.words)
    same = set(odd.words) & set(LINE)
    assert len(same) >= len(LINE) - 2, "more than a word and its option are gone"


@pytest.mark.parametrize(("name", "option"), [("export", "--library"), ("submit", "--nodes=")])
def test_options_come_from_the_parser(name, option):
    target = BY_NAME[name]
    options = described(target)
    assert option.rstrip("=") in options and "--help" not in options

    def has(odd: OddLine) -> bool:
        return any(word.startswith(option) for word in odd.words if word not in target.line)

    assert find(odd_lines(target.line, options, ()), has)


TEXT = json.dumps({"files": {"model/a.bin": 3}, "step": 1}).encode() + b"\n"
CONTENTS = {name: TEXT for name in ("x.json", "x.jsonl", "x.yaml", "x.bin")}
CONTENTS["x.safetensors"] = save({"a": np.ones(8, np.float32)})


@pytest.mark.parametrize("name", CONTENTS)
@given(data=st.data())
def test_damage_changes_a_file(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("damaged")
    entries = {name: CONTENTS[name], f"other-{name}": b"other"}
    for each, content in entries.items():
        (folder / each).write_bytes(content)
    data.draw(damages(entries, [name], folder)).apply(folder)
    path = folder / name
    assert path.is_symlink() or not path.is_file() or path.read_bytes() != CONTENTS[name]
    assert (folder / f"other-{name}").read_bytes() == b"other"


HOW = ("the first 0 ", "flipped", "bytes 0 to", "b'}' inserted", "other-x.json", "a folder")
HOW += ("nothing", "a link to nowhere", "a link to x.json", "put: files.model/a.bin", "whole")
HOW += ("delete: step", "add: ", "rename: files.model/a.bin", "raw: step", "step twice")


@pytest.mark.parametrize("how", HOW)
def test_damage_of_each_kind_is_drawn(tmp_path, how):
    entries = {"x.json": TEXT, "other-x.json": b"other"}
    assert find(damages(entries, ["x.json"], tmp_path), lambda damage: damage.how.startswith(how))


RIGHT = ("error: x: wrong", "step 1: loss 2\nerror: x: wrong", "error: c.yaml: \n  a: no\n  b: no")
RIGHT += ("usage: p [-h]\np: error: argument --a: invalid",)
WRONG = (
    "error: c.yaml: wrong\n  and so on",
    "x.py:3: UserWarning: old\nerror: x: wrong",
    "error: ",
)
WRONG += ("usage: p [-h]", "")


@pytest.mark.parametrize("stderr", RIGHT + WRONG)
def test_one_message(stderr):
    assert (verdict.message_problem(f"{stderr}\n") is None) == (stderr in RIGHT)


def test_weights_that_are_not_finite_are_seen(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones(4, np.float32)}, path)
    assert verdict.nonsense(path) is None
    save_file({"a": np.array([1, np.inf], np.float16)}, path)
    assert verdict.nonsense(path) == "a weight is not finite"
    path.write_bytes(b"no")
    assert verdict.nonsense(path) == "is no safetensors file"
