"""The model of the room: that of S4's code for the Long Range Arena, around any mixer.

    x = embedding or Linear of the inputs;  layer: x = x + f(norm x) or x = norm(x + f(x)),
    f first the mixer, then a network of 4 times the width with GELU;  a norm after the last layer
    where norms stand before; the mean over a row's positions, its last one, or each; Linear.

Norms are LayerNorm, or BatchNorm over rows and positions, padding counted, as S4 has it. Two
documents u and v of a row pass the same encoder and a head over (u, v, u − v, u v).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cat_lm.mixers import Mixer, Setting
from cat_lm.model.blocks.residual import Block
from cat_lm.model.context import Context
from eval.long_range.mixers import KIND
from eval.long_range.tasks import Task

NORMS, POOLS = ("layer", "batch"), ("mean", "last")


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm of each channel of [B, T, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class OneWay(nn.Module):
    """A causal mixer of the registry, which never reads the padding at rows' ends."""

    def __init__(self, mixer: Mixer, setting: Setting) -> None:
        super().__init__()
        self.mixer = mixer.build(setting)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix; a mixer that has a loss of its own adds it."""
        return self.mixer(x, Context(losses=context.losses))


class BothWays(nn.Module):
    """Two causal mixers of the registry, of which one reads rows from their end; their sum."""

    def __init__(self, mixer: Mixer, setting: Setting) -> None:
        super().__init__()
        self.there, self.back = OneWay(mixer, setting), OneWay(mixer, setting)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix. Padding stands at rows' ends, where neither mixer reads it for a real position."""
        real = context.padding
        if real is None:
            return self.there(x, context) + self.back(x.flip(1), context).flip(1)
        time = torch.arange(x.shape[1], device=x.device)
        lengths = real.sum(dim=1, keepdim=True)
        turned = torch.where(time < lengths, lengths - 1 - time, time)
        index = turned[..., None].expand_as(x)
        back = self.back(x.gather(1, index), context).gather(1, index)
        return self.there(x, context) + back


def build_mixer(mixer: Mixer, setting: Setting, is_causal: bool) -> nn.Module:
    """Make a layer's mixer.

    Raises:
        UserError: options that do not fit the width.
    """
    if mixer.kind is KIND:
        mixer.check(setting)
        return KIND.build_encoder(mixer.options, setting, is_causal)
    return (OneWay if is_causal else BothWays)(mixer, setting)


class LongRangeModel(nn.Module):
    """Inputs of a task to logits [n, classes] or values [n, scored].

    Args:
        norm: of NORMS; pool: of POOLS, what a class is read from.
        norm_first: whether norms stand before what they belong to.
        feed_forward: whether layers have a network beside the mixer.
    """

    def __init__(
        self,
        task: Task,
        mixer: Mixer,
        *,
        d_model: int,
        layers: int,
        norm: str,
        norm_first: bool,
        pool: str,
        is_causal: bool,
        feed_forward: bool,
    ) -> None:
        super().__init__()
        self.task, self.pool = task, pool
        self.encoder: nn.Module
        if task.vocabulary:
            self.encoder = nn.Embedding(task.vocabulary, d_model)  # of deviation 1, as S4's
        else:
            self.encoder = nn.Linear(task.channels, d_model)
        self.positions = _positions(mixer, task.length, d_model)
        norms = {"layer": nn.LayerNorm, "batch": BatchNorm}[norm]
        self.layers = nn.ModuleList()
        for layer in range(layers):
            mixes = build_mixer(mixer, Setting(d_model, layer, layers), is_causal)
            parts = [norms(d_model), mixes]
            if feed_forward:
                wide = nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model)
                parts += [norms(d_model), nn.Sequential(*wide)]
            self.layers.append(Block(*parts, norm_first=norm_first))
        self.norm = norms(d_model) if norm_first else nn.Identity()
        out = task.classes or 1
        self.head: nn.Module = nn.Linear(d_model, out)
        if task.towers == 2:
            self.head = nn.Sequential(
                nn.Linear(4 * d_model, d_model), nn.GELU(), nn.Linear(d_model, out)
            )

    def forward(
        self, inputs: Tensor, lengths: Tensor, losses: list[Tensor] | None = None
    ) -> Tensor:
        """Answer.

        Args:
            inputs: [n, T] ids or [n, T, channels]; of two towers [n, 2, T].
            lengths: [n] or [n, 2], positions that are no padding.
            losses: where layers that have a loss of their own add it.
        """
        if self.task.towers == 2:
            pooled = self._pooled(inputs.flatten(0, 1), lengths.flatten(), losses)
            u, v = pooled.unflatten(0, (-1, 2)).unbind(1)
            return self.head(torch.cat([u, v, u - v, u * v], dim=-1))
        if self.task.scored:
            hidden = self.hidden(inputs, lengths, losses)
            return self.head(hidden[:, -self.task.scored :]).squeeze(-1)
        return self.head(self._pooled(inputs, lengths, losses))

    def hidden(self, inputs: Tensor, lengths: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        """Return what the last layer makes of every position, [n, T, C]."""
        x = self.encoder(inputs)
        time = x.shape[1]
        if self.positions is not None:
            x = x + self.positions[:time]
        real = torch.arange(time, device=x.device) < lengths[:, None]
        context = Context(padding=None if self.task.scored else real, losses=losses)
        for layer in self.layers:
            x = layer(x, context)
        return self.norm(x)

    def _pooled(self, inputs: Tensor, lengths: Tensor, losses: list[Tensor] | None) -> Tensor:
        x = self.hidden(inputs, lengths, losses)
        if self.pool == "last":
            return x[torch.arange(len(x), device=x.device), lengths - 1]
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        return (x * real[..., None]).sum(dim=1) / lengths[:, None]


def _positions(mixer: Mixer, length: int, width: int) -> Tensor | None:
    """Make the table that is added to embeddings, [T, C]: sinusoidal, learned or none."""
    if mixer.learned_positions:
        return nn.Parameter(torch.randn(length, width) * 0.02)
    if mixer.kind is not KIND or mixer.options.position != "sinusoidal":
        return None
    return nn.Buffer(sinusoids(length, width), persistent=False)


def sinusoids(length: int, width: int) -> Tensor:
    """Return sines and cosines of positions (Vaswani et al., 2017, section 3.5), [T, C]."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
