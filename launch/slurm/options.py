"""Options of a job: those of `submit`, checked and joined with the site's."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

from cat_lm.core import numbers
from cat_lm.core.cli import whole
from cat_lm.core.errors import UserError
from cat_lm.core.numbers import Range
from cat_lm.core.readers import clipped
from launch.slurm.site import ENV_NAME, Site

DEFAULT_LEAD_SECONDS = 300
# Cores of a GPU's rank where nobody says: for the threads of the forward and backward pass, reading
# ahead and NCCL. SLURM would give a task one.
CORES_OF_A_GPU = 8
# SLURM stores the lead time of a signal in 16 bits.
LEAD_SECONDS = Range(1, 65535)
# Help texts that `local` shares.
CORES = "cores of a rank; sets OMP_NUM_THREADS"
CORES_DEFAULT = f"{CORES} (default: {CORES_OF_A_GPU} for each GPU, else SLURM's)"
ENV = "variable of the ranks; written into the run's folder, so nothing secret"
ATTEMPTS = "attempts in a row from the same checkpoint, after which the job gives up (default 3)"


@dataclass(frozen=True)
class Options:
    """As given on the command line; None stands for the site's value or SLURM's default."""

    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    container: str | None = None
    container_mounts: str | None = None
    mem: str | None = None
    reservation: str | None = None
    lead_seconds: int | None = None
    max_restarts: int = 3
    env: dict[str, str] = field(default_factory=dict)

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.tasks_per_node or 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def lead(self) -> int:
        """Seconds before the time limit at which the ranks are told to save and stop."""
        if self.lead_seconds is not None:
            return self.lead_seconds
        limit = seconds_of(self.time) if self.time else None
        # A job that is short itself must not be stopped before it has done anything.
        return DEFAULT_LEAD_SECONDS if limit is None else min(DEFAULT_LEAD_SECONDS, limit // 2)

    def with_site(self, site: Site) -> Options:
        """These options, the site's values where none was given."""
        same = {f.name for f in fields(self)} & set(Site.model_fields) - {"env"}
        missing = {name: getattr(site, name) for name in same if getattr(self, name) is None}
        return replace(self, env={**site.env, **self.env}, **missing)

    def check(self) -> Options:
        """Returns these options. Raises UserError for what contradicts itself or breaks lines."""
        if self.gpus_per_node and self.tasks_per_node not in (None, self.gpus_per_node):
            raise UserError(
                f"--tasks-per-node {self.tasks_per_node}: there is one task per GPU, "
                f"--gpus-per-node is {self.gpus_per_node}; leave it out"
            )
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, str) and not (value.strip() and value.isprintable()):
                name = f.name.replace("_", "-")
                raise UserError(f"--{name} {clipped(repr(value))}: must be one line of text")
        if self.container_mounts and not self.container:
            raise UserError(f"--container-mounts {self.container_mounts}: needs --container IMAGE")
        limit = seconds_of(self.time) if self.time else None
        if limit is not None and self.lead >= limit:
            raise UserError(
                f"--lead-seconds {self.lead}: must be less than the time limit, "
                f"--time {self.time} is {limit} seconds"
            )
        return self


def seconds_of(time: str) -> int | None:
    """A time limit in SLURM's notation in seconds; None: without limit.

    Raises:
        UserError: it is none of SLURM's forms.
    """
    if time.lower() in ("unlimited", "infinite", "-1"):
        return None
    # SLURM's own numbers have 32 bits.
    digits = r"[0-9]{1,9}"
    match = re.fullmatch(rf"(?:({digits})-)?({digits})(?::({digits}))?(?::({digits}))?", time)
    if not match:
        raise UserError(
            f"--time {clipped(time)}: must be minutes, hours:minutes:seconds, days-hours or "
            "days-hours:minutes:seconds"
        )
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:  # hours[:minutes[:seconds]]
        hours, minutes, seconds = numbers + [0] * (3 - len(numbers))
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes[:seconds]
        hours, minutes, seconds = 0, *numbers, *[0] * (2 - len(numbers))
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise UserError(f"--time {time}: must be more than nothing")
    return total


def add_options(parser: argparse.ArgumentParser, resumed: bool = False) -> None:
    """Adds a run's options; without a default for `resume`, whose defaults are the run's own."""
    add = parser.add_argument_group("ranks").add_argument
    gpus = whole(numbers.PER_NODE.at_least(0))
    add("--nodes", type=whole(numbers.NODES), metavar="N", required=not resumed)
    add("--gpus-per-node", type=gpus, metavar="G", help="one task each; 0: CPUs only")
    ranks = whole(numbers.PER_NODE)
    add("--tasks-per-node", type=ranks, metavar="N", help="ranks of a node without GPUs")
    add_resources(parser, CORES_DEFAULT)
    add = parser.add_argument_group("stopping and going on").add_argument
    add(
        "--lead-seconds",
        type=whole(LEAD_SECONDS),
        metavar="N",
        help="the ranks save and stop so long before the time limit (default 300, or half the "
        "limit where that is less)",
    )
    add("--max-restarts", type=whole(numbers.RESTARTS), metavar="N", help=ATTEMPTS)


def add_resources(parser: argparse.ArgumentParser, cores: str = CORES) -> None:
    """Adds what every job may ask for; `cores` is the help of --cpus-per-task."""
    add = parser.add_argument_group(
        "resources", "where none is given: the site file's, otherwise SLURM's default"
    ).add_argument
    add("--cpus-per-task", type=whole(numbers.CORES), metavar="N", help=cores)
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        add(f"--{name}", metavar="NAME")
    add("--time", metavar="LIMIT", help="minutes, hours:minutes:seconds or days-hours")
    add("--mem", metavar="SIZE", help="memory of a node, such as 200G; 0: all")
    add("--exclusive", action="store_true", default=None, help="no other jobs on these nodes")
    add("--container", metavar="IMAGE", help="image that the ranks run in (srun with pyxis)")
    add("--container-mounts", metavar="SRC:DST,…", help="beside the job's folder and the data")
    add("--env", action="append", type=variable, metavar="NAME=VALUE", help=ENV)
    add("--site", metavar="FILE", help="site settings (default: $CAT_LM_SITE)")
    add(
        "--print",
        action="store_true",
        help="only show the batch script; write nothing, and only warn of folders missing here",
    )


def options_from(arguments: argparse.Namespace, earlier: Options | None = None) -> Options:
    """The options of a command line over those of an earlier one."""
    given = {f.name: getattr(arguments, f.name, None) for f in fields(Options)}
    given = {name: value for name, value in given.items() if value is not None}
    earlier = earlier or Options()
    given["env"] = {**earlier.env, **dict(given.get("env", ()))}
    if given.get("gpus_per_node") and "tasks_per_node" not in given:
        given["tasks_per_node"] = None  # from GPUs to CPUs and back
    return replace(earlier, **given)


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not ENV_NAME.fullmatch(name) or "\n" in value:
        raise argparse.ArgumentTypeError(f"{clipped(repr(text))}: must have the form NAME=VALUE")
    return name, value


@contextmanager
def warning_where(only_shown: bool) -> Iterator[None]:
    """Make a UserError about this machine a warning where the script is only printed."""
    try:
        yield
    except UserError as error:
        if not only_shown:
            raise
        print(f"warning: on this machine, {error}", file=sys.stderr)
