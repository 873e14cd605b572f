"""What configurations of every family have in common: the keys that they know.

This module imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar

from cat_lm.model.attention.settings import AttentionSettings, refuse
from cat_lm.model.hf.sections.base import ModelSection

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
# How near a key of a file is, by `difflib`'s ratio, if it is a slip of one of transformers' fields,
# of ours, and if the nearest is any help to who reads of it.
_LETTERS, _WORDS, _HELPS = 0.88, 0.8, 0.6
# Keys of other programs that a letter or two keep apart from a field.
_OF_OTHERS = (
    *("architecture", "boi_token_id", "bos_token_ids", "eod_token_id", "eoi_token_id"),
    "eos_token_ids",
)


class KnownKeys:
    """Refuse keys and values that a configuration does not know; before its transformers' class.

    Attributes:
        Section: the keys of the family's models, which the fields are checked by.
    """

    Section: ClassVar[type[ModelSection]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Before anything is made of them: of each label transformers makes two entries.
        cls.Section.check_values(kwargs)
        cls.refuse_keys(cls.unknown_keys(kwargs))
        return super().__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        refuse(self.shape_problems())
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            pad = f"pad_token_id={self.pad_token_id}"
            raise ValueError(f"{pad}: must be below vocab_size={self.vocab_size}")

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
        cls.refuse_keys(k for k in others if hasattr(cls, k) or cls._is_slip(k))
        cls.refuse_keys(key for key in cls.unknown_keys(kwargs) if hasattr(cls, key))
        known = {key: value for key, value in config_dict.items() if key not in others}
        wants_unused = kwargs.pop("return_unused_kwargs", False)
        config, unused = super().from_dict(known, return_unused_kwargs=True, **kwargs)
        for key, value in others.items():
            setattr(config, key, value)
        if wants_unused:
            return config, unused
        # What else is unused may be for whoever loads the weights, such as device_map.
        cls.refuse_keys(key for key in cls.unknown_keys(unused) if cls._is_slip(key))
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
    def _is_slip(cls, key: str) -> bool:
        """Return True if a key of a file stands where one of this class was meant."""
        if key in _OF_OTHERS:
            return False
        nearest = cls._nearest(key, _WORDS)
        is_ours = bool(nearest) and nearest[0] in AttentionSettings.__dataclass_fields__
        return is_ours or bool(cls._nearest(key, _LETTERS))


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
