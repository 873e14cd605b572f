"""What a pattern of attention, and a transform of scores or values, says of itself.

Facts about an entry take a `model`: a section of the YAML or a configuration, whose keys are the
same. None of them imports torch; `build` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from cat_lm.core.numbers import Range
from cat_lm.core.readers import short

if TYPE_CHECKING:
    import torch
    from torch import nn

OWN_WEIGHT = 0.3  # of layers' own losses, where nothing else is said


@dataclass(frozen=True)
class Objective:
    """The loss of a step, token_weight · the tokens' loss + own_weight · the layers' own.

    Attributes:
        name: of the layers' own loss, in metrics and in the log.
        token_weight, own_weight: of the two losses.
        trains_all: whether all weights learn; else only those that the layers' own losses reach.
        section: keys of the model's section by which a step computes otherwise than the model.
        said: the key and value of the configuration that decide it, in messages.
    """

    name: str = "auxiliary_loss"
    token_weight: float = 1.0
    own_weight: float = OWN_WEIGHT
    trains_all: bool = True
    section: Mapping[str, Any] = field(default_factory=dict)
    said: str = "the tokens' loss"


class Entry:
    """An entry of the registry.

    A module that `build` returns, if it has parameters, names those without weight decay in its
    class's `no_decay` and gives all their starts in `initial_values()`; see
    `cat_lm.core.parameters`. Linear layers, embeddings and norms in it start as the model's, unless
    `initial_values` names them (`gate.bias`).

    Attributes:
        key, options_key: the keys that choose an entry of this class, and hold its options.
        name: what the key says.
        title: in a sentence, as in "cannot compute mixed attention maps".
        words: for descriptions of a model; "" where there is nothing to say.
        implementations: the values of `attn_implementation` that can compute it; None for all.
        options: the options' names with their defaults.
        divides: whether its module computes some of the heads as it computes them among all, for
            `train.sequence_parallel`. A module with something for each head finds the ranks in
            `call.group`, a transform of scores in `sequence_group`.
        takes_any_weights: whether a model that was trained without it can be trained on with it.
        computes_on_cpu: whether eager or sdpa computes its module on a CPU; one of a plugin is then
            checked for causality when it is first built.
        free_options: names of options that may differ where training goes on.
    """

    key: ClassVar[str]
    options_key: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str]
    words: ClassVar[str] = ""
    implementations: tuple[str, ...] | None = None
    options: ClassVar[Mapping[str, Any]] = {}
    divides: ClassVar[bool] = False
    takes_any_weights: ClassVar[bool] = False
    computes_on_cpu: ClassVar[bool] = True
    free_options: ClassVar[frozenset[str]] = frozenset()

    def build(self, config: Any, options: dict[str, Any]) -> nn.Module:
        """Build a layer's module; a pattern's takes no `options`."""
        raise NotImplementedError

    def resolved(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return all options: those given, and the others' defaults."""
        return dict(self.options) | dict(given or {})

    def keeps_parameters(
        self, theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None
    ) -> bool:
        """Return True if parameters learned with options of theirs mean the same with ours.

        The options differ in `free_options` alone. Other parameters are initialized.
        """
        return True

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        """Return what is wrong with the options or the model, in lines that begin with a key."""
        return []

    def length_problems(self, model: Any, length: int) -> list[str]:
        """Return why rows of `length` tokens cannot be read, in lines that begin with a key."""
        return []

    def holds_state(self, model: Any) -> bool:
        """Return True if decoding needs more than keys and values."""
        return False

    def division_problems(self, model: Any) -> list[str]:
        """Return why its module cannot compute some of the heads as it computes them among all."""
        return [] if self.divides else [f"{self.title} cannot be divided by heads"]


class Pattern(Entry):
    """How queries meet keys. `build` takes the configuration and gives a module like `SoftmaxCore`
    of `cat_lm.model.attention.modules.call`.

    Attributes:
        takes_transforms: whether scores and values may be transformed.
        takes_ranks: whether queries and keys may be wider than values (`conv_rank`).
        reads_positions: whether its module asks for the positions of keys.
        masks_keys: whether its module itself leaves out padding and other documents' keys, which
            `call` tells it, so that no mask is made; one that was prepared is refused.
        longest: the most tokens that a row may have; None for any number.
    """

    key, options_key = "attention", "attention_options"
    takes_transforms: ClassVar[bool] = True
    takes_ranks: ClassVar[bool] = False
    reads_positions: ClassVar[bool] = False
    masks_keys: ClassVar[bool] = False
    longest: ClassVar[int | None] = None

    def length_problems(self, model: Any, length: int) -> list[str]:
        if self.longest is None or length <= self.longest:
            return []
        return [
            f"attention={self.name}: reads rows of at most {self.longest} tokens, not of {length}"
        ]

    def describe_backend(self, config: Any, device: torch.device, dtype: torch.dtype) -> str:
        """Return what will compute it; "" where `attn_implementation` says it all."""
        return ""

    def cache_layers(self) -> tuple[type, type] | None:
        """Import subclasses of `StateDynamicLayer` and `StateStaticLayer`; None for these two.

        Only a pattern that `holds_state` has its own.
        """
        return None

    def reads_neighbours(self, model: Any) -> bool:
        """Return True if keys side by side are read together, so that no padding may part them."""
        return False

    def objective(self, train: Any) -> Objective:
        """Return what a step minimises, by the section `train` of a run's configuration."""
        return Objective()

    def objective_problems(self, config: Any) -> list[str]:
        """Return what of a run's `train` contradicts its model, whichever pattern that has."""
        return []

    def row_problems(self, config: Any) -> list[str]:
        """Return whether a run's rows are too short to learn from, where nothing else is wrong."""
        return []

    def prepare(self, model: Any, train: Any) -> None:
        """Set the modules of a model that will be trained by `objective`."""

    def mask(self, config: Any, **inputs: Any) -> Any:
        """Make what the module takes as `call.mask`; transformers' causal mask by default.

        Args:
            inputs: of `transformers.masking_utils.create_causal_mask`.
        """
        from transformers.masking_utils import create_causal_mask

        said = ("attention_mask", "past_key_values", "and_mask_function")
        is_plain = all(inputs.get(name) is None for name in said)
        if is_plain and config._attn_implementation == "sdpa":
            # `is_causal` says it all. transformers says so too, but 5.17 builds the mask where a
            # graph is captured, with which SDPA computes without flash attention.
            return None
        return create_causal_mask(config=config, **inputs)


class ScoreTransform(Entry):
    """What is done to the logits q·k / sqrt(D) of query i, key j and head h before the softmax.

    `build` returns a `ScoreModule` (`cat_lm.model.attention.modules.scores`). Its form decides what
    computes it:

    additive: l + b_h(i, j), where b does not depend on l: eager, sdpa, flex_attention.
    elementwise: f_h(l, i, j): eager, flex_attention.
    separable: l · f_h(i) · g_h(j), by which queries and keys are scaled: every implementation.

    A separable one whose factors overflow in long rows may compute logits (`separates`).
    """

    FORMS: ClassVar[dict[str, tuple[str, ...] | None]] = {
        "additive": ("eager", "sdpa", "flex_attention"),
        "elementwise": ("eager", "flex_attention"),
        "separable": None,
    }
    key, options_key = "score_transform", "score_options"
    form: ClassVar[str]
    divides = True  # the function gets the number of a head among all

    @property
    def implementations(self) -> tuple[str, ...] | None:
        return self.FORMS[self.form]

    def masks_documents(self, model: Any) -> bool:
        """Return True if sdpa computes logits for some queries at a time, and takes no mask."""
        return False


class ValueTransform(Entry):
    """What is done to the values, biases included, before they are cached and attended to.

    `build` returns a module whose forward takes values [B, T, H, D] and a
    `cat_lm.model.context.Context`, and returns values. What it reads of earlier tokens it keeps in
    `context.state` under "value".
    """

    key, options_key = "value_transform", "value_options"

    def taps(self, model: Any) -> int:
        """Count the taps of the filters, one for each head, that it convolves values with, or 0."""
        return 0


def whole_problems(key: str, value: Any, known: Range) -> list[str]:
    """Return whether the option of a key is no whole number of a range."""
    if isinstance(value, bool) or not isinstance(value, int):
        return [f"{key}={short(value)}: must be a whole number"]
    problem = known.problem(value)
    return [f"{key}={value}: {problem}"] if problem else []
