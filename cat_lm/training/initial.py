"""Starting a run from a model's weights: continued pretraining of an upcycled or exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cat_lm.config import ModelSection, RunConfig
from cat_lm.data.corpus import TokenCorpus
from cat_lm.errors import UserError
from cat_lm.model import CatConfig, CatForCausalLM
from cat_lm.pretrained import load_model, load_tokenizer, model_config, model_folder

# These a run may choose anew: they change no weight's meaning, or are what it wants to train with
# (longer contexts than before).
_FREE_KEYS = {"attn_implementation", "hidden_dropout", "attention_dropout", "conv_init"}
_FREE_KEYS |= {"rope_parameters", "attention_temperature", "temperature_scope"}
# What a run's configuration does not offer, and a model may have.
UNOFFERED_KEYS = ("hidden_act", "attention_bias")
# What a plain GPT-NeoX configuration does not say about convolutions.
_GPT_NEOX = {"conv_type": "none", "position_embedding": "rope"}


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


def load_initial_weights(model: CatForCausalLM, folder: str) -> None:
    """Fills `model` with the weights of the model in `folder`, in the dtype of `model`.

    Raises:
        UserError: there is no model, or it is not the one that the configuration describes.
    """
    source = model_folder(folder)
    differences = _differences(model_config(source), model.config)
    if differences:
        raise UserError(
            f"train.init_from={folder}: is another model than the configuration's: "
            + "; ".join(differences)
        )
    model.load_state_dict(load_model(source, device="cpu").state_dict())


def _differences(theirs: Any, ours: CatConfig) -> list[str]:
    """What makes their weights unfit for our model, as `key is theirs, not ours`."""
    if theirs.model_type not in ("cat_neox", "gpt_neox"):
        return [f"model_type is {theirs.model_type}, not cat_neox or gpt_neox"]
    differences = []
    conv_type = getattr(theirs, "conv_type", "none")
    for key in (*ModelSection.model_fields, *UNOFFERED_KEYS):
        is_unused = key.startswith("conv_") and key != "conv_type" and conv_type == "none"
        if key in _FREE_KEYS or is_unused:
            continue
        their_value, our_value = _value(theirs, key), _value(ours, key)
        if their_value != our_value:
            differences.append(f"model.{key} is {their_value!r} there and {our_value!r} here")
    if conv_type == "none" and ours.conv_type != "none":
        differences.append("python -m cat_lm.upcycle adds convolutions to a model")
    return differences


def _value(config: Any, key: str) -> Any:
    if key == "rotary_pct":
        return config.rope_parameters["partial_rotary_factor"]
    if key == "rope_theta":
        return config.rope_parameters["rope_theta"]
    return getattr(config, key, _GPT_NEOX.get(key))
