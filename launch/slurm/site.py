"""A cluster's own settings: a small YAML file, launch/site.example.yaml explains it."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cat_lm.core import numbers
from cat_lm.core.errors import UserError
from cat_lm.core.fields import whole
from cat_lm.core.readers import clipped, read_yaml, short
from launch.slurm import sbatch

VARIABLE = "CAT_LM_SITE"
USUAL_PLACE = Path("~/.config/cat_lm/site.yaml")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Site(BaseModel):
    """A cluster's settings. The command line wins over those that are also options of `submit`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: str | None = None
    mem: str | None = None
    cpus_per_task: Annotated[int, whole(numbers.CORES)] | None = None
    container: str | None = None
    container_mounts: str | None = None
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    sbatch: list[str] = Field(default=[], description="further options of #SBATCH lines")
    srun: list[str] = Field(default=[], description="further arguments of srun")
    setup: list[str] = Field(default=[], description="shell lines before everything else")
    env: dict[str, str] = {}
    python: str | None = None


def load_site(path: Path | str | None) -> tuple[Site, Path | None]:
    """The site's settings and their file: `path`, else $CAT_LM_SITE, else the usual place, if any.

    Raises:
        UserError: the file is missing, unreadable or has an unknown key or a wrong value.
    """
    if path is None:
        path = os.environ.get(VARIABLE) or None
    if path is None and USUAL_PLACE.expanduser().exists():
        path = USUAL_PLACE
    if path is None:
        return Site(), None
    path = _expanded(path)
    values = read_yaml(path, "site file")
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {short(values)}; must hold keys such as 'partition:'")
    unknown = sorted(key for key in values if key not in Site.model_fields)
    if unknown:
        near = difflib.get_close_matches(unknown[0][:60], Site.model_fields, n=1, cutoff=0.0)[0]
        raise UserError(
            f"{path}: {clipped(unknown[0])}: unknown key; the nearest known one is {near}"
        )
    try:
        site = Site.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = clipped(".".join(map(str, first["loc"])))
        # YAML takes 2:00:00 for the number 7200.
        is_text = first["type"] == "string_type"
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        wrong = "must be text; put it in quotes" if is_text else message[0].lower() + message[1:]
        raise UserError(f"{path}: {name}={clipped(repr(first['input']))}: {wrong}") from None
    _refuse_what_breaks_the_script(path, site)
    return site, path


def _expanded(path: Path | str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # ~nobody
        raise UserError(f"site file {path}: {error}") from None


def _refuse_what_breaks_the_script(path: Path, site: Site) -> None:
    for option in site.sbatch:
        if sbatch.option_of(option) is None:
            raise UserError(
                f"{path}: sbatch: {clipped(repr(option))}: must be one long option such as --hint=…"
            )
        if sbatch.asks_for(option, sbatch.OURS):
            raise UserError(
                f"{path}: sbatch: {clipped(repr(option))}: launch.slurm sets this one itself"
            )
    for argument in site.srun:
        if not argument.startswith("-") or not argument.isprintable():
            raise UserError(
                f"{path}: srun: {clipped(repr(argument))}: must be one argument such as --mpi=none"
            )
    for key in ("partition", "account", "qos", "constraint", "reservation", "time", "mem"):
        value = getattr(site, key)
        if value is not None and not (value.strip() and value.isprintable()):
            raise UserError(f"{path}: {key}={clipped(repr(value))}: must be one line of text")
    for name in site.env:
        if not ENV_NAME.fullmatch(name):
            raise UserError(
                f"{path}: env: {clipped(repr(name))}: is no name of an environment variable"
            )
