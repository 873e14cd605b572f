"""How attention attends: the one registry of patterns, and of transforms of scores and values.

A *pattern* is how queries meet keys (`model.attention`). A *score transform* changes the logits
before the softmax (`model.score_transform`), a *value transform* the values before they are cached
and attended to (`model.value_transform`); each takes options as a mapping. An entry is a subclass
of those in `cat_lm.model.attention.base`. This project's are files with an ENTRY in `patterns`,
`scores` and `values`; plugins (`cat_lm.core.plugins`) and scripts give theirs to `register`. This
module imports no torch: entries import it when they build their modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.plugins import is_own
from cat_lm.core.readers import clipped, short
from cat_lm.core.registry import Registry, mishap, module_problem
from cat_lm.model.attention.base import Entry, Pattern, ScoreTransform, ValueTransform
from cat_lm.model.rules import mixes_maps

__all__ = ["REGISTRIES", "Entry", "Pattern", "ScoreTransform", "ValueTransform", "build"]
__all__ += ["check_names", "chosen_entries", "compared_options", "described", "given_options"]
__all__ += ["implementation_problems", "keeps_parameters", "keys_of", "keys_of_any_weights"]
__all__ += ["length_problems", "names", "pattern", "problems", "register", "score_transform"]
__all__ += ["usual_implementation", "value_transform"]

# In the names of the parameters of patterns of attention, and of no others.
PATTERNS_OWN = ".core."
# The key that chooses an entry, and the one that holds its options, by the entries' class.
_KEYS = {
    Pattern: ("attention", "attention_options"),
    ScoreTransform: ("score_transform", "score_options"),
    ValueTransform: ("value_transform", "value_options"),
}


def _check(entry: Entry) -> None:
    """Check what an entry says of itself. Raises ValueError."""
    named = f"{_KEYS[kind_of(entry)][0]} {entry.name!r}"
    if isinstance(entry, ScoreTransform) and entry.form not in entry.FORMS:
        raise ValueError(f"{named}: form={entry.form!r} must be one of {', '.join(entry.FORMS)}")
    if not isinstance(entry.options, Mapping):
        raise ValueError(
            f"{named}: options={entry.options!r} must be a mapping of the options' names to their "
            "defaults"
        )
    able = entry.implementations
    if able is not None and not isinstance(able, tuple):
        raise ValueError(
            f"{named}: implementations={able!r} must be a tuple of names, as "
            '("eager", "sdpa"), or None for all'
        )


PATTERNS: Registry[Pattern] = Registry(
    "attention",
    Pattern,
    package=f"{__name__}.patterns",
    words=("name", "title"),
    methods=("build",),
    check=_check,
    first=("softmax",),
)
SCORE_TRANSFORMS: Registry[ScoreTransform] = Registry(
    "score_transform",
    ScoreTransform,
    package=f"{__name__}.scores",
    words=("name", "title", "form"),
    methods=("build",),
    check=_check,
    others=("none",),
)
VALUE_TRANSFORMS: Registry[ValueTransform] = Registry(
    "value_transform",
    ValueTransform,
    package=f"{__name__}.values",
    words=("name", "title"),
    methods=("build",),
    check=_check,
    others=("none",),
)
REGISTRIES: dict[type[Entry], Registry] = {
    Pattern: PATTERNS,
    ScoreTransform: SCORE_TRANSFORMS,
    ValueTransform: VALUE_TRANSFORMS,
}


def kind_of(entry: object) -> type[Entry]:
    """Return what an entry is: a pattern, or a transform of scores or values."""
    return next((kind for kind in REGISTRIES if isinstance(entry, kind)), Pattern)


def register(entry: Entry) -> None:
    """Add a pattern, or a transform of scores or values. Raises ValueError for a wrong one."""
    REGISTRIES[kind_of(entry)].register(entry)


def names(kind: type[Entry]) -> tuple[str, ...]:
    """List what a key may say; transforms have `none` first."""
    return (*(() if kind is Pattern else ("none",)), *REGISTRIES[kind].names())


def pattern(model: Any) -> Pattern:
    """Return the pattern of a model, by its section or configuration."""
    if mixes_maps(model):
        return PATTERNS.get("map_mixing")
    return _chosen(Pattern, model)


def score_transform(model: Any) -> ScoreTransform | None:
    """Return what a model does to its logits; None for nothing."""
    return None if model.score_transform == "none" else _chosen(ScoreTransform, model)


def value_transform(model: Any) -> ValueTransform | None:
    """Return what a model does to its values; None for nothing."""
    return None if model.value_transform == "none" else _chosen(ValueTransform, model)


def _chosen(kind: type[Entry], model: Any) -> Any:
    return REGISTRIES[kind].get(getattr(model, _KEYS[kind][0]))


def check_names(model: Any) -> None:
    """Check that a section or configuration names entries that there are. Raises ValueError."""
    for kind, (key, _) in _KEYS.items():
        name = getattr(model, key)
        if problem := REGISTRIES[kind].problem(name):
            raise ValueError(f"{key}={clipped(repr(name))}: {problem}")


def problems(model: Any, implementation: str | None = None) -> list[str]:
    """Return what does not go together in a model's attention, in lines that begin with the key.

    Args:
        model: a section or configuration whose names are known.
        implementation: `attn_implementation`; None where it is not decided.
    """
    if mixes_maps(model) and model.attention not in ("softmax", "map_mixing"):
        return [f"attention={model.attention}: not with conv_mixing=maps, which mixes softmax"]
    found = _option_problems(model)
    if found:
        return found
    chosen, score, value = pattern(model), score_transform(model), value_transform(model)
    if chosen.name == "map_mixing" and not mixes_maps(model):
        found.append("attention=map_mixing: is chosen by conv_type=multihead and conv_mixing=maps")
    rank = getattr(model, "conv_rank", 1)
    if rank > 1 and not chosen.takes_ranks:
        found.append(f"conv_rank={rank}: cannot be combined with {chosen.title}")
    for key, entry in (("score_transform", score), ("value_transform", value)):
        if entry is not None and not chosen.takes_transforms:
            found.append(f"{key}={entry.name}: cannot be combined with {chosen.title}")
    return [*found, *implementation_problems(model, implementation)]


def implementation_problems(model: Any, implementation: str | None) -> list[str]:
    """Return which parts of a model's attention `attn_implementation` cannot compute."""
    found = []
    for key, entry in (("attention", pattern(model)), ("score_transform", score_transform(model))):
        able = None if entry is None else entry.implementations
        if able is not None and implementation not in (None, *able):
            found.append(
                f"attn_implementation={implementation}: cannot compute {entry.title} "
                f"({key}={entry.name}); use one of {', '.join(able)}"
            )
    return found


def usual_implementation(model: Any) -> str | None:
    """Return what computes a model's attention by default; None for the usual one."""
    chosen = (entry for entry in (pattern(model), score_transform(model)) if entry is not None)
    served = [set(able) for entry in chosen if (able := entry.implementations) is not None]
    able = set.intersection(*served) if served else {"sdpa"}
    return None if "sdpa" in able else min(able, default=None)  # eager is the first by its name


def length_problems(model: Any, length: int) -> list[str]:
    """Return which parts of a model's attention are not for rows of `length` tokens."""
    entries = chosen_entries(model).values()
    return [problem for entry in entries for problem in entry.length_problems(model, length)]


def keys_of_any_weights(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> set[str]:
    """List the keys of what our model has and the one that its weights come from has not.

    Only of entries that `takes_any_weights`.
    """
    found = set()
    for kind, (key, options_key) in _KEYS.items():
        plain = "softmax" if kind is Pattern else "none"
        if theirs[key] == plain != ours[key] and REGISTRIES[kind].get(ours[key]).takes_any_weights:
            found |= {key, options_key}
    return found


def compared_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that must be the same in a model whose weights are taken: by their keys.

    Defaults are spelled out, and `free_options` left out.
    """
    found = {}
    for kind, (key, options_key) in _KEYS.items():
        if (name := values[key]) != "none":
            entry = REGISTRIES[kind].get(name)
            options = entry.resolved(values[options_key])
            found[options_key] = {n: v for n, v in options.items() if n not in entry.free_options}
    return found


def keeps_parameters(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Return True if what their pattern of attention learned means the same in our model."""
    key, options_key = _KEYS[Pattern]
    entry = PATTERNS.get(ours[key])
    return theirs[key] == ours[key] and entry.keeps_parameters(
        theirs[options_key], ours[options_key]
    )


def chosen_entries(model: Any) -> dict[type[Entry], Entry]:
    """Return the pattern of a section or configuration and its transforms, by their classes."""
    chosen = {
        Pattern: pattern(model),
        ScoreTransform: score_transform(model),
        ValueTransform: value_transform(model),
    }
    return {kind: entry for kind, entry in chosen.items() if entry is not None}


def keys_of(kind: type[Entry]) -> tuple[str, str]:
    """Return the key that chooses an entry, and that of its options, by the entries' class."""
    return _KEYS[kind]


def given_options(kind: type[Entry], model: Any) -> Any:
    """Return the options of a section or configuration as they stand there."""
    return getattr(model, _KEYS[kind][1])


def described(kind: type[Entry], model: Any) -> str:
    """Name an entry of a model, and the options that are given."""
    key, options_key = _KEYS[kind]
    named, options = f"{key} {chosen_entries(model)[kind].name!r}", given_options(kind, model)
    return f"{named}, {options_key}={short(options)}" if options else named


def build(kind: type[Entry], config: Any) -> Any:
    """Make a layer's module of the pattern or a transform of a configuration; None without one.

    And that the module says how all of them start, and which take no weight decay.

    Raises:
        UserError: naming the entry and its options: it makes no module, or one that does not say
            of its parameters what it must.
    """
    entry = chosen_entries(config).get(kind)
    if entry is None:
        return None
    named = described(kind, config)
    options = () if kind is Pattern else (entry.resolved(given_options(kind, config)),)
    try:
        module = entry.build(config, *options)
    except Exception as error:
        if is_own(entry) or isinstance(error, UserError | MemoryError):
            raise
        said = error if isinstance(error, ValueError) else f"build raises {mishap(error)}"
        raise UserError(f"{named}: {said}") from error
    _check_module(named, module)
    return module


def _check_module(named: str, module: Any) -> None:
    """Check that it is one, and what it says of its parameters. Raises UserError."""
    from cat_lm.core.parameters import check_parameters  # imports torch

    if problem := module_problem(module):
        raise UserError(f"{named}: {problem}")
    try:
        check_parameters(module, gives_all_starts=True)
    except ValueError as error:
        raise UserError(f"{named}: {error}") from None


def _option_problems(model: Any) -> list[str]:
    """Return which options are wrong or say nothing."""
    found = []
    entries = {
        Pattern: pattern(model),
        ScoreTransform: score_transform(model),
        ValueTransform: value_transform(model),
    }
    for kind, entry in entries.items():
        key, options_key = _KEYS[kind]
        options = getattr(model, options_key)
        if options is not None and not isinstance(options, dict):
            found.append(f"{options_key}={short(options)}: must be a mapping of options")
        elif entry is None and options:
            found.append(f"{options_key}={short(options)}: says nothing with {key}=none")
        elif entry is not None:
            unknown = sorted(set(options or {}) - set(entry.options))
            if unknown:
                known = ", ".join(entry.options) or "none"
                found.append(
                    f"{options_key}.{unknown[0]}: unknown with {key}={entry.name}; known: {known}"
                )
            else:
                found += entry.problems(model, entry.resolved(options))
    return found
