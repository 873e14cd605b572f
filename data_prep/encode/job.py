"""A preparation under way: its units and rounds, and which parts there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.common.progress import TextProgress
from data_prep.common.selection_spec import SelectionSpec
from data_prep.common.workers import run_tasks
from data_prep.encode.encoding import Encoding, Ranges, UnitTask, encode_unit
from data_prep.encode.parts import PartCheck, Parts, check_part, finished_part, remove_part
from data_prep.encode.plan import Plan
from data_prep.sources.base import counted_with
from data_prep.sources.units import Unit


@dataclass
class Job:
    """Everything that the stages share.

    `held_out_below` is the hash place below which all documents are held out, 0 where the source
    has a validation split of its own.
    """

    out: Path
    encoding: Encoding
    units: list[Unit]
    plan: Plan
    spec: SelectionSpec
    workers: int
    held_out_below: int
    _records: dict[tuple[int, int], dict] = field(default_factory=dict)
    _trusted: set[tuple[int, int]] = field(default_factory=set)  # made or checked by this process

    @property
    def work(self) -> Path:
        return self.encoding.work

    def record(self, unit: Unit, round_number: int) -> dict | None:
        """The record of a part, None where it is not done."""
        key = (unit.number, round_number)
        if key not in self._records:
            task = self._task(unit, round_number)
            done = finished_part(self.work, *key, task.key)
            if done is None:
                return None
            self._records[key] = done
        return self._records[key]

    def _task(self, unit: Unit, round_number: int) -> UnitTask:
        return UnitTask(self.encoding, unit, round_number, self.plan.rounds[round_number])

    def add_round(self, ranges: Ranges) -> None:
        """Plans another round of encoding."""
        self.plan.rounds.append(ranges)
        self.plan.save(self.work)

    def encode(self, units: Iterable[Unit], rounds: Iterable[int] = (0,)) -> None:
        """Makes all parts of these units and rounds that are not there yet and are needed."""
        for round_number in rounds:
            self._encode_round(list(units), round_number)

    def _encode_round(self, units: list[Unit], round_number: int) -> None:
        # Looked at in order: where a limit ends the input, the units behind it are not needed.
        todo = [unit for unit in units if self.record(unit, round_number) is None]
        if not todo:
            return
        processes = min(self.workers, len(todo))
        label = "encoding" if round_number == 0 else f"encoding (round {round_number + 1})"
        with TextProgress(label, self.plan.measured.text_bytes) as progress:
            done = (self.record(unit, round_number) for unit in units)
            progress.start(sum(record["text_bytes"] for record in done if record))
            # A few large files: the cores that no file keeps busy help with its tokens.
            threads = self.workers // processes
            tasks = self._tasks(todo, round_number)
            for number, record in run_tasks(
                encode_unit, tasks, processes, progress.update, threads
            ):
                self._records[number, round_number] = record
                self._trusted.add((number, round_number))

    def _tasks(self, units: list[Unit], round_number: int) -> Iterator[UnitTask]:
        for unit in units:
            if not self._behind_limit(unit):
                yield self._task(unit, round_number)

    def _behind_limit(self, unit: Unit) -> bool:
        """Return True if earlier units of the split, as far as they are done, reach the limits."""
        documents = text_bytes = 0
        if self.encoding.max_documents is None and self.encoding.max_bytes is None:
            return False
        for (number, round_number), record in self._records.items():
            earlier = round_number == 0 and number < unit.number
            if earlier and counted_with(self.units[number].split) == counted_with(unit.split):
                documents += record["documents"]
                text_bytes += record["encoded_bytes"]
        return self.encoding.limit_reached(unit.split, documents, text_bytes)

    def needed_units(self) -> list[Unit]:
        """All units, but those that lie behind the limits: which these are, all earlier ones say.

        Call it once the first round of all units is done.
        """
        return [unit for unit in self.units if not self._behind_limit(unit)]

    def parts(self, units: Iterable[Unit], names: list[str]) -> Parts:
        """Access to the documents of these units, of sets `names`; all rounds must be done."""
        numbers = range(len(self.plan.rounds))
        records = {unit.number: [self.record(unit, n) for n in numbers] for unit in units}
        return Parts(self.work, names, records, {unit.number: unit.split for unit in units})

    def check(self, units: Iterable[Unit]) -> list[tuple[int, int]]:
        """Reads the parts of these units through and removes the damaged ones; returns them.

        Parts that this process has made or checked are not read again.
        """
        checks = []
        for unit in units:
            for number in range(len(self.plan.rounds)):
                record = self.record(unit, number)
                if record and (unit.number, number) not in self._trusted:
                    checks.append(PartCheck(self.work, unit.number, number, record["sha256"]))
        if not checks:
            return []
        damaged = []
        total = sum(sum(self._records[c.unit, c.round]["bytes"].values()) for c in checks)
        with TextProgress("checking parts", total, "of parts") as progress:
            processes = min(self.workers, len(checks))
            for unit, number, good in run_tasks(check_part, checks, processes, progress.update):
                if good:
                    self._trusted.add((unit, number))
                else:
                    damaged.append((unit, number))
                    self.forget(unit, number)
                    remove_part(self.work, unit, number)
        return sorted(damaged)

    def forget(self, unit: int, round_number: int) -> None:
        """Looks at the files again when the part is asked for next."""
        self._records.pop((unit, round_number), None)
        self._trusted.discard((unit, round_number))
