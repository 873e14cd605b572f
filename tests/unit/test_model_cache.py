"""Named states of cache layers: several windows beside each other, and recurrent states."""

import pytest
import torch

from cat_lm.model.cache import StateDynamicLayer, StateStaticLayer

LAYERS = {"dynamic": StateDynamicLayer, "static": lambda: StateStaticLayer(max_cache_len=40)}


def filled(kind):
    """A layer with 6 tokens of 3 rows: keys, a recurrent state, and two windows."""
    layer = LAYERS[kind]()
    inputs = torch.arange(18.0).view(3, 6, 1)
    layer.update(inputs[:, None], inputs[:, None])
    layer.exchange_inputs("near", inputs, 3)
    layer.exchange_inputs("far", inputs[..., None].expand(3, 6, 2, 2), 5)
    layer.replace_recurrent("state", torch.ones(3, 2, 2))
    layer.replace_recurrent("state", torch.tensor([7.0, 8.0, 9.0])[:, None, None].expand(3, 2, 2))
    return layer


@pytest.mark.parametrize("kind", LAYERS)
def test_each_name_has_its_own_window(kind):
    layer = filled(kind)
    before = layer.exchange_inputs("near", torch.zeros(3, 1, 1), 3)
    assert before[:, :, 0].tolist() == [[4, 5], [10, 11], [16, 17]]
    before = layer.exchange_inputs("far", torch.zeros(3, 1, 2, 2), 5)
    assert before[1, :, 1, 1].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("kind", LAYERS)
def test_every_state_is_reordered_moved_and_cleared(kind):
    layer = filled(kind)
    layer.offload()
    layer.prefetch()
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert layer.recurrent["state"][:, 0, 0].tolist() == [9, 7, 7]
    assert layer.inputs["near"][:, -1, 0].tolist() == [17, 5, 5]
    layer.reset()
    for states in (layer.inputs, layer.recurrent):
        assert not any(state.any() for state in states.values())
    assert not layer.exchange_inputs("near", torch.ones(3, 2, 1), 3).any()


def test_rows_are_repeated_and_selected():
    layer = filled("dynamic")
    layer.batch_select_indices(torch.tensor([2, 1]))
    layer.batch_repeat_interleave(2)
    assert layer.recurrent["state"][:, 0, 0].tolist() == [9, 9, 8, 8]
    assert layer.inputs["far"][:, -1, 0, 0].tolist() == [17, 17, 11, 11]


def test_a_static_state_keeps_its_address():
    layer = filled("static")
    address = layer.recurrent["state"].data_ptr()
    layer.replace_recurrent("state", torch.zeros(3, 2, 2))
    layer.reset()
    assert layer.recurrent["state"].data_ptr() == address


def test_a_recurrent_state_cannot_go_back():
    layer = filled("dynamic")
    with pytest.raises(RuntimeError, match="recurrent states state cannot go back"):
        layer.crop(-1)
    layer.crop(0)
    assert layer.get_seq_length() == 6 and "state" in layer.recurrent
