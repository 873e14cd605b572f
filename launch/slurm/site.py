"""What is particular to a cluster: a small YAML file, launch/site.example.yaml explains it."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cat_lm.errors import UserError

VARIABLE = "CAT_LM_SITE"
USUAL_PLACE = Path("~/.config/cat_lm/site.yaml")
# Options of #SBATCH lines that the script's own logic rests on.
OURS = ("nodes", "ntasks", "signal", "requeue", "no-requeue", "open-mode", "output", "error")
OURS += ("array", "chdir", "export", "time", "job-name")
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
    cpus_per_task: int | None = Field(None, gt=0)
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
    path = Path(path).expanduser().absolute()
    values = _read(path)
    unknown = sorted(str(key) for key in values if key not in Site.model_fields)
    if unknown:
        near = difflib.get_close_matches(unknown[0], Site.model_fields, n=1, cutoff=0.0)[0]
        raise UserError(f"{path}: {unknown[0]}: unknown key; the nearest known one is {near}")
    try:
        site = Site.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        # YAML takes 2:00:00 for the number 7200.
        is_text = first["type"] == "string_type"
        wrong = "must be text; put it in quotes" if is_text else first["msg"].lower()
        raise UserError(f"{path}: {name}={first['input']!r}: {wrong}") from None
    _refuse_what_breaks_the_script(path, site)
    return site, path


def _read(path: Path) -> dict:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"site file {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"site file {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold keys such as 'partition:', not {values!r}")
    return values


def _refuse_what_breaks_the_script(path: Path, site: Site) -> None:
    for option in site.sbatch:
        if not option.startswith("-") or "\n" in option:
            raise UserError(f"{path}: sbatch: {option!r}: must be one option such as --hint=…")
        if re.split("[= ]", option.lstrip("-"), maxsplit=1)[0].startswith(OURS):
            raise UserError(f"{path}: sbatch: {option!r}: launch.slurm sets this one itself")
    for argument in site.srun:
        if not argument.startswith("-") or "\n" in argument:
            raise UserError(f"{path}: srun: {argument!r}: must be one argument such as --mpi=none")
    for name in site.env:
        if not ENV_NAME.fullmatch(name):
            raise UserError(f"{path}: env: {name!r}: is no name of an environment variable")
