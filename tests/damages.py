"""A Hypothesis strategy of one damaged file of several: its bytes, its structure, or its kind."""

from __future__ import annotations

import fnmatch
import functools
import json
import operator
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from hypothesis import assume
from hypothesis import strategies as st

DEEP = 3000  # levels of nesting, more than Python's recursion takes
# No numbers between these: a model of 5,000 layers is asked for, and takes what it takes.
_NUMBERS = (0, 1, -1, 2, 0.5, 1e300, 10**30, -(10**19), 2**31, 2**63, float("nan"), float("inf"))
_TEXTS = ("", " ", "abc", "0", "nan", "a" * 300, "2020-99-99", "\U0001f600\x01", "\ud800")
_SCALARS = st.none() | st.booleans() | st.sampled_from(_NUMBERS) | st.sampled_from(_TEXTS)
_VALUES = st.recursive(
    _SCALARS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
_OUTSIDE = ("../../escape", "../precious.txt", "..", "x/" * 150, "/proc/self", "n" * 300)
_OUTSIDE += ("/dev/full",)
_RAW = "@@RAW@@"  # stands for text that no dump writes
_RAW_JSON = ("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "9" * 5000, "1e999")
_RAW_YAML = ("2020-99-99", "!!timestamp abc", "!!python/object/apply:os.getcwd []", "&a [*a]")
_RAW_YAML += ("*nowhere", ".inf", ".nan", "2020-01-01", "!!binary abc", "!!int abc", "1:2:3")
_RAW_YAML += ("!!set {a}", "[" * 1000 + "]" * 1000, "{? [a]: b}", "9" * 5000, "0x" + "f" * 300)
_STRUCTURED = (".json", ".jsonl", ".yaml", ".safetensors")


@dataclass(frozen=True)
class Damage:
    """What stands in the place of a file: other content, a folder, a link to …, or nothing."""

    name: str
    how: str
    content: bytes | None = field(default=None, repr=False)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def undo(self, folder: Path, content: bytes) -> None:
        path = folder / self.name
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(content)

    def apply(self, folder: Path) -> None:
        path = folder / self.name
        path.unlink()
        if self.content is not None:
            path.write_bytes(self.content)
        elif self.how == "a folder":
            path.mkdir()
        elif self.how.startswith("a link to "):
            path.symlink_to(self.how.removeprefix("a link to "))


@st.composite
def damages(
    draw: st.DrawFn, entries: Mapping[str, bytes], patterns: Sequence[str], stranger: Path
) -> Damage:
    """Draw one damaged file; all patterns that match something are as likely.

    Args:
        entries: the files by name.
        patterns: of those that may be damaged; `*` stands for no `/`.
        stranger: a folder of somebody else, to which paths are made to lead.
    """
    same = {p: [n for n in entries if n.count("/") == p.count("/")] for p in patterns}
    found = [names for p in patterns if (names := fnmatch.filter(same[p], p))]
    name = draw(st.sampled_from(draw(st.sampled_from(found))))
    before, path = entries[name], PurePosixPath(name)
    if path.suffix in _STRUCTURED and draw(st.integers(0, 4)) > 1:
        how, content = draw(_edits(before, path.suffix, stranger))
    elif draw(st.integers(0, 4)):
        how, content = draw(_bytes(before))
    else:
        beside = [n for n in entries if PurePosixPath(n).parent == path.parent and n != name]
        ways = ("nothing", "a folder", "a link to nowhere", f"a link to {path.name}", *beside)
        how = draw(st.sampled_from(ways))
        content = entries.get(how)
    assume(content != before)
    return Damage(name, how, content)


@st.composite
def _bytes(draw: st.DrawFn, before: bytes) -> tuple[str, bytes]:
    size = len(before)
    start = draw(st.integers(0, size))
    way = draw(st.sampled_from(("cut", "flip", "set", "insert")))
    if way == "cut":
        return f"the first {start} of {size} bytes", before[:start]
    if way == "flip" and size:
        bits = draw(st.lists(st.integers(0, 8 * size - 1), min_size=1, max_size=8, unique=True))
        number = int.from_bytes(before, "little") ^ sum(1 << bit for bit in bits)
        return f"flipped bits {bits}", number.to_bytes(size, "little")
    if way == "set":
        end = min(size, start + draw(st.sampled_from((1, 8, 64, 512, 4096, size))))
        what = draw(st.sampled_from((b"\0", b"\xff"))) * (end - start)
        return f"bytes {start} to {end} = {what[:1]}", before[:start] + what + before[end:]
    what = draw(st.sampled_from((b"\xff\xfe", b"\xc3", b"\0", b"\xef\xbb\xbf", b"}")) | st.binary())
    start = draw(st.sampled_from((0, size, start)))
    return f"{what} inserted at {start}", before[:start] + what + before[start:]


@st.composite
def _edits(draw: st.DrawFn, before: bytes, suffix: str, stranger: Path) -> tuple[str, bytes]:
    """Draw a document of which one key is changed, one value replaced, or the whole."""
    outside = (*_OUTSIDE, str(stranger), f"{stranger}/thesis.txt")
    number, values = _load(before, suffix, draw)
    places, value, raw = list(_places(values)), draw(_VALUES), ""
    ways = ("put", "lead away", "raw", "delete", "add", "rename", "twice")
    way = draw(st.sampled_from((*ways, "whole"))) if places else "whole"
    *keys, key = draw(st.sampled_from(places)) if way != "whole" else ("whole",)
    node = functools.reduce(operator.getitem, keys, values)
    if way == "whole":
        values = value
    elif way == "delete":
        del node[key]
    elif way == "add" and isinstance(node, list):
        node.insert(key, value)
    elif way == "add":
        node["unknown_key"] = value
    elif way == "rename" and isinstance(node, dict):
        value = draw(st.sampled_from((*outside, "", f"{key}x")) | st.text(max_size=9))
        node[value] = node.pop(key)
    elif way == "lead away" and isinstance(node[key], str):
        node[key] = value = draw(st.sampled_from(outside))
    elif way == "raw":
        raw = value = draw(st.sampled_from(_RAW_YAML if suffix == ".yaml" else _RAW_JSON))
        node[key] = _RAW
    elif way == "twice" and suffix == ".json" and node is values and isinstance(node, dict):
        text = before.decode().rstrip()
        return f"{key} twice", f"{text[:-1]}, {json.dumps(key)}: {json.dumps(value)}}}".encode()
    else:
        node[key] = value
    where = ".".join(map(str, (*([] if number is None else [f"line {number}"]), *keys, key)))
    return f"{way}: {where}, {str(value)[:40]!r}", _dump(before, suffix, number, values, raw)


def _places(values: Any, keys: tuple = ()) -> Iterator[tuple]:
    """Yield the keys that lead to each value in a document, of lists the first twenty."""
    items = list(values.items()) if isinstance(values, dict) else ()
    if isinstance(values, list):
        items = list(enumerate(values))[:20]
    for key, value in items:
        yield (*keys, key)
        yield from _places(value, (*keys, key))


def _header_end(content: bytes) -> int:
    return 8 + struct.unpack("<Q", content[:8])[0]


def _load(content: bytes, suffix: str, draw: st.DrawFn) -> tuple[int | None, Any]:
    """Return the document; where each line is one, a drawn one with its number."""
    if suffix == ".safetensors":
        return None, json.loads(content[8 : _header_end(content)])
    if suffix != ".jsonl":
        return None, yaml.safe_load(content) if suffix == ".yaml" else json.loads(content)
    lines = content.splitlines() or [b"null"]
    number = draw(st.integers(0, len(lines) - 1))
    return number, json.loads(lines[number])


def _dump(before: bytes, suffix: str, number: int | None, values: Any, raw: str) -> bytes:
    if suffix == ".yaml":
        text = yaml.safe_dump(values, sort_keys=False, width=10**6)
        return text.replace(f"'{_RAW}'", raw).replace(_RAW, raw).encode()
    content = json.dumps(values).replace(f'"{_RAW}"', raw).encode()
    if suffix == ".safetensors":
        return struct.pack("<Q", len(content)) + content + before[_header_end(before) :]
    if number is not None:
        lines = before.splitlines()
        content = b"\n".join([*lines[:number], content, *lines[number + 1 :]])
    return content + b"\n"
