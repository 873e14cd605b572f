"""What a layer costs on a GPU: kernels, bytes and waits of the host, forward and backward.

Counted on a GPU that is not there (`tests.cat_lm.ops.fake_gpu`), so that a cost that comes back
shows without one. A unit is one [B, T, C] of bf16; each operator reads and writes its tensors once.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from cat_lm import architectures
from cat_lm.model.blocks.transformer import CatAttention
from tests.cat_lm.ops.fake_gpu import Counts, FakeGpu, fake_gpu, on_fake_gpu
from tests.tiny_models import LLAMA_VARIANTS, VARIANTS

BATCH, TIME, WIDTH, HEADS = 8, 2048, 1024, 16  # 370M's
UNIT = BATCH * TIME * WIDTH * 2
SIZES = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "max_position_embeddings": TIME,
    "conv_window": 21,
    "attn_implementation": "sdpa",
}
# A GPT-NeoX layer without positions and convolution, in units: (forward, backward).
PLAIN = {
    "two norms": (1 + 2, 4 + 1 + 0.5),  # x, two y; these, dx of the residual, dx, partial sums
    "projection to q, k, v": (1 + 3, (3 + 1) + (3 + 1) + 3),  # dx, dW, and its bias' sum
    "attention": (3 + 1, 5 + 3),  # q, k, v, y; these, dy, and the three gradients
    "q, k, v's gradients joined": (0, 3 + 3),
    "projection of the output": (1 + 1, 2 + 2 + 1),
    "MLP in": (1 + 4, (4 + 1) + (4 + 1)),
    "GELU": (4 + 4, 4 + 4 + 4 + 0.2),  # backward with partial sums of MLP in's bias
    "MLP out": (4 + 1, (1 + 4) + (1 + 4) + 1),
    "residual sum": (3 + 1, 0),
    "weights": (0.75, 2 * 0.75),  # 12 C², and their gradients
    "sums of the softmax": (1 / 32, 1 / 32),
}
PLAIN_UNITS = sum(map(sum, PLAIN.values()))
PLAIN_KERNELS = (
    8,
    21,
)  # 4 products, both norms, attention, GELU, a sum; 8, the norms and GELU with
# a sum and a cast each, 3, and the sums of 3 biases and the joining of q, k and v
# A convolution of q, k and v by kernels of their own: x to y; dy and x to dx.
CONVOLUTION = 3 * (1 + 1) + 3 * (2 + 1)
BIAS = 3  # whose gradient the convolution's kernel sums up in passing, not the projection
# What transformers' rotation of a quarter of the channels of q and k moves by torch's operators:
# parts, products, sums, and channels put together again.
THEIR_ROTATION = 30
ROTATION = 2 * (1 + 1) + 2 * (1 + 1)  # by one kernel a stream each way, q and k
NORMS = "torch's operators compute Llama's norms in fp32, in 8 kernels forward"


@dataclass(frozen=True)
class Expected:
    """A layer's kernels forward and backward, its units, and why they are these."""

    kernels: tuple[int, int]
    units: float
    why: str


# By the name of `tiny_models`.
EXPECTED = {
    "none": Expected((21, 41), PLAIN_UNITS + THEIR_ROTATION, "13 and 20 kernels rotate"),
    "head": Expected(
        (9, 26),
        # 3 to 3; 6 to 3, which joins them; partial sums of filters and biases are small
        PLAIN_UNITS + (3 + 3) + (6 + 3) - 6 - BIAS + 0.4,
        "one kernel each way, which rotates; two sums and four casts of small gradients",
    ),
    "depthwise": Expected(
        (17, 42),
        PLAIN_UNITS + CONVOLUTION - BIAS + 3 * 2 * 0.66,
        "a kernel a stream each way, which rotates; a filter for each channel leaves large partial "
        "sums",
    ),
    "silu": Expected(
        (22, 47),
        PLAIN_UNITS + CONVOLUTION - BIAS + 3 * 2 * 0.66 + 3 * (2 + 3) + ROTATION,
        "and a kernel a stream each way, and two each way that rotate behind it",
    ),
    "multihead": Expected(
        (16, 44),
        # A quarter of the channels of q and k is turned where it lies; their gradients wholly.
        PLAIN_UNITS + CONVOLUTION + 3 + 3 * 2 * 0.33 + 2 * (0.25 + 0.25) + 2 * (1 + 1),
        "the filters' gradient reads dy once more, and so does the bias'; two kernels rotate",
    ),
    "maps": Expected((49, 118), 380.6, "each head's attention reads values of all 16 heads"),
    "llama-none": Expected((38, 77), 309.9, NORMS),
    "llama-head": Expected((31, 73), 286.3, f"{NORMS}; a kernel a stream, which rotates"),
    "llama-silu": Expected((39, 84), 298.1, f"{NORMS}; and a kernel a stream, and two that rotate"),
    "llama-multihead": Expected((33, 81), 293.3, f"{NORMS}; filters' gradients apart"),
}


def model(layers: int, family: str, fields: dict) -> torch.nn.Module:
    """Make the body of a model of the meta device."""
    kinds = architectures.get(family).classes()
    with torch.device("meta"):
        made = kinds.causal_lm(kinds.config(**SIZES | {"num_hidden_layers": layers} | fields))
    return made.base_model.train()


def passes(
    gpu: FakeGpu,
    body: torch.nn.Module,
    documents: int | None = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Counts, Counts]:
    """(forward, backward) of a body that was made on the meta device, with so many documents.

    None are documents of whose number only the device knows.
    """
    body = on_fake_gpu(body, dtype)
    embeds = torch.empty(BATCH, TIME, WIDTH, dtype=dtype, requires_grad=True)
    inputs = {}
    if documents != 0:
        inputs["document_ids"] = torch.empty(BATCH, TIME, dtype=torch.int64)
    if documents:
        inputs["document_borders"] = torch.empty(documents + 1, dtype=torch.int32)
    gpu.counts = Counts()
    hidden = body(inputs_embeds=embeds, use_cache=False, **inputs).last_hidden_state
    forward = copy.deepcopy(gpu.counts)
    hidden.backward(torch.empty_like(hidden))
    return forward, gpu.counts - forward


def layer(
    family: str = "gpt_neox", rotation=None, documents: int = 0, dtype=torch.bfloat16, **fields
) -> tuple[Counts, Counts]:
    """A layer's (forward, backward): what a second one adds."""
    found = []
    for layers in (1, 2):
        body = model(layers, family, fields)
        with fake_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
            if rotation is not None:
                patch.setattr(CatAttention, "rotate", staticmethod(rotation(gpu)))
            found.append(passes(gpu, body, documents, dtype))
    (first, first_back), (second, second_back) = found
    return second - first, second_back - first_back


def units(counts: tuple[Counts, Counts]) -> float:
    return sum(part.bytes for part in counts) / UNIT


def fused_rotation(gpu: FakeGpu):
    """Rotate as a compiled graph does: queries and keys in one kernel each way."""

    def rotate(query, key, cosines, sines):
        return gpu.in_one("rotation", 2, query, key, cosines, sines)

    return rotate


@pytest.mark.parametrize("kind", VARIANTS | LLAMA_VARIANTS)
def test_what_a_layer_launches_and_moves(kind):
    expected, counts = EXPECTED[kind], layer(**(VARIANTS | LLAMA_VARIANTS)[kind])
    assert tuple(part.launches for part in counts) == expected.kernels, expected.why
    assert units(counts) == pytest.approx(expected.units, abs=0.5), expected.why
    assert [part.waits for part in counts] == [[], []], "the host waits in a layer"


def test_without_positions_a_layer_is_the_sum_of_its_parts():
    counts = layer(conv_type="none", position_embedding="none")
    assert tuple(part.launches for part in counts) == PLAIN_KERNELS
    assert units(counts) == pytest.approx(PLAIN_UNITS, abs=0.1)


def test_convolutions_cost_no_more_than_a_fused_rotation():
    """Both rotate inside of a kernel; so a convolution wins or loses by itself alone."""
    pythia, cat = layer(rotation=fused_rotation, conv_type="none"), layer(conv_type="head")
    # The rotation reads and writes q and k each way.
    assert units(pythia) == pytest.approx(PLAIN_UNITS + 2 * (2 + 2), abs=0.1)
    assert units(cat) <= 1.02 * units(pythia)


@pytest.mark.parametrize("kind", ["none", "head", "depthwise", "multihead", "llama-head"])
def test_documents_cost_a_layer_nothing(kind):
    """Their positions are computed once a batch, and no layer reads or keeps a mask."""
    fields = (VARIANTS | LLAMA_VARIANTS)[kind]
    plain, packed = layer(**fields), layer(documents=40, **fields)
    # What transformers rotated lies head by head, and is copied once, to be joined.
    copies = packed[0].launches - plain[0].launches
    assert copies == (kind == "none") and packed[1].launches == plain[1].launches
    assert units(packed) <= units(plain) + 2 * copies + 0.5
    assert [part.waits for part in packed] == [[], []]


def test_a_mask_of_documents_is_seen():
    """Negative control: fp32, for which there is no flash attention, as before there was one."""
    plain = layer(dtype=torch.float32, conv_type="head")
    masked = layer(dtype=torch.float32, documents=40, conv_type="head")
    assert (
        "aten::masked_fill_" in masked[0].kernels and "aten::masked_fill_" not in plain[0].kernels
    )
    assert units(masked) > units(plain) + 10


def test_only_borders_that_are_not_given_make_the_host_wait():
    for documents, waits in ((40, []), (None, ["aten::nonzero"])):
        body = model(1, "gpt_neox", VARIANTS["head"])
        with fake_gpu() as gpu:
            wait = pytest.raises(DynamicOutputShapeException) if waits else nullcontext()
            with wait:
                passes(gpu, body, documents)
            assert gpu.counts.waits == waits


def test_the_gpu_notices_what_is_added():
    """Negative control: a copy, a wait, and a view, which is neither."""
    with fake_gpu() as gpu:
        x = torch.empty(4, 1024, dtype=torch.bfloat16)
        gpu.counts = Counts()
        x.mT.unflatten(0, (2, -1))
        assert (gpu.counts.launches, gpu.counts.bytes, gpu.counts.waits) == (0, 0, [])
        x.mT.contiguous()
        assert (gpu.counts.launches, gpu.counts.bytes) == (1, 2 * 4 * 1024 * 2)
        x[:1].expand(4, -1).clone()
        assert gpu.counts.bytes == (2 * 4 + 1 + 4) * 1024 * 2
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        assert gpu.counts.waits == ["aten::_local_scalar_dense"]
