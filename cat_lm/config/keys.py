"""Every key of a run's YAML as YAML: `python train.py --keys` prints it."""

from __future__ import annotations

import argparse
import math
import types
import typing
from typing import Annotated, Any, Literal

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from cat_lm import architectures
from cat_lm.config.loading import sections_of
from cat_lm.core.errors import UserError

# A plugin's section may have other kinds, which its descriptions explain.
_KINDS = {int: "whole number", float: "number", str: "text"}
_KINDS |= {dict: "{key: value, …}", tuple: "[number, number]"}
_COLUMN = 40  # where comments begin


class ShowKeys(argparse.Action):
    """Print the keys of a family's runs and end, as --help does."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        print(all_keys(values))
        parser.exit()


def all_keys(architecture: str) -> str:
    """Return every key of a family's runs with its default, and what it means in a comment.

    Raises:
        UserError: there is no such family.
    """
    if architecture not in architectures.names():
        known = ", ".join(architectures.names())
        raise UserError(f"--keys {architecture}: no such architecture; choose one of {known}")
    lines = []
    for name, section in sections_of({"model": {"architecture": architecture}}).items():
        lines.append(f"{name}:")
        lines += [_line(key, field) for key, field in section.model_fields.items()]
    return "\n".join(lines)


def _line(key: str, field: FieldInfo) -> str:
    value = "" if field.is_required() else _as_yaml(field.get_default(call_default_factory=True))
    kind = field.annotation
    while typing.get_origin(kind) in (Annotated, typing.Union, types.UnionType):
        kind = typing.get_args(kind)[0]
    words = ["needed"] if field.is_required() else []
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if len(choices) > 1:
        words.append(" | ".join(map(str, choices)))
    elif field.is_required() or field.default is None:
        words.append(_KINDS.get(typing.get_origin(kind) or kind, ""))
    words.append(" ".join((field.description or "").split()))
    comment = "; ".join(filter(None, words))
    said = f"  {key}: {value}".rstrip()
    return f"{said:<{_COLUMN - 1}} # {comment}" if comment else said


def _as_yaml(value: Any) -> str:
    plain = TypeAdapter(Any).dump_python(value, mode="json", fallback=str)
    text = yaml.safe_dump(plain, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("\n...\n").strip()
