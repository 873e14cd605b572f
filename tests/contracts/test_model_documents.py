"""Contracts of rows: packed documents and padded texts are computed as if each were alone."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.models import DECODERS, Case, build, close, every_case, tokens
from tests.contracts.test_models import differentiable

LENGTHS = [13, 1, 4, 12]
IDS = torch.repeat_interleave(torch.tensor([5, 0, 7, 5]), torch.tensor(LENGTHS))[None]
RESTARTING = torch.cat([torch.arange(length) for length in LENGTHS])[None]


def is_mixing(case: Case) -> bool:
    """Return False for the one mixer that reads no other token."""
    return case.name != "mixer none"


@torch.no_grad()
@every_case
def test_packed_documents_equal_each_alone(case):
    """Also where positions go on over borders, and where an id comes back."""
    model, row = build(case), tokens(1, 30)
    alone = torch.cat([model(part).logits for part in row.split(LENGTHS, dim=1)], dim=1)
    close(model(row, document_ids=IDS).logits, alone)
    close(model(row, position_ids=RESTARTING, use_cache=False).logits, alone)
    two = row.expand(2, -1)
    ids = torch.cat([IDS, torch.zeros_like(IDS)])
    both = model(two, document_ids=ids).logits
    close(both[:1], alone)
    close(both[1:], model(row).logits)
    if is_mixing(case):
        assert not torch.allclose(model(row).logits, alone, atol=1e-2)


@torch.no_grad()
@every_case
def test_documents_whose_positions_go_on_are_apart(case):
    model, row = build(case), tokens(1, 30)
    other = row.clone()
    other[:, :18] = tokens(1, 18, seed=1)
    given = {"document_ids": IDS, "position_ids": torch.arange(30)[None]}
    found, changed = (model(ids, **given).logits for ids in (row, other))
    assert torch.equal(found[:, 18:], changed[:, 18:])
    assert not torch.equal(found[:, :18], changed[:, :18])


@every_case
def test_no_gradient_crosses_documents(case):
    model = differentiable(case)
    embedded = model.get_input_embeddings()(tokens(1, 30)).detach().requires_grad_()
    outputs = model(inputs_embeds=embedded, document_ids=IDS)
    outputs.logits[:, 14:18].square().sum().backward()
    assert embedded.grad.isfinite().all()
    assert embedded.grad[0].any(dim=-1).nonzero().flatten().tolist() == [14, 15, 16, 17]


@torch.no_grad()
@every_case
def test_padding_changes_nothing_at_real_tokens(case):
    """Whatever stands there, on either side, in a row of one token, and with a cache."""
    model, ids = build(case), tokens(4, 15)
    spans = [slice(0, 15), slice(7, 15), slice(0, 1), slice(3, 11)]
    mask = torch.zeros_like(ids)
    for row, span in enumerate(spans):
        mask[row, span] = 1
    expected = [model(ids[row : row + 1, span]).logits[0] for row, span in enumerate(spans)]
    for given, use_cache in ((ids, False), (ids.masked_fill(mask == 0, 0), True)):
        logits = model(given, attention_mask=mask, use_cache=use_cache).logits
        assert logits.isfinite().all()
        for row, span in enumerate(spans):
            close(logits[row, span], expected[row])


@torch.no_grad()
@every_case
def test_padding_and_documents_together(case):
    model, row = build(case), tokens(1, 30)
    alone = torch.cat([model(part).logits for part in row.split(LENGTHS, dim=1)], dim=1)
    ids = torch.cat([torch.zeros(1, 6, dtype=torch.long), row], dim=1)
    mask = (torch.arange(36) >= 6).long()[None]
    documents = torch.cat([IDS[:, :1].expand(1, 6), IDS], dim=1)
    close(model(ids, attention_mask=mask, document_ids=documents).logits[:, 6:], alone)


@torch.no_grad()
@every_case
def test_padding_between_tokens_is_not_read_or_refused(case):
    """Layers that read neighbours refuse it: they would read the padding."""
    model, ids = build(case), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 5:8] = 0
    real = mask[1].bool()
    if model.config.takes_gaps:
        alone = model(ids[1:, real]).logits
        close(model(ids, attention_mask=mask, use_cache=False).logits[1:, real], alone)
        return
    with pytest.raises(ValueError, match="no padding between the tokens of a row"):
        model(ids, attention_mask=mask, use_cache=False)
    cache = model(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="no padding between the tokens of a row"):
        model(ids[:, 5:], attention_mask=mask, past_key_values=cache)


def test_what_cannot_be_isolated_is_refused():
    model = build(next(case for case in DECODERS if case.fields["conv_type"] == "head"))
    ids = tokens(1, 10)
    with pytest.raises(ValueError, match="prepared attention mask"):
        model(ids, attention_mask=torch.ones(1, 1, 10, 10).tril().bool())
    with pytest.raises(ValueError, match="document_ids cannot be used with a cache"):
        model(ids, document_ids=torch.arange(10)[None] // 6, use_cache=True)
