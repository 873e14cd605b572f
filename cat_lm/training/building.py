"""Build the model of a run: configuration, initial weights, optimizer groups and precision."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cat_lm import architectures
from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.parameters import parameters_by_decay
from cat_lm.data.corpus import TokenCorpus
from cat_lm.model import attention
from cat_lm.model.attention.core import entry_weights
from cat_lm.model.attention.masks import DocumentAttention, document_attention
from cat_lm.pretrained.loading import load_model, load_tokenizer, model_folder
from cat_lm.pretrained.loading import model_config as read_config
from cat_lm.training.distributed import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from cat_lm.config.sections import OptimizerSection
    from cat_lm.optimizers import OptimizerKind


def model_config(config: RunConfig, vocab_size: int) -> PreTrainedConfig:
    """Return the transformers configuration of a run's model. Raises UserError if it is invalid."""
    architecture = config.architecture
    fields = architecture.fields(config.model, vocab_size, config.data.context_length)
    try:
        return architecture.config_class()(**fields)
    except ValueError as error:
        raise UserError(f"model: {' '.join(str(error).split())}") from error


def trained_config(config: RunConfig, vocab_size: int) -> PreTrainedConfig:
    """Return `model_config` with the changes that the training objective makes to the model."""
    section = config.as_trained(config.model)
    return model_config(config.model_copy(update={"model": section}), vocab_size)


def build_model(config: RunConfig, vocab_size: int, weights: bool = True) -> PreTrainedModel:
    """Build a model in fp32 on the CPU, initialized from `train.seed`.

    Args:
        weights: If False, leave the model on the meta device. The Engine then fills it with the
            weights of rank 0, which DeepSpeed broadcasts anyway, so that a host has a single copy.
    """
    fields = model_config(config, vocab_size)
    torch.manual_seed(config.train.seed)
    try:
        with contextlib.nullcontext() if weights else torch.device("meta"):
            model = config.architecture.classes().causal_lm(fields)
        architectures.check_model(config.architecture, config.model, model)
        make_buffers_contiguous(model)
    except (ValueError, ImportError) as error:
        raise UserError(f"model: {' '.join(str(error).split())}") from error
    model.set_conv_backend(config.train.conv_backend)
    model.set_mixer_backend(config.train.mixer_backend)
    if hasattr(config.model, "attention"):
        attention.pattern(config.model).prepare(model, config.train)
    if config.train.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def vocab_size(config: RunConfig, corpus: TokenCorpus, checkpoint: Path | None) -> int:
    """Return the vocabulary size: of the checkpoint, of `train.init_from`, or of the data.

    A model's vocabulary may be larger than its tokenizer's (Pythia's 50,304 for 50,277 entries).
    Raises UserError where the initial model's tokenizer is not the data's.
    """
    if checkpoint is not None:
        return read_config(checkpoint).vocab_size
    if config.train.init_from is None:
        return corpus.vocab_size
    source = model_folder(config.train.init_from)
    theirs = load_tokenizer(source).get_vocab()
    ours = load_tokenizer(corpus.folder / "tokenizer").get_vocab()
    if theirs != ours:
        raise UserError(
            f"train.init_from={config.train.init_from}: its tokenizer ({len(theirs)} entries) is "
            f"not the data's ({len(ours)} entries); prepare the data with --tokenizer {source}"
        )
    return read_config(source).vocab_size


def load_initial_weights(model: PreTrainedModel, folder: str) -> list[str]:
    """Copy the weights of the model in `folder` into `model`.

    Parameters of the attention pattern that the folder lacks, or has with other options, keep their
    initial values. Return their names within a layer. Raises UserError if the model in `folder` is
    not the one that the configuration describes.
    """
    source = model_folder(folder)
    theirs, ours = read_config(source), model.config
    architecture = architectures.of_config(ours)
    if theirs.model_type in (types := architectures.model_types(architecture)):
        there, here = (
            architecture.section_values(config)
            | {key: getattr(config, key) for key in architecture.unoffered_keys}
            for config in (theirs, ours)
        )
        differences = architecture.differences(there, here)
    else:
        differences = [f"model_type is {theirs.model_type}, not {' or '.join(types)}"]
    if differences:
        raise UserError(
            f"train.init_from={folder}: is another model than the configuration's: "
            + "; ".join(differences)
        )
    # Leave out the parameters of a pattern with other options, whose meaning is different.
    keeps_all = "attention" not in there or attention.keeps_parameters(there, here)
    weights = {
        name: weight
        for name, weight in load_model(source, device="cpu").state_dict().items()
        if keeps_all or attention.PATTERNS_OWN not in name
    }
    own = model.state_dict()
    starts = {name: own[name] for name in (own.keys() - weights.keys()) & entry_weights(model)}
    model.load_state_dict(starts | weights)
    return sorted({".".join(name.split(".")[-2:]) for name in starts})


def allocate_meta_tensors(model: nn.Module, device: torch.device) -> None:
    """Allocate the model's meta tensors on `device`, uninitialized; tied weights stay tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    made[tensor] = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        made[tensor] = nn.Parameter(made[tensor], tensor.requires_grad)
                    made[tensor].__dict__.update(tensor.__dict__)
                held[name] = made[tensor]


def make_buffers_contiguous(model: nn.Module) -> None:
    """Make buffers contiguous, because elements of an expanded tensor share memory."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.contiguous()


@torch.no_grad()
def broadcast_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Broadcast the buffers of rank 0, which may differ on other ranks (a collective)."""
    make_buffers_contiguous(model)
    if ranks.world_size == 1:
        return
    for buffer in model.buffers():
        if buffer.numel() > 0:
            # Every backend can send bytes, and sends NaN and booleans unchanged.
            torch.distributed.broadcast(buffer.view(-1).view(torch.uint8), src=0)


def describe_backend(
    config: RunConfig, model: PreTrainedConfig, device: torch.device, key: str
) -> str:
    """Return a text with the backend that a run will use, and why.

    Args:
        key: `conv_backend` for convolutions and attention, or `mixer_backend` for recurrences,
            whose text is empty for models without them.

    Raises:
        UserError: the configured backend cannot run here.
    """
    backend = getattr(config.train, key)
    how = model, device, compute_dtype(config), backend
    try:
        return config.architecture.describe_backend(key, *how)
    except ValueError as error:
        raise UserError(f"train.{key}={backend}: {error}") from error


def choose_document_attention(
    config: RunConfig, model: PreTrainedModel, device: torch.device
) -> DocumentAttention | None:
    """Return how attention separates packed documents, and why; None if nothing separates them."""
    if not config.data.mask_documents or not model.takes_borders:
        return None
    is_other = bool(config.objective.section)
    computed = trained_config(config, model.config.vocab_size) if is_other else model.config
    return document_attention(computed, device, compute_dtype(config))


def compute_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype that layers compute in; `train.precision` must not be `auto`."""
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def needs_exact_masters(config: RunConfig) -> bool:
    """Return True if master weights must be set to the initial fp32 weights.

    If some weights are frozen, these must keep every bit, but DeepSpeed makes the fp32 masters from
    the model in bf16. In fp32, and without ZeRO, the masters are the weights themselves.
    `train.precision` must not be `auto`.
    """
    train = config.train
    rounds = train.precision == "bf16" and train.zero_stage > 0
    return rounds and not config.objective.trains_all


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two optimizer groups: the parameters with weight decay and those without."""
    decayed, exempt = parameters_by_decay(model)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def optimizer_groups(
    model: nn.Module, kind: OptimizerKind, section: OptimizerSection, options: Any
) -> list[dict]:
    """Return optimizer groups of equal weight decay, kinds of state and learning-rate factor.

    Each group has the `names` of its parameters, the `kinds` of state that the optimizer keeps, and
    `lr_factor`, by which the scheduled learning rate is multiplied. Raises UserError for a pattern
    of `optimizer.lr_groups` that matches no parameter.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    factors, kinds = _rate_factors(section.lr_groups, list(names.values())), kind.state_kinds(model)
    groups: dict[tuple, dict] = {}
    for decay_group in parameter_groups(model, section.weight_decay):
        decay = decay_group["weight_decay"]
        for parameter in decay_group["params"]:
            name = names[id(parameter)]
            factor = factors[name] * kind.lr_factor(kinds[name], section, options)
            key = id(decay_group), kinds[name], factor
            new = {"params": [], "names": [], "weight_decay": decay, "kinds": kinds[name]}
            group = groups.setdefault(key, new | {"lr_factor": factor})
            group["params"].append(parameter)
            group["names"].append(name)
    return list(groups.values())


def describe_groups(name: str, groups: list[dict]) -> str:
    """Return the log's line about an optimizer's groups; with equal rates it is one group."""
    sizes: Counter = Counter()
    for group in groups:
        sizes[group["kinds"], group["lr_factor"]] += len(group["names"])
    parts = [
        f"{count} parameters with {' and '.join(kinds)} at {factor:g} x lr"
        for (kinds, factor), count in sizes.items()
    ]
    return f"optimizer: {name}: {', '.join(parts)}"


def _rate_factors(patterns: dict[str, float], names: list[str]) -> dict[str, float]:
    """Return each parameter's learning-rate factor: that of the first matching pattern, or 1."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"optimizer.lr_groups: {pattern!r} matches no parameter; names are like {names[0]}"
            )
    return {
        name: next((f for p, f in patterns.items() if fnmatch.fnmatchcase(name, p)), 1.0)
        for name in names
    }


def make_deterministic() -> None:
    """Make operators bit-reproducible on a GPU for the rest of the process.

    Backward passes may add with atomics, in any order: torch's attention does, the kernels of this
    project do not. torch then chooses kernels without atomics, and raises for operators that have
    none. This must be called before the first matrix product on a GPU.
    """
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = (
        "1"  # Read by transformers, which calls flash-attn.
    )
    # cuBLAS is reproducible only with one of these workspace sizes (cuBLAS manual, 2.1.4).
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Filling new memory helps to find bugs, costs time, and is not needed for equal bits.
    torch.utils.deterministic.fill_uninitialized_memory = False


def resolve_precision(config: RunConfig, device: torch.device) -> tuple[str, str]:
    """Return (`bf16` or `fp32`, the reason); `auto` is bf16 on hardware that multiplies it."""
    asked = config.train.precision
    if asked != "auto":
        return asked, "asked for"
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    has = "multiplies bf16 natively" if native else "has no native bf16 arithmetic"
    return ("bf16" if native else "fp32"), f"this {device.type} {has}"
