"""The Hub as a source: a local server in its place answers the Hub's own client, well and badly."""

import hashlib
import io
import json
import os
import random
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cat_lm.core import errors
from cat_lm.core.errors import UserError
from data_prep.sources import remote, slimpajama
from data_prep.sources import slimpajama as hub
from data_prep.sources.base import Part
from data_prep.sources.documents import Document, Malformed, Reading
from data_prep.sources.open import open_source
from tests.conftest import REPOSITORY
from tests.hub_server import COMMIT, NAME, serving


def lines(texts, name="RedPajamaC4"):
    records = ({"text": text, "meta": {"redpajama_set_name": name}} for text in texts)
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def compressed(texts):
    return zstandard.compress(lines(texts), 1)


TEXTS = [hashlib.sha512(str(number).encode()).hexdigest() for number in range(400)]
FILES = {
    "README.md": b"# not a document",
    ".gitattributes": b"",
    "train/chunk1/a_2.jsonl.zst": compressed(TEXTS[:100]),
    "train/chunk1/a_10.jsonl.zst": compressed(TEXTS[100:200]),
    "train/chunk10/a_0.jsonl.zst": compressed(TEXTS[300:400]),
    "train/chunk2/a_0.jsonl.zst": compressed(TEXTS[200:300]),
    "validation/chunk1/a_0.jsonl.zst": compressed(["held out"]),
    "test/chunk1/a_0.jsonl.zst": compressed(["tested"]),
}


@pytest.fixture
def slept(monkeypatch):
    """The waits that were asked for, in seconds; none of them happens."""
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr(errors.random, "uniform", lambda low, high: low)
    return waits


@pytest.fixture
def server(monkeypatch, slept):
    with serving(dict(FILES), monkeypatch) as server:
        yield server


def documents(source):
    return [item for part in source.parts for item in source.read(part)]


def open_hub(path=f"hub:{NAME}@v1", **reading):
    return open_source("slimpajama", path, Reading(**reading))


def test_the_hubs_files_are_the_parts_at_one_commit(server):
    source = open_hub()
    assert [part.name for part in source.parts] == [
        "train/chunk1/a_2.jsonl.zst",
        "train/chunk1/a_10.jsonl.zst",
        "train/chunk2/a_0.jsonl.zst",
        "train/chunk10/a_0.jsonl.zst",
        "validation/chunk1/a_0.jsonl.zst",
    ]
    assert all(part.size == len(FILES[part.name]) for part in source.parts)
    assert documents(source) == [
        *(Document(text, "RedPajamaC4", "train") for text in TEXTS),
        Document("held out", "RedPajamaC4", "validation"),
    ]
    description = source.describe()
    assert description["revision"] == COMMIT
    assert description["path"] == f"hub:{NAME}@v1"
    assert description["file_bytes"] == sum(part.size for part in source.parts)
    assert source.text_bytes() == sum(part.text_bytes for part in source.parts)
    of_files = [path for path in server.asked if "/tree/" in path or "/resolve/" in path]
    assert len(of_files) == 6
    assert all(COMMIT in path for path in of_files)


def test_the_command_prepares_from_the_hub_what_it_prepares_from_a_mirror(server, tmp_path):
    """Two workers, each reading files of its own, and a connection that breaks twice."""
    for name, data in FILES.items():
        (tmp_path / "mirror" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mirror" / name).write_bytes(data)
    server.trouble["train/chunk2/a_0.jsonl.zst"] = ["break", "break"]
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
    for path, out in ((f"hub:{NAME}@v1", "hub"), (tmp_path / "mirror", "local")):
        command = [
            sys.executable,
            "-m",
            "data_prep.prepare",
            "--source",
            "slimpajama",
            "--path",
            path,
        ]
        command += ["--tokenizer", "bytes", "--workers", "2", "--out", tmp_path / out]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert ("trying again in 1 s [1/8]" in done.stderr) == (out == "hub")
    names = ["train-00000.bin", "train-00000.idx", "validation-00000.bin", "validation-00000.idx"]
    for name in names:
        ours, mirrors = ((tmp_path / out / name).read_bytes() for out in ("hub", "local"))
        assert ours == mirrors
    manifest = json.loads((tmp_path / "hub" / "manifest.json").read_text())
    assert manifest["source"]["revision"] == COMMIT


def test_one_request_a_file_and_a_part_is_read_on_its_own(server):
    source = open_hub()
    assert len(list(source.read(source.parts[2]))) == 100
    resolved = [path for path in server.asked if "/resolve/" in path]
    assert resolved == [f"/datasets/{NAME}/resolve/{COMMIT}/train/chunk2/a_0.jsonl.zst"]
    assert server.asked[resolved[0]] == 1


@pytest.mark.parametrize("read_ahead", [1 << 24, 300])
def test_connections_that_break_in_the_middle_are_mended(server, slept, monkeypatch, read_ahead):
    monkeypatch.setattr(remote, "READ_AHEAD", read_ahead)
    monkeypatch.setattr("data_prep.sources.documents.PIECE", 128)
    source = open_hub()
    name = source.parts[0].name
    server.trouble[name] = ["break", "break", None, *["break"] * 8]
    found = list(source.read(source.parts[0]))
    assert [document.text for document in found] == TEXTS[:100]
    # A byte of progress begins the count anew; a file that came in one request asks no more.
    assert slept == ([1, 2] if read_ahead > 300 else [1, 2, 1, 2, 4, 8, 16, 32, 60, 60])


def test_a_connection_that_never_comes_back_is_one_error(server, slept):
    source = open_hub()
    server.trouble[source.parts[0].name] = ["break"] * 1000
    with pytest.raises(UserError) as error:
        list(source.read(source.parts[0]))
    message = str(error.value)
    assert message.startswith(f"hf://datasets/{NAME}@{COMMIT}/{source.parts[0].name}: cannot be")
    assert message.endswith(f"{remote.RETRIES + 1} times)")
    assert "\n" not in message
    assert slept == [1, 2, 4, 8, 16, 32, 60, 60]
    assert server.asked[f"/datasets/{NAME}/resolve/{COMMIT}/{source.parts[0].name}"] == 9


@pytest.mark.parametrize(
    ("headers", "least"),
    [
        ({"Retry-After": "77"}, 77),
        ({"RateLimit": '"resolvers";r=0;t=55'}, 55),
    ],
)
def test_a_rate_limit_waits_as_long_as_the_server_asks(server, slept, headers, least):
    source = open_hub()
    name = source.parts[0].name
    server.trouble[name] = [(429, headers)] * 7
    assert len(list(source.read(source.parts[0]))) == 100
    assert len(slept) == 7
    assert all(least <= wait <= 3600 for wait in slept)


def test_troubled_listings_are_retried_and_lasting_errors_are_not(server, slept):
    server.trouble["tree"] = [(503, {})] * 2 + ["break"]
    server.trouble["revision"] = [(429, {"Retry-After": "3"})]
    assert len(open_hub().parts) == 5
    for path, message in (
        (f"hub:{NAME}@v7", "v7"),
        ("hub:owner/absent", "absent"),
        (f"hub:{NAME}/nowhere@v1", "nowhere"),
        ("hub:owner", "give hub:OWNER/NAME"),
        ("hub:owner//x", "give hub:OWNER/NAME"),
        ("hub:ow ner/na!me", "cannot be read from the Hub"),
    ):
        slept.clear()
        with pytest.raises(UserError, match="--path hub:") as error:
            open_hub(path)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
        assert not slept


def test_files_that_differ_from_the_hubs_checksum_are_refused(server):
    source = open_hub()
    changed = bytearray(compressed(TEXTS[1:101]))
    part = source.parts[0]
    server.files[part.name] = bytes(changed)[: part.size].ljust(part.size, b"\0")
    with pytest.raises(
        UserError, match=r"a_2\.jsonl\.zst: (cannot be read .what came|broken zstd)"
    ):
        list(source.read(part))
    server.files[part.name] = b"\x28\xb5\x2f\xfd"  # ends before the size that was listed
    with pytest.raises(UserError, match=r"cannot be read"):
        list(source.read(part))


def test_parquet_and_bad_lines_on_the_hub(server, tmp_path):
    texts = pyarrow.array([b"one", b"\xff", b"three"], pyarrow.binary()).view(pyarrow.string())
    meta = ['{"redpajama_set_name": "RedPajamaBook"}'] * 3
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "meta": meta}), tmp_path / "x")
    server.files.clear()
    server.files["data/train-00000-of-00002.parquet"] = (tmp_path / "x").read_bytes()
    server.files["data/train-00001-of-00002.jsonl"] = lines(["ok"]) + b"{\n"
    server.files["data/dev.jsonl"] = lines(["held"])
    server.files["data/other.jsonl"] = lines(["neither"])
    found = documents(open_hub())
    assert [item for item in found if isinstance(item, Document)] == [
        Document("one", "RedPajamaBook", "train"),
        Document("three", "RedPajamaBook", "train"),
        Document("ok", "RedPajamaC4", "train"),
        Document("held", "RedPajamaC4", "validation"),
    ]
    assert [item.where for item in found if isinstance(item, Malformed)] == [
        "data/train-00000-of-00002.parquet: row 2",
        "data/train-00001-of-00002.jsonl:2",
    ]


def test_a_folder_of_a_repository(server):
    source = open_hub(f"hub:{NAME}/train/chunk1@v1")
    assert [part.name for part in source.parts] == ["a_2.jsonl.zst", "a_10.jsonl.zst"]
    assert [d.text for d in documents(source)] == TEXTS[:200]
    assert not source.has_validation


def test_what_file_names_say_of_the_split():
    for name, split in (
        ("train/chunk1/example_holdout_0.jsonl.zst", "train"),
        ("validation/train-0.jsonl", "validation"),
        ("data/val-00000-of-00001.parquet", "validation"),
        ("en/TEST.jsonl", "test"),
        ("constrained/invalid/retest.jsonl", None),
    ):
        assert slimpajama.split_of_name(name) == split
    parts = [Part(name, name, size=1) for name in ("a.jsonl", "b.jsonl", "dev.jsonl", "test.jsonl")]
    assert [(p.name, p.split) for p in slimpajama.with_splits(parts)] == [
        *(("a.jsonl", "train"), ("b.jsonl", "train"), ("dev.jsonl", "validation"))
    ]
    assert slimpajama.with_splits(parts[:2]) == parts[:2]  # whose split is left open


def test_what_a_repository_says_of_itself_is_no_document(server):
    server.files.clear()
    server.files.update({"README.md": b"no", "docs/x.md": b"no", ".x.jsonl": b"", "a.txt": b"yes"})
    assert [document.text for document in documents(open_hub())] == ["yes"]


def test_files_of_unknown_kinds_and_copies_are_named(server):
    names = ("a.jsonl.zst", "b.jsonl.zst", "data.csv", ".x", "README.md")
    server.files.clear()
    server.files.update(dict.fromkeys(names, compressed(["x"])))
    source = open_hub()
    assert [part.name for part in source.parts] == ["a.jsonl.zst"]
    unread, copies = source.left_out
    assert (unread.names, copies.names) == (("data.csv",), ("b.jsonl.zst is a.jsonl.zst",))


def test_held_out_files_alone_are_refused(server):
    server.files.clear()
    server.files["test/a.jsonl"] = lines(["x"])
    with pytest.raises(UserError, match="all held out, none is for training"):
        open_hub()


def test_a_repository_without_such_files_is_refused(server):
    server.files.clear()
    server.files["data.csv"] = b"x"
    with pytest.raises(UserError, match=r"no file of a known kind in it \(\.txt, "):
        open_hub()


def test_a_hub_that_cannot_be_reached_is_one_error(monkeypatch, slept):
    def unreachable(name, revision):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(hub, "resolve_revision", unreachable)
    message = r"cannot be read from the Hub \(no route to host, 4 times\)"
    with pytest.raises(UserError, match=message):
        open_hub()
    assert slept == [1, 2, 4]


def test_other_errors_are_not_taken_for_the_networks(slept):
    def broken():
        raise TypeError("ours")

    with pytest.raises(TypeError):
        remote.read_patiently(broken, "x")
    with pytest.raises(UserError, match=r"x \(no\)"):
        remote.read_patiently(lambda: (_ for _ in ()).throw(PermissionError("no")), "x")
    assert not slept


@pytest.mark.parametrize("read_ahead", [1, 7, 1000])
def test_any_bytes_of_a_remote_file_can_be_read(monkeypatch, read_ahead):
    monkeypatch.setattr(remote, "READ_AHEAD", read_ahead)
    data = bytes(range(256))
    digest = hashlib.sha256(data).hexdigest()
    file = remote.RemoteFile(lambda start, stop: data[start:stop], "x", len(data), digest)
    plain = io.BytesIO(data)
    rng = random.Random(0)
    for _ in range(500):
        if rng.random() < 0.2 or plain.tell() >= 256:
            offset, whence = rng.choice([(rng.randrange(300), 0), (-rng.randrange(99), 2), (0, 0)])
            assert file.seek(offset, whence) == plain.seek(offset, whence)
        size = rng.choice([0, 1, 2, 3, 5, 9, 13, 40, 300, -1, None])
        assert file.read(size) == plain.read(size)
        assert file.tell() == plain.tell()
    file.seek(3)
    assert file.readinto(bytearray(9)) == 9
    assert remote.RemoteFile(lambda start, stop: b"", "x", 0).read() == b""


def test_short_answers_are_asked_for_again_and_wrong_ones_are_refused(slept):
    data = bytes(range(200))
    answers = [data[:50], data[:150], data]
    file = remote.RemoteFile(lambda start, stop: answers.pop(0), "x", 200)
    assert file.read() == data
    assert slept == [1, 2]
    wrong = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(UserError, match=r"x \(what came has the SHA-256"):
        remote.RemoteFile(lambda start, stop: data[start:stop], "x", 200, wrong).read()
