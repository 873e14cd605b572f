"""`CatMambaForCausalLM`: Mamba (Gu and Dao, 2023), with the library's names of parameters.

    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t,   y_t = C_t h_t + D x_t

in every layer between a short convolution and a gate, with one norm and no MLP beside it. Step
sizes, decays and states are computed in fp32 whatever the precision. Documents and padding are as
of `cat_lm.mixers`; the library's class, which knows neither packed documents nor how to go on from
a state with several tokens, computes the same logits.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cat_lm.mixers.modules.context import State, at_least_fp32, from_state, without_padding
from cat_lm.mixers.modules.mamba import selective_scan
from cat_lm.model.hf.configuration_mamba import CatMambaConfig
from cat_lm.model.hf.recurrent import RecurrentBody, RecurrentCausalLM, RecurrentPreTrained, mix
from cat_lm.model.mixer_cache import MixerCache
from cat_lm.model.sequence import SequenceGroup, own_heads, to_heads, to_sequence, to_tokens
from cat_lm.model.short_convolution import ShortConvolution
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead


def first_steps(config: CatMambaConfig, count: int) -> Tensor:
    """Draw softplus⁻¹(Δ) [count] for step sizes that are spread evenly in their logarithm."""
    low, high = math.log(config.time_step_min), math.log(config.time_step_max)
    steps = (low + (high - low) * torch.rand(count)).exp().clamp(min=config.time_step_floor)
    return steps + torch.log(-torch.expm1(-steps))


def first_output(config: CatMambaConfig, weight: Tensor) -> Tensor:
    """Draw a projection that writes to the residual stream, as torch draws a linear layer."""
    bound = 1 / math.sqrt(weight.shape[1])
    if config.rescale_prenorm_residual:
        bound /= math.sqrt(config.num_hidden_layers)
    return torch.empty_like(weight).uniform_(-bound, bound)


class StepProjection(nn.Linear):
    """The projection to Δ before its softplus, whose bias is added in fp32.

    The bias sets time scales over two orders of magnitude, which bf16 would round.
    """

    def forward(self, low_rank: Tensor) -> Tensor:
        return at_least_fp32(F.linear(low_rank, self.weight)) + at_least_fp32(self.bias)


class MambaMixer(nn.Module):
    """The selective state space of a layer. I inner channels, N numbers of state for each."""

    no_decay = ("A_log", "D")
    sequence_group: SequenceGroup | None = None

    def __init__(self, config: CatMambaConfig) -> None:
        super().__init__()
        self.config, self.mixer_backend = config, "auto"
        width, inner = config.hidden_size, config.intermediate_size
        self.sizes = [config.time_step_rank, config.state_size, config.state_size]
        self.in_proj = nn.Linear(width, 2 * inner, bias=config.use_bias)
        self.conv1d = ShortConvolution(inner, config.conv_kernel, config.use_conv_bias)
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        self.dt_proj = StepProjection(config.time_step_rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, config.state_size))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, width, bias=config.use_bias)

    def initial_values(self) -> dict[str, Tensor]:
        """Return what the parameters start from, by name; the other projections' start is usual."""
        inner, states = self.A_log.shape
        bound = self.config.time_step_rank**-0.5
        return {
            "A_log": torch.arange(1.0, states + 1).log().expand(inner, -1),
            "D": torch.ones(inner),
            "dt_proj.weight": torch.empty_like(self.dt_proj.weight).uniform_(-bound, bound),
            "dt_proj.bias": first_steps(self.config, inner),
            "out_proj.weight": first_output(self.config, self.out_proj.weight),
        }

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        """Compute [B, T, C]; see `cat_lm.mixers.base`."""
        how = {"document_ids": document_ids, "state": state}
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = self.conv1d(x, padding_mask=padding_mask, **how)
        low_rank, b, c = self.x_proj(x).split(self.sizes, dim=-1)
        # A step of no length leaves the state as it was.
        delta = without_padding(F.softplus(self.dt_proj(low_rank)), padding_mask)
        a = -at_least_fp32(self.A_log).exp()
        scan = functools.partial(selective_scan, backend=self.mixer_backend)
        group = self.sequence_group
        (own,), (delta,) = to_heads(group, x), to_heads(group, delta)  # channels are heads here
        b, c = to_sequence(group, b), to_sequence(group, c)
        y = from_state(scan, own, delta, own_heads(group, a), b, c, **how)
        y = to_tokens(group, y) + self.D * x
        return self.out_proj(y * F.silu(gate))


class MambaLayer(GradientCheckpointingLayer):
    """RMSNorm and the mixer on the residual stream, which stays in fp32 if so configured."""

    mixer_class: type[nn.Module] = MambaMixer

    def __init__(self, config: CatMambaConfig, index: int) -> None:
        super().__init__()
        self.index, self.residual_in_fp32 = index, config.residual_in_fp32
        self.norm = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = self.mixer_class(config)

    def forward(
        self,
        hidden_states: Tensor,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        past_key_values: MixerCache | None = None,
    ) -> Tensor:
        """Compute [B, T, C]."""
        normed = self.norm(hidden_states.to(self.norm.weight.dtype))
        residual = at_least_fp32(hidden_states) if self.residual_in_fp32 else hidden_states
        how = (self.index, document_ids, padding_mask, past_key_values)
        return residual + mix(self.mixer, normed, *how)


class MambaPreTrainedModel(RecurrentPreTrained, PreTrainedModel):
    """Share with the classes below: configuration, initialisation, what transformers may do."""

    config_class = CatMambaConfig
    config: CatMambaConfig
    base_model_prefix = "backbone"
    _input_embed_layer = "embeddings"
    _no_split_modules = ("MambaLayer",)
    _can_record_outputs = {"hidden_states": MambaLayer}  # noqa: RUF012


class CatMambaModel(RecurrentBody, MambaPreTrainedModel):
    """The model without its head."""

    layer_class: type[MambaLayer] = MambaLayer

    def __init__(self, config: CatMambaConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            self.layer_class(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm_f = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def _leave(self, hidden_states: Tensor) -> Tensor:
        return self.norm_f(hidden_states.to(self.norm_f.weight.dtype))


class CatMambaForCausalLM(RecurrentCausalLM, MambaPreTrainedModel, GenerationMixin):
    """The language model. `state_dict()` has the names of transformers' Mamba."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012
    body_class: type[CatMambaModel] = CatMambaModel

    def __init__(self, config: CatMambaConfig) -> None:
        super().__init__(config)
        self.backbone = self.body_class(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
