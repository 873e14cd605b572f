"""The texts that are prepared and scored."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess

from cat_lm.data.manifest import fingerprint, listed_shards
from cat_lm.data.opening import open_verified
from cat_lm.pretrained.loading import load_tokenizer
from eval.length_sweep.token_stream import Documents, split_stream
from eval.small_study.plan import SIZES, Study
from eval.small_study.run import prepared
from tests.unit.imitated_study import Imitation
from tests.unit.small_study.calls import run_study


def test_texts_beside_each_other(
    arguments, long_corpus, tmp_path, monkeypatch, capsys, tiny_corpus
):
    other = tmp_path / "books"
    shutil.copytree(long_corpus, other)
    seeds = ("--seeds", "0,1", "--held-out", other)
    code, _, err = run_study(monkeypatch, capsys, both := Imitation(), *arguments, *seeds)
    assert code == 0, err
    sweeps = [call for call in both.calls if "length_sweep" in call]
    assert len(sweeps) == 12 and sum(f"--data {other} " in call for call in sweeps) == 6
    for call in sweeps:
        assert "--max-document-tokens 1024 --max-tokens 4096 " in call
        assert ("--skip-tokens 32768 " in call) == (f"--data {other} " not in call)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert list(summary["held_out"]) == ["books"]
    assert len(summary["held_out"]["books"]["rows"]) == len(summary["rows"]) == 60
    assert {pair["comparisons"] for pair in summary["comparisons"]} == {12}
    table = (tmp_path / "out/small_study.md").read_text(encoding="utf-8")
    assert f"Text of {other} (4,096 tokens of 9 documents" in table
    few = ("--held-out", tiny_corpus)
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, *few)
    assert code == 2 and "holds out 0 documents of 1024 tokens or more, 4 are scored" in err


def test_too_few_held_out_documents(arguments, monkeypatch, capsys):
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--documents", 99)
    assert code == 2 and err.count("\n") == 1
    assert "documents of 1024 tokens or more behind the first 32,768 tokens, which" in err
    assert "99 are scored" in err


def test_documents_are_counted_as_the_sweep_scores_them(
    arguments, long_corpus, tmp_path, monkeypatch, capsys
):
    tokenizer = load_tokenizer(long_corpus / "tokenizer")
    given = (long_corpus, tokenizer, None, Documents(1024, 1024))
    there = split_stream(*given, skip_tokens=32_768).num_documents
    assert 4 < there < split_stream(*given).num_documents - 20
    few = ("--documents", there + 1, "--estimate")
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, *few)
    assert code == 2 and f"holds out {there} documents of 1024 tokens or more" in err
    enough = ("--documents", there, "--estimate")
    assert run_study(monkeypatch, capsys, Imitation(), *arguments, *enough)[0] == 0


def test_attention_is_measured_behind_what_is_skipped(long_corpus, tmp_path, monkeypatch):
    import cat_lm.pretrained.loading
    from eval.small_study import attention

    found = []
    monkeypatch.setattr(cat_lm.pretrained.loading, "load_model", lambda folder: None)
    monkeypatch.setattr(
        attention, "attention_statistics", lambda model, rows: found.append(rows) or {}
    )
    study = Study(SIZES["cpu"], ("qk_l2",), (0,), tmp_path, long_corpus, question="qk_norm")
    attention._measured(study, study.jobs()[0])
    corpus = open_verified(long_corpus, "validation")
    assert found[0].shape == (64, 128)
    wanted = corpus.tokens(32_768, 32_768 + 64 * 128)
    assert found[0].flatten().tolist() == wanted.tolist()


def test_the_library_is_prepared_without_codec_tables(long_corpus, tmp_path, monkeypatch, capsys):
    called = []

    def imitated(call, **options):
        called.append(call)
        shutil.copytree(long_corpus, tmp_path / "library")
        return subprocess.CompletedProcess(call, 0)

    monkeypatch.setattr("eval.small_study.run.subprocess.run", imitated)
    study = Study(SIZES["cpu"], ("pythia",), (0,), tmp_path, tmp_path / "library", documents=4)
    prepared(study, own=False)
    (call,) = called
    assert call[call.index("--source") + 1] == "python-stdlib"
    assert call[call.index("--exclude") + 1] == "encodings/*"


def test_a_missing_folder_is_named_before_any_text_is_prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("eval.small_study.run.subprocess.run", None)
    for option in ("--held-out", "--data"):
        arguments = ["--out", tmp_path / "out", option, tmp_path / "nowhere"]
        code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments)
        assert code == 2 and err.count("\n") == 1 and "nowhere: no such folder" in err


def test_another_tokenizer_is_refused_before_training(
    arguments, long_corpus, tmp_path, monkeypatch, capsys
):
    other = tmp_path / "other"
    shutil.copytree(long_corpus, other)
    tokenizer = other / "tokenizer/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    manifest["fingerprint"] = fingerprint(listed_shards(manifest), digest)
    (other / "manifest.json").write_text(json.dumps(manifest))
    code, _, err = run_study(monkeypatch, capsys, Imitation(), *arguments, "--held-out", other)
    assert code == 2 and err.count("\n") == 1
    assert f"--held-out {other}: was prepared with another tokenizer" in err
