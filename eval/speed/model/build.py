"""The models whose speed is measured: one size, each convolution or none, and transformers' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from cat_lm import architectures
from cat_lm.architectures import ModelSection
from cat_lm.errors import UserError
from eval.speed.choices import MODELS
from eval.speed.machine import without_home

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Relative to the largest logit. In bf16 the bias is added to a projection that was rounded before.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True)
class ModelSize:
    """A model and the arithmetic it is run in, but for its convolutions."""

    layers: int
    hidden_size: int
    heads: int
    vocab_size: int
    window: int
    dtype: str
    device: str
    attention: str = "sdpa"

    def section(self, name: str) -> ModelSection:
        """The `model:` section of one of `MODELS`, as far as it has such keys."""
        sizes = {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "vocab_size": self.vocab_size,
            "conv_window": self.window,
            "attn_implementation": self.attention,
        }
        kind = architectures.get(MODELS[name].architecture).Section
        own = {key: value for key, value in sizes.items() if key in kind.model_fields}
        return kind(**own | MODELS[name].keys)


def build(size: ModelSize, name: str, positions: int) -> nn.Module:
    """One of `MODELS` with identity filters, for sequences of up to `positions` tokens.

    Only weights are cast to the dtype; rotary frequencies stay fp32.
    """
    torch.manual_seed(0)
    try:
        config = model_config(size, name, positions)
        architecture = architectures.of_config(config)
        if MODELS[name].stock:
            config = architecture.library_config(config, attn_implementation=size.attention)
        model = architecture.classes_of(config).causal_lm(config)
    except (ValueError, ImportError) as error:
        raise UserError(f"model {name}: {' '.join(str(error).split())}") from error
    model.to(size.device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, size.dtype))
    return model


def model_config(size: ModelSize, name: str, positions: int) -> PreTrainedConfig:
    """The configuration of one of `MODELS`, of this project's class; stock's is Pythia's."""
    architecture = architectures.get(MODELS[name].architecture)
    fields = architecture.fields(size.section(name), size.vocab_size, positions)
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return architecture.config_class()(**fields, **tokens, use_cache=False)


def check_logits(
    models: Mapping[str, nn.Module], ids: torch.Tensor, dtype: str
) -> dict[str, float]:
    """Gives all models stock's weights; the largest difference of their logits from stock's.

    With identity filters every model is what stock is.

    Args:
        models: "stock" and others.
        ids: [B, T], what to compare on.

    Returns:
        Differences relative to the largest logit.

    Raises:
        UserError: one is above the tolerance: the speed of a wrong model is not worth knowing.
    """
    differences = {}
    with torch.no_grad():
        expected = models["stock"](input_ids=ids).logits.float()
        for name, model in models.items():
            if name == "stock":
                continue
            model.load_state_dict(models["stock"].state_dict(), strict=False)
            difference = (model(input_ids=ids).logits.float() - expected).abs().max()
            differences[name] = float(difference / expected.abs().max())
    wrong = {name: value for name, value in differences.items() if not value <= TOLERANCES[dtype]}
    if wrong:
        raise UserError(
            f"logits differ from transformers' by {wrong} of the largest (at most "
            f"{TOLERANCES[dtype]} is right); speeds of a wrong model are not reported"
        )
    return differences


def randomize_filters(model: nn.Module) -> None:
    """Draws filters, so that no kernel is timed on zeros, which can be faster than numbers are."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_filter"):
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.5 * drawn / drawn.shape[-1] ** 0.5)


def random_ids(size: ModelSize, batch: int, time: int) -> torch.Tensor:
    """Token ids [B, T], the same every time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(size.vocab_size, (batch, time), generator=generator).to(size.device)


def convolution_of(model: nn.Module, size: ModelSize) -> str | None:
    """Name what computes a model's convolutions and why; None for transformers' own."""
    architecture = architectures.of_config(model.config)
    if model.config.model_type != architecture.model_type:
        return None
    dtype = getattr(torch, size.dtype)
    return without_home(
        architecture.describe_backend(model.config, torch.device(size.device), dtype, "auto")
    )
