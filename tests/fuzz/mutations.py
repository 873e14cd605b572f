"""Ways to damage a file, by seed: bytes, kinds of files, and the structure of JSON and YAML."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEEP = 3000  # levels of nesting, more than Python's recursion takes
_RAW = "@@RAW@@"  # stands for text that no dump writes
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, 1e300, 10**30, -(10**19), 2**31, 2**63),
    *(float("nan"), float("inf"), "", " ", "abc", "0", "nan", "a" * 300, "2020-99-99"),
    *([], {}, [[]], [0], ["a", 1], {"a": {}}, "\U0001f600\x01"),
)
_RAW_JSON = ("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "9" * 5000, "1e999")
_RAW_YAML = ("2020-99-99", "!!timestamp abc", "!!python/object/apply:os.getcwd []", "&a [*a]")
_RAW_YAML += ("*nowhere", ".inf", ".nan", "2020-01-01", "!!binary abc", "!!int abc", "1:2:3")
_RAW_YAML += ("!!set {a}", "[" * 1000 + "]" * 1000, "{? [a]: b}", "9" * 5000, "0x" + "f" * 300)
_BYTES = ("truncate", "empty", "flip", "flip", "overwrite", "insert")
_KINDS = ("missing", "folder", "dangling", "loop", "other file")
_EDITS = (
    "put",
    "put",
    "delete",
    "add",
    "rename",
    "lead away",
    "lead away",
    "raw",
    "whole",
    "twice",
)


class NotApplicable(Exception):
    """This way does nothing to this file; another one must be drawn."""


def damage(path: Path, rng: random.Random, stranger: Path) -> str:
    """Change one file and return how.

    Args:
        path: a regular file; its folder may be written.
        stranger: a folder outside, to which paths are made to lead.
    """
    structured = path.suffix in (".json", ".yaml", ".jsonl", ".safetensors")
    before = path.read_bytes()
    while True:
        try:
            if structured and rng.random() < 0.6:
                done = _edit(path, rng.choice(_EDITS), rng, stranger)
            elif (way := rng.choice((*_BYTES, *_BYTES, *_KINDS))) in _KINDS:
                done = _replace(path, way, rng)
            else:
                done, content = _damage_bytes(before, way, rng)
                path.write_bytes(content)
        except NotApplicable:
            continue
        if path.is_symlink() or not path.is_file() or path.read_bytes() != before:
            return done


def _damage_bytes(before: bytes, way: str, rng: random.Random) -> tuple[str, bytes]:
    if not before or way == "empty":
        return "emptied", b""
    content, size = bytearray(before), len(before)
    start = rng.randrange(size)
    if way == "truncate":
        return f"truncated to {start} bytes", before[:start]
    if way == "flip":
        places = [rng.randrange(8 * size) for _ in range(rng.randint(1, 8))]
        for place in places:
            content[place // 8] ^= 1 << place % 8
        return f"bits flipped: {places}", bytes(content)
    if way == "overwrite":
        stop = min(size, start + rng.choice((1, 8, 64, 512, 4096, size)))
        value = rng.choice((0, 0xFF))
        content[start:stop] = bytes([value]) * (stop - start)
        return f"bytes {start} to {stop} set to {value:#x}", bytes(content)
    what = rng.choice((b"\xff\xfe", b"\xc3", b"\0", b"\xef\xbb\xbf", b"}"))
    start = rng.choice((0, size, start))
    return f"{what!r} inserted at {start}", before[:start] + what + before[start:]


def _replace(path: Path, way: str, rng: random.Random) -> str:
    if way == "other file":
        others = sorted(p for p in path.parent.iterdir() if p.is_file() and p != path)
        if not others:
            raise NotApplicable
        shutil.copyfile(other := rng.choice(others), path)
        return f"replaced by a copy of {other.name}"
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way != "missing":
        path.symlink_to("nothing-is-here" if way == "dangling" else path.name)
    return f"{way}, instead of the file"


def _edit(path: Path, way: str, rng: random.Random, stranger: Path) -> str:
    """Change one key of the document, drawn evenly from all of them."""
    line, values = _load(path, rng)
    raw, value = "", rng.choice(_VALUES)
    if way == "whole":
        _dump(path, value, line)
        return f"its content replaced by {value!r}"
    places = list(_places(values))
    if not places:
        raise NotApplicable
    node, key, name = rng.choice(places)
    paths = ("../../escape", "../precious.txt", "..", "x/" * 150, "/proc/self", "/dev/full")
    away = rng.choice((*paths, str(stranger), f"{stranger}/thesis.txt", "n" * 300))
    if way == "delete":
        del node[key]
    elif way == "add" and isinstance(node, list):
        node.insert(key, value)
    elif way == "add":
        node["unknown_key"] = value
    elif way == "rename" and isinstance(node, dict):
        node[rng.choice((away, "", f"{key}x"))] = node.pop(key)
    elif way == "lead away" and isinstance(node[key], str):
        node[key] = value = away
    elif way == "raw":
        raw = value = rng.choice(_RAW_YAML if path.suffix == ".yaml" else _RAW_JSON)
        node[key] = _RAW
    elif way == "twice" and path.suffix == ".json" and node is values and isinstance(node, dict):
        text = path.read_text(encoding="utf-8").rstrip()
        path.write_text(f"{text[:-1]}, {json.dumps(key)}: {json.dumps(value)}}}\n")
        return f"{key} a second time, = {value!r}"
    elif way == "put":
        node[key] = value
    else:
        raise NotApplicable
    _dump(path, values, line, raw)
    return f"{way}: line {line}, {name}, {str(value)[:40]!r}"


def _places(values: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield (container, key, dotted name) of every value in a document."""
    items = values.items() if isinstance(values, dict) else ()
    if isinstance(values, list):
        items = list(enumerate(values))[:20]
    for key, value in items:
        yield values, key, f"{prefix}{key}"
        yield from _places(value, f"{prefix}{key}.")


def _load(path: Path, rng: random.Random) -> tuple[int | None, Any]:
    """Return the document, with the line's number where each line is one."""
    if path.suffix == ".safetensors":
        content = path.read_bytes()
        return None, json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return None, yaml.safe_load(text)
    if path.suffix == ".json":
        return None, json.loads(text)
    lines = text.splitlines()
    number = rng.randrange(len(lines)) if lines else 0
    return (number, json.loads(lines[number])) if lines else (None, None)


def _dump(path: Path, values: Any, line: int | None, raw: str = "") -> None:
    if path.suffix == ".yaml":
        text = yaml.safe_dump(values, sort_keys=False, width=10**6)
        path.write_text(text.replace(f"'{_RAW}'", raw).replace(_RAW, raw), encoding="utf-8")
        return
    text = json.dumps(values).replace(f'"{_RAW}"', raw)
    if path.suffix == ".safetensors":
        content = path.read_bytes()
        data = content[8 + struct.unpack("<Q", content[:8])[0] :]
        path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + data)
        return
    if path.suffix == ".jsonl" and line is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        text = "\n".join([*lines[:line], text, *lines[line + 1 :]])
    path.write_text(text + "\n", encoding="utf-8")
