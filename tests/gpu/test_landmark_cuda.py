"""Landmark attention's Triton kernel on a CUDA GPU, against masks in fp64."""

from __future__ import annotations

import pytest
import torch

from cat_lm.model.attention.modules import landmark
from cat_lm.model.attention.modules.landmark import train_landmarks
from cat_lm.ops.landmark.attend import attend_blocks, choose_backend
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import sequence_blocks
from cat_lm.ops.landmark.segments import why_not
from cat_lm.ops.landmark.select import Choice, choose_blocks
from cat_lm.ops.runtime.documents import document_borders
from cat_lm.ops.runtime.triton_launch import INSTALLED
from tests.tiny_models import cat_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not INSTALLED, reason="triton is not installed"),
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
BLOCK, TIME, SCALING = 64, 1000, 0.125


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_outputs_and_gradients(dtype, packed):
    torch.manual_seed(0)
    shapes = ((2, 8, TIME, 64), (2, 4, TIME, 64), (2, 4, TIME, 64))
    inputs = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    dy = torch.randn(shapes[0], device="cuda").to(dtype)
    ids = torch.arange(TIME, device="cuda").expand(2, -1) // 333 if packed else None
    layout = sequence_blocks(TIME, BLOCK, ids, None, inputs[0].device)
    weights = block_weights("box", BLOCK).cuda()
    marks = landmark_keys(inputs[1], weights.to(dtype), layout, False)
    selected = choose_blocks(inputs[0], marks, layout, Choice(3, 2))
    assert why_not(inputs[0].device, dtype, BLOCK, 64) is None
    assert choose_backend("sdpa", TIME, TIME, 0.0, True) == "triton"
    results = []
    for name, given in (("sdpa", inputs), ("eager", [x.double() for x in inputs])):
        given = [x.requires_grad_() for x in given]
        y = attend_blocks(name, *given, selected, layout, 2, SCALING, 0.0)[0]
        results.append((y, *torch.autograd.grad(y, given, dy.to(y.dtype))))
    for found, wanted in zip(*results, strict=True):
        assert relative_error(found, wanted) < TOLERANCE[dtype]


def test_the_kernel_gives_the_same_bits_every_time():
    torch.manual_seed(0)
    half = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.randn(1, 4, TIME, 64, **half) for _ in range(3))
    layout = sequence_blocks(TIME, BLOCK, None, None, query.device)
    marks = landmark_keys(key, block_weights("box", BLOCK).cuda(), layout, False)
    given = choose_blocks(query, marks, layout, Choice(4, 1)), layout, 1, SCALING, 0.0
    runs = []
    for _ in range(2):
        y, _ = attend_blocks("sdpa", query, key, value, *given)
        runs.append((y, *torch.autograd.grad(y.square().sum(), (query, key, value))))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_teaching_takes_the_borders_of_documents(monkeypatch):
    """In bf16 by torch's kernel, with the loss, the landmarks' own and the gradients of a mask."""
    options = {"block": 16, "top_k": 2, "filter": "learned"}
    fields = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": TIME}
    fields |= {"attention": "landmark", "attention_options": options}
    ids = torch.randint(0, 64, (2, TIME), device="cuda")
    documents = torch.arange(TIME, device="cuda").expand(2, -1) // 333
    results = []
    for obstacle in (None, "a mask instead"):
        if obstacle:
            monkeypatch.setattr(landmark, "why_no_kernel", lambda *_, found=obstacle: found)
        model = cat_model(**fields).cuda().bfloat16().train()
        train_landmarks(model, "guided", TIME)
        given = {"document_ids": documents, "document_borders": document_borders(documents)}
        output = model(ids, labels=ids, **given)
        (output.loss + output.auxiliary_loss).backward()
        grads = [weights.grad for weights in model.parameters()]
        results.append([output.loss.detach(), output.auxiliary_loss.detach(), *grads])
    for found, wanted in zip(*results, strict=True):
        assert relative_error(found, wanted.double()) < 5e-2
