"""A mixer whose module has buffers, as a plugin's may: `features` and `features:learns=…`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor, nn

from cat_lm.mixers import MixerKind, Setting
from cat_lm.model.context import Context


@dataclass(frozen=True)
class Options:
    """Which buffers change: "" (none), "together" (statistics of all ranks); "lost": not saved."""

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
        if learns == "together":
            self.register_buffer("mean", torch.zeros(width))
        if learns == "lost":
            self.register_buffer("table", torch.arange(8.0), persistent=False)

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
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(mean)
        self.mean.lerp_(mean.to(self.mean), 0.5)
        self.start.add_(0.01 * self.mean)
