"""Every source of documents: order, names, splits, repeated reading, units, description, damage."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import shutil

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cat_lm.core.errors import UserError
from data_prep.sources.base import in_natural_order, task_units, units_of
from data_prep.sources.documents import Document
from data_prep.sources.repository import KNOWN_SETS
from tests.conftest import generated_text
from tests.data_prep.helpers import documents, json_lines, names, opened, write_files
from tests.data_prep.hub_server import NAME, serving

TEXTS = generated_text(120)
SETS = [KNOWN_SETS[index % len(KNOWN_SETS)] for index in range(len(TEXTS))]
SPLITS = {"train": range(80), "validation": range(80, 100), "test": range(100, 120)}
COMMON = {"README.md": b"# what it is", ".gitattributes": b"", ".cache/x.jsonl": b"{"}
Files = dict[str, bytes]


def zst(indices, named: bool = True) -> bytes:
    metas = [{"meta": {"redpajama_set_name": SETS[i]}} if named else {} for i in indices]
    rows = (json_lines([TEXTS[i]], **meta) for i, meta in zip(indices, metas, strict=True))
    return zstandard.compress(b"".join(rows))


def parquet(indices, as_text: bool) -> bytes:
    metas = [{"redpajama_set_name": SETS[i]} for i in indices]
    meta = [json.dumps(meta) for meta in metas] if as_text else metas
    stream = io.BytesIO()
    table = pyarrow.table({"text": [TEXTS[i] for i in indices], "meta": meta})
    pyarrow.parquet.write_table(table, stream, row_group_size=30)
    return stream.getvalue()


def original() -> tuple[Files, list[int], list[int]]:
    chunks = ((0, 1, 2), (20, 1, 10), (40, 2, 0), (60, 10, 0))
    files = {f"train/chunk{c}/e_{n}.jsonl.zst": zst(range(s, s + 20)) for s, c, n in chunks}
    files |= {f"{s}/chunk1/h_0.jsonl.zst": zst(SPLITS[s]) for s in ("validation", "test")}
    return files, list(SPLITS["train"]), list(SPLITS["validation"])


def sample() -> tuple[Files, list[int], list[int]]:
    files = {
        "data/train-00000-of-00002-ab2b.parquet": parquet(range(50), False),
        "data/train-00001-of-00002-f2ff.parquet": parquet(range(50, 80), False),
        "data/validation-00000-of-00001-d5.parquet": parquet(SPLITS["validation"], False),
        "data/test-00000-of-00001-9f.parquet": parquet(SPLITS["test"], False),
    }
    return files, list(SPLITS["train"]), list(SPLITS["validation"])


def reupload() -> tuple[Files, list[int], list[int]]:
    files = {
        "data/train-00000-of-00250.parquet": parquet(range(50), True),
        "data/train-00001-of-00250.parquet": parquet(range(50, 80), True),
        "data/test-00000-of-00030.parquet": parquet(SPLITS["test"], True),
    }
    return files, list(SPLITS["train"]), []


def by_set() -> tuple[Files, list[int], list[int]]:
    """Its records name no set; their folders do."""
    chosen = {
        (split, name): [i for i in SPLITS[split] if SETS[i] == name]
        for split in SPLITS
        for name in KNOWN_SETS
    }
    files = {f"{s}/{name}/chunk_1.jsonl.zst": zst(own, False) for (s, name), own in chosen.items()}
    order = [[i for n in KNOWN_SETS for i in chosen[s, n]] for s in ("train", "validation")]
    return files, *order


LAYOUTS = {layout.__name__: layout for layout in (original, sample, reupload, by_set)}
ALL_KINDS = {
    "a.jsonl": json_lines(["one", "zwei\nZeilen", ""]) + b"\n",
    "b.ndjson.gz": gzip.compress(json_lines(["three"])),
    "c.json.xz": lzma.compress(json_lines(["four"])),
    "d.txt.bz2": bz2.compress(b"fi") + bz2.compress(b"ve"),
    "sub2/e.jsonl.zst": zstandard.compress(json_lines(["six"])[:9])
    + zstandard.compress(json_lines(["six"])[9:]),
    "sub10/f.md": b"\xef\xbb\xbf# seven\r\n",
}
KINDS = ("python-stdlib", "files", *LAYOUTS, *(f"hub {layout}" for layout in LAYOUTS))


@pytest.fixture(params=KINDS)
def source(request, tmp_path, monkeypatch):
    """An opened source, and the documents that it has, where they are known."""
    if request.param == "python-stdlib":
        yield opened("python-stdlib", "", exclude=("encodings/*",)), None
    elif request.param == "files":
        folder = write_files(tmp_path / "in", ALL_KINDS)
        texts = ["one", "zwei\nZeilen", "", "three", "four", "five", "six", "# seven\r\n"]
        kinds = ["jsonl"] * 3 + ["ndjson.gz", "json.xz", "txt.bz2", "jsonl.zst", "md"]
        found = [Document(text, kind) for text, kind in zip(texts, kinds, strict=True)]
        yield opened("files", folder), found
    else:
        layout = request.param.removeprefix("hub ")
        files, train, held_out = LAYOUTS[layout]()
        splits = {"train": train, "validation": held_out} if held_out else {None: train}
        found = [Document(TEXTS[i], SETS[i], split) for split in splits for i in splits[split]]
        if layout == request.param:
            yield opened("slimpajama", write_files(tmp_path / "in", COMMON | files)), found
            return
        with serving(COMMON | files, monkeypatch):
            yield opened("slimpajama", f"hub:{NAME}@v1"), found


def test_documents_come_in_one_order_with_their_sets_and_splits(source):
    source, expected = source
    found = documents(source)
    assert expected is None or found == expected
    assert all(isinstance(item, Document) and item.set for item in found)
    assert source.has_validation == all(item.split for item in found)
    for split in {part.split for part in source.parts}:
        own = [part for part in source.parts if part.split == split]
        assert source.kind == "python-stdlib" or own == in_natural_order(own)


def test_parts_have_equal_contents_in_any_order_and_process(source):
    source, _ = source
    again = pickle.loads(pickle.dumps(source))
    some = source.parts[:20]
    first = [list(source.read(part)) for part in some]
    assert [list(again.read(part)) for part in reversed(some)] == first[::-1]


def test_units_hold_every_part_once_and_tasks_share_them(source):
    source, _ = source
    units = units_of(source)
    assert [part for unit in units for part in unit.parts] == source.parts
    assert all(len({part.split for part in unit.parts}) == 1 for unit in units)
    shares = [unit for task in range(3) for unit in task_units(units, (task, 3))]
    assert sorted(shares, key=lambda unit: unit.number) == units == task_units(units, None)


@pytest.mark.parametrize("kind", ["files", "slimpajama"])
def test_description_follows_contents_and_not_the_place(tmp_path, kind, monkeypatch):
    files = ALL_KINDS if kind == "files" else original()[0]
    there = write_files(tmp_path / "a", files)
    source = opened(kind, there)
    copy = opened(kind, shutil.copytree(there, tmp_path / "b"))
    described = [{k: v for k, v in s.describe().items() if k != "path"} for s in (source, copy)]
    assert described[0] == described[1] and names(source) == names(copy)
    last = source.parts[-1].path
    content = last.read_bytes()
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    changed = {k for k, v in opened(kind, there).describe().items() if described[1].get(k) != v}
    assert changed - {"path"} == {"contents_sha256"}
    monkeypatch.setattr("data_prep.sources.base.HASHED_BYTES", 7)  # as with terabytes: not read
    assert "contents_sha256" not in source.describe()


@pytest.mark.parametrize("name", [name for name in ALL_KINDS if name.count(".") > 1])
@pytest.mark.parametrize("damage", ["cut", "empty", "garbage"])
def test_damaged_file_is_named_with_its_path(tmp_path, name, damage):
    content = {"cut": ALL_KINDS[name][:-5], "empty": b"", "garbage": b"no such format"}[damage]
    write_files(tmp_path, {name: content})
    with pytest.raises(UserError, match=r"broken (gzip|xz|bz2|zstd) file") as error:
        documents(opened("files", tmp_path))
    assert str(error.value).startswith(f"{tmp_path / name}: ")
