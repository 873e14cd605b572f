"""Attention: the registry of patterns, score transforms and value transforms.

A *pattern* is how queries meet keys (`model.attention`). A *score transform* changes the logits
before the softmax (`model.score_transform`), a *value transform* the values before they are cached
and attended to (`model.value_transform`); each takes options as a mapping. This
project's are files with an ENTRY in `patterns`, `scores` and `values`; plugins
(`cat_lm.core.plugins`) and scripts give theirs to `register`. This module imports no torch: entries
import it when they build their modules.

A `model` is a section of the YAML or a configuration, whose keys are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from cat_lm.core.errors import UserError
from cat_lm.core.numbers import Range
from cat_lm.core.readers import short
from cat_lm.core.registry import Registry, module_problem
from cat_lm.model.rules import mixes_maps

if TYPE_CHECKING:
    import torch
    from torch import nn

# Only the parameters of attention patterns have this in their names.
PATTERNS_OWN = ".core."
OWN_WEIGHT = 0.3  # The default weight of the layers' own losses.


@dataclass(frozen=True)
class Objective:
    """The training objective: token_weight · token loss + own_weight · the layers' own losses.

    Attributes:
        name: the name of the layers' auxiliary loss, in metrics and in the log.
        token_weight, own_weight: weights of the two losses.
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
    """The base class of registered attention parts.

    A module that `build` returns, if it has parameters, names those without weight decay in its
    class's `no_decay` and gives all their starts in `initial_values()`; see
    `cat_lm.core.parameters`. Linear layers, embeddings and norms in it start as the model's, unless
    `initial_values` names them (`gate.bias`).

    Attributes:
        key, options_key: the keys that choose an entry of this class, and hold its options.
        name: the value of the key.
        title: in a sentence, as in "cannot compute mixed attention maps".
        words: for descriptions of a model; "" where there is nothing to say.
        implementations: the values of `attn_implementation` that can compute it; None for all.
        options: the options' names with their defaults.
        divides: whether its module computes some of the heads as among all, for
            `train.sequence_parallel`; the ranks are in `call.group`, or `sequence_group` of scores.
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
        """Build a layer's module; a pattern takes no `options`."""
        raise NotImplementedError

    def resolved(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return all options: the given ones, and defaults for the others."""
        return dict(self.options) | dict(given or {})

    def keeps_parameters(
        self, theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None
    ) -> bool:
        """Return True if parameters trained with `theirs` keep their meaning under `ours`.

        The options differ in `free_options` alone. Other parameters are initialized.
        """
        return True

    def problems(self, model: Any, options: dict[str, Any]) -> list[str]:
        """Return problems of the options or the model, in lines that begin with a key."""
        return []

    def length_problems(self, model: Any, length: int) -> list[str]:
        """Return why rows of `length` tokens cannot be read, in lines that begin with a key."""
        return []

    def holds_state(self, model: Any) -> bool:
        """Return True if decoding needs more than keys and values."""
        return False

    def division_problems(self, model: Any) -> list[str]:
        """Return why a rank cannot compute its share of the heads separately (sequence
        parallelism).
        """
        return [] if self.divides else [f"{self.title} cannot be divided by heads"]


class Pattern(Entry):
    """Define how queries attend to keys. `build` takes the configuration and returns a module like
    `cat_lm.model.attention.modules.call.SoftmaxCore`.

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
        most = f"at most {self.longest} tokens, not of {length}"
        return [f"attention={self.name}: reads rows of {most}"]

    def describe_backend(self, config: Any, device: torch.device, dtype: torch.dtype) -> str:
        """Return a description of the backend; "" if `attn_implementation` describes it already."""
        return ""

    def cache_layers(self) -> tuple[type, type] | None:
        """Import the subclasses of `StateDynamicLayer` and `StateStaticLayer`; None for the base
        classes.

        Only a pattern that `holds_state` has its own.
        """
        return None

    def reads_neighbours(self, model: Any) -> bool:
        """Return True if adjacent keys are read together, so that no padding may stand between
        them.
        """
        return False

    def objective(self, train: Any) -> Objective:
        """Return the training objective for the section `train` of a run's configuration."""
        return Objective()

    def objective_problems(self, config: Any) -> list[str]:
        """Return contradictions between a run's `train` section and its model."""
        return []

    def prepare(self, model: Any, train: Any) -> None:
        """Prepare the modules of a model for training with `objective`."""

    def mask(self, config: Any, **inputs: Any) -> Any:
        """Return the mask of the configuration's attention, from the inputs of transformers'
        `create_causal_mask`.
        """
        from transformers.masking_utils import create_causal_mask

        said = ("attention_mask", "past_key_values", "and_mask_function")
        is_plain = all(inputs.get(name) is None for name in said)
        if is_plain and config._attn_implementation == "sdpa":
            # `is_causal` is enough. In a captured graph transformers 5.17 builds a mask anyway, and
            # then SDPA cannot use flash attention.
            return None
        return create_causal_mask(config=config, **inputs)


class ScoreTransform(Entry):
    """A transform of the logits q·k / sqrt(D) of query i, key j and head h before the softmax.

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
    divides = True  # The function gets the global index of each head.

    @property
    def implementations(self) -> tuple[str, ...] | None:
        return self.FORMS[self.form]

    def splits_queries(self, model: Any) -> bool:
        """Return True if SDPA is called for some queries at a time, with computed logits."""
        return False


class ValueTransform(Entry):
    """A transform of the values, biases included, before they are cached and attended to.

    `build` returns a module whose forward takes values [B, T, H, D] and a
    `cat_lm.model.context.Context`, and returns values. What it reads of earlier tokens it keeps in
    `context.state` under "value".
    """

    key, options_key = "value_transform", "value_options"

    def taps(self, model: Any) -> int:
        """Return the number of taps of the filters that convolve values, or 0."""
        return 0


def whole_problems(key: str, value: Any, known: Range) -> list[str]:
    """Return a problem if the option of a key is no whole number in the known range."""
    if isinstance(value, bool) or not isinstance(value, int):
        return [f"{key}={short(value)}: must be a whole number"]
    problem = known.problem(value)
    return [f"{key}={value}: {problem}"] if problem else []


# The registries


def _registry(kind: type[Entry], folder: str, **further: Any) -> Registry:
    made = {"words": ("name", "title"), "methods": ("build",)}
    return Registry(kind.key, kind, package=f"{__name__}.{folder}", **made, **further)


def _check_form(entry: ScoreTransform) -> None:
    if entry.form not in entry.FORMS:
        problem = f"form={entry.form!r} must be one of {', '.join(entry.FORMS)}"
        raise ValueError(f"score_transform {entry.name!r}: {problem}")


REGISTRIES: dict[type[Entry], Registry] = {
    Pattern: _registry(Pattern, "patterns", first=("softmax",)),
    ScoreTransform: _registry(ScoreTransform, "scores", others=("none",), check=_check_form),
    ValueTransform: _registry(ValueTransform, "values", others=("none",)),
}
PATTERNS: Registry[Pattern] = REGISTRIES[Pattern]


def register(entry: Entry) -> None:
    """Register a pattern or a transform of scores or values. Raises ValueError if it is invalid."""
    kinds = (kind for kind in REGISTRIES if isinstance(entry, kind))
    REGISTRIES[next(kinds, Pattern)].register(entry)


def names(kind: type[Entry]) -> tuple[str, ...]:
    """List the values that a key may have; transforms have `none` first."""
    return (*REGISTRIES[kind].others, *REGISTRIES[kind].names())


def _chosen(kind: type[Entry], model: Any) -> Any:
    if kind is Pattern and mixes_maps(model):
        return PATTERNS.get("map_mixing")
    name = getattr(model, kind.key)
    return None if name == "none" else REGISTRIES[kind].get(name)


def pattern(model: Any) -> Pattern:
    """Return the attention pattern of a model."""
    return _chosen(Pattern, model)


def score_transform(model: Any) -> ScoreTransform | None:
    """Return the transform of a model's logits, or None."""
    return _chosen(ScoreTransform, model)


def value_transform(model: Any) -> ValueTransform | None:
    """Return the transform of a model's values, or None."""
    return _chosen(ValueTransform, model)


def chosen_entries(model: Any) -> dict[type[Entry], Entry]:
    """Return the pattern and the transforms of a model by their base classes."""
    chosen = {kind: _chosen(kind, model) for kind in REGISTRIES}
    return {kind: entry for kind, entry in chosen.items() if entry is not None}


def describe_entry(kind: type[Entry], model: Any) -> str:
    """Return the name of a model's entry with the options that are given."""
    named, options = f"{kind.key} {_chosen(kind, model).name!r}", getattr(model, kind.options_key)
    return f"{named}, {kind.options_key}={short(options)}" if options else named


def build(kind: type[Entry], config: Any) -> Any:
    """Build a layer's module of a configuration's pattern or transform; None without one.

    Raises:
        UserError: it builds no module, or one that does not say of its parameters how they start
            and which take no weight decay.
    """
    from cat_lm.core.parameters import check_parameters  # This import loads torch.

    entry = _chosen(kind, config)
    if entry is None:
        return None
    options = () if kind is Pattern else (entry.resolved(getattr(config, kind.options_key)),)
    try:
        module = entry.build(config, *options)
        if problem := module_problem(module):
            raise ValueError(problem)
        check_parameters(module, needs_initial_values=True)
    except ValueError as error:
        raise UserError(f"{describe_entry(kind, config)}: {error}") from error
    return module


# Contradictions between keys


def problems(model: Any, implementation: str | None = None) -> list[str]:
    """Return contradictions between a model's attention keys, one line each that begins with the
    key.

    `implementation` is `attn_implementation`, None where it is not decided.
    """
    if mixes_maps(model) and model.attention not in ("softmax", "map_mixing"):
        return [f"attention={model.attention}: not with conv_mixing=maps, which mixes softmax"]
    if found := [problem for kind in REGISTRIES for problem in _option_problems(kind, model)]:
        return found
    chosen = pattern(model)
    if chosen.name == "map_mixing" and not mixes_maps(model):
        found.append("attention=map_mixing: is chosen by conv_type=multihead and conv_mixing=maps")
    rank = getattr(model, "conv_rank", 1)
    if rank > 1 and not chosen.takes_ranks:
        found.append(f"conv_rank={rank}: cannot be combined with {chosen.title}")
    for entry in (score_transform(model), value_transform(model)):
        if entry is not None and not chosen.takes_transforms:
            found.append(f"{entry.key}={entry.name}: cannot be combined with {chosen.title}")
    return [*found, *implementation_problems(model, implementation)]


def _option_problems(kind: type[Entry], model: Any) -> list[str]:
    entry, options = _chosen(kind, model), getattr(model, kind.options_key)
    if options is not None and not isinstance(options, dict):
        return [f"{kind.options_key}={short(options)}: must be a mapping of options"]
    if entry is None:
        said = f"{kind.options_key}={short(options)}: says nothing with {kind.key}=none"
        return [said] if options else []
    if unknown := sorted(set(options or {}) - set(entry.options)):
        known = ", ".join(entry.options) or "none"
        where = f"{kind.options_key}.{unknown[0]}"
        return [f"{where}: unknown with {kind.key}={entry.name}; known: {known}"]
    return entry.problems(model, entry.resolved(options))


def implementation_problems(model: Any, implementation: str | None) -> list[str]:
    """Return which parts of a model's attention `attn_implementation` cannot compute."""
    found = []
    for entry in chosen_entries(model).values():
        able = entry.implementations
        if able is not None and implementation not in (None, *able):
            found.append(
                f"attn_implementation={implementation}: cannot compute {entry.title} "
                f"({entry.key}={entry.name}); use one of {', '.join(able)}"
            )
    return found


def usual_implementation(model: Any) -> str | None:
    """Return a model's default `attn_implementation`; None if transformers' default serves."""
    able = [entry.implementations for entry in chosen_entries(model).values()]
    served = [set(names) for names in able if names is not None]
    common = set.intersection(*served) if served else {"sdpa"}
    # "eager" comes first in the alphabet.
    return None if "sdpa" in common else min(common, default=None)


def length_problems(model: Any, length: int) -> list[str]:
    """Return the parts of a model's attention that do not support rows of `length` tokens."""
    entries = chosen_entries(model).values()
    return [problem for entry in entries for problem in entry.length_problems(model, length)]


# Keys that a model must share with another one to reuse its weights


def compared_keys(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys that must be equal in both models, with default options filled in."""
    theirs, ours = dict(theirs), dict(ours)
    for kind, registry in REGISTRIES.items():
        name, plain = ours[kind.key], "softmax" if kind is Pattern else "none"
        for values in (theirs, ours):
            if values[kind.key] != "none":
                entry = registry.get(values[kind.key])
                options = entry.resolved(values[kind.options_key])
                kept = {n: v for n, v in options.items() if n not in entry.free_options}
                values[kind.options_key] = kept
        if theirs[kind.key] == plain != name and registry.get(name).takes_any_weights:
            del theirs[kind.key], theirs[kind.options_key]
    return theirs, ours


def keeps_parameters(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Return True if the other model's attention parameters keep their meaning in ours."""
    options = (values[Pattern.options_key] for values in (theirs, ours))
    name = ours[Pattern.key]
    return theirs[Pattern.key] == name and PATTERNS.get(name).keeps_parameters(*options)
