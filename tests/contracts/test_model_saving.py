"""Contracts of folders: what is saved is loaded bit for bit, whatever the precision."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.contracts.models import DECODERS, build, each, every_case, tokens


def loaded(case, folder, **how):
    """Open a folder by the implementation of attention that the case names, if it does."""
    by = case.fields.get("attn_implementation")
    how |= {"attn_implementation": by} if by else {}
    return AutoModelForCausalLM.from_pretrained(folder, **how)


@torch.no_grad()
@every_case
def test_folder_holds_the_model(case, tmp_path):
    model, ids, kinds = build(case), tokens(2, 20), case.architecture.classes()
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).save_pretrained(tmp_path)
        again = loaded(case, tmp_path, dtype=dtype)
        assert type(again) is kinds.causal_lm
        for kind in ("named_parameters", "named_buffers"):
            own, theirs = (dict(getattr(m, kind)()) for m in (again, model))
            assert own.keys() == theirs.keys()
            for name, tensor in theirs.items():
                assert own[name].dtype == tensor.dtype and torch.equal(own[name], tensor), name
        assert torch.equal(again(ids).logits, model(ids).logits)
    config = AutoConfig.from_pretrained(tmp_path)
    ours = {key: value for key, value in model.config.to_dict().items() if key[0] != "_"}
    assert type(config) is kinds.config and ours.items() <= config.to_dict().items()
    if kinds.base_model is not None:
        how = {"attn_implementation": case.fields.get("attn_implementation")}
        body = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16, **how)
        assert type(body) is kinds.base_model
        hidden = model.base_model(ids).last_hidden_state
        assert torch.equal(body(ids).last_hidden_state, hidden)


@every_case
def test_weights_that_a_folder_lacks_start_as_new_ones(case, tmp_path):
    model = build(case)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lacking = {name for name in weights if "layers.1." in name}
    kept = {name: w for name, w in weights.items() if name not in lacking}
    assert lacking and kept
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    torch.manual_seed(1)
    again = loaded(case, tmp_path)
    fresh, other = (build(case, seed=s, moved=False).state_dict() for s in (0, 1))
    for name, value in again.state_dict().items():
        if name not in lacking:
            assert torch.equal(value, weights[name])
        elif torch.equal(fresh[name], other[name]):  # not drawn
            assert torch.equal(value, fresh[name]), name
        elif value.numel() >= 64:  # of the same distribution
            (mean, std), (found, spread) = ((s.mean(), s.std()) for s in (fresh[name], value))
            assert (found - mean).abs() <= 0.6 * std and 0.7 * std <= spread <= 1.4 * std, name
        else:
            assert not torch.equal(value, weights[name]), name


@torch.no_grad()
@each(DECODERS[::2])
def test_casting_a_model_rounds_its_weights_alone(case):
    """Frequencies of positions stay exact, as training engines cast whole models."""
    model, ids = build(case).bfloat16().float(), tokens(1, 60)
    rounded = build(case)
    for own, weight in zip(rounded.parameters(), model.parameters(), strict=True):
        own.copy_(weight)
    assert torch.equal(model(ids).logits, rounded(ids).logits)
