"""The keys that every family has, and the check of a configuration's values by its family's keys.

A family's `Section` declares each key once: its type, range, default and description. The YAML's
`model:` is parsed by it, and the configuration that transformers stores, whose fields have the same
names, is checked by it. This module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from cat_lm.core import numbers
from cat_lm.core.fields import Section, whole
from cat_lm.core.readers import clipped
from cat_lm.model.rules import gated_width

# Keys that a configuration takes otherwise, or that transformers has more values of.
_NOT_CHECKED = {"architecture", "attn_implementation", "rope_parameters"}


class ModelSection(Section):
    """The keys that every family has; its own section adds the others."""

    architecture: str
    hidden_size: Annotated[int, whole(numbers.HIDDEN_SIZE)] = Field(
        description="channels of a token between layers"
    )
    num_hidden_layers: Annotated[int, whole(numbers.LAYERS)] = Field(description="layers")
    vocab_size: Annotated[int, whole(numbers.VOCABULARY)] | None = Field(
        None, description="default: the tokenizer's"
    )
    tie_word_embeddings: bool = Field(False, description="one table for embeddings and logits")

    @property
    def windows(self) -> dict[str, int]:
        """Return the taps of the filters that layers have, by the key that gives them."""
        return {}

    @property
    def divided_counts(self) -> dict[str, int] | None:
        """Return what ranks that share a sequence divide, by its key; None where they cannot."""
        return None

    @property
    def isolates_documents(self) -> bool:
        """Return True if the model can keep the documents of a packed row apart."""
        return True

    def derived(self) -> dict[str, Any]:
        """Return what a configuration stores for keys that may be left out here."""
        return {}

    def portable(self) -> ModelSection:
        """Return the same model, computed by what every machine has."""
        return self

    def shape_problems(self) -> list[str]:
        """Return what of the keys does not go together, in lines that begin with the key."""
        return []

    def division_problems(self, parts: int, context_length: int) -> list[str]:
        """Return why `parts` ranks cannot share a sequence, for `train.sequence_parallel`."""
        if self.divided_counts is None:  # its modules take no `cat_lm.model.sequence`
            return [f"cannot divide the sequences of model.architecture={self.architecture}"]
        return division_problems(parts, context_length, self.divided_counts, self.windows)

    @classmethod
    def check_values(cls, values: Mapping[str, Any]) -> None:
        """Check a configuration's values, each for itself; None stands for a default.

        Raises:
            ValueError: a value has another type than its key, or lies outside its range.
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
    """Return the check of a key's values; None where any will do."""
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
