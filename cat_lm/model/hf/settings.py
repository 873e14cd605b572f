"""The keys that configurations of every family know, and checks of their fields.

This module imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import fields
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

from cat_lm.core.numbers import (
    CONTEXT,
    CONV_STATE,
    FRACTION,
    HEADS,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    LABELS,
    LAYERS,
    TEMPERATURE,
    VOCABULARY,
    WINDOW,
    Range,
)
from cat_lm.model.attention.settings import AttentionSettings, refuse
from cat_lm.model.rules import head_problems

WHOLE_NUMBERS = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INTERMEDIATE_SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "conv_window": WINDOW,
    "conv_state": CONV_STATE,
    "conv_rank": WINDOW,
    "canon_window": WINDOW,
}
NUMBERS = {"attention_temperature": TEMPERATURE, "attention_dropout": FRACTION}
SWITCHES = ("tie_word_embeddings", "attention_bias", "use_cache")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What transformers, its present version and earlier ones, takes or writes of every model beside the
# attributes of its configuration's class and the settings of generation.
_OF_EVERY_MODEL = frozenset(
    (
        *("add_cross_attention", "attn_implementation", "auto_map", "configuration_files"),
        *("cross_attention_hidden_size", "custom_pipelines", "experts_implementation"),
        *("finetuning_task", "gradient_checkpointing", "is_decoder", "loss_type", "model_type"),
        *("prefix", "pretraining_tp", "pruned_heads", "quantization_config", "sep_token_id"),
        *("task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class"),
        *("torchscript", "transformers_weights", "use_bfloat16"),
        *("_attn_implementation_autoset", "_commit_hash", "_from_auto", "_from_pipeline"),
    )
)
# How near a key of a file is to a field, by `difflib`'s ratio, if it is a slip of a letter or two,
# and if it has most of the field's words.
_LETTERS, _WORDS = 0.88, 0.8
# Below this the nearest key is no help to who reads of it.
_HELPS = 0.6
# Fields of which other programs keep the like under longer names (bos_token, padded_vocab_size,
# attention_probs_dropout_prob): none changes what trained weights compute.
_LIKE_OTHERS = (
    *(*_TOKENS, "vocab_size", "max_position_embeddings", "initializer_range"),
    *("attention_dropout", "hidden_dropout", "classifier_dropout"),
)
# Keys of other programs that a letter or two keep apart from a field.
_OF_OTHERS = (
    *("architecture", "boi_token_id", "bos_token_ids", "eod_token_id", "eoi_token_id"),
    "eos_token_ids",
)


class KnownKeys:
    """Refuse keys that a configuration does not know; before its class of transformers."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Before anything is made of them: of each label transformers makes two entries.
        if "num_labels" in kwargs:
            check_numbers(SimpleNamespace(**kwargs), {"num_labels": LABELS}, whole=True)
        cls.refuse_keys(cls.unknown_keys(kwargs))
        return super().__new__(cls)

    @classmethod
    def other_keys(cls) -> Collection[str]:
        """Return the keys that are no fields and that `__post_init__` takes."""
        return ()

    @classmethod
    def unknown_keys(cls, keys: Iterable[str]) -> list[str]:
        """Return those keys that mean nothing to this class nor to transformers."""
        own = {*(field.name for field in fields(cls)), *cls.attribute_map, *cls.other_keys()}
        return [key for key in keys if key not in own | _OF_EVERY_MODEL | _keys_of_transformers()]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration of a file's keys; those of other programs stay as attributes.

        Raises:
            ValueError: a key, of the file or beside it, is nearly one of this class, or would
                replace a method or another attribute of it.
        """
        others = {key: config_dict[key] for key in cls.unknown_keys(config_dict)}
        cls.refuse_keys(k for k in others if hasattr(cls, k) or cls._is_slip(k, config_dict))
        cls.refuse_keys(key for key in cls.unknown_keys(kwargs) if hasattr(cls, key))
        known = {key: value for key, value in config_dict.items() if key not in others}
        wants_unused = kwargs.pop("return_unused_kwargs", False)
        config, unused = super().from_dict(known, return_unused_kwargs=True, **kwargs)
        for key, value in others.items():
            setattr(config, key, value)
        if wants_unused:
            return config, unused
        # What else is unused may be for whoever loads the weights, such as device_map.
        cls.refuse_keys(key for key in cls.unknown_keys(unused) if cls._is_slip(key, ()))
        return config

    @classmethod
    def from_json_file(cls, json_file: Any) -> Any:
        """Make a configuration of a file, as `from_dict`."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def refuse_keys(cls, keys: Iterable[str]) -> None:
        """Raise ValueError for the first of the unknown keys, with the nearest that is known."""
        for key in keys:
            said = f"{key}: unknown key of {cls.__name__}"
            for nearest in cls._nearest(key, _HELPS):
                said += f"; the nearest known one is {nearest}"
            raise ValueError(said)

    @classmethod
    def _nearest(cls, key: str, cutoff: float) -> list[str]:
        names = [*(field.name for field in fields(cls)), *cls.other_keys()]
        return difflib.get_close_matches(key[:60], names, n=1, cutoff=cutoff)

    @classmethod
    def _is_slip(cls, key: str, given: Container[str]) -> bool:
        """Return True if a key stands where one of this class was meant.

        It differs by a letter or two; or by more from a field of ours, or from one that is not
        given beside it, so that the model would have the field's default.
        """
        if key in _OF_OTHERS:
            return False
        for nearest in cls._nearest(key, _WORDS):
            is_ours = nearest in AttentionSettings.__dataclass_fields__
            if is_ours or not (nearest in _LIKE_OTHERS or nearest in given):
                return True
        return bool(cls._nearest(key, _LETTERS))


@cache
def _keys_of_transformers() -> frozenset[str]:
    """Return what a configuration takes beside its fields, and the settings of generation."""
    from transformers import GenerationConfig, PreTrainedConfig

    takes = {
        name
        for kind in PreTrainedConfig.__mro__
        for name, value in vars(kind).items()
        if isinstance(value, property) and value.fset
    }
    return frozenset(takes.union(vars(PreTrainedConfig()), vars(GenerationConfig())))


class RecurrentSettings(KnownKeys):
    """Say what holds of configurations whose layers keep a state; before a family's own.

    Attributes:
        attends: whether layers have attention, which takes masks.
        keeps_state: whether it is kept from call to call, so that a text can be continued.
        reads_padding: that the model must be told which tokens are padding.
        takes_gaps: whether padding may stand between the tokens of a row.
        keeps_padding: whether states hold what was read as padding.
        needs_layer_state: whether a cache holds more than keys and values.
    """

    attends: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True
    needs_layer_state: ClassVar[bool] = True
    reads_padding: ClassVar[bool] = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]  # a list to Trainer
    takes_gaps: ClassVar[bool] = False
    keeps_padding: ClassVar[bool] = True

    @property
    def cache_layers(self) -> tuple[type, type]:
        """Import the class of cache layers, which is one of those that grow."""
        from cat_lm.model.cache import RecurrentLayer

        return RecurrentLayer, RecurrentLayer


def check_numbers(config: Any, numbers: Mapping[str, Range], whole: bool) -> None:
    """Check types and ranges of fields of `config`.

    Raises:
        ValueError: naming the field, its value and what would be right.
    """
    types, what = (int, "a whole number") if whole else (int | float, "a number")
    for name, allowed in numbers.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, types):
            raise ValueError(f"{name}={value!r}: must be {what}")
        if problem := allowed.problem(value):
            raise ValueError(f"{name}={value}: {problem}")


def check_shape(config: Any, switches: tuple[str, ...]) -> None:
    """Check what every family with attention has: switches, heads, activation, special tokens.

    Raises:
        ValueError: naming the field, its value and what would be right.
    """
    check_switches(config, switches)
    refuse(head_problems(config))
    if not isinstance(config.hidden_act, str):
        raise ValueError(f"hidden_act={config.hidden_act!r}: must be a name such as 'gelu'")
    check_tokens(config)


def check_switches(config: Any, switches: tuple[str, ...]) -> None:
    """Check that fields are true or false. Raises ValueError."""
    for name in switches:
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name}={getattr(config, name)!r}: must be true or false")


def check_tokens(config: Any) -> None:
    """Check the ids of the special tokens. Raises ValueError."""
    for name in _TOKENS:
        value = getattr(config, name)
        for token in value if isinstance(value, list) else [value]:
            is_id = isinstance(token, int) and not isinstance(token, bool)
            if token is not None and (not is_id or not -1 <= token < VOCABULARY.high):
                raise ValueError(f"{name}={value!r}: must be the id of a token")
    pad = config.pad_token_id
    if pad is not None and pad >= config.vocab_size:
        raise ValueError(f"pad_token_id={pad}: must be below vocab_size={config.vocab_size}")
