"""Starting a run from a model's weights: continued pretraining of an upcycled or exported model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm import architectures
from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.data.corpus import TokenCorpus
from cat_lm.pretrained.loading import load_model, load_tokenizer, model_config, model_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from cat_lm.architectures import Architecture


def vocab_size(config: RunConfig, corpus: TokenCorpus, checkpoint: Path | None) -> int:
    """The vocabulary of the run's model: the checkpoint's, the initial model's, or the data's.

    A model's vocabulary may be larger than its tokenizer's (Pythia's 50,304 for 50,277 entries).

    Raises:
        UserError: there is no initial model, or its tokenizer is not the data's.
    """
    if checkpoint is not None:
        return model_config(checkpoint).vocab_size
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
    return model_config(source).vocab_size


def load_initial_weights(model: PreTrainedModel, folder: str) -> list[str]:
    """Fills `model` with the weights of the model in `folder`, in the dtype of `model`.

    What its pattern of attention learns and theirs has not, or for other options, stays as it
    starts.

    Returns:
        What does, by its names in a layer.

    Raises:
        UserError: there is no model, or it is not the one that the configuration describes.
    """
    source = model_folder(folder)
    theirs, ours = model_config(source), model.config
    differences = _differences(theirs, ours)
    if differences:
        raise UserError(
            f"train.init_from={folder}: is another model than the configuration's: "
            + "; ".join(differences)
        )
    weights = _kept(load_model(source, device="cpu").state_dict(), theirs, ours)
    starts = _starts_of_entries(model, weights)
    model.load_state_dict(starts | weights)
    return sorted({".".join(name.split(".")[-2:]) for name in starts})


def _kept(
    weights: Mapping[str, Tensor], theirs: PreTrainedConfig, ours: PreTrainedConfig
) -> dict[str, Tensor]:
    """Leave out what has another meaning in our model, or none."""
    architecture, there, here = _compared(theirs, ours)
    return {name: x for name, x in weights.items() if architecture.keeps_weight(name, there, here)}


def _starts_of_entries(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `weights` lack of what entries of `cat_lm.model.attention` hold."""
    from cat_lm.model.attention.core import entry_weights

    ours = model.state_dict()
    lacking = ours.keys() - weights.keys()
    return {name: ours[name] for name in lacking & entry_weights(model)}


def _differences(theirs: PreTrainedConfig, ours: PreTrainedConfig) -> list[str]:
    """Name what makes their weights unfit for our model, as `key is theirs, not ours`."""
    architecture = architectures.of_config(ours)
    if theirs.model_type not in architecture.model_types:
        known = " or ".join(architecture.model_types)
        return [f"model_type is {theirs.model_type}, not {known}"]
    _, there, here = _compared(theirs, ours)
    return architecture.differences(there, here)


def _compared(
    theirs: PreTrainedConfig, ours: PreTrainedConfig
) -> tuple[Architecture, dict[str, Any], dict[str, Any]]:
    """Return our model's family, and what it says of both models."""
    architecture = architectures.of_config(ours)
    there, here = (
        architecture.section_values(config)
        | {key: getattr(config, key) for key in architecture.unoffered_keys}
        for config in (theirs, ours)
    )
    return architecture, there, here
