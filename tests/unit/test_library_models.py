"""Families of transformers beside its own models: upcycled there and back, and what it has not.

`tests/unit/test_upcycle.py` and `test_export.py` have what does not depend on the family, and
`test_families.py` the exports of plain models.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import cat_lm  # noqa: F401
from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.export import export_checkpoint
from cat_lm.pretrained import conversion
from cat_lm.training.estimate import num_parameters
from cat_lm.upcycle import Convolution, model_section, upcycle
from tests.finished_runs import checkpoint, tiny_model
from tests.unit.tiny_models import GROUPED, random_ids, stock_model

FAMILIES = {"gpt_neox": {}, "llama": {"num_key_value_heads": 1, "attention_bias": True}}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def tokenizer_folder(tiny_corpus) -> Path:
    return tiny_corpus / "tokenizer"


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


IDS = random_ids(2, 30)


@each_family
def test_a_model_of_longer_reach_is_exported_as_the_librarys(family, tokenizer_folder, tmp_path):
    rope = {"conv_type": "none", "rope_parameters": dict(SCALED)}
    model = tiny_model(257, family=family, **FAMILIES[family], **rope)
    checkpoint(tmp_path / "run", model, tokenizer_folder)
    out = export_checkpoint(tmp_path / "run", tmp_path / "out", library=True)
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(loaded) is architectures.get(family).library_classes().causal_lm
    assert not any(report.values())
    settings = json.loads((out / "config.json").read_text())
    assert not any(key.startswith(("conv_", "score_", "temperature")) for key in settings)
    with torch.no_grad():
        expected = model(IDS).logits
        assert (loaded(IDS).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert f"tags: [{family}]" in (out / "README.md").read_text()
    if family != "llama":
        return
    code = (
        "import sys\nfrom transformers import AutoModelForCausalLM as Auto\n"
        f"print(type(Auto.from_pretrained({str(out)!r})).__name__, 'cat_lm.model' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == type(loaded).__name__


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "has head convolutions of q, k, v, which transformers' {title} does not have"),
        ({"conv_type": "none", "position_embedding": "none"}, "has position_embedding='none'"),
        ({"conv_type": "none", "attention_temperature": 0.5}, "has attention_temperature=0.5"),
    ],
    ids=["convolutions", "nope", "temperature"],
)
@each_family
def test_what_the_library_does_not_have_is_refused(
    family, changes, said, tokenizer_folder, tmp_path
):
    checkpoint(tmp_path / "run", tiny_model(257, family=family, **changes), tokenizer_folder)
    said = said.format(title=architectures.get(family).title)
    with pytest.raises(UserError, match=f"--library: the model {said}.*without --library"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", library=True)
    assert not (tmp_path / "out").exists()


def test_other_logits_are_no_export(tokenizer_folder, tmp_path, monkeypatch):
    checkpoint(tmp_path / "run", tiny_model(257, conv_type="none"), tokenizer_folder)
    monkeypatch.setattr(conversion, "logits_of", lambda model: torch.tensor([torch.nan]))
    with pytest.raises(UserError, match=r"--library: .* differ by nan"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", library=True)


@pytest.mark.parametrize("kind", ["head", "multihead", "depthwise"])
def test_llama_there_and_back(kind, tokenizer_folder, tmp_path):
    stock_model(**GROUPED, vocab_size=257).save_pretrained(tmp_path / "llama")
    shutil.copytree(tokenizer_folder, tmp_path / "llama", dirs_exist_ok=True)
    expected = logits(tmp_path / "llama")
    convolution = Convolution(kind, window=4, streams="qv")
    out, difference = upcycle(tmp_path / "llama", tmp_path / "cat", convolution)
    assert difference <= 1e-5
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == "CatLlamaForCausalLM" and not any(report.values())
    assert model.config.convolved_streams == "qv" and model.config.num_key_value_heads == 2
    torch.testing.assert_close(logits(out), expected, rtol=1e-5, atol=1e-6)
    section = model_section(model.config)
    assert section["architecture"] == "llama" and section["attention_bias"] is True
    back, _ = upcycle(out, tmp_path / "back", Convolution("none"))
    assert type(AutoModelForCausalLM.from_pretrained(back)).__name__ == "LlamaForCausalLM"
    assert torch.equal(logits(back), expected)


def test_the_rows_of_tfpp_have_their_sizes():
    folder = Path(__file__).parents[2] / "configs/pretrain"
    rows = {"tfpp": 373_867_520, "tfpp_cat": 373_891_712, "pythia": 367_847_424}
    # Canon layers of 4 taps: at A, C and D 589,824 (gated 761,856), at B 294,912.
    rows |= {"canon_abcd": rows["pythia"] + 589_824 + 294_912}
    rows |= {"cat_canon_acd": rows["pythia"] + 24_192 + 589_824}
    rows |= {"tfpp_canon_abcd": rows["tfpp"] + 1_032_192}
    rows |= {"tfpp_cat_canon_acd": rows["tfpp_cat"] + 1_032_192 - 294_912}
    # 34 numbers for each of 24 x 16 x 3 filters.
    rows |= dict.fromkeys(("cat_ssm_rope", "cat_ssm_nope"), rows["pythia"] + 39_168)
    for name, parameters in rows.items():
        config = load_config(folder / f"{name}.yaml")
        assert num_parameters(config, 0) == parameters
        assert config.train.max_tokens == 15_000_000_000 and config.optimizer.lr == 3e-4
    assert load_config(folder / "pythia.yaml").model.rotary_pct == 0.25
