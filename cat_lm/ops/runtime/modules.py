"""Whether a module of torch can be replaced by an operator on its weights."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def is_unchanged(module: nn.Module, kind: type[nn.Module]) -> bool:
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
