"""A block of a mixer and a feed-forward network, each with a norm, on the residual stream."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from cat_lm.model.context import Context, at_least_fp32


class GatedMLP(nn.Module):
    """SwiGLU: W_down (SiLU(W_gate x) ⊙ W_up x), without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(GradientCheckpointingLayer):
    """h ← h + mixer(norm h), and with a feed-forward network h ← h + MLP(norm h).

    With norms last: h ← norm(h + mixer h), h ← norm(h + MLP h).

    Args:
        norm: the norm of the mixer's input.
        mixer: takes x [B, T, C] and a `Context`.
        mlp_norm: the norm of the feed-forward network's input; None without a network.
        mlp: the feed-forward network.
        residual_in_fp32: whether the residual stream stays in fp32 whatever the precision; the
            norm then gets its own precision. None for what the inputs have.
        norm_first: whether norms stand before what they belong to.

    Attributes:
        names: of both norms, the mixer and the network, which stand in this order.
    """

    names: ClassVar[tuple[str, str, str, str]] = ("attn_norm", "mlp_norm", "attn", "mlp")

    def __init__(
        self,
        norm: nn.Module,
        mixer: nn.Module,
        mlp_norm: nn.Module | None = None,
        mlp: nn.Module | None = None,
        residual_in_fp32: bool | None = None,
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        self.residual_in_fp32, self.norm_first = residual_in_fp32, norm_first
        for name, part in zip(self.names, (norm, mlp_norm, mixer, mlp), strict=True):
            self.add_module(name, part)

    @property
    def token_mixer(self) -> nn.Module:
        return self._modules[self.names[2]]

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        norm, mlp_norm, mixer, mlp = [self._modules[name] for name in self.names]
        if not self.norm_first:
            hidden_states = norm(hidden_states + mixer(hidden_states, context))
            return hidden_states if mlp is None else mlp_norm(hidden_states + mlp(hidden_states))
        residual = at_least_fp32(hidden_states) if self.residual_in_fp32 else hidden_states
        if self.residual_in_fp32 is not None:
            hidden_states = hidden_states.to(norm.weight.dtype)
        hidden_states = residual + mixer(norm(hidden_states), context)
        return hidden_states if mlp is None else hidden_states + mlp(mlp_norm(hidden_states))
