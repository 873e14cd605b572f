"""Contracts of every model: its equations, causality, precision, training, loss and start."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm import architectures
from cat_lm.core.parameters import parameters_by_decay
from tests.contracts.models import (
    CASES,
    CONTEXT,
    DECODERS,
    OTHERS,
    VOCABULARY,
    Case,
    build,
    close,
    each,
    every_case,
    tokens,
)
from tests.reference import recurrent, transformer

# One of each family and each pattern of attention, for what takes seconds a model.
FEW = [case for case in DECODERS if "flex" not in case.name][:9:3] + OTHERS[:7:2]


def differentiable(case: Case, **changes) -> nn.Module:
    """Return the case's model, by SDPA where flex attention has no gradient on a CPU."""
    if case.fields.get("attn_implementation") == "flex_attention":
        changes["attn_implementation"] = "sdpa"
    return build(case, **changes)


def gradients(model: nn.Module, ids: Tensor, **given) -> list[Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **given).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@every_case
def test_logits_and_gradients_equal_the_reference(case):
    is_flex = case.fields.get("attn_implementation") == "flex_attention"
    model, ids = build(case), tokens(1, 13)
    weights = {n: w.double().requires_grad_() for n, w in model.state_dict().items()}
    reference = transformer if case in DECODERS else recurrent
    expected = reference.logits(weights, model.config.to_dict(), ids[0])
    with torch.set_grad_enabled(not is_flex):
        found = model(ids).logits[0]
    close(found.double(), expected, 2e-5)
    if is_flex:
        return
    shares = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * shares).sum().backward()
    (found * shares.float()).sum().backward()
    if model.lm_head.weight is model.get_input_embeddings().weight:
        (name,) = [n for n, p in model.named_parameters() if p is model.lm_head.weight]
        weights[name].grad += weights["lm_head.weight"].grad
    for name, parameter in model.named_parameters():
        wanted = weights[name].grad
        if wanted is None:  # of landmarks, which choose and do not weigh
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            close(parameter.grad.double(), wanted, 1e-4)


@every_case
def test_no_token_reads_later_ones(case):
    model, ids = build(case), tokens(2, 23)
    changed = ids.clone()
    changed[:, 15] = 1 + changed[:, 15] % (VOCABULARY - 1)
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    close(after[:, :15], before[:, :15], 1e-6)
    assert (after[:, 15] - before[:, 15]).abs().amax(-1).min() > 1e-3
    model = differentiable(case)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded).logits[:, :15].square().sum().backward()
    assert not embedded.grad[:, 15:].any() and embedded.grad[:, :15].any(dim=-1).all()


@every_case
def test_half_precision_is_near_and_learns(case):
    model, ids = differentiable(case), tokens(2, 20)
    exact = model(ids, labels=ids).loss.detach()
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(ids, labels=ids).loss
    cast.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.to(torch.bfloat16)
    model.zero_grad()
    half = model(ids, labels=ids)
    half.loss.backward()
    assert half.logits is None or half.logits.dtype == torch.bfloat16
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    for loss in (cast, half.loss):
        assert abs(loss.detach().float() - exact) < 0.03 * exact


@every_case
def test_checkpointed_layers_give_the_same_gradients(case):
    """Also that a recomputed layer reads documents and padding again."""
    model, ids = differentiable(case).train(), tokens(2, 20)
    documents = (torch.arange(20) // 9).expand(2, -1)
    plain = gradients(model, ids, document_ids=documents)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for one, other in zip(gradients(model, ids, document_ids=documents), plain, strict=True):
        close(one, other, 1e-6)


@each(FEW)
def test_training_step_compiles_without_a_graph_break(case):
    torch._dynamo.reset()
    model, ids = differentiable(case, num_hidden_layers=1).train(), tokens(2, 24)
    names = list(model.state_dict())
    documents = (torch.arange(24) // 9).expand(2, -1)
    plain = gradients(model, ids, document_ids=documents)
    model.compile(backend="aot_eager", fullgraph=True)
    assert list(model.state_dict()) == names
    for one, other in zip(gradients(model, ids, document_ids=documents), plain, strict=True):
        close(one, other, 1e-5)


@every_case
def test_matrices_alone_take_weight_decay(case):
    model = build(case, moved=False)
    decayed, exempt = ({id(p) for p in group} for group in parameters_by_decay(model))
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    assert decayed == {id(weight) for weight in matrices} and not decayed & exempt
    assert decayed | exempt == {id(p) for p in model.parameters()}


@every_case
def test_it_says_what_it_is(case):
    family, model = case.architecture, build(case)
    section = architectures.section_of(model.config)
    assert family.problems(section, CONTEXT) == []
    assert family.summary(section).words and family.summary(section).description


@every_case
def test_loss_is_the_mean_of_what_is_scored(case):
    model, ids = build(case), tokens(2, 12)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.manual_seed(0)) < 0.3, -100)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        logits = model(ids).logits
        expected = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        total = int((shifted != -100).sum())
        close(model(ids, labels=labels).loss, expected, 1e-5)
        close(model(ids, labels=ids, shift_labels=shifted).loss, expected, 1e-5)
        divided = model(ids, labels=labels, num_items_in_batch=torch.tensor(3 * total)).loss
        close(3 * divided, expected, 1e-5)
        assert torch.equal(model(ids, logits_to_keep=2).logits, logits[:, -2:])


@torch.no_grad()
@every_case
def test_new_model_predicts_all_tokens_alike(case):
    model, ids = build(case, moved=False), tokens(4, 30)
    assert abs(model(ids, labels=ids).loss - math.log(VOCABULARY)) < 0.4


@every_case
def test_unscored_tokens_move_no_weight(case):
    """The last token is read by none that is scored, and its own logits are not."""
    model, ids = differentiable(case).train(), tokens(1, 12)
    labels = ids.clone()
    labels[:, 8:] = -100
    found = gradients(model, ids, shift_labels=labels)
    expected = gradients(model, ids[:, :8])
    model.zero_grad()
    model(ids[:, :8], labels=ids[:, :8], shift_labels=labels[:, :8]).loss.backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e-5)


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_matrices_and_norms_start_as_published(family):
    """Small-init (Nguyen and Salazar, 2019), and wang-init of what writes to the residual."""
    case = next(c for c in DECODERS if c.family == family and c.fields["attention"] == "softmax")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    model = build(case, moved=False, **sizes)
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "filter" not in name and "embed" not in name:
            writes = name.endswith(
                ("dense.weight", "4h_to_h.weight", "o_proj.weight", "down_proj.weight")
            )
            std = 2 / (3 * math.sqrt(128)) if writes else math.sqrt(2 / (5 * 128))
            assert weight.std().item() == pytest.approx(std, rel=0.06), name
            assert abs(weight.mean().item()) < 0.06 * std, name
        elif "norm" in name and name.endswith("weight"):
            assert (weight == 1).all(), name
        elif name.endswith("bias"):
            assert not weight.any(), name


@pytest.mark.parametrize("start", ["identity", "uniform", "residual"])
@each([c for c in DECODERS if c.fields["conv_type"] != "none"][::3])
def test_filters_start_as_asked_for(case, start):
    fields = {}
    if case.fields.get("conv_filter", "taps") == "taps":
        fields["conv_window"] = 16
    models = [build(case, moved=False, **fields | {"conv_init": s}) for s in (start, "identity")]
    weights, identity = (dict(model.named_parameters()) for model in models)
    for name in [n for n in weights if n.endswith((".q_filter", ".k_filter", ".v_filter"))]:
        own, delta = weights[name].detach(), identity[name].detach()
        if case.fields.get("conv_filter", "taps") != "taps":
            reads = case.fields["conv_state"]
            own, delta = own[:, -reads - 1 :], delta[:, -reads - 1 :]
            assert torch.equal(weights[name][:, : -reads - 1], identity[name][:, : -reads - 1])
        else:
            reads = 16 * (own.shape[-1] if case.fields["conv_type"] == "multihead" else 1)
        assert delta.sum() == delta.count_nonzero() and ((delta == 0) | (delta == 1)).all()
        drawn = own if start == "uniform" else own - delta
        bound = reads**-0.5
        assert drawn.abs().max() <= bound * (1 + 1e-6)
        assert (start == "identity") == (not drawn.any())
        if start != "identity":
            assert drawn.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.35)


def test_cases_hold_every_family():
    assert len({case.name for case in CASES}) == len(CASES)
