"""Tokenizers by their names on the Hub: one download, a pinned commit, the run's own copy."""

import shutil

import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.hub_tokenizers import hub_files, is_hub_name, pin
from cat_lm.data.tokenizers import build_tokenizer, spec_sha256
from tests.conftest import generated_text
from tests.data_prep.helpers import json_lines, made, manifest_of
from tests.data_prep.hub_server import COMMIT, NAME, serving

LATER = "fedcba9876543210fedcba9876543210fedcba98"
PINNED = f"{NAME}@{COMMIT}"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A folder with a sentencepiece model, and in `fast/` the same as transformers has it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer("train:sentencepiece:300", folder / "fast", lambda: generated_text(50))
    shutil.move(folder / "fast" / "sentencepiece.model", folder / "tokenizer.model")
    return folder


@pytest.fixture
def server(tmp_path, monkeypatch, local):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    files = {path.name: path.read_bytes() for path in (local / "fast").iterdir()}
    with serving({**files, "model.safetensors": b"weights"}, monkeypatch) as server:
        yield server


def downloads(server):
    return {path: n for path, n in server.asked.items() if "/resolve/" in path}


@pytest.mark.parametrize("kind", ["transformers", "sentencepiece"])
def test_name_on_the_hub_gives_what_its_files_give(tmp_path, server, prepare, local, kind):
    path = local / "fast"
    if kind == "sentencepiece":
        path = local / "tokenizer.model"
        server.files = {path.name: path.read_bytes()}
    text = tmp_path / "text.jsonl"
    text.write_bytes(json_lines(generated_text(60)))
    flags = ("--source", "files", "--path", text, "--workers", 1, "--tokenizer")
    expected = prepare(tmp_path / "expected", *flags, path)
    out = prepare(tmp_path / "out", *flags, NAME)
    found, wanted = manifest_of(out), manifest_of(expected)
    assert found["fingerprint"] == wanted["fingerprint"]
    assert found["tokenizer"] == {**wanted["tokenizer"], "spec": PINNED}
    assert found["arguments"]["tokenizer"] == PINNED
    assert found["arguments"]["tokenizer_sha256"] == spec_sha256(PINNED)
    assert not any("safetensors" in path for path in server.asked)

    before, files = downloads(server), made(out)
    server.commit = LATER  # Of the branch, with files that the server does not give.
    prepare(out, *flags, NAME)
    assert downloads(server) == before and made(out) == files


def test_pin_keeps_an_earlier_commit_unless_another_is_asked_for(server):
    assert pin(NAME) == pin(f"{NAME}@v1") == PINNED
    server.commit = LATER
    assert pin(NAME) == pin(f"{NAME}@main", [PINNED]) == f"{NAME}@{LATER}"
    assert pin(NAME, ["bytes", "owner/names@v", PINNED]) == PINNED
    asked = server.asked.total()
    assert pin(PINNED) == PINNED and pin("bytes") == "bytes"
    assert server.asked.total() == asked


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("owner/absent", "--tokenizer owner/absent: no such file or folder here, and the Hub does"),
        (f"{NAME}@v7", f"--tokenizer {NAME}@v7: no such file or folder here"),
        (NAME, f"--tokenizer {PINNED}: has neither tokenizer.json nor tokenizer.model on the Hub"),
    ],
)
def test_unusable_name_is_one_line(server, spec, words):
    server.files = {"config.json": b"{}"}
    with pytest.raises(UserError) as error:
        hub_files(pin(spec))
    assert str(error.value).startswith(words) and "\n" not in str(error.value)


def test_gated_tokenizer_names_its_page(server):
    server.trouble["tokenizer.json"] = [(403, {"X-Error-Code": "GatedRepo"})] * 9
    with pytest.raises(UserError, match=f"gated on the Hub: ask for access at {server.url}/{NAME}"):
        hub_files(PINNED)


def test_names_on_the_hub_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/here").mkdir(parents=True)
    hub = ("EleutherAI/gpt-neox-20b", "mistralai/Mistral-7B-v0.1@main", "owner/away")
    paths = ("owner/here", "./owner", "/a/b", "a/b/c", "mistral/tokenizer.model", "a/x.json", "x")
    assert [is_hub_name(spec) for spec in (*hub, *paths)] == [True] * len(hub) + [False] * len(
        paths
    )
