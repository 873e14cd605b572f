"""Any data set of the Hub as a source: layouts, pinned commits, checksums, shares of the files."""

import dataclasses
import gzip
import io
import json
import os
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from cat_lm.core.errors import UserError
from data_prep.sources import remote
from data_prep.sources.presets import PRESETS
from tests.conftest import REPOSITORY, generated_text
from tests.data_prep.helpers import command, json_lines, made, manifest_of, opened
from tests.data_prep.hub_server import COMMIT, NAME, serving
from tests.data_prep.test_kills import die_at

GOLDEN = Path(__file__).with_name("hub_manifests.json")
TEXTS = generated_text(240, seed=3)
LATER = "fedcba9876543210fedcba9876543210fedcba98"


def parquet(texts, **columns):
    stream = io.BytesIO()
    table = pyarrow.table({**columns, "text": texts})
    pyarrow.parquet.write_table(table, stream, row_group_size=50, compression="NONE")
    return stream.getvalue()


def fineweb(texts, dump):
    more = {"id": [f"<{n}>" for n in range(len(texts))], "score": [3.5] * len(texts)}
    return parquet(texts, **more, dump=[dump] * len(texts))


FINEWEB = {
    "README.md": b"# card",
    "sample/10BT/000_00000.parquet": fineweb(TEXTS[:120], "CC-MAIN-2013-20"),
    "sample/10BT/001_00000.parquet": fineweb(TEXTS[120:], "CC-MAIN-2024-10"),
    "sample/100BT/000_00000.parquet": fineweb(["of another folder"], "CC-MAIN-2024-10"),
}
DCLM = {
    f"global-shard_0{n}_of_10/local-shard_1_of_10/shard_0000000{n}_processed.jsonl.zstd": (
        zstandard.compress(json_lines(texts, url="u", metadata={"WARC-Type": "response"}))
    )
    for n, texts in ((1, TEXTS[:120]), (2, TEXTS[120:]))
}
COMMON_PILE = {
    f"{name}/00000_{name}.jsonl.gz": gzip.compress(json_lines(texts, source=name), mtime=0)
    for name, texts in (("arxiv_papers", TEXTS[:120]), ("uk_hansard", TEXTS[120:]))
}
SLIMPAJAMA = {
    f"data/{split}-00000-of-00001.parquet": parquet(
        texts, meta=[{"redpajama_set_name": "RedPajamaC4"}] * len(texts)
    )
    for split, texts in (("train", TEXTS[:200]), ("validation", TEXTS[200:]))
}
LAYOUTS = {
    "fineweb-edu-10bt": (FINEWEB, "/sample/10BT"),
    "dclm": (DCLM, ""),
    "common-pile": (COMMON_PILE, ""),
    "slimpajama-6b": (SLIMPAJAMA, ""),
}


def flags(*more, source=f"hub:{NAME}", workers=1):
    return ("--source", source, "--tokenizer", "bytes", "--workers", workers, *more)


@pytest.fixture
def server(monkeypatch):
    with serving(dict(FINEWEB), monkeypatch) as server:
        yield server


@pytest.mark.parametrize("preset", LAYOUTS)
def test_preset_prepares_its_layout_as_golden_manifest_says(tmp_path, monkeypatch, prepare, preset):
    files, folder = LAYOUTS[preset]
    here = dataclasses.replace(PRESETS[preset], path=f"hub:{NAME}{folder}")
    monkeypatch.setitem(PRESETS, preset, here)
    with serving(dict(files), monkeypatch):
        manifest = manifest_of(prepare(tmp_path / "out", *flags(source=preset)))
    found = {key: manifest[key] for key in ("fingerprint", "sources", "source")}
    # Of packed files, whose bytes other versions of the libraries write otherwise.
    for key in ("file_bytes", "listing_sha256"):
        del found["source"][key]
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("RENEW_GOLDEN"):
        GOLDEN.write_text(json.dumps({**golden, preset: found}, indent=1) + "\n")
    assert found == golden[preset]


def test_killed_preparation_goes_on_at_the_commit_of_its_first_listing(tmp_path, server, prepare):
    expected = made(prepare(tmp_path / "whole", *flags("--text-column", "text")))
    out, renames = tmp_path / "out", 3
    while not die_at(out, flags("--text-key", "text"), renames):
        if (out / "unfinished" / "preparation.json").exists():
            server.commit = LATER  # The server refuses files of any commit but the first.
        renames += 6
    assert server.commit == LATER and made(out) == expected
    source = manifest_of(out)["source"]
    assert source["revision"] == COMMIT and source["path"] == f"hub:{NAME}"
    prepare(out, *flags())  # Complete data stay what they are.
    assert made(out) == expected
    with pytest.raises(UserError, match=f"was .*{COMMIT}.*, now .*{LATER}"):
        prepare(out, *flags(source=f"hub:{NAME}@{LATER}"))


def test_environment_names_endpoint_and_token(tmp_path, server, prepare):
    expected = made(prepare(tmp_path / "whole", *flags()))
    environment = {**os.environ, "HF_TOKEN": "hf_" + "x" * 30}  # HF_ENDPOINT is set
    line = command(*flags(workers=2), "--out", tmp_path / "out")
    done = subprocess.run(line, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert made(tmp_path / "out") == expected
    assert "Bearer hf_" + "x" * 30 in server.tokens


@pytest.mark.parametrize("where", ["revision", "tree", "sample/10BT/000_00000.parquet"])
def test_gated_repository_is_one_line_with_the_page(tmp_path, server, prepare, where):
    server.trouble[where] = [(403, {"X-Error-Code": "GatedRepo"})] * 9
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "out", *flags())
    page = f"ask for access at {server.url}/datasets/{NAME}, and log in by `hf auth login`"
    assert str(error.value).startswith(f"{NAME} is gated on the Hub: {page}")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_missing_column_names_the_columns_there_are(tmp_path, server, prepare):
    with pytest.raises(UserError, match=r"no column 'body'; its columns are id, score, dump, text"):
        prepare(tmp_path / "out", *flags("--text-column", "body"))
    server.files = dict(DCLM)
    with pytest.raises(UserError, match=r"no text under the key 'body'; its keys are text, url"):
        prepare(tmp_path / "out", *flags("--text-column", "body"))


def test_parquet_of_other_bytes_is_refused_by_its_checksum(tmp_path, server, monkeypatch, prepare):
    """Its rows can be read: only the unused column is another."""
    monkeypatch.setattr(remote, "READ_AHEAD", 500)
    name = "sample/10BT/001_00000.parquet"
    server.listed[name] = fineweb(TEXTS * 5, "CC-MAIN-2024-10")  # of which not all is the footer
    data = bytearray(server.listed[name])
    data[data.index(b"<7>") + 1] = ord("8")
    server.files[name] = bytes(data)
    source = opened("hub", f"hub:{NAME}/sample/10BT")
    assert len(list(source.read(source.parts[1]))) == 1200  # as a sample reads it
    with pytest.raises(
        UserError, match=r"001_00000\.parquet: cannot be read \(what came has the SHA"
    ):
        prepare(tmp_path / "out", *flags(source=f"hub:{NAME}/sample/10BT"))
    assert not any(path.suffix == ".parquet" for path in tmp_path.rglob("*"))


def test_share_of_the_files_follows_from_their_names(tmp_path, server, prepare):
    server.files = {
        f"{n}.jsonl.zst": zstandard.compress(json_lines([t])) for n, t in enumerate(TEXTS)
    }
    server.files |= {"validation.jsonl": json_lines(["held out"])}
    out = prepare(tmp_path / "out", *flags("--files-share", "0.05"))
    manifest = manifest_of(out)
    assert manifest["source"]["files_share"] == {"share": 0.05, "files": 12, "of": 240}
    assert [manifest["splits"][s]["documents"] for s in ("train", "validation")] == [12, 1]

    def chosen(share, seed=0):
        source = opened("hub", f"hub:{NAME}")
        source.keep_share(share, seed)
        return {part.name for part in source.parts}

    assert len(chosen(1e-9)) == 2 and len(chosen(1.0)) == 241
    assert chosen(0.02) < chosen(0.05) < chosen(0.5)
    assert chosen(0.05) != chosen(0.05, seed=1)
