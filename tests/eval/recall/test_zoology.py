"""The model around every mixer against Zoology's blocks, written here, in both modes.

Zoology (Arora et al., 2023; `TransformerBlock`, `MambaBlock`, `LMBackbone`): dropout of 0.1 stands
before the first TransformerBlock's norm, on the embeddings; MambaBlock has none. Dropout is drawn
from one generator, so that under the same seed two models that drop in the same places and order
are equal.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm import mixers
from cat_lm.core.errors import UserError
from cat_lm.mixers import Setting, make_mixer
from cat_lm.model.context import Context
from eval.lab import cell as cells
from eval.recall.cell import Cell
from eval.recall.model import RecallModel
from eval.recall.training import Trial

VOCABULARY, WIDTH, TIME = 11, 16, 9
OF_ZOOLOGY = ("attention", "based", "mamba", "gla", "deltanet", "gated-deltanet")
INSIDE = ("attention", "cat", "chunk", "landmark", "multi-token")  # drop parts of their maps


def model_of(specification: str, **options: float | None) -> RecallModel:
    torch.manual_seed(0)
    model = RecallModel(
        make_mixer(specification),
        vocabulary=VOCABULARY,
        d_model=WIDTH,
        positions=TIME,
        layers=2,
        **options,
    )
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)):
        nn.init.uniform_(norm.weight, 0.5, 2.0)  # a norm forgotten or taken for another shows
    return model


def embedded(model: RecallModel, tokens: Tensor) -> Tensor:
    table = model.embedding.weight[tokens]
    return table if model.positions is None else table + model.positions.weight


def transformer_blocks(model: RecallModel, tokens: Tensor) -> Tensor:
    """Zoology's with `embed_dropout` 0.1, no other dropout, Identity as the state mixer."""
    hidden, residual = embedded(model, tokens), 0.0
    for i, block in enumerate(model.blocks):
        residual = residual + F.dropout(hidden, 0.1 if i == 0 else 0.0, model.training)
        one, two = block.attn_norm, block.mlp_norm
        normed = F.layer_norm(residual, (WIDTH,), one.weight, one.bias, 1e-5)
        residual = residual + block.attn(normed, Context())
        hidden = F.layer_norm(residual, (WIDTH,), two.weight, two.bias, 1e-5)
    return residual + hidden


def mamba_blocks(model: RecallModel, tokens: Tensor) -> Tensor:
    hidden, residual = embedded(model, tokens), 0.0
    for block in model.blocks:
        residual = residual + hidden
        scale = (residual.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
        hidden = block.attn(residual * scale * block.attn_norm.weight, Context())
    return residual + hidden


def zoologys(name: str, model: RecallModel, tokens: Tensor) -> Tensor:
    """Logits at all positions, [B·T, vocabulary]."""
    out = (mamba_blocks if name == "mamba" else transformer_blocks)(model, tokens)
    out = F.layer_norm(out, (WIDTH,), model.norm.weight, model.norm.bias, 1e-5)
    return (out @ model.embedding.weight.T).flatten(0, 1)


def both(name: str, model: RecallModel) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(2 * TIME).view(2, TIME) % VOCABULARY
    scored = torch.ones_like(tokens, dtype=torch.bool)
    torch.manual_seed(1)
    found = model(tokens, scored)
    torch.manual_seed(1)
    return found, zoologys(name, model, tokens)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", mixers.names())
def test_the_frame_is_zoologys(name, training):
    found, wanted = both(name, model_of(name).train(training))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("training", [False, True])
def test_attention_is_zoologys_mha(training):
    """Its mask of −10,000, its scale on the keys, dropout of 0.1 on the map after the softmax."""
    torch.manual_seed(0)
    layer = make_mixer("attention:heads=2").build(Setting(WIDTH)).train(training)
    x = torch.randn(2, TIME, WIDTH)
    torch.manual_seed(1)
    found = layer(x, Context())
    q, k, v = layer.streams.projection(x).view(2, TIME, 3, 2, WIDTH // 2).unbind(dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k / math.sqrt(WIDTH // 2))
    scores = scores + torch.full((TIME, TIME), -10_000.0).triu(1)
    torch.manual_seed(1)
    maps = F.dropout(scores.softmax(dim=-1), 0.1, training)
    wanted = layer.out_proj(torch.einsum("bhts,bshd->bthd", maps, v).flatten(2))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_all_of_zoologys_mixers_start_as_there():
    """Linear layers and embeddings N(0, 0.02), `out_proj` N(0, 0.02/√4), biases 0."""
    for name in OF_ZOOLOGY:
        options = {"mamba": ":init=zoology"}.get(name, "")
        torch.manual_seed(0)
        model = RecallModel(
            make_mixer(name + options), vocabulary=64, d_model=64, positions=9, layers=2
        )
        linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        assert linear, name
        for where, module in linear.items():
            spread = 0.01 if where.endswith("out_proj") else 0.02
            assert abs(module.weight.std() / spread - 1) < 0.25, (name, where)
            assert module.bias is None or not module.bias.any(), (name, where)
        assert abs(model.embedding.weight.std() / 0.02 - 1) < 0.05


def cell_of(mixer: str, **options) -> Cell:
    sizes = {"epochs": 1, "train_examples": 8, "test_examples": 4, "batch_size": 4}
    return Cell("mqar:keys=2,vocab_size=20", mixer, 8, 16, **(sizes | options))


def test_a_cell_says_its_dropout_and_keeps_apart_what_differs(tmp_path):
    assert cell_of("mamba").resolved()["embedding_dropout"] == 0.0
    assert cell_of("cat").resolved()["embedding_dropout"] == 0.1
    chosen = cell_of("mamba", embedding_dropout=0.1)
    assert chosen.resolved()["embedding_dropout"] == 0.1
    assert Trial(chosen, "cpu").model.dropout.p == 0.1
    assert Trial(cell_of("mamba"), "cpu").model.dropout.p == 0.0
    paths = {cells.cell_path(tmp_path, cell) for cell in (cell_of("mamba"), chosen)}
    assert len(paths) == 2
    with pytest.raises(UserError, match=r"embedding_dropout=1\.0: must be from 0 to 0\.99"):
        cell_of("mamba", embedding_dropout=1.0)
