"""The keys that every family has, and the check of a configuration's values by its family's keys.

A family's `Section` declares each key once: its type, range, default and description. The YAML's
`model:` is parsed by it, and the configuration that transformers stores, whose fields have the same
names, is checked by it. `KnownKeys` refuses the keys that a configuration has not. This module
imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, ValidationError

from cat_lm.core import numbers
from cat_lm.core.fields import Section, number, whole
from cat_lm.core.readers import clipped
from cat_lm.model.attention.settings import AttentionSettings, refuse
from cat_lm.model.rules import gated_width

# Keys that a configuration takes otherwise, or that transformers has more values of.
_NOT_CHECKED = {"architecture", "attn_implementation", "rope_parameters"}

Width = Annotated[int, whole(numbers.HIDDEN_SIZE)]
InnerWidth = Annotated[int, whole(numbers.INTERMEDIATE_SIZE)]
Heads = Annotated[int, whole(numbers.HEADS)]
Window = Annotated[int, whole(numbers.WINDOW)]
_Vocabulary = Annotated[int, whole(numbers.VOCABULARY)]
Epsilon = Annotated[float, number(numbers.NORM_EPSILON)]
# The description of the width of a gated MLP.
GATED_WIDTH = "default: 8/3 x hidden_size, up to a multiple of 256"


def field(default: Any, words: str) -> Any:
    """Return a field with its default (`...` for none) and description."""
    return Field(default, description=words)


class ModelSection(Section):
    """The keys that every family has; its own section adds the others."""

    architecture: str
    hidden_size: Width = field(..., "channels of a token between layers")
    num_hidden_layers: Annotated[int, whole(numbers.LAYERS)] = field(..., "layers")
    vocab_size: _Vocabulary | None = field(None, "default: the tokenizer's")
    tie_word_embeddings: bool = field(False, "one table for embeddings and logits")

    @property
    def windows(self) -> dict[str, int]:
        """Return the number of taps of the layers' filters, by key."""
        return {}

    @property
    def divided_counts(self) -> dict[str, int] | None:
        """Return the counts that sequence parallelism divides, by key; None if unsupported."""
        return None

    @property
    def isolates_documents(self) -> bool:
        """Return True if the model can keep the documents of a packed row separate."""
        return True

    def derived(self) -> dict[str, Any]:
        """Return the stored values of keys that may be left out."""
        return {}

    def with_portable_attention(self) -> ModelSection:
        """Return the same model with implementations that every machine supports."""
        return self

    def shape_problems(self) -> list[str]:
        """Return contradictions between keys, in lines that begin with the key."""
        return []

    def division_problems(self, parts: int, context_length: int) -> list[str]:
        """Return why `parts` ranks cannot share a sequence, for `train.sequence_parallel`."""
        if self.divided_counts is None:  # Its modules do not support `cat_lm.model.sequence`.
            return [f"cannot divide the sequences of model.architecture={self.architecture}"]
        return division_problems(parts, context_length, self.divided_counts, self.windows)

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        """Check a configuration's values, each for itself; None stands for a default.

        Raises ValueError where a value has another type than its key, or lies outside its range.
        """
        for key, value in values.items():
            if value is not None and (check := _check_of(cls, key)) is not None:
                try:
                    found = check.validate_python(value, strict=True)
                    problem = "must be a number" if type(found) is not type(value) is str else ""
                except ValidationError as error:
                    said = error.errors(include_url=False)[0]["msg"]
                    said = said.removeprefix("Value error, ").replace("Input should", "must")
                    problem = said.replace("be a valid boolean", "be true or false")
                if problem:
                    raise ValueError(f"{key}={clipped(repr(value))}: {problem}")


_Token = Annotated[int, whole(numbers.Range(-1, numbers.VOCABULARY.high - 1))]


class _LibraryKeys(Section):
    """Keys of transformers that every configuration may have, and no section."""

    max_position_embeddings: Annotated[int, whole(numbers.CONTEXT)]
    num_labels: Annotated[int, whole(numbers.LABELS)]
    hidden_act: str
    use_cache: bool
    attention_bias: bool
    bos_token_id: _Token
    eos_token_id: _Token | list[_Token]
    pad_token_id: _Token


@cache
def _check_of(section: type[Section], key: str) -> TypeAdapter | None:
    """Return the validator of a key's values; None if any value is allowed."""
    field = (_LibraryKeys.model_fields | section.model_fields).get(key)
    if field is None or key in _NOT_CHECKED:
        return None
    return TypeAdapter(Annotated[field.annotation, field, *field.metadata])


def division_problems(
    parts: int, context_length: int, counts: Mapping[str, int], windows: Mapping[str, int]
) -> list[str]:
    """Return which numbers of heads or channels, by their key, `parts` ranks cannot share.

    And which short convolutions, W by its key, read more than one part before a token's.
    """
    share = context_length // parts
    return [
        *(f"must divide model.{key}={count}" for key, count in counts.items() if count % parts),
        *(
            f"parts of {share} tokens are shorter than the {window - 1} before them that "
            f"model.{key}={window} reads"
            for key, window in windows.items()
            if window - 1 > share
        ),
    ]


class GatedWidth:
    """The width of an MLP of three matrices, by default 8/3 of the model's."""

    @property
    def inner_size(self) -> int:
        """Return the width, by default up to a multiple of 256."""
        return self.intermediate_size or gated_width(self.hidden_size)

    def derived(self) -> dict[str, Any]:
        """Return the width."""
        return {"intermediate_size": self.inner_size}


# Configurations, and what is no key of theirs

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
_OF_OTHERS = ("architecture", "boi_token_id", "bos_token_ids", "eod_token_id", "eoi_token_id")
_OF_OTHERS += ("eos_token_ids",)


class KnownKeys:
    """Refuse keys and values that a configuration does not know; before its transformers' class.

    `Section` has the keys of the family's models, which the fields are checked by.
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
        """Return the keys that neither this class nor transformers knows."""
        own = {*(field.name for field in fields(cls)), *cls.attribute_map, *cls.other_keys()}
        return [key for key in keys if key not in own | _OF_EVERY_MODEL | _keys_of_transformers()]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration of a file's keys; those of other programs stay as attributes.

        Raises ValueError where a key is nearly one of this class, or would replace a method of it.
        """
        others = {key: config_dict[key] for key in cls.unknown_keys(config_dict)}
        cls.refuse_keys(k for k in others if hasattr(cls, k) or cls._is_slip(k))
        cls.refuse_keys(key for key in cls.unknown_keys(kwargs) if hasattr(cls, key))
        # The file that auto_map names is not of this class, and does not go where it is saved.
        known = {k: v for k, v in config_dict.items() if k not in others and k != "auto_map"}
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
        """Return True if an unknown key is probably a misspelt key of this class."""
        if key in _OF_OTHERS:
            return False
        nearest = cls._nearest(key, _WORDS)
        is_ours = bool(nearest) and nearest[0] in AttentionSettings.__dataclass_fields__
        return is_ours or bool(cls._nearest(key, _LETTERS))


@cache
def _keys_of_transformers() -> frozenset[str]:
    """Return the keys that every transformers configuration takes, and those of generation."""
    from transformers import GenerationConfig, PreTrainedConfig

    takes = {
        name
        for kind in PreTrainedConfig.__mro__
        for name, value in vars(kind).items()
        if isinstance(value, property) and value.fset
    }
    return frozenset(takes.union(vars(PreTrainedConfig()), vars(GenerationConfig())))
