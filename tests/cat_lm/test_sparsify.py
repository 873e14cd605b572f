"""Dense models get landmark attention and compute the same when they read all blocks."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cat_lm import sparsify as sparsify_module
from cat_lm.core.errors import UserError
from cat_lm.pretrained.loading import load_model
from cat_lm.sparsify import Calibration, sparsify
from tests.calls import call_main
from tests.tiny_models import GROUPED, cat_model, random_ids, stock_model

OPTIONS = {"block": 4, "top_k": 1, "local": 1}
MODELS = {
    "cat": lambda: cat_model(),
    "llama": lambda: cat_model(**GROUPED),
    "pythia": lambda: stock_model(),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_stay_and_attention_changes(name, tiny_corpus, tmp_path):
    folder = tmp_path / "dense"
    MODELS[name]().to(torch.bfloat16).save_pretrained(folder)
    shutil.copytree(tiny_corpus / "tokenizer", folder, dirs_exist_ok=True)
    out, difference, losses = sparsify(folder, tmp_path / "sparse", OPTIONS)
    assert losses is None
    assert difference <= 1e-5 and (out / "tokenizer.json").is_file()
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert sorted(map(str, before.values())) == sorted(map(str, after.values()))
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    ids = random_ids(2, 40)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sparse = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert sparse.config.attention_options == OPTIONS
    with torch.no_grad():
        # The first block and the next are read whole; from the third on one is left out.
        found, expected = sparse(ids).logits, dense(ids).logits
    torch.testing.assert_close(found[:, :8], expected[:, :8], rtol=1e-4, atol=1e-5)
    assert not found[:, 12:].allclose(expected[:, 12:], rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False}
    texts = [sparse.generate(ids, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*texts)
    # What was made can be made again, with other blocks.
    again, _, _ = sparsify(out, tmp_path / "again", OPTIONS | {"block": 8, "filter": "exponential"})
    assert load_model(again).config.attention_options["block"] == 8


def test_refusals_leave_nothing_behind(tiny_corpus, tmp_path):
    folder, out = tmp_path / "dense", tmp_path / "out"
    cat_model(conv_type="multihead", conv_mixing="maps").save_pretrained(folder)
    with pytest.raises(UserError, match="has mixed attention maps"):
        sparsify(folder, out, OPTIONS)
    cat_model(vocab_size=257).save_pretrained(folder)
    with pytest.raises(UserError, match=r"attention_options\.filter=exponential: says nothing"):
        sparsify(folder, out, OPTIONS | {"top_k": 0, "filter": "exponential"})
    learned = OPTIONS | {"filter": "learned"}
    with pytest.raises(UserError, match="has no learned filters of 4 tokens; give --calibrate"):
        sparsify(folder, out, learned)
    with pytest.raises(UserError, match="--calibrate data: says nothing with --filter box"):
        sparsify(folder, out, OPTIONS | {"filter": "box"}, Calibration("data", 10))
    with pytest.raises(UserError, match=r"--tokens 100: a step reads 4 windows of 128 tokens"):
        sparsify(folder, out, learned, Calibration(tiny_corpus, 100))
    with pytest.raises(UserError, match="nowhere"):
        sparsify(tmp_path / "nowhere", out, OPTIONS)
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(UserError, match="exists already and is not empty"):
        sparsify(folder, out, OPTIONS)


def test_the_command(tmp_path, monkeypatch, capsys):
    cat_model().save_pretrained(tmp_path / "dense")

    def called(*options: object) -> tuple[int, str, str]:
        words = (tmp_path / "dense", tmp_path / "out", "--block", 16, "--top-k", 2, *options)
        return call_main(sparsify_module.main, monkeypatch, capsys, "sparsify", *words)

    code, said, _ = called("--sink")
    assert code == 0
    assert "landmark attention" in said and "at most 62% of the keys" in said
    for wrong, named in ((["--block", "0"], "--block"), (["--top-k", "-1"], "--top-k")):
        code, _, error = called(*wrong)
        assert code == 2
        assert named in error and error.count("\n") == 1


def test_filters_are_calibrated_alone_and_go_on(tiny_corpus, tmp_path, monkeypatch, capsys):
    folder, options = tmp_path / "dense", OPTIONS | {"filter": "learned"}
    fields = {"vocab_size": 257, "max_position_embeddings": 32, "hidden_dropout": 0.5}
    cat_model(**fields).save_pretrained(folder)
    state = torch.get_rng_state()
    calibration = Calibration(tiny_corpus, 30 * 4 * 32)
    out, difference, (first, last) = sparsify(folder, tmp_path / "sparse", options, calibration)
    assert torch.equal(torch.get_rng_state(), state) and difference <= 1e-5
    assert last < first
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    new = after.keys() - before.keys()
    assert len(new) == 4 and all(torch.equal(after[name], before[name]) for name in before)
    filters = [after[name] for name in new if name.endswith(".filter")]
    assert all(one.shape == (4, 4) and (one - 0.25).abs().max() > 1e-3 for one in filters)
    # Learned filters are kept where another choice is made, and dropped where they are not asked.
    again, _, _ = sparsify(out, tmp_path / "again", options | {"top_k": 2})
    kept = load_file(again / "model.safetensors")
    assert all(torch.equal(kept[name], after[name]) for name in after)
    box, _, _ = sparsify(out, tmp_path / "box", OPTIONS)
    assert load_file(box / "model.safetensors").keys() == before.keys()
    words = ["sparsify", str(out), str(tmp_path / "told"), "--block", "4", "--top-k", "1"]
    for more, is_told in (([], True), (["--filter", "learned"], False)):
        monkeypatch.setattr("sys.argv", [*words[:2], f"{words[2]}{is_told}", *words[3:], *more])
        sparsify_module.main()
        said = "the model's own landmarks (filter=learned, block=4) are left out\n"
        assert (said in capsys.readouterr().out) == is_told
