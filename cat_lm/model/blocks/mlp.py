"""GPT-NeoX's MLP, which computes its first bias and GELU in one pass when it learns on a CPU."""

from __future__ import annotations

from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import GELUActivation
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

from cat_lm.ops.activation.gelu import DTYPES, gelu_with_bias
from cat_lm.ops.runtime.operators import has_tangent, is_differentiated


class CatMLP(GPTNeoXMLP):
    """W_2 act(W_1 x + b_1) + b_2, with the modules of GPT-NeoX."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense_4h_to_h(activate(self.dense_h_to_4h, self.act, hidden_states))


def activate(linear: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """Return activation(linear(x)).

    In training on a CPU, the bias of a linear layer and an exact GELU are computed by one operator.
    Without gradients the modules are called, so that evaluation has the same bits as transformers.
    """
    if _is_one_operator(linear, activation, x):
        return gelu_with_bias(F.linear(x, linear.weight), linear.bias)
    return activation(linear(x))


def _is_one_operator(linear: nn.Module, activation: nn.Module, x: Tensor) -> bool:
    if not (linear.training and x.device.type == "cpu" and x.dtype in DTYPES):
        return False
    if not (_is_unchanged(linear, nn.Linear) and _is_unchanged(activation, GELUActivation)):
        return False
    tensors = x, linear.weight, linear.bias
    if linear.bias is None or not is_differentiated(*tensors):
        return False
    # The operator has neither forward-mode derivatives nor those of torch.func.
    return not has_tangent(*tensors) and not _are_functorch_transforms_active()


def _is_unchanged(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a call of the module is the forward of its class and nothing else.

    Adapters and quantization replace modules or their forward. Hooks see a module's output, or
    gather its parameters first, as those of ZeRO-3 do.
    """
    hooks = (
        *(module._forward_pre_hooks, module._forward_hooks),
        *(module._backward_pre_hooks, module._backward_hooks),
    )
    has_hooks = any(hooks) or _has_any_global_hook()
    return type(module) is kind and "forward" not in vars(module) and not has_hooks
