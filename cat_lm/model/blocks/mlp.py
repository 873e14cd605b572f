"""GPT-NeoX's MLP, which computes its first bias and GELU in one pass when it learns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.nn import functional as F
from transformers.activations import GELUActivation
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

from cat_lm.ops.activation.gelu import DTYPES, gelu_with_bias
from cat_lm.ops.runtime.modules import is_unchanged
from cat_lm.ops.runtime.operators import has_tangent, is_differentiated
from cat_lm.ops.runtime.triton_launch import INSTALLED


class CatMLP(GPTNeoXMLP):
    """W_2 act(W_1 x + b_1) + b_2, with the modules of GPT-NeoX."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense_4h_to_h(activate(self.dense_h_to_4h, self.act, hidden_states))


def activate(linear: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """Return activation(linear(x)).

    In training, the bias of a linear layer and an exact GELU are computed by one operator.
    Without gradients the modules are called, so that evaluation has the same bits as transformers.
    """
    if _is_one_operator(linear, activation, x):
        return gelu_with_bias(F.linear(x, linear.weight), linear.bias)
    return activation(linear(x))


def _is_one_operator(linear: nn.Module, activation: nn.Module, x: Tensor) -> bool:
    if not (linear.training and x.dtype in DTYPES and _has_kernel(x.device)):
        return False
    if not (is_unchanged(linear, nn.Linear) and is_unchanged(activation, GELUActivation)):
        return False
    tensors = x, linear.weight, linear.bias
    if linear.bias is None or not is_differentiated(*tensors):
        return False
    # The operator has neither forward-mode derivatives nor those of torch.func.
    return not has_tangent(*tensors) and not _are_functorch_transforms_active()


def _has_kernel(device: torch.device) -> bool:
    """Return True on a CPU, and on a GPU where nothing else joins operators."""
    if device.type == "cpu":
        return True
    return device.type == "cuda" and INSTALLED and not torch.compiler.is_compiling()
