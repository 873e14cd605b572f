"""Every key of a run's YAML as YAML: `python train.py --keys` prints it."""

from __future__ import annotations

import argparse
import math
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from cat_lm import architectures
from cat_lm.config.run import RunConfig
from cat_lm.core.errors import UserError

_KINDS = {int: "whole number", float: "number", str: "text"}
_KINDS |= {dict: "{key: value, …}", tuple: "[number, number]"}
_COLUMN = 40  # where comments begin


class ShowKeys(argparse.Action):
    """Print the keys of a family's runs and end, as --help does."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        print(all_keys(values))
        parser.exit()


def all_keys(architecture: str) -> str:
    """Write every key of a family's runs with its default, and what it means in a comment.

    Raises:
        UserError: there is no such family.
    """
    if architecture not in architectures.names():
        known = ", ".join(architectures.names())
        raise UserError(f"--keys {architecture}: no such architecture; choose one of {known}")
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    sections["model"] = architectures.get(architecture).Section
    lines = []
    for name, section in sections.items():
        lines.append(f"{name}:")
        lines += [_line(key, field) for key, field in section.model_fields.items()]
    return "\n".join(lines)


def _line(key: str, field: FieldInfo) -> str:
    value = "" if field.is_required() else _as_yaml(field.get_default(call_default_factory=True))
    said = f"  {key}: {value}".rstrip()
    comment = "; ".join(_words(field))
    return f"{said:<{_COLUMN - 1}} # {comment}" if comment else said


def _as_yaml(value: Any) -> str:
    plain = TypeAdapter(Any).dump_python(value, mode="json", fallback=str)
    text = yaml.safe_dump(plain, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("\n...\n").strip()


def _words(field: FieldInfo) -> Iterator[str]:
    kind = _plain(field.annotation)
    if field.is_required():
        yield "needed"
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if len(choices) > 1:
        yield " | ".join(map(str, choices))
    elif field.is_required() or field.default is None:
        # A plugin's section may have other kinds, which its descriptions tell.
        yield from filter(None, [_KINDS.get(typing.get_origin(kind) or kind)])
    if field.description:
        yield " ".join(field.description.split())


def _plain(kind: Any) -> Any:
    """Take away what checks a kind, and that it may be null."""
    while typing.get_origin(kind) in (Annotated, typing.Union, types.UnionType):
        kind = typing.get_args(kind)[0]
    return kind
