"""What evaluations compute in: fp32 on a CPU; on a GPU what an export says it was trained in."""

from __future__ import annotations

import json

import pytest
import torch

from cat_lm.export import export_model
from cat_lm.pretrained import loading
from cat_lm.pretrained.loading import load_tokenizer
from cat_lm.pretrained.record import read_record
from eval.common import precision
from eval.common.provenance import provenance
from eval.length_sweep import perplexity
from eval.length_sweep import sweep as length_sweep
from tests.finished_runs import tiny_model


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU multiplies bf16, as far as the choice of a dtype looks."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(
        loading, "choose_device", lambda name: device if name == "auto" else torch.device(name)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_corpus):
    """Exports of a bf16 run, of an fp32 run, and of nobody knows which."""
    folder, tokenizer = tmp_path_factory.mktemp("m"), load_tokenizer(tiny_corpus / "tokenizer")
    facts = {"bf16": {"precision": "bf16"}, "fp32": {"precision": "fp32"}, "unknown": {}}
    return {
        name: export_model(tiny_model(257), tokenizer, folder / name, facts=known)
        for name, known in facts.items()
    }


def test_auto_on_a_cpu_is_fp32(models):
    assert precision.evaluation_dtype("auto", [models["bf16"]], "cpu") == "float32"
    assert precision.evaluation_dtype("bfloat16", [models["fp32"]], "cpu") == "bfloat16"


def test_auto_on_a_gpu_is_what_all_were_trained_in(models, gpu, monkeypatch):
    def chosen(*names: str, asked: str = "auto", device: str = "auto") -> str:
        return precision.evaluation_dtype(asked, [models[name] for name in names], device)

    assert chosen("bf16") == "bfloat16"
    assert chosen("fp32") == chosen("unknown") == "float32"
    # Models that are compared have one dtype.
    assert chosen("bf16", "fp32") == chosen("bf16", "unknown") == "float32"
    assert chosen("bf16", asked="float32") == chosen("bf16", device="cpu") == "float32"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert chosen("bf16") == "float32"


def test_precision_that_nobody_gave_is_not_recorded(models):
    assert read_record(models["bf16"]).precision == "bf16"
    assert read_record(models["unknown"]).precision is None
    assert "precision" not in json.loads((models["unknown"] / "export.json").read_text())


TEXT = "The dog saw a bird near the house. Seven trees, 12 houses!\n" * 40


def test_bf16_is_within_its_bound_and_sums_in_fp32(models, tmp_path, monkeypatch):
    monkeypatch.setattr(length_sweep, "_draw", lambda rows, out: None)
    found, nlls = {}, perplexity.token_nlls

    def kept(*arguments, **options):
        found["nlls"] = torch.from_numpy(nlls(*arguments, **options))
        return found["nlls"].numpy()

    monkeypatch.setattr(perplexity, "token_nlls", kept)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    losses = {}
    for dtype in ("float32", "bfloat16"):
        (row,) = length_sweep.sweep(
            [models["bf16"]], [32], tmp_path / "out", text=text, dtype=dtype, device="cpu"
        )
        assert row["dtype"] == dtype
        losses[dtype] = row["loss"]
    assert 0 < abs(losses["bfloat16"] - losses["float32"]) < precision.BF16_BOUND
    # What was rounded to bf16 before it was summed would be the same in bf16.
    rounded = found["nlls"].bfloat16().float()
    assert (rounded != found["nlls"]).float().mean() > 0.9
    assert losses["bfloat16"] == pytest.approx(float(found["nlls"].double().mean()), rel=1e-12)


def test_record_tells_that_fp32_products_were_tf32(monkeypatch):
    """Images set it by a variable of their own; numbers in fp32 are then others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100")
    for set_to, ends in (("highest", "2 x H100"), ("high", "H100, fp32 products in TF32")):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda given=set_to: given)
        assert provenance()["machine"].endswith(ends)
