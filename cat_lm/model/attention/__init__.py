"""How attention attends: the one registry of patterns, and of transforms of scores and values.

A *pattern* is how queries meet keys (`model.attention`). A *score transform* changes the logits
before the softmax (`model.score_transform`), a *value transform* the values before they are cached
and attended to (`model.value_transform`); each takes options as a mapping. An entry is a subclass
of those in `cat_lm.model.attention.base`. This project's are files with an ENTRY in `patterns`,
`scores` and `values`; plugins (`cat_lm.core.plugins`) and scripts give theirs to `register`. This
module imports no torch: entries import it when they build their modules.

Functions that take a `model` take a section of the YAML or a configuration, whose keys are the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.readers import short
from cat_lm.core.registry import Registry, module_problem
from cat_lm.model.attention.base import Entry, Pattern, ScoreTransform, ValueTransform
from cat_lm.model.rules import mixes_maps

# In the names of the parameters of patterns of attention, and of no others.
PATTERNS_OWN = ".core."


def _registry(kind: type[Entry], folder: str, **names: tuple[str, ...]) -> Registry:
    made = {"words": ("name", "title"), "methods": ("build",)}
    return Registry(kind.key, kind, package=f"{__name__}.{folder}", **made, **names)


def _check_form(entry: ScoreTransform) -> None:
    if entry.form not in entry.FORMS:
        forms = ", ".join(entry.FORMS)
        raise ValueError(
            f"score_transform {entry.name!r}: form={entry.form!r} must be one of {forms}"
        )


PATTERNS: Registry[Pattern] = _registry(Pattern, "patterns", first=("softmax",))
SCORE_TRANSFORMS: Registry[ScoreTransform] = _registry(
    ScoreTransform, "scores", others=("none",), check=_check_form
)
VALUE_TRANSFORMS: Registry[ValueTransform] = _registry(ValueTransform, "values", others=("none",))
REGISTRIES: dict[type[Entry], Registry] = {
    Pattern: PATTERNS,
    ScoreTransform: SCORE_TRANSFORMS,
    ValueTransform: VALUE_TRANSFORMS,
}


def register(entry: Entry) -> None:
    """Add a pattern, or a transform of scores or values. Raises ValueError for a wrong one."""
    kinds = (kind for kind in REGISTRIES if isinstance(entry, kind))
    REGISTRIES[next(kinds, Pattern)].register(entry)


def names(kind: type[Entry]) -> tuple[str, ...]:
    """List what a key may say; transforms have `none` first."""
    return (*REGISTRIES[kind].others, *REGISTRIES[kind].names())


def _chosen(kind: type[Entry], model: Any) -> Any:
    if kind is Pattern and mixes_maps(model):
        return PATTERNS.get("map_mixing")
    name = getattr(model, kind.key)
    return None if name == "none" else REGISTRIES[kind].get(name)


def pattern(model: Any) -> Pattern:
    """Return the pattern of a model."""
    return _chosen(Pattern, model)


def score_transform(model: Any) -> ScoreTransform | None:
    """Return what a model does to its logits; None for nothing."""
    return _chosen(ScoreTransform, model)


def value_transform(model: Any) -> ValueTransform | None:
    """Return what a model does to its values; None for nothing."""
    return _chosen(ValueTransform, model)


def chosen_entries(model: Any) -> dict[type[Entry], Entry]:
    """Return the pattern of a model and its transforms, by their classes."""
    chosen = {kind: _chosen(kind, model) for kind in REGISTRIES}
    return {kind: entry for kind, entry in chosen.items() if entry is not None}


def described(kind: type[Entry], model: Any) -> str:
    """Name an entry of a model, and the options that are given."""
    named, options = f"{kind.key} {_chosen(kind, model).name!r}", getattr(model, kind.options_key)
    return f"{named}, {kind.options_key}={short(options)}" if options else named


def build(kind: type[Entry], config: Any) -> Any:
    """Build a layer's module of the pattern or a transform of a configuration; None without one.

    Raises:
        UserError: it builds no module, or one that does not say of its parameters how they start
            and which take no weight decay.
    """
    from cat_lm.core.parameters import check_parameters  # imports torch

    entry = _chosen(kind, config)
    if entry is None:
        return None
    options = () if kind is Pattern else (entry.resolved(getattr(config, kind.options_key)),)
    try:
        module = entry.build(config, *options)
        if problem := module_problem(module):
            raise ValueError(problem)
        check_parameters(module, gives_all_starts=True)
    except ValueError as error:
        raise UserError(f"{described(kind, config)}: {error}") from error
    return module


# What does not go together


def problems(model: Any, implementation: str | None = None) -> list[str]:
    """Return what does not go together in a model's attention, in lines that begin with the key.

    Args:
        model: its names are known.
        implementation: `attn_implementation`; None where it is not decided.
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
    """Return what computes a model's attention by default; None for the usual one."""
    able = [entry.implementations for entry in chosen_entries(model).values()]
    served = [set(names) for names in able if names is not None]
    common = set.intersection(*served) if served else {"sdpa"}
    return None if "sdpa" in common else min(common, default=None)  # eager is first by its name


def length_problems(model: Any, length: int) -> list[str]:
    """Return which parts of a model's attention are not for rows of `length` tokens."""
    entries = chosen_entries(model).values()
    return [problem for entry in entries for problem in entry.length_problems(model, length)]


# What a model whose weights are taken must have in common with ours, by the keys of both


def compared(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of both models that must be the same, options with their defaults.

    Not compared are `free_options`, and entries that their model lacks if they `takes_any_weights`.
    """
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
    """Return True if what their pattern of attention learned means the same in our model."""
    options = (values[Pattern.options_key] for values in (theirs, ours))
    name = ours[Pattern.key]
    return theirs[Pattern.key] == name and PATTERNS.get(name).keeps_parameters(*options)
