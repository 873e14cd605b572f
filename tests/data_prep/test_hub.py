"""The Hub as a source: a local server in its place answers the Hub's own client, well and badly."""

import hashlib
import io
import json
import random

import pytest
import zstandard

from cat_lm.core import errors
from cat_lm.core.errors import UserError
from data_prep.sources import remote, repository
from data_prep.sources.base import Part
from data_prep.sources.documents import Reading
from data_prep.sources.open import open_source
from tests.data_prep.hub_server import COMMIT, NAME, serving


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


def test_what_file_names_say_of_the_split():
    for name, split in (
        ("train/chunk1/example_holdout_0.jsonl.zst", "train"),
        ("validation/train-0.jsonl", "validation"),
        ("data/val-00000-of-00001.parquet", "validation"),
        ("en/TEST.jsonl", "test"),
        ("constrained/invalid/retest.jsonl", None),
    ):
        assert repository.split_of_name(name) == split
    parts = [Part(name, name, size=1) for name in ("a.jsonl", "b.jsonl", "dev.jsonl", "test.jsonl")]
    assert [(p.name, p.split) for p in repository.assign_splits(parts)] == [
        *(("a.jsonl", "train"), ("b.jsonl", "train"), ("dev.jsonl", "validation"))
    ]
    assert repository.assign_splits(parts[:2]) == parts[:2]  # whose split is left open


def test_files_of_unknown_kinds_and_copies_are_named(server):
    names = ("a.jsonl.zst", "b.jsonl.zst", "data.csv", ".x", "README.md")
    server.files.clear()
    server.files.update(dict.fromkeys(names, compressed(["x"])))
    source = open_hub()
    assert [part.name for part in source.parts] == ["a.jsonl.zst"]
    unread, copies = source.left_out
    assert (unread.names, copies.names) == (("data.csv",), ("b.jsonl.zst is a.jsonl.zst",))


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
