"""Ways to damage a file, by seed: bytes, kinds of files, and the structure of JSON and YAML."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
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
_RAW_YAML = (
    *(
        "2020-99-99",
        "!!timestamp abc",
        "!!python/object/apply:os.getcwd []",
        "&a [*a]",
        "&a {b: *a}",
    ),
    *("*nowhere", ".inf", ".nan", "2020-01-01", "!!binary abc", "!!int abc", "1:2:3"),
    *(
        "!!set {a}",
        "[" * 1000 + "]" * 1000,
        "{? [a]: b}",
        "9" * 5000,
        "0x" + "f" * 300,
        "!!null abc",
    ),
)


class NotApplicable(Exception):
    """This way does nothing to this file; another one must be drawn."""


def damage(path: Path, rng: random.Random, stranger: Path) -> str:
    """Changes one file and says how.

    Args:
        path: a regular file; its folder may be written.
        stranger: a folder outside, to which paths are made to lead.
    """
    structured = path.suffix in (".json", ".yaml", ".jsonl", ".safetensors")
    before = path.read_bytes()
    while True:
        way: Callable[..., str]
        if structured and rng.random() < 0.6:
            way = rng.choice(_STRUCTURE)
        else:
            way = rng.choice((*_BYTES, *_BYTES, *_KINDS))
        try:
            said = way(path, rng, stranger) if way in _STRUCTURE else way(path, rng)
        except NotApplicable:
            continue
        if path.is_symlink() or not path.is_file() or path.read_bytes() != before:
            return said


def _truncate(path: Path, rng: random.Random) -> str:
    length = rng.randrange(max(1, path.stat().st_size))
    os.truncate(path, length)
    return f"truncated to {length} bytes"


def _empty(path: Path, rng: random.Random) -> str:
    path.write_bytes(b"")
    return "emptied"


def _flip(path: Path, rng: random.Random) -> str:
    content = bytearray(_content(path))
    places = [rng.randrange(8 * len(content)) for _ in range(rng.randint(1, 8))]
    for place in places:
        content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    return f"bits flipped: {places}"


def _overwrite(path: Path, rng: random.Random) -> str:
    content = bytearray(_content(path))
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.choice((1, 8, 64, 512, 4096, len(content))))
    value = rng.choice((0, 0xFF))
    content[start:stop] = bytes([value]) * (stop - start)
    path.write_bytes(content)
    return f"bytes {start} to {stop} set to {value:#x}"


def _insert(path: Path, rng: random.Random) -> str:
    content, what = _content(path), rng.choice((b"\xff\xfe", b"\xc3", b"\0", b"\xef\xbb\xbf", b"}"))
    place = rng.choice((0, len(content), rng.randrange(len(content))))
    path.write_bytes(content[:place] + what + content[place:])
    return f"{what!r} inserted at {place}"


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if not content:
        raise NotApplicable
    return content


def _other_file(path: Path, rng: random.Random) -> str:
    others = sorted(p for p in path.parent.iterdir() if p.is_file() and p != path)
    if not others:
        raise NotApplicable
    other = rng.choice(others)
    shutil.copyfile(other, path)
    return f"replaced by a copy of {other.name}"


def _missing(path: Path, rng: random.Random) -> str:
    path.unlink()
    return "removed"


def _folder(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "replaced by a folder"


def _dangling(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.symlink_to("nothing-is-here")
    return "replaced by a link to nothing"


def _loop(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return "replaced by a link to itself"


def _swap_type(path: Path, rng: random.Random, stranger: Path) -> str:
    return _edit(path, rng, lambda node, key: _put(node, key, rng.choice(_VALUES)))


def _delete_key(path: Path, rng: random.Random, stranger: Path) -> str:
    def delete(node: Any, key: Any) -> str:
        del node[key]
        return "deleted"

    return _edit(path, rng, delete)


def _add_key(path: Path, rng: random.Random, stranger: Path) -> str:
    def add(node: Any, key: Any) -> str:
        if isinstance(node, list):
            node.insert(key, rng.choice(_VALUES))
            return "an item inserted before it"
        node["unknown_key"] = rng.choice(_VALUES)
        return f"beside it, unknown_key = {node['unknown_key']!r}"

    return _edit(path, rng, add)


def _rename_key(path: Path, rng: random.Random, stranger: Path) -> str:
    def rename(node: Any, key: Any) -> str:
        if not isinstance(node, dict):
            raise NotApplicable
        new = rng.choice((*_paths(stranger), "", "a" * 300, f"{key}x"))
        node[new] = node.pop(key)
        return f"renamed to {new!r}"

    return _edit(path, rng, rename)


def _lead_away(path: Path, rng: random.Random, stranger: Path) -> str:
    """Makes a text, one that looks like a file's name where there is one, lead elsewhere."""

    def lead(node: Any, key: Any) -> str:
        if not isinstance(node[key], str):
            raise NotApplicable
        if not any(mark in node[key] for mark in "./") and rng.random() < 0.7:
            raise NotApplicable
        return _put(node, key, rng.choice(_paths(stranger)))

    return _edit(path, rng, lead)


def _paths(stranger: Path) -> tuple[str, ...]:
    names = ("../../escape", "../precious.txt", "precious.txt", "..", ".", "x/" * 150, "/proc/self")
    return (*names, str(stranger), f"{stranger}/thesis.txt", "n" * 300, "/dev/full")


def _raw(path: Path, rng: random.Random, stranger: Path) -> str:
    texts = _RAW_YAML if path.suffix == ".yaml" else _RAW_JSON
    text = rng.choice(texts)

    def mark(node: Any, key: Any) -> str:
        node[key] = _RAW
        return f"= {text[:40]}"

    return _edit(path, rng, mark, raw=text)


def _duplicate_key(path: Path, rng: random.Random, stranger: Path) -> str:
    if path.suffix != ".json":
        raise NotApplicable
    text = path.read_text(encoding="utf-8").rstrip()
    values = json.loads(text)
    if not isinstance(values, dict) or not values:
        raise NotApplicable
    key, value = rng.choice(sorted(values)), rng.choice(_VALUES)
    path.write_text(f"{text[:-1]}, {json.dumps(key)}: {json.dumps(value)}}}\n", encoding="utf-8")
    return f"{key} a second time, = {value!r}"


def _whole(path: Path, rng: random.Random, stranger: Path) -> str:
    value = rng.choice((None, [], {}, 0, "text", [1, 2], {"a": 1}, [{}], True))
    _dump(path, value, rng, None)
    return f"its content replaced by {json.dumps(value)}"


def _edit(path: Path, rng: random.Random, change: Callable, raw: str = "") -> str:
    """Applies `change` to one key of the document, drawn evenly from all of them."""
    line, values = _load(path, rng)
    places = list(_places(values))
    if not places:
        raise NotApplicable
    for _ in range(20):
        node, key, name = rng.choice(places)
        try:
            said = change(node, key)
            break
        except NotApplicable:
            continue
    else:
        raise NotApplicable
    _dump(path, values, rng, line, raw)
    where = f"line {line + 1}, " if line is not None else ""
    return f"{where}{name}: {said}"


def _put(node: Any, key: Any, value: Any) -> str:
    node[key] = value
    return f"= {value!r}"


def _places(values: Any, prefix: str = "") -> Any:
    """(container, key, dotted name) of every value in a document."""
    if isinstance(values, dict):
        items: Any = list(values.items())
    elif isinstance(values, list):
        items = list(enumerate(values))[:20]
    else:
        return
    for key, value in items:
        yield values, key, f"{prefix}{key}"
        yield from _places(value, f"{prefix}{key}.")


def _load(path: Path, rng: random.Random) -> tuple[int | None, Any]:
    """The document, with the line's number where each line is one."""
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


def _dump(path: Path, values: Any, rng: random.Random, line: int | None, raw: str = "") -> None:
    if path.suffix == ".yaml":
        text = yaml.safe_dump(values, sort_keys=False, width=10**6)
        path.write_text(text.replace(_RAW, raw).replace(f"'{_RAW}'", raw), encoding="utf-8")
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


_BYTES = (_truncate, _empty, _flip, _flip, _overwrite, _insert)
_KINDS = (_missing, _folder, _dangling, _loop, _other_file)
_STRUCTURE = (
    *(_swap_type, _swap_type, _delete_key, _add_key, _rename_key, _lead_away, _lead_away, _raw),
    *(_duplicate_key, _whole),
)
