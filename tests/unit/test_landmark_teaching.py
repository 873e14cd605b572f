"""The guided loss by its C++ kernel, against the operators of torch in double precision."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cat_lm.model import attention
from cat_lm.ops.landmark import calls
from cat_lm.ops.landmark.keys import block_weights, landmark_keys
from cat_lm.ops.landmark.layout import sequence_blocks
from cat_lm.ops.landmark.teaching import guided_loss
from cat_lm.ops.landmark.teaching_cpu import can_teach, teach
from tests.unit.test_model_landmark import landmark_model
from tests.unit.test_ops_landmark import BLOCK, DOCUMENTS, ROWS, SCALING, drawn

TIME = 26


def loss_and_gradients(inputs, layout, local, rows, compute=guided_loss):
    """The loss, and its gradients by queries, keys (through landmarks) and sharpness."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    query, key, sharpness = inputs
    marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)
    loss = compute(query, key, marks, layout, local, SCALING, sharpness, rows)
    return loss, torch.autograd.grad(loss, inputs)


def inputs_of(time=TIME, kv_heads=2, scale=1.0):
    query, key, _ = drawn(time, 4, kv_heads)
    return [query * scale, key * scale, torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)]


@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_the_loss_with_its_gradients(rows, kv_heads, local):
    documents, padding = ROWS[rows]
    inputs = inputs_of(kv_heads=kv_heads)
    layout = sequence_blocks(TIME, BLOCK, documents, padding, torch.device("cpu"))
    assert not can_teach(*inputs[:2], inputs[1])  # in double precision torch computes
    wanted, gradients = loss_and_gradients(inputs, layout, local, TIME)
    half = [x.float() for x in inputs]
    found, own = loss_and_gradients(half, layout, local, TIME)
    assert wanted > 0.005 and all(x.abs().max() > 1e-3 for x in gradients)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(own, gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)
    # Of other blocks it is another one.
    other = loss_and_gradients(half, layout, 3 - local, TIME)[0]
    assert not torch.isclose(other.double(), wanted, rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 40])
def test_some_queries_are_those_that_were_drawn(rows):
    inputs = inputs_of(40)
    layout = sequence_blocks(40, BLOCK, None, None, torch.device("cpu"))
    torch.manual_seed(5)
    wanted, gradients = loss_and_gradients(inputs, layout, 1, rows)
    torch.manual_seed(5)
    found, own = loss_and_gradients([x.float() for x in inputs], layout, 1, rows)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(own, gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)
    assert int((own[0].abs().sum(dim=(0, 1, 3)) > 0).sum()) <= rows


@pytest.mark.parametrize("time", [1, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK])
def test_rows_with_no_block_or_one_to_choose_give_none(time):
    layout = sequence_blocks(time, BLOCK, None, None, torch.device("cpu"))
    found, own = loss_and_gradients([x.float() for x in inputs_of(time)], layout, 2, time)
    assert found == 0
    assert all(torch.equal(x, torch.zeros_like(x)) or x.abs().max() < 1e-6 for x in own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_what_comes_in_and_goes_out_alone(dtype):
    inputs = inputs_of()
    rounded = [x.to(dtype) for x in inputs[:2]]
    layout = sequence_blocks(TIME, BLOCK, None, None, torch.device("cpu"))
    marks = landmark_keys(rounded[1], block_weights("box", BLOCK), layout, False)
    given = [*rounded, marks, inputs[2].float()]

    def run(tensors):
        query, key, marks, sharpness = (x.detach().requires_grad_() for x in tensors)
        loss = guided_loss(query, key, marks, layout, 1, SCALING, sharpness, TIME)
        return loss, torch.autograd.grad(loss, (query, marks, sharpness))

    assert can_teach(*given[:3])
    found, own = run(given)
    wanted, gradients = run([x.double() for x in given])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(own, gradients, strict=True):
        allowed = torch.finfo(ours.dtype).eps * theirs.abs() + 1e-5
        assert ((ours.double() - theirs).abs() <= allowed).all()


def test_a_scaled_loss_saves_small_gradients_in_half_precision():
    inputs = inputs_of(scale=0.3)
    layout = sequence_blocks(TIME, BLOCK, None, None, torch.device("cpu"))

    def gradients(tensors, scale):
        query, key, sharpness = (x.detach().requires_grad_() for x in tensors)
        marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)
        loss = guided_loss(query, key, marks, layout, 1, SCALING, sharpness, TIME)
        return torch.autograd.grad(loss * 1e-5 * scale, query)[0].double() / scale

    half = [x.half() for x in inputs[:2]] + [inputs[2].float()]
    wanted = gradients([x.double() for x in half], 1.0)
    off = [(gradients(half, scale) - wanted).norm() / wanted.norm() for scale in (1.0, 2.0**17)]
    assert off[0] > 0.1 and off[1] < 2e-3
    assert gradients(half, 2.0**17).isfinite().all()


def test_tensors_that_stand_for_others_go_to_torch():
    """In stacked models and where shapes alone are computed: a kernel would read their memory."""
    layout = sequence_blocks(TIME, BLOCK, None, None, torch.device("cpu"))
    query, key, sharpness = (x.float() for x in inputs_of())

    def loss(query, key):
        marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)
        return guided_loss(query, key, marks, layout, 1, SCALING, sharpness, TIME)

    wanted = torch.stack([loss(query, key), loss(2 * query, key)])
    stacked = torch.stack([query, 2 * query]), torch.stack([key, key])
    found = torch.vmap(loss, randomness="different")(*stacked)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(loss(query.requires_grad_(), key), query)[0]
    torch.testing.assert_close(torch.func.grad(loss)(query.detach(), key), ours)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert loss(mode.from_tensor(query), mode.from_tensor(key)).shape == ()


def test_gradients_that_nobody_asks_for_are_none_and_second_ones_an_error():
    layout = sequence_blocks(TIME, BLOCK, None, None, torch.device("cpu"))
    query, key, sharpness = (x.float().requires_grad_() for x in inputs_of())
    marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)

    def gradients(query, marks, sharpness, of, **how):
        given = query, key.detach(), marks, layout, 1, SCALING, sharpness, TIME
        return torch.autograd.grad(guided_loss(*given), of, **how)

    whole = gradients(query, marks, sharpness, (query, marks, sharpness), retain_graph=True)
    for place, alone in enumerate((query, marks, sharpness)):
        own = [x if i == place else x.detach() for i, x in enumerate((query, marks, sharpness))]
        assert torch.equal(gradients(*own, alone, retain_graph=True)[0], whole[place])
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradients(query, marks, sharpness, query, create_graph=True)


def test_large_logits_and_what_is_no_number():
    layout = sequence_blocks(TIME, BLOCK, None, None, torch.device("cpu"))
    inputs = inputs_of(scale=30.0)
    wanted, gradients = loss_and_gradients(inputs, layout, 1, TIME)
    found, own = loss_and_gradients([x.float() for x in inputs], layout, 1, TIME)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(own, gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4)
    broken = [x.float() for x in inputs]
    broken[1][1, 0, 3, 2] = torch.nan
    assert loss_and_gradients(broken, layout, 1, TIME)[0].isnan()


def test_neither_threads_nor_strides_change_a_bit(monkeypatch):
    layout = sequence_blocks(TIME, BLOCK, *ROWS["documents"], torch.device("cpu"))
    inputs = [x.float() for x in inputs_of()]
    wanted, gradients = loss_and_gradients(inputs, layout, 1, TIME)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone, own = loss_and_gradients(inputs, layout, 1, TIME)
    finally:
        torch.set_num_threads(before)
    # Side by side for each token, as projections give them, and every second channel of a tensor.
    tokens = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:2]]
    spread = [x.repeat_interleave(2, dim=3)[..., ::2] for x in inputs[:2]]
    for others in (tokens, spread):
        found, theirs = loss_and_gradients([*others, inputs[2]], layout, 1, TIME)
        assert torch.equal(found, wanted)
        assert all(map(torch.equal, theirs, gradients))
    assert torch.equal(alone, wanted) and all(map(torch.equal, own, gradients))
    config = landmark_model().config
    pattern = attention.pattern(config)
    how = config, torch.device("cpu"), torch.float32
    assert pattern.describe_backend(*how).endswith(
        "the guided loss by a C++ kernel, if not compiled"
    )
    monkeypatch.setattr(calls, "load", lambda *kernel: None)  # no compiler: torch's operators
    assert pattern.describe_backend(*how).endswith("the guided loss by torch")
    without, theirs = loss_and_gradients(inputs, layout, 1, TIME)
    assert not torch.equal(theirs[0], gradients[0])
    torch.testing.assert_close(without, wanted, rtol=1e-5, atol=1e-7)


def test_it_reads_nothing_that_is_not_there():
    query, key, sharpness = (x.float() for x in inputs_of())
    layout = sequence_blocks(TIME, BLOCK, None, None, torch.device("cpu"))
    marks = landmark_keys(key, block_weights("box", BLOCK), layout, False)

    def call(
        query=query,
        key=key,
        marks=marks,
        local=1,
        layout=layout,
        sharpness=sharpness,
        queries=range(TIME),
    ):
        drawn = torch.tensor(queries, dtype=torch.long)
        return teach(query, key, marks, layout, local, SCALING, sharpness, drawn)

    assert call().isfinite()
    for wrong in (
        {"key": key[:, :, 1:]},
        {"key": key[:1]},
        {"key": key[..., 1:]},
        {"query": query[:, :3]},
        {"marks": marks[:, :, 1:]},
        {"marks": marks[:, :1]},
        {"local": 0},
        {"queries": ()},
        {"sharpness": sharpness[:3]},
        {"layout": sequence_blocks(TIME - 1, BLOCK, None, None, query.device)},
        {"layout": sequence_blocks(TIME, BLOCK, DOCUMENTS[[0, 1, 1]], None, query.device)},
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"do not fit|must match"):
            call(**wrong)
    assert torch.equal(call(sharpness=sharpness[:1]), call(sharpness=float(sharpness[0])))
