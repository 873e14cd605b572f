"""The options of a job: those of the command line, and a cluster's settings in the site file.

The command line has priority. launch/site.example.yaml explains the site file.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from cat_lm.core import numbers
from cat_lm.core.cli import whole
from cat_lm.core.errors import UserError
from cat_lm.core.fields import whole as whole_key
from cat_lm.core.numbers import Range
from cat_lm.core.readers import check_shape, clipped, read_yaml, short

SITE_VARIABLE = "CAT_LM_SITE"
USUAL_SITE = Path("~/.config/cat_lm/site.yaml")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DEFAULT_LEAD_SECONDS = 300
# Default cores per GPU rank: for the threads of the forward and backward pass, of reading ahead and
# of NCCL. SLURM's default is one.
CORES_OF_A_GPU = 8
# SLURM stores the lead time of a signal in 16 bits.
LEAD_SECONDS = Range(1, 65535)
# #SBATCH options on which the logic of the script relies.
OWN_OPTIONS = (
    *("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu", "array", "time"),
    *("signal", "requeue", "no-requeue", "open-mode", "output", "error", "job-name", "chdir"),
    *("export", "export-file", "wait"),
)
# Help texts that `local` uses, too.
CORES = "cores per rank; sets OMP_NUM_THREADS"
CORES_DEFAULT = f"{CORES} (default: {CORES_OF_A_GPU} for each GPU, else SLURM's)"
ENV = "environment variable of the ranks; it is stored in the run's folder, so no secrets"
ATTEMPTS = "attempts in a row from the same checkpoint, after which the job gives up (default 3)"


def sbatch_option(line: str) -> str | None:
    """Return the name of the option in a line such as --nodes=2; None if it is no long option."""
    match = re.fullmatch(r"--([a-z][a-z-]*)(=\S.*)?", line)
    return match[1] if match and line.isprintable() else None


def asks_for(line: str, options: Iterable[str]) -> bool:
    """Return True if a line sets one of the options; sbatch also accepts prefixes of names."""
    name = sbatch_option(line)
    return name is not None and any(option.startswith(name) for option in options)


def _check_line(text: object) -> object:
    # YAML takes 2:00:00 for the number 7200.
    if not (isinstance(text, str) and text.strip() and text.isprintable()):
        raise ValueError("must be one line of text, in quotes if it looks like a number")
    return text


def _check_sbatch(line: str) -> str:
    if sbatch_option(line) is None:
        raise ValueError("must be one long option such as --hint=…")
    if asks_for(line, OWN_OPTIONS):
        raise ValueError("launch.slurm sets this one itself")
    return line


def _check_srun(argument: str) -> str:
    if not argument.startswith("-") or not argument.isprintable():
        raise ValueError("must be one argument such as --mpi=none")
    return argument


def _check_name(name: str) -> str:
    if not ENV_NAME.fullmatch(name):
        raise ValueError("is no name of an environment variable")
    return name


Line = Annotated[str, BeforeValidator(_check_line)]


class Resources(BaseModel):
    """Options of both the command line and the site file; None stands for SLURM's default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cpus_per_task: Annotated[int, whole_key(numbers.CORES)] | None = None
    mem: Line | None = None
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    time: Line | None = None
    container: Line | None = None
    container_mounts: Line | None = None
    env: dict[Annotated[str, AfterValidator(_check_name)], str] = {}


class Site(Resources):
    """A cluster's settings; options of the command line have priority over the same keys."""

    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    sbatch: list[Annotated[str, AfterValidator(_check_sbatch)]] = Field(
        default=[], description="further options of #SBATCH lines"
    )
    srun: list[Annotated[str, AfterValidator(_check_srun)]] = Field(
        default=[], description="further arguments of srun"
    )
    setup: list[str] = Field(default=[], description="shell lines before everything else")
    python: str | None = None


class Options(Resources):
    """The options of a command line; None stands for the site's value."""

    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int | None = None
    exclusive: bool = False
    lead_seconds: int | None = None
    max_restarts: int = 3

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.tasks_per_node or 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def lead(self) -> int:
        """Return the seconds before the time limit at which the ranks save and stop."""
        if self.lead_seconds is not None:
            return self.lead_seconds
        limit = seconds_of(self.time) if self.time else None
        # A short job must not be stopped before it has trained.
        return DEFAULT_LEAD_SECONDS if limit is None else min(DEFAULT_LEAD_SECONDS, limit // 2)

    def with_site(self, site: Site) -> Options:
        """Return these options with the site's values for missing ones, after checking them.

        Raises:
            UserError: two options contradict each other.
        """
        missing = {
            name: getattr(site, name)
            for name in Resources.model_fields
            if getattr(self, name) is None
        }
        result = self.model_copy(update={**missing, "env": {**site.env, **self.env}})
        if result.gpus_per_node and result.tasks_per_node not in (None, result.gpus_per_node):
            raise UserError(
                f"--tasks-per-node {result.tasks_per_node}: there is one task per GPU, "
                f"--gpus-per-node is {result.gpus_per_node}; leave it out"
            )
        if result.container_mounts and not result.container:
            raise UserError(
                f"--container-mounts {result.container_mounts}: needs --container IMAGE"
            )
        limit = seconds_of(result.time) if result.time else None
        if limit is not None and result.lead >= limit:
            raise UserError(
                f"--lead-seconds {result.lead}: must be less than the time limit, "
                f"--time {result.time} is {limit} seconds"
            )
        return result


def seconds_of(time: str) -> int | None:
    """Return a time limit in SLURM's notation as seconds; None for no limit.

    Raises:
        UserError: the text has none of SLURM's forms.
    """
    if time.lower() in ("unlimited", "infinite", "-1"):
        return None
    # SLURM's own numbers have 32 bits.
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?([0-9]{1,9}(?::[0-9]{1,9}){0,2})", time)
    if not match:
        raise UserError(
            f"--time {clipped(time)}: must be minutes, hours:minutes:seconds, days-hours or "
            "days-hours:minutes:seconds"
        )
    parts = [int(part) for part in match[2].split(":")]
    if match[1]:
        parts = [int(match[1]), *parts, 0, 0]  # days-hours[:minutes[:seconds]]
    else:
        parts = [0, *parts] if len(parts) == 3 else [0, 0, *parts, 0]  # minutes[:seconds]
    days, hours, minutes, seconds = parts[:4]
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise UserError(f"--time {time}: must be more than nothing")
    return total


def load_site(given: Path | str | None) -> tuple[Site, Path | None]:
    """Read a site file: the given one, or $CAT_LM_SITE, or the default path if it exists.

    Raises:
        UserError: the file is missing, unreadable or has an unknown key or a wrong value.
    """
    path = given or os.environ.get(SITE_VARIABLE)
    if not path and os.path.exists(os.path.expanduser(USUAL_SITE)):
        path = USUAL_SITE
    if not path:
        return Site(), None
    path = Path(os.path.abspath(os.path.expanduser(path)))
    values = read_yaml(path, "site file")
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {short(values)}; must hold keys such as 'partition:'")
    for key in values:
        if key not in Site.model_fields:
            near = difflib.get_close_matches(key[:60], Site.model_fields, n=1, cutoff=0.0)[0]
            raise UserError(f"{path}: {clipped(key)}: unknown key; the nearest known one is {near}")
    return check_shape(values, Site, str(path)), path


def options_from(arguments: argparse.Namespace, earlier: Options | None = None) -> Options:
    """Return the options of a command line, with `earlier` ones for those that it lacks.

    Raises:
        UserError: a value would break the lines of the script.
    """
    given = {name: getattr(arguments, name, None) for name in Options.model_fields}
    given = {name: value for name, value in given.items() if value is not None}
    earlier = earlier or Options()
    given["env"] = {**earlier.env, **dict(given.get("env", ()))}
    if given.get("gpus_per_node") and "tasks_per_node" not in given:
        given["tasks_per_node"] = None  # The run may have used CPUs before.
    return check_shape({**earlier.model_dump(), **given}, Options, "options")


def add_options(parser: argparse.ArgumentParser, resumed: bool = False) -> None:
    """Add the options of a run; `resume` requires none, and defaults to the run's."""
    add = parser.add_argument_group("ranks").add_argument
    gpus = whole(numbers.PER_NODE.at_least(0))
    add("--nodes", type=whole(numbers.NODES), metavar="N", required=not resumed)
    add(
        "--gpus-per-node",
        type=gpus,
        metavar="G",
        help="GPUs per node, with one rank each; 0: CPUs only",
    )
    ranks = whole(numbers.PER_NODE)
    add("--tasks-per-node", type=ranks, metavar="N", help="ranks per node without GPUs")
    add_resources(parser, CORES_DEFAULT)
    add = parser.add_argument_group("stopping and resuming").add_argument
    add(
        "--lead-seconds",
        type=whole(LEAD_SECONDS),
        metavar="N",
        help="seconds before the time limit at which the ranks save and stop (default 300, or half "
        "the limit if that is less)",
    )
    add("--max-restarts", type=whole(numbers.RESTARTS), metavar="N", help=ATTEMPTS)


def add_resources(parser: argparse.ArgumentParser, cores: str = CORES) -> None:
    """Add the options of every job; `cores` is the help text of --cpus-per-task."""
    add = parser.add_argument_group(
        "resources", "default: those of the site file, or else of SLURM"
    ).add_argument
    add("--cpus-per-task", type=whole(numbers.CORES), metavar="N", help=cores)
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        add(f"--{name}", metavar="NAME")
    add("--time", metavar="LIMIT", help="time limit: minutes, hours:minutes:seconds or days-hours")
    add("--mem", metavar="SIZE", help="memory per node, such as 200G; 0: all")
    add("--exclusive", action="store_true", default=None, help="allow no other jobs on these nodes")
    add("--container", metavar="IMAGE", help="image that the ranks run in (srun with pyxis)")
    add(
        "--container-mounts",
        metavar="SRC:DST,…",
        help="further mounts, besides the job's folder and the data",
    )
    add("--env", action="append", type=variable, metavar="NAME=VALUE", help=ENV)
    add("--site", metavar="FILE", help="site file (default: $CAT_LM_SITE)")
    add(
        "--print",
        action="store_true",
        help="only show the batch script; write nothing, and only warn of folders missing here",
    )


def check_name(text: str) -> str:
    """Return the name of a command's folder."""
    if not re.fullmatch(r"\w[\w.-]*", text, re.ASCII):
        raise ValueError("must be letters, digits, '_', '.' and '-'")
    return text


def variable(text: str) -> tuple[str, Any]:
    """Parse an environment variable of the ranks, NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not ENV_NAME.fullmatch(name) or "\n" in value:
        raise argparse.ArgumentTypeError(f"{clipped(repr(text))}: must have the form NAME=VALUE")
    return name, value


@contextmanager
def warning_where(only_shown: bool) -> Iterator[None]:
    """Print a UserError about this machine as a warning if the script is only shown."""
    try:
        yield
    except UserError as error:
        if not only_shown:
            raise
        print(f"warning: on this machine, {error}", file=sys.stderr)
