"""Plain models get convolutions and compute the same; what is no longer the identity stays."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import cat_lm.model  # noqa: F401
from cat_lm import architectures
from cat_lm import upcycle as upcycle_module
from cat_lm.core.errors import UserError
from cat_lm.model import CatForCausalLM
from cat_lm.model.streams.operations import RANK_START
from cat_lm.pretrained.loading import load_model
from cat_lm.upcycle import Convolution, model_section, upcycle
from tests.calls import call_main
from tests.tiny_models import cat_model, random_ids, stock_model

KINDS = {
    "values": Convolution(window=3, streams="v"),
    "multihead": Convolution("multihead", window=4),
    "maps": Convolution("multihead", window=4, mixing="maps"),
    "depthwise": Convolution("depthwise", window=4),
    "ranks": Convolution("head", 5, streams="qk", rank=3),
    "long filters": Convolution("head", filter="ssm", state=6),
    "Canon": Convolution(canon="DA", canon_window=3),
}
STOCK = {"gpt_neox": {}, "llama": {"num_key_value_heads": 2, "attention_bias": True}}
FIRST_KEY = "gpt_neox.layers.0.attention.convolution"


@pytest.fixture(scope="module")
def tokenizer_folder(tiny_corpus) -> Path:
    return tiny_corpus / "tokenizer"


@pytest.fixture(scope="module")
def pythia(tmp_path_factory, tokenizer_folder) -> Path:
    """A stock folder in fp32 safetensors, with a tokenizer."""
    folder = tmp_path_factory.mktemp("pythia")
    stock_model(vocab_size=257).save_pretrained(folder)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    return folder


def as_published(
    folder: Path, out: Path, *, dtype: torch.dtype, shards: int, head: str = "embed_out"
) -> Path:
    """The folder as EleutherAI published Pythia: torch files, `embed_out`, stored constants."""
    shutil.copytree(folder, out)
    (out / "model.safetensors").unlink()
    weights = load_file(folder / "model.safetensors")
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    assert "embed_out.weight" in weights  # transformers 5 calls it lm_head, and saves it so
    if head != "embed_out":
        weights[f"{head}.weight"] = weights.pop("embed_out.weight")
    for layer in range(2):
        prefix = f"gpt_neox.layers.{layer}.attention"
        weights[f"{prefix}.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.uint8).tril()
        weights[f"{prefix}.masked_bias"] = torch.tensor(-1e9)
        weights[f"{prefix}.rotary_emb.inv_freq"] = torch.ones(1)
    names = sorted(weights)
    parts = [names[start::shards] for start in range(shards)]
    if shards == 1:
        torch.save(weights, out / "pytorch_model.bin")
        return out
    index = {"metadata": {}, "weight_map": {}}
    for number, part in enumerate(parts, start=1):
        file = f"pytorch_model-{number:05d}-of-{shards:05d}.bin"
        torch.save({name: weights[name] for name in part}, out / file)
        index["weight_map"] |= dict.fromkeys(part, file)
    (out / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return out


@torch.no_grad()
def logits(folder: Path, kind=AutoModelForCausalLM) -> torch.Tensor:
    return kind.from_pretrained(folder, dtype=torch.float32)(random_ids(2, 50)).logits


@pytest.mark.parametrize(("kind", "family"), [*zip(KINDS, itertools.cycle(STOCK), strict=False)])
def test_there_and_back(kind, family, tokenizer_folder, tmp_path):
    if kind == "maps":
        family = "gpt_neox"
    stock = stock_model(family=family, **STOCK[family], vocab_size=257)
    stock.save_pretrained(tmp_path / "plain")
    shutil.copytree(tokenizer_folder, tmp_path / "plain", dirs_exist_ok=True)
    out, difference = upcycle(tmp_path / "plain", tmp_path / "cat", KINDS[kind])
    assert difference <= 1e-5
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model) is architectures.get(family).classes().causal_lm
    assert not any(report.values()), report
    assert model.config.convolved_streams == KINDS[kind].streams
    torch.testing.assert_close(logits(out), logits(tmp_path / "plain"), rtol=1e-5, atol=1e-5)
    ids = AutoTokenizer.from_pretrained(tmp_path / "plain")("The cat sat.").input_ids
    assert AutoTokenizer.from_pretrained(out)("The cat sat.").input_ids == ids
    # The keys that are printed for train.py make the same model.
    section = architectures.get(family).Section(**model_section(model.config))
    fields = architectures.get(family).fields(section, 257, 128)
    again = type(model.config)(**fields).to_dict()
    assert all(again[key] == v for key, v in model.config.to_dict().items() if "conv" in key)
    model.train()(random_ids(2, 20), labels=random_ids(2, 20)).loss.backward()
    learned = [p.grad.any() for name, p in model.named_parameters() if "k_filter" in name]
    assert any(learned) or KINDS[kind].streams == "v"
    back, _ = upcycle(out, tmp_path / "back", Convolution("none"))
    config = json.loads((back / "config.json").read_text())
    assert config["model_type"] == family and not any("conv" in key for key in config)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("plain", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_ranks_start_apart():
    fields = {"conv_window": 5, "conv_rank": 3, "conv_streams": "qk", "conv_init": "uniform"}
    fresh = type(cat_model())(cat_model(**fields).config)
    convolution = fresh.base_model.layers[0].attention.convolution
    expected = torch.zeros(2, 4, 5)
    expected[0, :, 1] = expected[1, :, 2] = RANK_START
    assert torch.equal(convolution.q_rank_filter, expected)
    assert not convolution.k_rank_filter.any()


def test_part_that_is_kept_keeps_its_start(pythia, tmp_path):
    """Of Canon layers and a convolution one stays, and a changed one is named."""
    out, _ = upcycle(pythia, tmp_path / "both", Convolution(canon="DA", canon_window=3))
    out, _ = upcycle(out, tmp_path / "canon", Convolution("none", window=1000, canon="C"))
    changed = load_model(out, device="cpu")
    assert list(changed.base_model.layers[0].canon) == ["C"]
    with torch.no_grad():
        changed.base_model.layers[1].canon["C"].canon_filter[0, 2, 1] = 0.25
    changed.save_pretrained(tmp_path / "changed")
    with pytest.raises(UserError, match=r"layers\.1\.canon\.C\.canon_filter is no longer the iden"):
        upcycle(tmp_path / "changed", tmp_path / "out", Convolution("none"))


@pytest.mark.long
def test_the_stock_library_opens_what_came_back(pythia, tmp_path):
    """In a process that knows nothing of cat_lm, which torch would load where it is installed."""
    upcycle(pythia, tmp_path / "cat", Convolution(window=3, rank=2, canon="D"))
    upcycle(tmp_path / "cat", tmp_path / "back", Convolution("none"))
    code = (
        "import sys\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "assert 'cat_lm' not in sys.modules\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'back')!r})\n"
        "assert type(model).__name__ == 'GPTNeoXForCausalLM'\n"
        f"AutoTokenizer.from_pretrained({str(tmp_path / 'back')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize(
    ("dtype", "shards", "head"),
    [
        (torch.float16, 1, "embed_out"),
        (torch.float16, 3, "embed_out"),
        (torch.bfloat16, 1, "lm_head"),
    ],
)
def test_folders_as_published(dtype, shards, head, pythia, tmp_path):
    folder = as_published(pythia, tmp_path / "stock", dtype=dtype, shards=shards, head=head)
    out, difference = upcycle(folder, tmp_path / "cat", Convolution(window=5))
    assert difference <= 1e-5
    stored = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == dtype and f"{FIRST_KEY}.q_filter" in stored


def test_changed_filters_are_named(tmp_path):
    model = CatForCausalLM(cat_model(conv_init="identity").config)
    with torch.no_grad():
        model.gpt_neox.layers[1].attention.convolution.k_filter[2, 3] = 0.25
    model.save_pretrained(tmp_path / "cat")
    name = r"gpt_neox\.layers\.1\.attention\.convolution\.k_filter is no longer the identity"
    for kind in ("none", "multihead"):
        with pytest.raises(UserError, match=name):
            upcycle(tmp_path / "cat", tmp_path / "back", Convolution(kind))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_type": "depthwise", "conv_activation": "silu"}, "activation silu"),
        ({"position_embedding": "none"}, "position_embedding='none'"),
        ({"attention_temperature": 0.9}, "attention_temperature=0.9"),
    ],
    ids=["silu", "nope", "temperature"],
)
def test_what_plain_gpt_neox_cannot_compute(fields, message, tmp_path):
    CatForCausalLM(cat_model(**fields, conv_init="identity").config).save_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match=message):
        upcycle(tmp_path / "a", tmp_path / "back", Convolution("none"))


def test_refusals(pythia, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(UserError, match="not empty"):
        upcycle(pythia, tmp_path / "full", Convolution())
    with pytest.raises(UserError, match="no such folder"):
        upcycle(tmp_path / "nowhere", tmp_path / "out", Convolution())
    with pytest.raises(UserError, match="plain GPT-NeoX already"):
        upcycle(pythia, tmp_path / "out", Convolution("none"))
    with pytest.raises(UserError, match=r"conv_rank=2: needs conv_type=head, .* streams q and"):
        upcycle(pythia, tmp_path / "out", Convolution(streams="k", rank=2))
    with pytest.raises(UserError, match="conv_window=0"):
        upcycle(pythia, tmp_path / "out", Convolution(window=0))
    with pytest.raises(UserError, match="conv_window=100000000000: must be from 1"):
        upcycle(pythia, tmp_path / "out", Convolution(window=10**11))
    with pytest.raises(UserError, match="conv_mixing=maps: needs"):
        upcycle(pythia, tmp_path / "out", Convolution(mixing="maps"))
    other = Path(shutil.copytree(pythia, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text()) | {"model_type": "gpt2"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model_type is 'gpt2'"):
        upcycle(other, tmp_path / "out", Convolution())
    other = Path(shutil.copytree(pythia, tmp_path / "not a number"))
    (other / "generation_config.json").write_text('{"use_cache": NaN}')
    with pytest.raises(UserError, match=r"generation_config.json: .*NaN"):
        upcycle(other, tmp_path / "out", Convolution())
    assert not (tmp_path / "out").exists()


def test_damaged_weights(pythia, tmp_path):
    folder = Path(shutil.copytree(pythia, tmp_path / "stock"))
    weights = load_file(folder / "model.safetensors")
    cases = {
        "missing keys gpt_neox.layers.1.attention.dense.bias": lambda w: w.pop(
            "gpt_neox.layers.1.attention.dense.bias"
        ),
        "unexpected keys gpt_neox.extra": lambda w: w.update({"gpt_neox.extra": torch.zeros(1)}),
        r"mismatched keys .*final_layer_norm.bias.*\[3\].*\[32\]": lambda w: w.update(
            {"gpt_neox.final_layer_norm.bias": torch.zeros(3)}
        ),
        r"1 of 28 tensors is not finite \(.*final_layer_norm.bias\)": lambda w: w[
            "gpt_neox.final_layer_norm.bias"
        ].fill_(torch.nan),
    }
    for message, damage in cases.items():
        damaged = {name: tensor.clone() for name, tensor in weights.items()}
        damage(damaged)
        save_file(damaged, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            upcycle(folder, tmp_path / "out", Convolution())
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"stock: cannot be loaded: "):
        upcycle(folder, tmp_path / "out", Convolution())
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has config.json but no weights"):
        upcycle(folder, tmp_path / "out", Convolution())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock"]


def test_what_train_py_cannot_go_on_with_is_said(pythia, tmp_path, capsys):
    folder = Path(shutil.copytree(pythia, tmp_path / "stock"))
    config = json.loads((folder / "config.json").read_text()) | {"hidden_act": "relu"}
    (folder / "config.json").write_text(json.dumps(config))
    out, difference = upcycle(folder, tmp_path / "out", Convolution())
    upcycle_module._print_result(out, difference)
    printed = capsys.readouterr().out
    assert "no key for hidden_act" in printed and "train.init_from" not in printed


def test_a_model_that_differs_is_not_written(pythia, tmp_path, monkeypatch):
    """The comparison at the end is of what was written, not of what was meant."""
    build = upcycle_module._target_weights

    def wrong(*given):
        weights = build(*given)
        weights[f"{FIRST_KEY}.v_filter"] = weights[f"{FIRST_KEY}.v_filter"] * 1.01
        return weights

    monkeypatch.setattr(upcycle_module, "_target_weights", wrong)
    with pytest.raises(UserError, match="its logits and those of the new model differ by"):
        upcycle(pythia, tmp_path / "out", Convolution())
    assert not list(tmp_path.iterdir())


def test_command(pythia, tmp_path, monkeypatch, capsys):
    def run(*words: object) -> tuple[int, str, str]:
        return call_main(upcycle_module.main, monkeypatch, capsys, "upcycle", *words)

    convolution = ("--conv", "multihead", "--window", 3, "--mixing", "maps")
    code, out, err = run(pythia, tmp_path / "cat", *convolution)
    assert code == 0, err
    assert "mixing attention maps" in out and "logits equal the original's" in out
    assert "  conv_type: multihead\n  conv_window: 3\n  conv_mixing: maps\n" in out
    assert "  vocab_size: 257\n" in out and "rope" not in out
    for words, said in (
        ((pythia, tmp_path / "cat"), "error: OUT"),
        ((tmp_path / "cat", tmp_path / "back", "--conv", "none", "--window", 3), "says nothing"),
        ((pythia, tmp_path / "back", "--canon-window", 3), "--canon-window: says nothing without"),
    ):
        code, _, err = run(*words)
        assert code == 2 and said in err and err.count("\n") == 1
