"""What the length sweep refuses, and lengths that do not fit into memory."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from cat_lm.core import host
from cat_lm.core.errors import UserError
from cat_lm.pretrained.loading import load_model
from eval.length_sweep import memory
from eval.length_sweep.sweep import sweep
from tests.unit.length_sweep.sweeps import TEXT, command


class TestBadInput:
    def test_bad_input_is_one_line(
        self, models, text, documents, tiny_corpus, tmp_path, monkeypatch, capsys
    ):
        cat, nope = models["cat"], models["nope"]
        base = ("--out", tmp_path / "out", "--lengths")
        bytes_ = len(TEXT.encode())
        per_document = ("--documents", "per-document")
        rotary = ("--temperature-scope", "rotary")
        broken = ('{"step": 1', "[]", '{"program": "cat_lm.export"}')
        damaged = [shutil.copytree(cat, tmp_path / f"damaged{number}") for number in range(3)]
        for folder, content in zip(damaged, broken, strict=True):
            (folder / "export.json").write_text(content)
        (tmp_path / "bare").mkdir()
        shutil.copy(cat / "config.json", tmp_path / "bare")
        no_tokenizer = shutil.copytree(cat, tmp_path / "no_tokenizer")
        for path in no_tokenizer.glob("tokenizer*"):
            path.unlink()
        for arguments, message in (
            ((cat, "--text", text, *base, bytes_ + 1), f"it has {bytes_} tokens"),
            (
                (cat, "--text", text, *base, "64", "--max-tokens", "60"),
                "--max-tokens 60: must be at",
            ),
            ((cat, "--text", text, *base, "8", "--skip-tokens", 9), "-tokens 9: only with --data"),
            ((cat, "--data", tiny_corpus, *base, "8", "--skip-tokens", -1), "'-1' must be from 1"),
            (
                (cat, "--data", tiny_corpus, *base, "8", "--skip-tokens", 10**9),
                "tokens; skip fewer",
            ),
            (
                (cat, "--data", tiny_corpus, *base, "8", "--skip-tokens", 10**9, *per_document),
                "tokens; skip fewer",
            ),
            ((cat, "--text", text, *base, "900", *per_document), f"the longest has {bytes_}"),
            ((cat, "--text", text, *base, "64", "--methods", "ntk"), "known: none, pi,"),
            (
                (cat, nope, "--text", text, *base, "64", "--methods", "none,yarn"),
                "model nope: it has none, temperature;",
            ),
            (
                (cat, "--text", text, *base, "64", "--methods", "temperature"),
                "it has none, pi, pi+temperature, yarn;",
            ),
            (
                (nope, "--text", text, *base, "64", "--methods", "temperature", *rotary),
                "nothing is rotated",
            ),
            ((cat, "--text", text, *base, "64", "--factor", "0.5"), "--factor: '0.5' must be from"),
            ((cat, "--text", text, *base, "64", "--factor", "1e300"), "must be from 1 to 4,096"),
            ((cat, "--text", text, *base, "64", "--factor", "nan"), "--factor: 'nan' must be from"),
            ((cat, "--text", text, *base, "64,"), "--lengths: '' must be a whole number"),
            ((cat, "--text", text, *base, "64,99999999999"), "'99999999999' must be from 1 to"),
            ((cat, "--text", text, *base, "64", "--stride", "65"), "largest of --lengths is 64"),
            ((cat, "--text", text, *base, "64", "--batch-tokens", "0"), "--batch-tokens: '0' must"),
            ((cat, "--text", "", *base, "64"), "--text: '' is no path"),
            ((cat, "--text", tmp_path, *base, "64"), f"--text {tmp_path}: is a folder, not a"),
            ((cat, "--text", text, *base, "64", "--device", "meta"), "--device meta: cannot be"),
            ((cat, "--text", text, *base, "64", "--out", "/proc/x"), "/proc may not be written"),
            ((cat, "--text", text, *base, "64", "--out", 300 * "x"), "File name too long"),
            ((cat, "--text", text, *base, "64", "--factor", "2"), "--factor 2: does nothing with"),
            ((cat, "--text", text, *base, "64", *rotary), "--temperature-scope rotary: does noth"),
            (
                (cat, "--text", text, *base, "64", *rotary, "--methods", "none, pi"),
                "--temperature-scope rotary: does nothing with --methods none,pi;",
            ),
            ((cat, nope, cat, "--text", text, *base, "64"), f"model {cat}: given twice"),
            *(
                ((folder, "--text", text, *base, "64"), f"{folder / 'export.json'}: ")
                for folder in damaged
            ),
            ((cat, "--text", text, *base, "64", "--stride", "0"), "--stride: '0' must be from 1"),
            ((cat, "--text", text, *base, "64", "--min-document-tokens", "9"), "only with --doc"),
            ((cat, "--text", text, *base, "64", "--max-document-tokens", "9"), "only with --doc"),
            (
                (cat, "--text", text, *base, "64", *per_document, "--max-document-tokens", "63"),
                "--max-document-tokens 63: must be at least 64",
            ),
            (
                (cat, "--text", documents, *base, "64", "--document-separator", "("),
                "--document-separator '(': no regular",
            ),
            ((cat, "--text", tmp_path / "no.txt", *base, "8"), "no.txt: no such file or folder"),
            ((cat, "--data", tmp_path, *base, "8"), "no manifest.json"),
            ((tmp_path, "--text", text, *base, "8"), "not a model folder"),
            ((tmp_path / "bare", "--text", text, *base, "8"), "has config.json but no weights"),
            ((no_tokenizer, "--text", text, *base, "8"), "no tokenizer.json"),
            ((cat, "--text", text, *base, "8", "--device", "cuda:77"), "--device cuda:77"),
        ):
            code, _, err = command(monkeypatch, capsys, *arguments)
            assert code == 2, arguments
            assert message in err
            assert err.count("\n") == 1, err
        assert not (tmp_path / "out").exists()

    def test_missing_weight_gives_no_number(self, models, text, tmp_path, monkeypatch, capsys):
        from safetensors.torch import load_file, save_file

        folder = shutil.copytree(models["cat"], tmp_path / "model")
        weights = load_file(folder / "model.safetensors")
        del weights["gpt_neox.final_layer_norm.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "export.json").unlink()
        arguments = ("--text", text, "--out", tmp_path / "out", "--lengths", 64)
        code, out, err = command(monkeypatch, capsys, folder, *arguments, "--methods", "none,yarn")
        assert (code, out) == (2, "")
        assert "missing keys gpt_neox.final_layer_norm.weight" in err

    def test_length_that_does_not_fit_is_named_and_the_others_kept(
        self, models, text, tmp_path, monkeypatch, capsys
    ):
        estimate = memory.forward_bytes(load_model(models["cat"]), 8, 64)
        monkeypatch.setattr(memory, "free_bytes", lambda device: estimate)
        arguments = (models["cat"], models["pythia"], "--text", text, "--out", tmp_path / "out")
        options = ("--lengths", "32,64,128", "--batch-tokens", 512)
        monkeypatch.setattr(
            memory,
            "forward_bytes",
            lambda model, rows, length: estimate + (length > 64),
        )
        code, out, err = command(monkeypatch, capsys, *arguments, *options)
        assert code == 2
        assert out == ""
        assert "cat, none: length 128: a batch of 4 does not fit into memory (about" in err
        last = err.splitlines()[-1]
        assert last.startswith("error: did not fit into memory: cat none 128, pythia none 128 ")
        rows = json.loads((tmp_path / "out/length_sweep.json").read_text())["rows"]
        assert [row["length"] for row in rows] == [32, 64] * 2

    def test_allocation_that_fails_is_the_same_line(self, models, text, tmp_path, monkeypatch):
        from cat_lm.model.hf.modeling import CatModel

        forward = CatModel.forward

        def fails_when_long(self, input_ids, **options):
            if input_ids.shape[1] > 64:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
            return forward(self, input_ids, **options)

        monkeypatch.setattr(CatModel, "forward", fails_when_long)
        with pytest.raises(UserError, match=r"cat none 128 \(label.*; the 1 others are in"):
            sweep([models["cat"]], [64, 128], tmp_path / "out", text=text)


class TestMemory:
    def test_estimate_grows_linearly_but_for_eager_attention(self, models):
        model = load_model(models["cat"])
        fixed = memory.forward_bytes(model, 1, 0)
        sizes = [memory.forward_bytes(model, 1, length) - fixed for length in (1000, 2000)]
        assert sizes[1] == 2 * sizes[0]
        model.set_attn_implementation("eager")
        assert memory.forward_bytes(model, 1, 2000) - fixed > 3.5 * sizes[1]

    def test_a_step_s_own_limit_counts(self, monkeypatch):
        monkeypatch.setattr(host, "group_memory", lambda: 450_000)
        assert memory.free_bytes(torch.device("cpu")) == 450_000
        monkeypatch.setattr(host, "group_memory", lambda: None)
        assert memory.free_bytes(torch.device("cpu")) > 450_000
