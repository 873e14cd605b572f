"""What the length sweep refuses, and lengths that do not fit into memory."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from cat_lm.core import host
from cat_lm.core.errors import UserError
from cat_lm.pretrained.loading import load_model
from cat_lm.pretrained.memory import forward_bytes, free_bytes
from eval.length_sweep import perplexity
from eval.length_sweep.sweep import sweep
from tests.eval.length_sweep.calls import TEXT, command

PER_DOCUMENT = ("--documents", "per-document")
ROTARY = ("--temperature-scope", "rotary")
BYTES = len(TEXT.encode())
# Models and --lengths, further options, and the decisive words. Names stand for folders; without
# --data the text is --text.
BAD = [
    (("cat", BYTES + 1), (), f"it has {BYTES} tokens"),
    (("cat", 64), ("--max-tokens", 60), "--max-tokens 60: must be at least 64"),
    (("cat", 8), ("--skip-tokens", 9), "--skip-tokens 9: only with --data"),
    (("cat", 8), ("--split", "test"), "--split test: only with --data"),
    (("cat", 8), ("--data", "corpus", "--skip-tokens", -1), "'-1' must be from 1"),
    (("cat", 8), ("--data", "corpus", "--skip-tokens", 10**9), "tokens; skip fewer"),
    (("cat", 8), ("--data", "corpus", "--document-separator", "x"), "only with --text"),
    (("cat", 900), PER_DOCUMENT, f"the longest has {BYTES}"),
    (("cat", 64), ("--methods", "ntk"), "known: none, pi,"),
    (("cat", "nope", 64), ("--methods", "none,yarn"), "model nope: it has none, temperature;"),
    (("nope", 64), ("--methods", "temperature", *ROTARY), "nothing is rotated"),
    (("cat", 64), ("--factor", "nan"), "--factor: 'nan' must be from 1 to 4,096"),
    (("cat", 64), ("--factor", "2"), "--factor 2: does nothing with"),
    (("cat", 64), ROTARY, "--temperature-scope rotary: does nothing with --methods none"),
    (("cat", 64), (*ROTARY, "--methods", "none, pi"), "--methods none,pi;"),
    (("cat", "64,"), (), "--lengths: '' must be a whole number"),
    (("cat", 64), ("--stride", 65), "largest of --lengths is 64"),
    (("cat", 64), ("--batch-tokens", 0), "--batch-tokens: '0' must"),
    (("cat", 64), ("--text", ""), "--text: '' is no path"),
    (("cat", 8), ("--text", "no.txt"), "no.txt: no such file or folder"),
    (("cat", 64), ("--out", "/proc/x"), "/proc may not be written"),
    (("cat", 64), ("--out", 300 * "x"), "File name too long"),
    (("cat", 8), ("--device", "cuda:77"), "--device cuda:77"),
    (("cat", "nope", "cat", 64), (), "cat: given twice"),
    (("cat", 64), ("--min-document-tokens", 9), "only with --documents per-document"),
    (("cat", 64), (*PER_DOCUMENT, "--max-document-tokens", 63), "63: must be at least 64"),
    (("cat", 64), ("--document-separator", "("), "--document-separator '(': no regular"),
    (("cat", 8), ("--data", "empty"), "no manifest.json"),
    (("empty", 8), (), "not a model folder"),
    (("bare", 8), (), "has config.json but no weights"),
    (("no_tokenizer", 8), (), "no tokenizer.json"),
    (("damaged", 8), (), "damaged/export.json: "),
    (("partial", 64), (), "missing keys gpt_neox.final_layer_norm.weight"),
]


@pytest.fixture(scope="module")
def folders(models, tiny_corpus, tmp_path_factory) -> dict:
    """Whole and damaged folders by name."""
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("folders")
    (root / "empty").mkdir()
    (root / "bare").mkdir()
    shutil.copy(models["cat"] / "config.json", root / "bare")
    for path in shutil.copytree(models["cat"], root / "no_tokenizer").glob("tokenizer*"):
        path.unlink()
    (shutil.copytree(models["cat"], root / "damaged") / "export.json").write_text('{"step": 1')
    partial = shutil.copytree(models["cat"], root / "partial")
    weights = load_file(partial / "model.safetensors")
    del weights["gpt_neox.final_layer_norm.weight"]
    save_file(weights, partial / "model.safetensors", {"format": "pt"})
    (partial / "export.json").unlink()
    return {path.name: path for path in root.iterdir()} | models | {"corpus": tiny_corpus}


@pytest.mark.parametrize(("given", "options", "message"), BAD)
def test_bad_input_is_one_line(
    folders, text, tmp_path, monkeypatch, capsys, given, options, message
):
    *names, lengths = given
    source = () if "--data" in options or "--text" in options else ("--text", text)
    out = () if "--out" in options else ("--out", tmp_path / "out")
    arguments = (*(folders[name] for name in names), "--lengths", lengths, *source, *out)
    options = [folders.get(option, option) for option in options]
    monkeypatch.chdir(tmp_path)
    code, out, err = command(monkeypatch, capsys, *arguments, *options)
    assert (code, out) == (2, "") and message in err
    # Models and texts may be described before a weight is found to be missing.
    assert err.count("\n") == (2 if names == ["partial"] else 1), err
    assert not list((tmp_path / "out").glob("*.json"))


def test_length_that_does_not_fit_is_named_and_the_others_kept(
    models, text, tmp_path, monkeypatch, capsys
):
    estimate = forward_bytes(load_model(models["cat"]), 8, 64)
    monkeypatch.setattr(perplexity, "free_bytes", lambda device: estimate)
    monkeypatch.setattr(perplexity, "forward_bytes", lambda _, rows, n: estimate + (n > 64))
    arguments = (models["cat"], models["pythia"], "--text", text, "--out", tmp_path / "out")
    options = ("--lengths", "32,64,128", "--batch-tokens", 512)
    code, out, err = command(monkeypatch, capsys, *arguments, *options)
    assert (code, out) == (2, "")
    assert "cat, none: length 128: a batch of 4 does not fit into memory (about" in err
    last = err.splitlines()[-1]
    assert last.startswith("error: did not fit into memory: cat none 128, pythia none 128 ")
    rows = json.loads((tmp_path / "out/length_sweep.json").read_text())["rows"]
    assert [row["length"] for row in rows] == [32, 64] * 2


def test_allocation_that_fails_is_the_same_line(models, text, tmp_path, monkeypatch):
    from cat_lm.model.hf.modeling import CatModel

    forward = CatModel.forward

    def fails_when_long(self, input_ids, **options):
        if input_ids.shape[1] > 64:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
        return forward(self, input_ids, **options)

    monkeypatch.setattr(CatModel, "forward", fails_when_long)
    with pytest.raises(UserError, match=r"cat none 128 \(label.*; the 1 others are in"):
        sweep([models["cat"]], [64, 128], tmp_path / "out", text=text)


def test_estimate_grows_linearly_but_for_eager_attention(models):
    model = load_model(models["cat"])
    fixed = forward_bytes(model, 1, 0)
    sizes = [forward_bytes(model, 1, length) - fixed for length in (1000, 2000)]
    assert sizes[1] == 2 * sizes[0]
    model.set_attn_implementation("eager")
    assert forward_bytes(model, 1, 2000) - fixed > 3.5 * sizes[1]


def test_limit_of_a_container_counts(monkeypatch):
    monkeypatch.setattr(host, "group_memory", lambda: 450_000)
    assert free_bytes(torch.device("cpu")) == 450_000
    monkeypatch.setattr(host, "group_memory", lambda: None)
    assert free_bytes(torch.device("cpu")) > 450_000
