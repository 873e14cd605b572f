"""The models whose speed is measured: one size, each convolution or none, and transformers' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cat_lm import architectures
from cat_lm.architectures import ModelSection
from cat_lm.core.errors import UserError
from cat_lm.counts import count_parameters, meta_model
from eval.speed.choices import models
from eval.speed.timing import without_home

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

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    def section(self, name: str, positions: int) -> ModelSection:
        """Return the `model:` section of one of `models`, of the sizes that it has keys for."""
        sizes = {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "vocab_size": self.vocab_size,
            "conv_window": self.window,
            "attn_implementation": self.attention,
        }
        model = models()[name]
        family = architectures.get(model.architecture)
        own = {k: value for k, value in sizes.items() if k in family.Section.model_fields}
        own |= family.variant_keys(model.variant, self.heads, positions)
        section = family.Section(**own)
        # A filter may be longer than the prompt, since decoding adds tokens.
        for problem in family.problems(section, max(positions, self.window)):
            raise UserError(f"model {name}: {problem}")
        return section

    def num_parameters(self, name: str, positions: int) -> int:
        """Return the number of parameters of one of `models`, without making it."""
        return count_parameters(meta_model(model_config(self, name, positions)))


def build(size: ModelSize, name: str, positions: int) -> nn.Module:
    """Build one of `models` with identity filters, for sequences of up to `positions` tokens.

    Only weights are cast to the dtype; rotary frequencies stay fp32.

    Raises:
        UserError: there is no such model of this size.
    """
    torch.manual_seed(0)
    try:
        config = model_config(size, name, positions)
        family = architectures.of_config(config)
        if models()[name].stock == name:
            attends = "attn_implementation" in family.Section.model_fields
            how = {"attn_implementation": size.attention} if attends else {}
            config = architectures.library_config(config, **how)
        model = architectures.classes_of(config).causal_lm(config)
    except (ValueError, ImportError) as error:
        raise UserError(f"model {name}: {' '.join(str(error).split())}") from error
    model.to(size.device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, size.dtype))
    return model


def model_config(size: ModelSize, name: str, positions: int) -> PreTrainedConfig:
    """Return the configuration of one of `models`, of this project's class; stock's is plain's."""
    architecture = architectures.get(models()[name].architecture)
    fields = architecture.fields(size.section(name, positions), size.vocab_size, positions)
    fields |= {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    return architecture.config_class()(**fields)


def check_logits(built: Mapping[str, nn.Module], ids: Tensor, dtype: str) -> dict[str, float]:
    """Load the stock model's weights into models, and return the largest differences of logits.

    With identity filters every model is what stock is.

    Args:
        built: by name, with the stock of those that have one; the others are left as they are.
        ids: [B, T], what to compare on.

    Returns:
        Differences from stock's, relative to its largest logit.

    Raises:
        UserError: one is above the tolerance: the speed of a wrong model is not worth knowing.
    """
    known, expected, differences = models(), {}, {}
    with torch.no_grad():
        for name, model in built.items():
            stock = known[name].stock
            if stock is None or stock == name:
                continue
            if stock not in expected:
                expected[stock] = built[stock](input_ids=ids).logits.float()
            model.load_state_dict(built[stock].state_dict(), strict=False)
            difference = model(input_ids=ids).logits.float() - expected[stock]
            differences[name] = float(difference.abs().max() / expected[stock].abs().max())
    # Not `>`: a NaN must not pass.
    wrong = {name: value for name, value in differences.items() if not value <= TOLERANCES[dtype]}
    if wrong:
        raise UserError(
            f"logits differ from transformers' by {wrong} of the largest (at most "
            f"{TOLERANCES[dtype]} is right); speeds of a wrong model are not reported"
        )
    return differences


def randomize_filters(model: nn.Module) -> None:
    """Draw filters, so that no kernel is timed on zeros, which can be faster than numbers are."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_filter"):
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.5 * drawn / drawn.shape[-1] ** 0.5)


def random_ids(size: ModelSize, batch: int, time: int) -> Tensor:
    """Return token ids [B, T], the same every time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(size.vocab_size, (batch, time), generator=generator).to(size.device)


def convolution_of(model: nn.Module, size: ModelSize) -> str | None:
    """Return what computes a model's convolutions and recurrences; None for transformers' own."""
    architecture = architectures.of_config(model.config)
    if model.config.model_type != architecture.model_type:
        return None
    how = (model.config, torch.device(size.device), getattr(torch, size.dtype), "auto")
    keys = ("conv_backend", "mixer_backend")
    said = (architecture.describe_backend(key, *how) for key in keys)
    return without_home("; ".join(filter(None, said)))
