"""The model of long-range tasks: that of S4's code for the Long Range Arena, around any mixer.

    x = embedding or Linear of the inputs;  layer: x = x + f(norm x) or x = norm(x + f(x)),
    f first the mixer, then a network of 4 times the width with GELU;  a norm after the last layer
    where norms stand before; the mean over a row's positions, its last one, or each; Linear.

Norms are LayerNorm, or BatchNorm over rows and positions, padding counted, as S4 has it. Two
documents u and v of a row pass the same encoder and a head over (u, v, u − v, u v). Padding stands
at the end of rows: a causal mixer never meets it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cat_lm.core.errors import UserError
from cat_lm.mixers import Mixer, Setting
from cat_lm.mixers.parts.attention import rotary_angles
from cat_lm.model.attention.modules.call import AttentionCall
from cat_lm.model.attention.modules.las import DecayScores, SmoothedValues
from cat_lm.model.attention.modules.scores import (
    ScoreModule,
    attend_by_rows,
    scale_queries_and_keys,
)
from cat_lm.model.blocks.residual import Block
from cat_lm.model.context import Context
from cat_lm.ops import head_conv
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.api import centred_conv
from eval.long_range.mixers import KIND, Options
from eval.long_range.tasks import Task

if TYPE_CHECKING:
    from eval.long_range.cell import Cell


class AlibiScores(ScoreModule):
    """l − m_h |i − j| with m_h = 2^{−8 (h + 1) / H} (Press et al., 2022); later keys of a causal
    model are masked.

    Args:
        heads: H.
        scale: the scale of the bias: 1, or 1/√D as the LaS paper's equation 2 has it.
    """

    def __init__(self, heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale

    def separates(self, queries: int, dtype: torch.dtype, implementation: str) -> bool:
        return False

    def score(
        self, logits: Tensor, query_position: Tensor, key_position: Tensor, head: Tensor
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        slopes = 2 ** (-8 * (head + 1).to(dtype) / self.heads)
        return logits - self.scale * slopes * (query_position - key_position).abs()


class LearnedFilter(nn.Module):
    """CAT's filter of values, one of W taps for each head, over the past or over both sides."""

    def __init__(self, heads: int, width: int, start: str, is_centred: bool) -> None:
        super().__init__()
        self.is_centred = is_centred
        if start == "box":
            taps = torch.full((heads, width), 1 / width)
        else:
            taps = kinds.HEAD.identity(heads, 1, width)
            taps = taps.roll(width // 2, dims=1) if is_centred else taps
        self.taps = nn.Parameter(taps)

    def forward(self, value: Tensor, context: Context) -> Tensor:
        convolve = centred_conv if self.is_centred else head_conv
        return convolve(context.without_padding(value), self.taps)


class Attention(nn.Module):
    """One layer, [B, T, C] to [B, T, C].

    Decay, box and rotations are the language models' own; where queries read both sides, the decay
    has no factors, and logits are computed for some queries at a time.
    """

    def __init__(self, options: Options, setting: Setting, is_causal: bool) -> None:
        super().__init__()
        width, self.heads = setting.d_model, options.heads
        self.options, self.is_causal = options, is_causal
        self.projection = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.scores: ScoreModule | None = None
        if options.position.startswith("alibi"):
            is_scaled = options.position == "alibi-scaled"
            scale = 1 / math.sqrt(width // self.heads) if is_scaled else 1.0
            self.scores = AlibiScores(self.heads, scale)
        elif options.decay != "none":
            self.scores = DecayScores(self.heads, options.decay, options.bound, not is_causal)
        is_centred = options.place == "centred" or (options.place == "auto" and not is_causal)
        self.values: nn.Module | None = None
        if options.values == "learned":
            self.values = LearnedFilter(self.heads, options.width, options.start, is_centred)
        elif options.values == "box":
            self.values = SmoothedValues(options.width, None, is_centred)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix x [B, T, C], in chunks or in whole rows; it reads the context's padding."""
        rows, time, padding = *x.shape[:2], context.padding
        size = self.options.chunk or time
        if size >= time:
            return self._mix(x, padding)
        if padding is None and time % size:
            padding = x.new_ones(x.shape[:2], dtype=torch.bool)
        mixed = self._mix(
            _in_chunks(x, size), None if padding is None else _in_chunks(padding, size)
        )
        return mixed.reshape(rows, -1, x.shape[2])[:, :time]

    def _mix(self, x: Tensor, padding: Tensor | None) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, self.heads, -1)).unbind(dim=2)
        if self.options.position == "rope":
            cos, sin = rotary_angles(torch.arange(q.shape[1], device=q.device)[None], q)
            q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        if self.values is not None:
            v = self.values(v, Context(padding=padding))
        mask = None if self.is_causal else self._visible(x, padding)
        y = self._attend(*(stream.transpose(1, 2) for stream in (q, k, v)), mask)
        return self.out_proj(y.flatten(2))

    def _visible(self, x: Tensor, real: Tensor | None) -> Tensor | None:
        """Return the visible keys of a row's queries, [B or 1, 1, T, T], as a view."""
        if real is None and self.scores is None:
            return None
        time = x.shape[1]
        if real is None:
            real = x.new_ones(1, time, dtype=torch.bool)
        # A chunk of padding alone reads itself: what it gives is read by nobody.
        real = real | ~real.any(dim=1, keepdim=True)
        return real[:, None, None].expand(len(real), 1, time, time)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to streams [B, H, T, D]; return [B, T, H, D]."""
        time, scaling = q.shape[2], q.shape[3] ** -0.5
        if self.scores is not None:
            where = torch.arange(time, device=q.device)[None]
            if not self.scores.separates(time, q.dtype, "sdpa"):
                how = {"positions": where, "key_positions": where, "scaling": scaling}
                return attend_by_rows(self.scores, q, k, v, AttentionCall(mask=mask, **how))
            q, k = scale_queries_and_keys(self.scores, q, k, where, where)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.is_causal, scale=scaling
        )
        return y.transpose(1, 2)


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Split rows [B, T, …] into padded chunks [B n, size, …]."""
    filled = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % size))
    return filled.unflatten(1, (-1, size)).flatten(0, 1)


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm of each channel of [B, T, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class UnidirectionalMixer(nn.Module):
    """A causal mixer of the registry, which never reads the padding at rows' ends."""

    def __init__(self, mixer: Mixer, setting: Setting) -> None:
        super().__init__()
        self.mixer = mixer.build(setting)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix; a mixer that has a loss of its own adds it."""
        return self.mixer(x, Context(losses=context.losses))


class BidirectionalMixer(nn.Module):
    """Two causal mixers of the registry, of which one reads rows from their end; their sum."""

    def __init__(self, mixer: Mixer, setting: Setting) -> None:
        super().__init__()
        self.there, self.back = (
            UnidirectionalMixer(mixer, setting),
            UnidirectionalMixer(mixer, setting),
        )

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
    """Make a layer's mixer. Raises UserError for options that do not fit the width."""
    if mixer.kind is KIND:
        mixer.check(setting)
        return Attention(mixer.options, setting, is_causal)
    return (UnidirectionalMixer if is_causal else BidirectionalMixer)(mixer, setting)


class LongRangeModel(nn.Module):
    """The model of a cell: inputs to logits [n, classes] or values [n, scored].

    Raises:
        UserError: options that do not fit.
    """

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.task, self.pool, mixer = cell.make_task(), cell.pool, cell.make_mixer()
        task, width, layers = self.task, cell.d_model, cell.layers
        _check_lengths(cell.mixer, mixer, task)
        self.encoder: nn.Module
        if task.vocabulary:
            # It is initialized with standard deviation 1, as in S4.
            self.encoder = nn.Embedding(task.vocabulary, width)
        else:
            self.encoder = nn.Linear(task.channels, width)
        self.positions = _positions(mixer, task.length, width)
        norms = {"layer": nn.LayerNorm, "batch": BatchNorm}[cell.norm]
        self.layers = nn.ModuleList()
        for layer in range(layers):
            mixes = build_mixer(mixer, Setting(width, layer, layers), cell.is_causal)
            parts = [norms(width), mixes]
            if cell.feed_forward:
                wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                parts += [norms(width), nn.Sequential(*wide)]
            self.layers.append(Block(*parts, norm_first=cell.norm_first))
        self.norm = norms(width) if cell.norm_first else nn.Identity()
        out = task.classes or 1
        self.head: nn.Module = nn.Linear(width, out)
        if task.towers == 2:
            self.head = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, out))

    def forward(
        self, inputs: Tensor, lengths: Tensor, losses: list[Tensor] | None = None
    ) -> Tensor:
        """Return the logits or values of rows.

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


def _check_lengths(name: str, mixer: Mixer, task: Task) -> None:
    """Refuse a chunk that cuts no row, and a smoother that reaches beyond all of one."""
    options, wrong = mixer.options, ""
    if mixer.kind is KIND and options.chunk >= task.length:
        wrong = f"chunk={options.chunk}: cuts no row; leave it out"
    elif mixer.kind is KIND and options.values != "none" and options.width > task.length:
        wrong = f"width={options.width}: reaches beyond every row; give fewer"
    if wrong:
        raise UserError(
            f"mixer {name}: {wrong} ({task.name} has {task.length:,} positions at most)"
        )


def _positions(mixer: Mixer, length: int, width: int) -> Tensor | None:
    """Return the position table added to embeddings, [T, C]: sinusoidal, learned or None."""
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
