"""Bias and GELU in one operator, by the C++ kernel and by torch: values, gradients and threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.activation import gelu
from cat_lm.ops.activation.gelu import KERNEL, gelu_with_bias

needs_kernel = pytest.mark.skipif(not KERNEL.is_built, reason="the C++ kernel cannot be built")
HALF = (torch.bfloat16, torch.float16)
# More rows than a block's, and numbers that are no multiple of a vector's.
SHAPES = [(3, 37, 53), (67, 130), (1, 1), (5,), (0, 7), (4, 0)]


@pytest.fixture(params=[pytest.param("kernel", marks=needs_kernel), "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(gelu, "_has_kernel", lambda *_: False)
    return request.param


def draw(shape: tuple[int, ...], dtype: torch.dtype, bias_dtype=None) -> tuple[Tensor, ...]:
    """Return a product, a bias and a gradient."""
    torch.manual_seed(0)
    product, grad = torch.randn(2, *shape).mul(3).to(dtype)
    return product, torch.randn(shape[-1:]).to(bias_dtype or dtype), grad


def computed(product: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    """Return y, and the gradients of the product and the bias."""
    leaves = [x.detach().requires_grad_() for x in (product, bias)]
    y = gelu_with_bias(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def exact(product: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in (product, bias)]
    y = 0.5 * sum(leaves) * (1 + torch.erf(sum(leaves) / 2**0.5))
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.double())]


def assert_rounded_once(found: Tensor, wanted: Tensor, dtype: torch.dtype, error: float) -> None:
    """Check that each number is the wanted one, rounded once, but for an error before that."""
    assert found.dtype == dtype and found.shape == wanted.shape
    bound = 0.51 * torch.finfo(dtype).eps * wanted.abs() + error + torch.finfo(dtype).tiny
    assert ((found.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_gelu_and_its_gradients_equal_those_in_double_precision(backend, dtype, shape):
    given = draw(shape, dtype)
    found, wanted = computed(*given), exact(*given)
    largest = given[2].abs().max().item() if given[2].numel() else 0.0
    rows = given[0].numel() // max(1, shape[-1])
    errors = 2e-6, 2e-6 * largest, 2e-6 * largest * rows
    for pair in zip(found, wanted, errors, strict=True):
        assert_rounded_once(*pair[:2], dtype, pair[2])


def test_double_precision_is_torchs(backend):
    given = draw((3, 5), torch.float64)
    for one, other in zip(computed(*given), exact(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@needs_kernel
def test_kernel_is_as_exact_as_fp32():
    z = torch.cat([torch.linspace(-9, 9, 400_001), torch.tensor([0.0, 1e-30, 40.0, 3e38])])
    z = torch.cat([z, -z])[None]
    y, slope, _ = computed(z, torch.zeros(z.shape[1]), torch.ones_like(z))
    wanted = exact(z, torch.zeros(z.shape[1]), torch.ones_like(z))
    assert_rounded_once(y, wanted[0], torch.float32, 1.2e-7 + 1e-6 * wanted[0].abs())
    assert_rounded_once(slope, wanted[1], torch.float32, 7e-7)
    extremes = torch.tensor([[torch.inf, -torch.inf, torch.nan]])
    y, slope, _ = computed(extremes, torch.zeros(3), torch.ones(1, 3))
    assert y[0, 0] == torch.inf and abs(y[0, 1]) < 1e-7 and y[0, 2].isnan()
    assert slope[0, 0] == 1 and abs(slope[0, 1]) < 1e-7 and slope[0, 2].isnan()


@pytest.mark.parametrize("dtype", HALF)
def test_bias_of_a_wider_dtype_is_not_rounded(backend, dtype):
    """As under autocast: parameters stay in fp32 and get gradients in fp32."""
    given = draw((67, 130), dtype, torch.float32)
    (y, of_product, of_bias), wanted = computed(*given), exact(*given)
    assert_rounded_once(y, wanted[0], dtype, 2e-6)
    assert_rounded_once(of_product, wanted[1], dtype, 2e-5)
    assert_rounded_once(of_bias, wanted[2], torch.float32, 1e-4)


@needs_kernel
def test_strided_tensors_compute_as_contiguous_ones():
    product, bias, grad = draw((70, 33), torch.float32)
    wanted = computed(product, bias, torch.ones_like(grad))
    strided = torch.stack([product, grad], dim=-1)[..., 0]
    ones = torch.ones(()).expand_as(grad)
    for given in (strided, product.T.contiguous().T):
        found = computed(given, torch.stack([bias, bias], dim=-1)[..., 0], ones)
        assert all(map(torch.equal, found, wanted))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_compute_the_same_bits(dtype):
    given, before = draw((1111, 96), dtype), torch.get_num_threads()
    assert given[0].numel() > KERNEL.small
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(computed(*given))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_second_derivatives_are_torchs(backend):
    product, bias, _ = (x.requires_grad_() for x in draw((3, 5), torch.float64))
    assert torch.autograd.gradgradcheck(gelu_with_bias, (product, bias))
    leaves = [x.detach().float().requires_grad_() for x in (product, bias)]
    curvatures = []
    for function in (gelu_with_bias, lambda x, b: F.gelu(x + b)):
        slopes = torch.autograd.grad(function(*leaves).sum(), leaves, create_graph=True)
        curvatures.append(torch.autograd.grad(sum(s.square().sum() for s in slopes), leaves))
    torch.testing.assert_close(*curvatures)


def test_models_of_vmap_compute_in_turn(backend):
    product, bias, grad = draw((4, 6, 5), torch.float32)
    found = torch.func.vmap(gelu_with_bias, in_dims=(0, None))(product, bias)
    assert torch.equal(found, torch.stack([gelu_with_bias(x, bias) for x in product]))
    leaves = [x.requires_grad_() for x in (product[0], bias)]
    y = gelu_with_bias(*leaves)
    slopes = [torch.autograd.grad(y, leaves, g, retain_graph=True) for g in grad]
    batched = torch.autograd.grad(y, leaves, grad, is_grads_batched=True)
    assert all(map(torch.equal, batched, map(torch.stack, zip(*slopes, strict=True))))


def test_bias_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"a bias \[4\] does not fit a product \[2, 3\]"):
        gelu_with_bias(torch.zeros(2, 3), torch.zeros(4))
