"""Callbacks: what happens beside the steps of a training run, by name.

A callback reacts to events of a run: its launch, each step, each record of numbers, each
validation, each checkpoint and its end. Those of this project are files in
`cat_lm/training/callbacks`, and each is chosen by a key of its own. One of an installed package or
a script is given to `register`, and chosen by `train.callbacks`:

    train:
      callbacks: {heartbeat: {every: 50}}

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cat_lm.core.errors import UserError
from cat_lm.core.fields import NoOptions, build_options
from cat_lm.core.registry import Registry

if TYPE_CHECKING:
    from cat_lm.data.corpus import Mixture, TokenCorpus
    from cat_lm.training.distributed import Ranks
    from cat_lm.training.watchdog import Watchdog

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Run:
    """The run as a callback sees it.

    Attributes:
        config: the `RunConfig` of `cat_lm.config`, which itself imports this module.
        engine: the `Engine` of `cat_lm.training.engine`.
        recorded_step: the step up to which the folder's records are this run's past; 0 if none is.
        log: takes a line for train.log; of the later ranks it goes nowhere.
        record: takes a dictionary with `step` for metrics.jsonl and the trackers, whose other names
            hold a /, as in tasks/piqa/acc; every rank calls it alike, the first one's is written.
        must_stop: lets the ranks vote on whether a signal ends the run (a collective), which a long
            action asks now and then.
    """

    config: Any
    folder: Path
    ranks: Ranks
    engine: Any
    corpus: TokenCorpus | Mixture
    watchdog: Watchdog
    recorded_step: int
    log: Callable[[str], object]
    record: Callable[[dict[str, Any]], object]
    must_stop: Callable[[], bool]


class Callback:
    """React to the events of one run; each method does nothing unless a subclass defines it.

    Whatever a method raises ends the run after a checkpoint, with one line that names the callback.
    An event comes to all ranks of a callback in the same order, so that they may hold collectives;
    an error of one rank must then reach the others, as `Ranks.on_all_ranks` does it. A callback
    leaves the weights, and the generators of random numbers, as it finds them.
    """

    def waits(self, step: int) -> bool:
        """Return True if the numbers of this step are to be recorded before `step` is called.

        All ranks must answer alike; a callback of the first rank alone is not asked.
        """
        return False

    def launch(self, step: int) -> None:
        """Begin, after this step (0: before the first), when all that is saved was restored."""

    def step(self, step: int) -> None:
        """React to a step. On a GPU, work that is launched now is done behind it."""

    def record(self, record: dict[str, Any]) -> None:
        """React to a line of metrics.jsonl: of a step, when its numbers are known, or another."""

    def validation(self, step: int, results: dict[str, float]) -> None:
        """Add to the results of a validation, before they are recorded.

        Where `Run.must_stop` is true, a callback returns at once: the next launch validates again.
        """

    def checkpoint(self, step: int, folder: Path) -> None:
        """React to a checkpoint, which is complete."""

    def end(self, step: int, exit_code: int) -> None:
        """Finish: the run ends after this step. Not called when the process is killed."""

    def state(self) -> Mapping[str, Any]:
        """Return what the checkpoint of this moment must hold: tensors, and values as of JSON.

        All ranks of the callback are asked; what the first one returns is saved.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back a saved `state`, on every rank of the callback, before `launch`.

        Tensors are on the CPU, and read from the file each time that one is asked for.
        """


class CallbackKind:
    """A kind of callback; one instance of a subclass is registered.

    Attributes:
        name: as in `train.callbacks`, and of its state in checkpoints.
        Options: a frozen dataclass of plain values, see cat_lm/core/fields.py.
        ranks: which ranks have the callback: all, or the first.
        collective: its events hold collectives, so that an error of one rank which the others do
            not share ends the process, and with it the launch: they would wait for that rank.
        key: the configuration key that chooses it, of those of this project; the callback reads
            its settings there.
    """

    name: ClassVar[str]
    Options: ClassVar[type] = NoOptions
    ranks: ClassVar[Literal["all", "first"]] = "all"
    collective: ClassVar[bool] = False
    key: ClassVar[str] = ""

    def is_chosen(self, config: Any) -> bool:
        """Return True if a configuration asks for this callback."""
        if not self.key:
            return self.name in config.train.callbacks
        section, _, key = self.key.partition(".")
        return bool(getattr(getattr(config, section), key))

    def build(self, options: Any, run: Run) -> Callback:
        """Make the callback of a run, on all of its ranks; raises UserError for bad input."""
        raise NotImplementedError


def _check(kind: CallbackKind) -> None:
    """Check what a callback says of itself. Raises ValueError."""
    named = f"callback {kind.name!r}"
    if not _NAME.fullmatch(kind.name):
        raise ValueError(f"{named}: its name must be of letters, digits, - and _")
    if kind.ranks not in ("all", "first"):
        raise ValueError(f"{named}: ranks is {kind.ranks!r}; must be 'all' or 'first'")
    if not dataclasses.is_dataclass(kind.Options) or not kind.Options.__dataclass_params__.frozen:
        raise ValueError(f"{named}: its Options must be a frozen dataclass")


CALLBACKS = Registry(
    "train.callbacks",
    CallbackKind,
    package="cat_lm.training.callbacks",
    methods=("build",),
    check=_check,
)
get, names, register = CALLBACKS.get, CALLBACKS.names, CALLBACKS.register


def chosen(config: Any) -> list[tuple[CallbackKind, Any]]:
    """Return the callbacks that a configuration asks for, with their options.

    Raises UserError for an unknown name or option.
    """
    given, what = config.train.callbacks, "train.callbacks: "
    for name in given:
        if key := get(name).key:
            raise UserError(f"{what}{name} is chosen by {key} instead")
    kinds = (get(name) for name in names())
    return [
        (
            kind,
            build_options(kind.Options, f"{what}{kind.name}", given.get(kind.name, {})),
        )
        for kind in kinds
        if kind.is_chosen(config)
    ]
