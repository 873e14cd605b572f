"""Documents of a file: its blocks, lines and rows; what cannot be read is named."""

import bz2
import gzip
import io
import json
import lzma
import re
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.core.errors import UserError
from data_prep.sources import documents as reader
from data_prep.sources.base import set_name
from data_prep.sources.documents import Malformed, Reading
from tests.damages import damages
from tests.data_prep.helpers import documents, json_lines, opened, texts

PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
BLOCKS = st.integers(1, 9)
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def read(data, name="x.jsonl", reading=None):
    return list(reader.read_records(io.BytesIO(data), name, "x", reading or Reading()))


@given(
    text=st.text(st.sampled_from("aä\n\r🙂\ufeff-"), max_size=40),
    separator=st.none() | st.text(st.sampled_from("a\n🙂-"), min_size=1, max_size=3),
    block=BLOCKS,
    packing=st.sampled_from(list(PACK)),
)
def test_texts_are_cut_alike_wherever_blocks_end(text, separator, block, packing):
    data = text.encode()
    packed = PACK[packing](data[:3]) + PACK[packing](data[3:]) if data else PACK[packing](data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK", block)
        patch.setattr(reader, "PIECE", block)
        found = read(packed, f"x.txt{packing}", Reading(separator=separator))
    whole = text.removeprefix("\ufeff")
    assert [item[0] for item in found] == (whole.split(separator) if separator else [whole])


@given(
    values=st.lists(VALUES | st.fixed_dictionaries({"text": VALUES | st.text()}), max_size=8),
    block=BLOCKS,
    blank=st.lists(st.integers(0, 3), min_size=9, max_size=9),
)
def test_lines_are_documents_or_malformed_in_their_places(values, block, blank):
    lines, expected = [], []
    for value, count in zip(values, blank, strict=False):
        lines += [" "] * count + [json.dumps(value)]
        text = value.get("text") if isinstance(value, dict) else None
        expected.append(text if isinstance(text, str) else f"x:{len(lines)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK", block)
        found = read("\n".join(lines).encode())
    assert [i.where if isinstance(i, Malformed) else i[0] for i in found] == expected


BAD_LINES = {
    b"{broken": "not a JSON line",
    b'{"text": "\xff"}': r"not UTF-8 \(byte 0xff at 10\)",
    b"[1]": "a JSON object is needed, not list",
    b'{"body": "x"}': "no text under the key 'text'.*body",
    b'{"text": null}': "no text under the key 'text' but null$",
    b'{"text": "a\\ud800"}': "half a surrogate pair at 1",
    b"[" * 100_000: "not a JSON line",
    b'{"text": ' + b"1" * 9999 + b"}": "not a JSON line",
    b'{"a\\nb": 1}': "no text.* its keys are a b .choose",
    b"\0\0\0": "not a JSON line",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_line_is_named_in_its_place_and_the_others_are_read(line):
    first, bad, last = read(json_lines(["before"]) + line + b"\n" + json_lines(["after"]))
    assert (first[0], bad.where, last[0]) == ("before", "x:2", "after")
    assert re.match(BAD_LINES[line], bad.reason) and "\n" not in bad.reason


@pytest.mark.parametrize("packing", [packing for packing in PACK if packing])
def test_packed_files_are_unpacked_in_bounded_memory(packing):
    blocks = reader._decompressed_blocks(
        io.BytesIO(PACK[packing](bytes(1 << 26))), "x", f".txt{packing}"
    )
    tracemalloc.start()
    size, (_, peak) = sum(map(len, blocks)), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 1 << 26 and peak < 100e6


def test_text_larger_than_memory_is_read_document_by_document(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "BLOCK", 1 << 16)
    monkeypatch.setattr(reader, "MAX_DOCUMENT", 1 << 20)
    paragraph, long = "wörter " * 1000, "ab" * (1 << 20)
    parts = [*[paragraph] * 1500, long, "kept", long]
    (tmp_path / "a.txt").write_text("\n\n".join(parts), encoding="utf-8")
    (tmp_path / "b.md").write_text(long * 4, encoding="utf-8")
    source = opened("files", tmp_path, Reading(separator="\n\n"))
    tracemalloc.start()
    items = (item for part in source.parts for item in source.read(part))
    found = [item if isinstance(item, Malformed) else hash(item.text) for item in items]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20
    assert found[:1500] == [hash(paragraph)] * 1500 and found[1501] == hash("kept")
    refused = [found[1500], *found[1502:]]
    assert [item.where for item in refused] == ["a.txt", "a.txt", "b.md"]
    assert all("a document of more than 1 million characters" in i.reason for i in refused)


def test_lines_too_long_for_memory_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_LINE", 20)
    (tmp_path / "a.jsonl").write_bytes(json_lines(["x", "y" * 99]))
    with pytest.raises(UserError, match=r"a\.jsonl: line 2 has more than 0 MiB"):
        texts(tmp_path)


def text_column(values):
    """A string column of raw bytes, which may not be UTF-8; None for null."""
    return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())


def test_bad_parquet_rows_are_named_and_the_others_are_read(tmp_path):
    columns = {
        "text": text_column([b"ok", None, b"\xff\xfe", "é".encode(), b""]),
        "meta": pyarrow.array([0, 0, 0, 1, 2**40], pyarrow.timestamp("s")),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    found = documents(opened("files", tmp_path))
    bad = {item.where: item.reason for item in found if isinstance(item, Malformed)}
    assert [i.text for i in found if not isinstance(i, Malformed)] == ["ok", "é"]
    assert list(bad) == [f"a.parquet: row {row}" for row in (2, 3, 5)]
    reasons = ("no text under the key", "not UTF-8 (byte 0xff at 0)", "not readable (")
    assert all(map(str.startswith, bad.values(), reasons))


def test_parquet_file_of_one_large_group_of_rows_is_not_read_at_once(monkeypatch):
    monkeypatch.setattr(reader, "BLOCK", 1 << 14)
    asked = []

    class File(io.BytesIO):
        def read(self, size=-1):
            asked.append(size)
            return super().read(size)

    written, stream = [f"{n:010}" * 1000 for n in range(200)], File()
    options = {"use_dictionary": False, "write_batch_size": 1, "data_page_size": 1 << 12}
    options |= {"compression": "none", "row_group_size": 10**6}
    pyarrow.parquet.write_table(pyarrow.table({"text": written}), stream, **options)
    records = reader.read_records(stream, "x.parquet", "x", Reading())
    assert [text for text, _ in records] == written
    assert 0 < max(asked) <= 1 << 16 and min(asked) >= 0


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.zst"])
def test_file_damaged_in_the_middle_is_named(tmp_path, name):
    values = [f"{number} text" * 20 for number in range(5000)]
    data = zstandard.ZstdCompressor(write_checksum=True).compress(json_lines(values))
    if name == "x.parquet":
        stream = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), stream, compression="zstd")
        data = stream.getvalue()
    (tmp_path / name).write_bytes(data[:100] + bytes(4900) + data[5000:])
    with pytest.raises(UserError, match=rf"{name}(:\d+)?: (broken|not|cannot be read)"):
        texts(tmp_path)


def parquet(values):
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), stream)
    return stream.getvalue()


WRITTEN = ["some text", "ä", ""]
FILES = {f"x.jsonl{packing}": PACK[packing](json_lines(WRITTEN)) for packing in PACK}
FILES["x.parquet"] = parquet(WRITTEN)


def test_parquet_column_whose_name_is_not_utf8_is_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(FILES["x.parquet"].replace(b"text", b"tex\xf4"))
    with pytest.raises(UserError, match=r"x\.parquet: broken parquet file \('utf-8' codec"):
        texts(tmp_path)


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
def test_damaged_file_is_read_or_refused_in_one_line(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("damaged")
    (folder / name).write_bytes(FILES[name])
    data.draw(damages({name: FILES[name]}, [name], folder)).apply(folder)
    try:
        found = documents(opened("files", folder))
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
    else:
        assert all("\n" not in item.reason for item in found if isinstance(item, Malformed))


def test_zstd_windows_beyond_the_librarys_default_are_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = compressor.compress(json_lines(["a"])) + compressor.flush()
    (tmp_path / "x.jsonl.zst").write_bytes(packed)
    assert texts(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("meta", "name"),
    [
        ({"redpajama_set_name": "Another"}, "Another"),
        ('{"redpajama_set_name": "RedPajamaBook"}', "RedPajamaBook"),
        ("not JSON", "unknown"),
        ('["RedPajamaBook"]', "unknown"),
        ({"redpajama_set_name": 7}, "unknown"),
        ({"redpajama_set_name": ""}, "unknown"),
        (None, "unknown"),
        ("[" * 100_000, "unknown"),
        ({"redpajama_set_name": "a\n\x1b[31mb"}, r"a\n\x1b[31mb"),
        ('{"redpajama_set_name": "\\ud800x"}', r"\ud800x"),
    ],
)
def test_set_is_what_a_record_names(meta, name):
    assert set_name({"meta": meta}, Reading()) == name
    assert set_name({"kind": "web"}, Reading(set_key="kind")) == "web"
