"""Start a run from a model's weights: continued pretraining of an upcycled or exported model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm import architectures
from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.data.corpus import TokenCorpus
from cat_lm.model import attention
from cat_lm.pretrained.loading import load_model, load_tokenizer, model_config, model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def vocab_size(config: RunConfig, corpus: TokenCorpus, checkpoint: Path | None) -> int:
    """Return the vocabulary of the model: the checkpoint's, the initial model's, or the data's.

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
    """Fill `model` with the weights of the model in `folder`, in the dtype of `model`.

    What its pattern of attention learns and theirs has not, or for other options, stays as it
    starts.

    Returns:
        What does, by its names in a layer.

    Raises:
        UserError: there is no model, or it is not the one that the configuration describes.
    """
    from cat_lm.model.attention.core import entry_weights

    source = model_folder(folder)
    theirs, ours = model_config(source), model.config
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
    # What has another meaning in our model, or none, is left out.
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
