"""A mixer whose module has buffers, as a plugin's may: `features` and `features:learns=…`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor, nn

from cat_lm.mixers import MixerKind, Setting, register
from cat_lm.model.context import Context


@dataclass(frozen=True)
class Options:
    """What buffers the module has beside those that never change.

    `learns`: "" (none), "alone" or "together" (running statistics), "lost" (not
    saved), "turned" (put in its place with other strides), "own" (what a rank keeps from batch to
    batch, and never saves).
    """

    learns: str = ""


class Features(MixerKind):
    """Linear attention on random features."""

    name = "features"
    Options = Options

    def build(self, options: Options, setting: Setting) -> nn.Module:
        return RandomFeatures(setting.d_model, options.learns)


class RandomFeatures(nn.Module):
    """y_t = Σ_s≤t φ(q_t)·φ(k_s) v_s, over the sum of the weights, φ(x) = exp(ω x)."""

    def __init__(self, width: int, learns: str) -> None:
        super().__init__()
        self.learns = learns
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.register_buffer("omega", torch.randn(width, 8) / width**0.5)
        self.register_buffer("start", self.qkv.weight.detach()[0].clone())
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("one", torch.ones(()).expand(2, 3))
        self.register_buffer("used", torch.randn(8) > 0)
        if learns in ("alone", "together"):
            self.register_buffer("mean", torch.zeros(width))
        if learns == "lost":
            self.register_buffer("table", torch.arange(8.0), persistent=False)
        if learns == "own":
            self.register_buffer("last", None, persistent=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.training and self.learns:
            self._learn(x.detach().mean(dim=(0, 1)))
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        kept = self.used[self.order]
        query, key = ((kept * (z @ self.omega).clamp(max=5)).exp() for z in (query, key))
        sums = torch.einsum("btf,btc->btfc", key, value).cumsum(dim=1)
        weights = torch.einsum("btf,btf->bt", query, key.cumsum(dim=1))
        return torch.einsum("btf,btfc->btc", query, sums) / weights[..., None] + self.start

    @torch.no_grad()
    def _learn(self, mean: Tensor) -> None:
        if self.learns == "turned":
            self.omega = self.omega.t().contiguous().t()
            return
        if self.learns == "own":
            self.last = mean
            return
        if self.learns == "together" and torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(mean)
        self.mean.lerp_(mean.to(self.mean), 0.5)
        self.start.add_(0.01 * self.mean)


register(Features())
