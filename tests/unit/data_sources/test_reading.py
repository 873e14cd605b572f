"""Documents of a file: its blocks, lines and pages; what cannot be read is named."""

import bz2
import gzip
import hashlib
import io
import lzma
import re
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cat_lm.core.errors import UserError
from data_prep.sources import documents as documents_module
from data_prep.sources.documents import Document, Malformed, Reading
from data_prep.sources.open import open_source
from tests.unit.data_sources.folders import (
    TEXTS,
    documents,
    json_lines,
    texts,
)


def test_zstd_frames_larger_than_a_block(tmp_path):
    lines = json_lines([f"{number} " * 1000 for number in range(3000)])
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.compress(lines))
    assert texts("files", tmp_path) == [f"{number} " * 1000 for number in range(3000)]


PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("packing", PACK)
def test_every_kind_is_read_packed_too(tmp_path, packing):
    content = {".jsonl": json_lines(), ".ndjson": json_lines(), ".txt": b"text", ".md": b"marked"}
    if packing:
        content[".json"] = json_lines()
    for kind, data in content.items():
        frames = PACK[packing](data[:3]) + PACK[packing](data[3:])
        (tmp_path / f"x{kind}{packing}").write_bytes(frames)
    source = open_source("files", str(tmp_path), Reading())
    assert source.left_out == []
    found = [document.text for document in documents(source)]
    assert sorted(found) == sorted([*TEXTS * (3 if packing else 2), "text", "marked"])


@pytest.mark.parametrize("packing", [packing for packing in PACK if packing])
def test_packed_files_are_unpacked_in_bounded_blocks(packing):
    """A call for each 128 kB of a zstd file gave gigabytes of such text."""
    packed = PACK[packing](bytes(1 << 27))
    blocks = documents_module._blocks(io.BytesIO(packed), "x", f".txt{packing}")
    tracemalloc.start()
    size, (_, peak) = sum(map(len, blocks)), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 1 << 27
    assert peak < 100e6


def test_runs_of_blank_lines_are_skipped_and_counted(monkeypatch):
    content = b"\n\r\n" + b'{"text": "a"}\n' + b"\n \n" * 9 + b'  x\n\n{"text": "b"}\n\n \n'
    for block in (1, 2, 3, 7, 1000):
        monkeypatch.setattr(documents_module, "BLOCK", block)
        records = documents_module.read_records(io.BytesIO(content), "x.jsonl", "x", Reading())
        first, bad, last = records
        assert (first[0], bad.where, last[0]) == ("a", "x:22", "b")


def parquet_of(values):
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), stream)
    return stream.getvalue()


def test_more_records_than_text_packs_into_bytes_are_refused(monkeypatch):
    """Some kB held hundreds of millions of empty or broken records: hours, and a log of GB."""
    monkeypatch.setattr(documents_module, "MOST_RECORDS", 1000)
    for name, data, separator in (
        ("x.jsonl.zst", zstandard.compress(b"x\n" * (1 << 20)), None),
        ("x.jsonl.zst", zstandard.compress(b"\n" * (1 << 26)), None),
        ("x.txt.gz", gzip.compress(b"\n" * (1 << 24)), "\n"),
        ("x.parquet", parquet_of([""] * (1 << 16)), None),
    ):
        with pytest.raises(UserError, match=rf"^{name}: more than [\d,]+ records in [\d,]+ bytes"):
            list(
                documents_module.read_records(
                    io.BytesIO(data), name, "x", Reading(separator=separator)
                )
            )


def test_parquet_values_that_a_dictionary_repeats_are_read_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(documents_module, "PARQUET_BYTES", 1 << 22)
    stream = io.BytesIO(parquet_of(["a" * (1 << 20)] * 64))
    tracemalloc.start()
    assert sum(1 for _ in documents_module.read_records(stream, "x.parquet", "x", Reading())) == 64
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_json_of_millions_of_values_is_malformed_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT", 1 << 20)
    escaped, long = b'{"text": "' + b'\\"' * (1 << 20), b'"' * (1 << 22)
    lines = (
        b"[" + b"[]," * (1 << 20) + b"0]",
        b'[""' + b',""' * (1 << 21),
        escaped + b'"}',
        escaped,
        long,
    )
    content = b"\n".join(lines)
    records = documents_module.read_records(io.BytesIO(content), "x.jsonl", "x", Reading())
    found = [getattr(item, "reason", "read") for item in records]
    assert found[:3] == [*["more than 1 MiB of JSON beside strings"] * 2, "read"]
    assert all(reason.startswith("not a JSON line") for reason in found[3:])


BAD_LINES = {
    "y.jsonl": (json_lines(["ok"]) + b"{broken\n", r"y\.jsonl:2", "not a JSON line"),
    "u.jsonl": (b'{"text": "\xff"}\n', r"u\.jsonl:1", r"not UTF-8 \(byte 0xff at 10\)"),
    "l.jsonl": (b"\n[1]\n", r"l\.jsonl:2", "a JSON object is needed, not list"),
    "k.jsonl": (json_lines(["x"], key="body"), r"k\.jsonl:1", "no text under the key 'text'.*body"),
    "n.jsonl": (b'{"text": null}', r"n\.jsonl:1", "no text under the key 'text' but null$"),
    "f.jsonl": (b'{"text": 1.5}', r"f\.jsonl:1", "no text under the key 'text' but float$"),
    "s.jsonl": (b'{"text": "a\\ud800"}\n', r"s\.jsonl:1", "half a surrogate pair at 1"),
    "d.jsonl": (b"[" * 100_000 + b"\n", r"d\.jsonl:1", "not a JSON line"),
    "i.jsonl": (b'{"text": ' + b"1" * 9999 + b"}\n", r"i\.jsonl:1", "not a JSON line"),
    "m.jsonl": (b'{"a\\nb": 1}\n', r"m\.jsonl:1", "no text.* its keys are a b .choose"),
    "0.jsonl": (b"\0\0\0\n", r"0\.jsonl:1", "not a JSON line"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_in_its_place_and_the_others_are_read(tmp_path, name):
    content, where, reason = BAD_LINES[name]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).write_bytes(content.rstrip(b"\n") + b"\n" + json_lines(["after"]))
    found = documents(open_source("files", str(tmp_path), Reading()))
    bad = [item for item in found if isinstance(item, Malformed)]
    assert len(bad) == 1
    assert re.fullmatch(f"sub/{where}", bad[0].where)  # the name within the source: no machine's
    assert re.match(reason, bad[0].reason)
    assert "\n" not in bad[0].reason
    assert found[-2:] == [bad[0], Document("after", "jsonl")]


def test_lines_too_long_for_memory_are_skipped_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "MAX_LINE", 2 << 20)
    monkeypatch.setattr(documents_module, "BLOCK", 1 << 18)
    long, fits = b"x" * (32 << 20), json_lines(["y" * (1 << 20)])
    (tmp_path / "a.jsonl").write_bytes(long + b"\n" + fits + long + b"\n" + fits + long)
    tracemalloc.start()
    found = documents(open_source("files", str(tmp_path), Reading()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert [getattr(item, "where", None) for item in found] == [
        *("a.jsonl:1", None, "a.jsonl:3", None, "a.jsonl:5")
    ]
    assert found[1] == found[3] == Document("y" * (1 << 20), "jsonl")
    assert found[0].reason == "a line of more than 2 MiB"


def test_a_text_larger_than_memory_is_read_document_by_document(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "BLOCK", 1 << 16)
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT", 1 << 20)
    paragraph, long = "wörter " * 1000, "ab" * (1 << 20)
    parts = [*[paragraph] * 1500, long, "kept", long]
    (tmp_path / "a.txt").write_text("\n\n".join(parts), encoding="utf-8")
    (tmp_path / "b.md").write_text(long * 4, encoding="utf-8")
    tracemalloc.start()
    source = open_source("files", str(tmp_path), Reading(separator="\n\n"))
    items = (item for part in source.parts for item in source.read(part))
    found = [item if isinstance(item, Malformed) else hash(item.text) for item in items]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20
    said = "a document of more than 1 million characters (it begins 'abab"
    assert found[:1500] == [hash(paragraph)] * 1500 and found[1501] == hash("kept")
    refused = [found[1500], *found[1502:]]
    assert [item.where for item in refused] == ["a.txt", "a.txt", "b.md"]
    assert all(item.reason.startswith(said) for item in refused)


def test_a_text_that_is_too_large_is_not_read_to_its_end(monkeypatch):
    """Without a separator nothing behind its beginning can be encoded; it may be very long."""
    monkeypatch.setattr(documents_module, "BLOCK", 10)
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT", 100)
    text = b"ab\n" * 1000
    for separator, read in ((None, 110), ("\n\n", len(text))):
        stream = io.BytesIO(text)
        (found,) = documents_module.read_records(stream, "x.txt", "x", Reading(separator=separator))
        assert isinstance(found, Malformed) and stream.tell() == read


@pytest.mark.parametrize("block", [3, 4, 5, 7])
def test_texts_are_cut_alike_wherever_blocks_end(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents_module, "BLOCK", block)
    for text in ("", "\n", "äa\n\n\nb", "\n\n\n\n", "\ufeffaab\n\n🙂\ufeff\n", "\r\n\n a\n\n"):
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        for separator in ("\n\n", "\n", "🙂", "aab", None):
            whole = text.removeprefix("\ufeff")
            expected = [whole] if separator is None else whole.split(separator)
            assert texts("files", tmp_path, Reading(separator=separator)) == expected
    for text, place in ((b"ab\xffcd", 2), ("ö".encode() * 5 + b"\xc3", 10)):
        (tmp_path / "a.txt").write_bytes(text)
        with pytest.raises(UserError, match=rf"not UTF-8 \(byte 0x.. at {place}\); convert"):
            texts("files", tmp_path)


def text_column(values):
    """A string column of raw bytes, which may not be UTF-8; None for null."""
    return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())


def test_bad_parquet_rows_are_named_and_the_others_are_read(tmp_path):
    table = pyarrow.table({"text": text_column([b"ok", None, b"\xff\xfe", "é".encode(), b""])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = documents(open_source("files", str(tmp_path), Reading()))
    assert [item.text for item in found if isinstance(item, Document)] == ["ok", "é", ""]
    bad = [item for item in found if isinstance(item, Malformed)]
    assert [item.where for item in bad] == ["a.parquet: row 2", "a.parquet: row 3"]
    assert bad[0].reason.startswith("no text under the key 'text'")
    assert bad[1].reason == "not UTF-8 (byte 0xff at 0)"


def test_a_parquet_file_of_one_large_group_of_rows_is_not_read_at_once(monkeypatch):
    monkeypatch.setattr(documents_module, "BLOCK", 1 << 14)
    asked = []

    class File(io.BytesIO):
        def read(self, size=-1):
            asked.append(size)
            return super().read(size)

    written = [hashlib.shake_256(bytes([number])).hexdigest(10_000) for number in range(200)]
    stream = File()
    table = pyarrow.table({"text": written})
    options = {"use_dictionary": False, "write_batch_size": 1, "data_page_size": 1 << 12}
    pyarrow.parquet.write_table(table, stream, row_group_size=10**6, **options)
    assert len(stream.getvalue()) > 2 << 20
    records = documents_module.read_records(stream, "x.parquet", "x", Reading())
    assert [text for text, _ in records] == written
    assert 0 < max(asked) <= 1 << 16 and min(asked) >= 0


def test_parquet_times_that_python_does_not_have_are_named(tmp_path):
    times = pyarrow.array([0, 2**40, 1], pyarrow.timestamp("s"))
    table = pyarrow.table({"text": ["a", "b", "c"], "meta": times})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    first, bad, last = documents(open_source("files", str(tmp_path), Reading()))
    assert (first.text, last.text) == ("a", "c")
    assert bad.where == "a.parquet: row 2" and bad.reason.startswith("not readable (")


BAD_FILES = {
    "x.txt": (b"ab\xffcd", r"x\.txt: not UTF-8 \(byte 0xff at 2\)"),
    "g.jsonl.gz": (gzip.compress(json_lines())[:-9], "g.jsonl.gz: broken gzip file"),
    "h.jsonl.gz": (b"not gzip", "h.jsonl.gz: broken gzip file"),
    "z.jsonl.zst": (zstandard.compress(json_lines())[:-3], "broken zstd file .cut short"),
    "w.jsonl.zst": (b"not zstd at all", r"w\.jsonl\.zst: broken zstd file"),
    "b.ndjson.bz2": (bz2.compress(json_lines())[:-9], r"broken bz2 file \(cut short\)"),
    "c.md.bz2": (b"not bz2", "broken bz2 file"),
    "x.json.xz": (lzma.compress(json_lines())[:-9], r"broken xz file \(cut short\)"),
    "y.txt.xz": (b"not xz", "broken xz file"),
    "y0.txt.xz": (b"", r"broken xz file \(it is empty\)"),
    "p.parquet": (b"PAR1 broken", r"p\.parquet: broken parquet file"),
    # What a download or a copy leaves that was cut short at once.
    "g0.jsonl.gz": (b"", r"g0\.jsonl\.gz: broken gzip file \(it is empty\)"),
    "z0.jsonl.zst": (b"", r"z0\.jsonl\.zst: broken zstd file \(it is empty\)"),
    "p0.parquet": (b"", r"p0\.parquet: broken parquet file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_read_are_named_with_their_path(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        texts("files", tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/")


def test_a_parquet_file_damaged_in_a_page_is_named(tmp_path):
    table = pyarrow.table({"text": [f"{number} text" * 20 for number in range(5000)]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", compression="zstd")
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[100:5000] = bytes(4900)
    (tmp_path / "x.parquet").write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"x\.parquet: (broken parquet file|cannot be read)"):
        texts("files", tmp_path)


def test_zstd_windows_beyond_the_librarys_default_are_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(json_lines()) + compressor.flush()
    (tmp_path / "x.jsonl.zst").write_bytes(data)
    assert texts("files", tmp_path) == TEXTS


def test_a_zstd_file_damaged_in_the_middle_is_named(tmp_path):
    lines = json_lines([str(number) * 50 for number in range(5000)])
    data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "x.jsonl.zst").write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"x\.jsonl\.zst(:\d+)?: (broken|not)"):
        texts("files", tmp_path)


def test_parquet_without_the_column_names_the_ones_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no column 'text'; its columns are body"):
        texts("files", tmp_path)
    assert texts("files", tmp_path, Reading("body")) == ["x"]
