"""flash-linear-attention's operators on a GPU, for `operator=fla`.

The recurrent Triton operators of GLA and of the delta rule: the recurrence as it reads, a whole
sequence in one kernel, all products and sums in fp32, forward and backward. They compute what the
torch forms do, and differ by the order of sums alone.

Its chunked operators do not serve here, where everything is trained in fp32: that of the delta rule
refuses fp32, and those of GLA and of the gated delta rule multiply on matrix units in TF32. The
gated delta rule's recurrent operator has no backward pass, so that Gated DeltaNet has the torch
form alone; Based and linear attention are a few large products in torch already. No operator of the
package has a rule for torch.func.vmap: models trained in a stack need `operator=torch`.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from cat_lm.errors import UserError

OPERATORS = ("torch", "fla")


def check_operator(name: str) -> None:
    """For options.

    Raises:
        ValueError: an unknown operator, or one of a package that is not here.
    """
    if name not in OPERATORS:
        raise ValueError(f"operator={name!r}: must be torch or fla")
    if name == "fla" and importlib.util.find_spec("fla") is None:
        raise ValueError(
            "operator=fla: fla-core is not installed (pip install fla-core); or use operator=torch"
        )


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """As the gated linear attention of a decaying scan, o [B, T, H, V].

    Raises:
        UserError: tensors that are not on a GPU, or are batched over models.
    """
    check_tensor(q)
    from fla.ops.gla import fused_recurrent_gla

    return fused_recurrent_gla(q, k, v, gk=log_decay)[0]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """As `cat_lm.ops.recurrence.delta_rule` without decay.

    Raises:
        UserError: tensors that are not on a GPU, or are batched over models.
    """
    check_tensor(q)
    from fla.ops.delta_rule import fused_recurrent_delta_rule

    return fused_recurrent_delta_rule(q, k, v, beta)[0]


def check_tensor(x: Tensor) -> None:
    """Refuses what the operators cannot do, by name."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise UserError("operator=fla: it cannot train models in a stack; use operator=torch")
    if not x.is_cuda:
        raise UserError(
            f"operator=fla: it needs a CUDA GPU, not {x.device.type}; use --device cuda"
        )
