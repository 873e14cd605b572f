"""The base class of model families: what each declares, and what all have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cat_lm.model.attention import Objective
from cat_lm.model.attention.settings import rename_parameter
from cat_lm.model.hf.sections.base import ModelSection
from cat_lm.model.rules import tap_problems

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

# Keys of a configuration's dictionary that are not arguments of its class.
NOT_FIELDS = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype"}


class Classes(NamedTuple):
    """The classes of a model. `base_model` is the class that `AutoModel` builds, or None."""

    config: type[PreTrainedConfig]
    causal_lm: type[PreTrainedModel]
    base_model: type[PreTrainedModel] | None = None


class Summary(NamedTuple):
    """A description and the size of a model, for logs and the model card.

    Attributes:
        title: the name of such a model in tables.
        words: how it differs from the others of its size.
        facts: its entries in a table of runs, by column.
        sizes: the numbers that make its size, by name.
        variant: its variant, by `Architecture.variants`.
    """

    title: str
    words: str
    facts: dict[str, Any]
    sizes: dict[str, int]
    variant: str = ""

    @property
    def description(self) -> str:
        """Return one sentence that describes the model, for its card."""
        return f"{self.title} language model ({self.words})"


class Architecture:
    """A family of models. Every method that takes a `section` takes one of its `Section`.

    Attributes:
        name: the value of `model.architecture`.
        title: the name of the family for people.
        model_type: the model type of this project's configuration class.
        library_type: of a library's own models that this family reads and goes on from; None
            where there are none.
        library: whose models those are. Of another library than transformers they are read and
            written by this project's classes; `library_import` registers them with transformers.
        class_prefix, library_prefix: the beginning of the names of this project's classes, which
            are in `cat_lm.model`, and of the library's.
        Section: the keys of `model:`.
        layer_weight: a matrix that every layer has, `{layer}` standing for its number.
        old_constants: a pattern of what old versions of a library stored with the weights.
        scales_positions: whether longer contexts can be read by `cat_lm.pretrained.conversion`.
        takes_convolutions: whether `cat_lm.upcycle` can give its models convolutions.
        recurrent: whether `train.mixer_backend` chooses what computes its recurrences.
        short_names: names of variants, by `variants`, that commands offer in place of longer ones.
        free_keys: keys that may change when a run starts from a model's weights.
        unoffered_keys: options of models that the section has no key for.
        adapter_modules: linear layers that peft adapts where nobody names any, of a family whose
            library's models peft does not know.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    model_type: ClassVar[str]
    library_type: ClassVar[str | None] = None
    library: ClassVar[str] = "transformers"
    library_import: ClassVar[str] = ""
    class_prefix: ClassVar[str] = ""
    library_prefix: ClassVar[str] = ""
    Section: ClassVar[type[ModelSection]]
    layer_weight: ClassVar[str]
    old_constants: ClassVar[str | None] = None
    scales_positions: ClassVar[bool] = False
    takes_convolutions: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False
    short_names: ClassVar[dict[str, str]] = {}
    free_keys: ClassVar[frozenset[str]] = frozenset()
    unoffered_keys: ClassVar[tuple[str, ...]] = ()
    adapter_modules: ClassVar[tuple[str, ...]] = ()

    # Classes and configurations

    def classes(self) -> Classes:
        """Import this project's classes."""
        from cat_lm import model

        prefix = self.class_prefix
        return Classes(
            self.config_class(),
            getattr(model, f"{prefix}ForCausalLM"),
            getattr(model, f"{prefix}Model"),
        )

    def config_class(self) -> type[PreTrainedConfig]:
        """Import the configuration class without importing the model classes."""
        if not self.class_prefix:
            return self.classes().config
        from cat_lm import model

        return getattr(model, f"{self.class_prefix}Config")

    def library_classes(self) -> Classes:
        """Import the classes of the library's models; only with a `library_type`."""
        import transformers

        ends = ("Config", "ForCausalLM", "Model")
        return Classes(*(getattr(transformers, f"{self.library_prefix}{end}") for end in ends))

    def own_config(
        self, config: PreTrainedConfig | Mapping[str, Any], **changes: Any
    ) -> PreTrainedConfig:
        """Convert a configuration of this project or of the library to this project's, with
        changes.

        Args:
            config: the configuration, or what its config.json holds.

        Raises:
            ValueError: the class refuses them.
        """
        values = config if isinstance(config, Mapping) else config.to_dict()
        kind = self.config_class()
        fields = {key: value for key, value in values.items() if key not in NOT_FIELDS}
        if values.get("model_type") == self.library_type and hasattr(kind, "unknown_keys"):
            # The library's class knows which of its keys are never written, such as Mamba's
            # d_model.
            for key in kind.unknown_keys(fields):
                del fields[key]
        return kind.from_dict(fields | changes)

    def library_problems(self, config: PreTrainedConfig) -> list[str]:
        """Return the features of a model, besides convolutions, that the library's class lacks."""
        return []

    def own_name(self, config: PreTrainedConfig, name: str) -> str | None:
        """Translate the name of a tensor in a file to its name in this project's model.

        None for a constant that old files hold and no model does.
        """
        if self.old_constants is None:
            return name
        if re.search(self.old_constants, name):
            return None
        convolved = bool(getattr(config, "convolved_streams", ""))
        return rename_parameter(name, self.config_class().renamings(convolved))

    # Sections

    def fields(self, section: ModelSection, vocab_size: int, context_length: int) -> dict[str, Any]:
        """Return the arguments of the configuration class for a section.

        Args:
            vocab_size: the size for a section that sets none, the tokenizer's.
            context_length: the context length of a training sequence, in tokens.
        """
        # Section and configuration share their keys, so that a new key cannot be forgotten here.
        return section.model_dump(exclude={"architecture"}) | {
            "vocab_size": section.vocab_size or vocab_size,
            "max_position_embeddings": context_length,
            **section.derived(),
        }

    def section_values(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the section's keys except `architecture` of a configuration, ours or the
        library's.

        Keys that it does not know have their defaults.
        """
        known = config.to_dict()
        fields = self.Section.model_fields.items()
        values = {name: known.get(name, field.get_default()) for name, field in fields}
        del values["architecture"]
        return values

    def differences(self, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
        """Return the keys, by comparing `section_values`, that make one model's weights unusable in
        the other.
        """
        return [
            f"model.{key} is {value!r} there and {ours[key]!r} here"
            for key, value in theirs.items()
            if key not in self.free_keys and value != ours[key]
        ]

    def problems(self, section: Any, context_length: int) -> list[str]:
        """Return contradictions between a section's keys, in lines that begin with the key."""
        return [*section.shape_problems(), *tap_problems(section.windows, context_length)]

    def objective(self, section: Any, train: Any) -> Objective:
        """Return the training objective for the section `train` of a run's configuration."""
        return Objective()

    # Descriptions

    def summary(self, section: Any) -> Summary:
        """Describe a model; by default by the keys that are particular to its family."""
        own = section.model_dump(exclude=set(ModelSection.model_fields))
        words = ", ".join(f"{key}={value}" for key, value in own.items()) or self.title
        return Summary(self.title, words, {}, sizes_of(section))

    def variants(self) -> dict[str, str]:
        """Return the variants of one model size, name -> short description.

        "" in a family of one; with a `library_type` the variant of the library comes first.
        """
        return {"": self.title}

    def variant_keys(self, variant: str, heads: int, context_length: int) -> dict[str, Any]:
        """Return the section's keys that turn a model into one of its variants.

        Args:
            heads: the number of heads of parts that have no key of their own for it.
            context_length: the length of tables by position.
        """
        return {}

    def describe_backend(
        self,
        key: str,
        config: PreTrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
    ) -> str:
        """Return one line that names the backend of a model's convolutions or recurrences, and the
        reason.

        Args:
            key: the key in the section `train`: conv_backend or mixer_backend.

        Returns:
            The line; "" of the recurrences of a model without any.

        Raises:
            ValueError: the backend asked for cannot serve.
        """
        if key == "conv_backend":
            return "no convolutions"
        if backend != "auto":
            raise ValueError("the model has no recurrences that a backend could be named for")
        return ""


def sizes_of(section: ModelSection, **others: int) -> dict[str, int]:
    """Return the numbers of a model's size (layers, width, heads, …) by name."""
    sizes = {"layers": section.num_hidden_layers, "hidden size": section.hidden_size}
    return sizes | others
