"""What a family of models says of itself, and what families have in common.

An `Architecture` answers for a model's *section*: the keys of the YAML's `model:`, which are there
long before the model is. Of a model that is there, `Architecture.section` makes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from cat_lm.core import numbers
from cat_lm.core.fields import Section, whole
from cat_lm.model.attention.objective import Objective

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


# What a configuration's dictionary holds beside the arguments of its class.
_NOT_FIELDS = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype"}


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


class Classes(NamedTuple):
    """The classes of a model. `base_model` is what `AutoModel` makes; None where nothing does."""

    config: type[PreTrainedConfig]
    causal_lm: type[PreTrainedModel]
    base_model: type[PreTrainedModel] | None = None


class Architecture:
    """A family of models. Every method that takes a `section` takes one of its `Section`.

    Attributes:
        name: the value of `model.architecture`.
        title: what people call the family.
        model_type: of this project's configuration class.
        library_type: of a library's own models that this family reads and goes on from; None
            where there are none.
        library: whose models those are. Of another library than transformers they are read and
            written by this project's classes; `library_import` registers them with transformers.
        Section: the keys of `model:`.
        embedding: the parameter that looks tokens up.
        layer_weight: a matrix that every layer has, `{layer}` standing for its number.
        scales_positions: whether longer contexts can be read by `cat_lm.pretrained.scaled`.
        takes_convolutions: whether `cat_lm.upcycle` can give its models convolutions.
        recurrent: whether `train.mixer_backend` chooses what computes its recurrences.
        short_names: names of variants, by `variants`, that commands offer in place of longer ones.
        free_keys: what a run may choose anew that starts from a model's weights.
        unoffered_keys: what a model may have and the section has no key for.
        adapter_modules: linear layers that peft adapts where nobody names any, of a family whose
            library's models peft does not know.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    model_type: ClassVar[str]
    library_type: ClassVar[str | None] = None
    library: ClassVar[str] = "transformers"
    library_import: ClassVar[str] = ""
    Section: ClassVar[type[ModelSection]]
    embedding: ClassVar[str]
    layer_weight: ClassVar[str]
    scales_positions: ClassVar[bool] = False
    takes_convolutions: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False
    short_names: ClassVar[dict[str, str]] = {}
    free_keys: ClassVar[frozenset[str]] = frozenset()
    unoffered_keys: ClassVar[tuple[str, ...]] = ()
    adapter_modules: ClassVar[tuple[str, ...]] = ()

    # Classes

    @property
    def model_types(self) -> tuple[str, ...]:
        """The types that a config.json of this family can have: its own, and the library's."""
        return (self.model_type, *([self.library_type] if self.library_type else []))

    @property
    def has_stock(self) -> bool:
        """Return True if transformers has a model of this family that runs beside ours."""
        return self.library_type is not None and self.library == "transformers"

    def classes(self) -> Classes:
        """Import this project's classes."""
        raise NotImplementedError

    def config_class(self) -> type[PreTrainedConfig]:
        """Import the configuration's class alone, which may need no torch."""
        return self.classes().config

    def library_classes(self) -> Classes:
        """Import the classes of the library's models; only with a `library_type`."""
        raise NotImplementedError

    def classes_of(self, config: PreTrainedConfig) -> Classes:
        """Import the classes that a configuration belongs to."""
        is_own = config.model_type == self.model_type
        return self.classes() if is_own else self.library_classes()

    def own_config(
        self, config: PreTrainedConfig | Mapping[str, Any], **changes: Any
    ) -> PreTrainedConfig:
        """Make this project's configuration of one of it or of the library's, with changes.

        Args:
            config: the configuration, or what its config.json holds.

        Raises:
            ValueError: the class refuses them.
        """
        values, kind = (
            config if isinstance(config, Mapping) else config.to_dict(),
            self.config_class(),
        )
        fields = {key: value for key, value in values.items() if key not in _NOT_FIELDS}
        if values.get("model_type") == self.library_type and hasattr(kind, "unknown_keys"):
            # The library's class knows what it leaves out of its files, such as Mamba's d_model.
            for key in kind.unknown_keys(fields):
                del fields[key]
        return kind.from_dict(fields | changes)

    def library_config(self, config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
        """Make the library's configuration of a model that `library_problems` finds nothing in."""
        kind = self.library_classes().config
        known = kind().to_dict().keys() - _NOT_FIELDS
        fields = {key: value for key, value in config.to_dict().items() if key in known}
        return kind(**fields | changes)

    def library_problems(self, config: PreTrainedConfig) -> list[str]:
        """Return what of a model, its convolutions aside, the library's class does not have."""
        return []

    # Sections and configurations

    def fields(self, section: ModelSection, vocab_size: int, context_length: int) -> dict[str, Any]:
        """Return the arguments of the configuration's class.

        Args:
            vocab_size: the tokenizer's; the section's comes before it.
            context_length: of a training sequence, in tokens.
        """
        # The keys of both are the same, so that a new one cannot be forgotten here.
        return section.model_dump(exclude={"architecture"}) | {
            "vocab_size": section.vocab_size or vocab_size,
            "max_position_embeddings": context_length,
        }

    def section_values(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the section's keys but `architecture` for a configuration, ours or the library's.

        Keys that it does not know have their defaults.
        """
        known = config.to_dict()
        fields = self.Section.model_fields.items()
        values = {name: known.get(name, field.get_default()) for name, field in fields}
        del values["architecture"]
        return values

    def section(self, config: PreTrainedConfig) -> Any:
        """Make the section of a model that is there, whatever its values."""
        return self.Section.model_construct(**self.section_values(config))

    def differences(self, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
        """Return what makes one model's weights unfit for another, by their `section_values`."""
        return [
            f"model.{key} is {value!r} there and {ours[key]!r} here"
            for key, value in theirs.items()
            if key not in self.free_keys and value != ours[key]
        ]

    def keeps_weight(self, name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
        """Return True if a weight of theirs means the same in our model; else ours stays as it is.

        Of models without `differences`.
        """
        return True

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Check a config.json before a configuration is made of it. Raises ValueError."""

    def problems(self, section: Any, context_length: int) -> list[str]:
        """Return what does not go together in a section, in lines that begin with the key."""
        return []

    def objective(self, section: Any, train: Any) -> Objective:
        """Return what a step minimises, by the section `train` of a run's configuration."""
        return Objective()

    def prepare_training(self, model: PreTrainedModel, section: Any, train: Any) -> None:
        """Set the modules of a model that will be trained by `objective`."""

    def isolates_documents(self, section: Any) -> bool:
        """Return True if the model can keep the documents of a packed row apart."""
        return True

    def division_problems(self, section: Any, parts: int, context_length: int) -> list[str]:
        """Return why `parts` ranks cannot share a sequence, for `train.sequence_parallel`.

        By default nobody knows how: a family whose modules take a `cat_lm.model.sequence` says so.
        """
        return [f"cannot divide the sequences of model.architecture={self.name}"]

    def portable(self, section: Any) -> Any:
        """Return the same model, computed by what every machine has."""
        return section

    # Words

    def describe(self, section: Any) -> str:
        """Return what a model is, for its card."""
        return f"{self.title} language model ({self.words(section)})"

    def words(self, section: Any) -> str:
        """Describe in a few words how a model differs from the others of its size.

        By default by the keys that other families have not.
        """
        own = section.model_dump(exclude=set(ModelSection.model_fields))
        return ", ".join(f"{key}={value}" for key, value in own.items()) or self.title

    def facts(self, section: Any) -> dict[str, Any]:
        """Return what a table of runs shows of a model, by column."""
        return {}

    def sizes(self, section: Any) -> dict[str, int]:
        """Return the numbers that make a model's size, by name."""
        return {"layers": section.num_hidden_layers, "hidden size": section.hidden_size}

    # Variants: what sets models of one family and size apart

    def variant(self, section: Any) -> str:
        """Name the variant of a model; "" in a family of one."""
        return ""

    def variants(self) -> dict[str, str]:
        """Return all variants by name, in a few words; with a `library_type` its own first."""
        return {"": self.title}

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        """Return the section's keys that make a model one of a variant.

        Args:
            heads: for what has heads and no other key for them.
            context_length: for tables that are as long.
        """
        return {}

    def decodes(self, variant: str) -> bool:
        """Return True if models of a variant decode token by token, from a state."""
        return True

    def describe_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Describe in one line what computes the convolutions of a model, and why.

        Raises:
            ValueError: the backend asked for cannot serve.
        """
        return "no convolutions"

    def describe_mixer_backend(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, backend: str
    ) -> str:
        """Describe in one line what computes the recurrences of a model, and why; "" without any.

        Raises:
            ValueError: the backend asked for cannot serve.
        """
        if backend != "auto":
            raise ValueError("the model has no recurrences that a backend could be named for")
        return ""

    # Files of the library

    def own_name(self, config: PreTrainedConfig, name: str) -> str | None:
        """Translate the name of a file's tensor into that in the model of a configuration.

        None for a constant that old files hold and no model does.
        """
        return name

    # Upcycling: models with convolutions, and the same without

    def plain_name(self, name: str) -> str:
        """Translate the name of a parameter of a model with convolutions into that without."""
        return name


def head_division_problems(parts: int, counts: Mapping[str, int]) -> list[str]:
    """Return which numbers of heads or channels, by their key, `parts` ranks cannot share."""
    return [
        f"must divide model.{key}={count}" for key, count in counts.items() if count % parts != 0
    ]


def halo_problems(parts: int, context_length: int, windows: Mapping[str, int]) -> list[str]:
    """Return which short convolutions, W by its key, read more than one part before a token's."""
    share = context_length // parts
    return [
        f"parts of {share} tokens are shorter than the {window - 1} before them that "
        f"model.{key}={window} reads"
        for key, window in windows.items()
        if window - 1 > share
    ]
