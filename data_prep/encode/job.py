"""A preparation in progress: its units of work, and its finished parts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from cat_lm.core.files import checksums
from data_prep.common.amounts import SelectionSpec
from data_prep.common.progress import progress_bar
from data_prep.common.workers import run_tasks
from data_prep.encode.encoding import Coverage, Encoding, encode_unit
from data_prep.encode.parts import PartRecord, Parts, finished_part, part_path, remove_part
from data_prep.encode.plan import Plan
from data_prep.sources.base import Unit, counted_with


@dataclass
class Job:
    """The state that the stages of a preparation share.

    `staging` is the temporary folder of the result. Documents below the hash place
    `held_out_below` are validation documents; it is 0 if the source has a validation split.
    """

    staging: Path
    encoding: Encoding
    units: list[Unit]
    plan: Plan
    spec: SelectionSpec
    workers: int
    held_out_below: int
    _records: dict[int, PartRecord] = field(default_factory=dict)
    _checked: set[int] = field(default_factory=set)  # parts that this process has made or verified

    @property
    def work(self) -> Path:
        return self.encoding.work

    def record(self, unit: Unit) -> PartRecord | None:
        """Return the record of a unit's finished part, or None."""
        if unit.number not in self._records:
            done = finished_part(self.work, unit.number, self.encoding.key(unit))
            if done is None:
                return None
            self._records[unit.number] = done
        return self._records[unit.number]

    def encoded_bytes(self, units: Iterable[Unit]) -> int:
        """Return the bytes of text in the finished parts of these units."""
        return sum(record.text_bytes for unit in units if (record := self.record(unit)))

    def cover(self, coverage: Coverage) -> None:
        """Extend the plan by more documents, after which all parts must be made again."""
        self.plan = replace(self.plan, coverage=self.plan.coverage.join(coverage))
        self.plan.save(self.work)
        self.encoding = replace(self.encoding, coverage=self.plan.coverage)
        self._records.clear()
        self._checked.clear()

    def encode(self, units: list[Unit]) -> None:
        """Make the missing parts of these units, as far as they are needed."""
        # Units are examined in order, because those after a limit's end are not needed.
        todo = [unit for unit in units if self.record(unit) is None]
        if not todo:
            return
        done, total = self.encoded_bytes(units), self.plan.measured.text_bytes
        processes = min(self.workers, len(todo))
        # With few large files, the remaining cores run tokenizer threads.
        threads = max(1, min(self.workers, len(os.sched_getaffinity(0))) // processes)
        tasks = ((self.encoding, unit) for unit in todo if not self._is_after_limit(unit))
        with progress_bar("encoding text", total, done) as bar:
            for number, record in run_tasks(encode_unit, tasks, processes, bar.update, threads):
                self._records[number] = record
                self._checked.add(number)

    def _is_after_limit(self, unit: Unit) -> bool:
        if not self.encoding.rules.is_limited:
            return False
        documents = text_bytes = 0
        for number, record in self._records.items():
            split = self.units[number].split
            if number < unit.number and counted_with(split) == counted_with(unit.split):
                documents += record.documents
                text_bytes += record.encoded_bytes
        return self.encoding.rules.limit_reached(unit.split, documents, text_bytes)

    def complete_parts(self, units: list[Unit]) -> list[Unit]:
        """Make the missing and damaged parts of these units; return the units that are needed.

        Units after the end that a limit sets are not needed.
        """
        while True:
            self.encode(units)
            needed = [unit for unit in units if not self._is_after_limit(unit)]
            if not (damaged := list(self._find_damaged(needed))):
                return needed
            print(f"{len(damaged)} damaged parts are made again", flush=True)
            for number in damaged:
                self.remove(number)

    def _find_damaged(self, units: list[Unit]) -> Iterator[int]:
        for unit in units:
            if unit.number in self._checked:
                continue
            digests = self.record(unit).sha256
            paths = {part_path(self.work, unit.number, kind): kind for kind in digests}
            found = checksums(paths, "sha256")
            if any(found[path] != digests[kind] for path, kind in paths.items()):
                yield unit.number
            else:
                self._checked.add(unit.number)

    def parts(self, units: Iterable[Unit], names: list[str]) -> Parts:
        """Return a reader of the finished parts of these units, with set indices into `names`."""
        records = {unit.number: self.record(unit) for unit in units}
        sets = {number: record.sets for number, record in records.items()}
        tokens = {number: record.tokens for number, record in records.items()}
        return Parts(self.work, names, sets, tokens, {unit.number: unit.split for unit in units})

    def remove(self, unit: int, *kinds: str) -> None:
        """Remove a part, or only its files of some kinds."""
        remove_part(self.work, unit, *([kinds] if kinds else []))
        self._records.pop(unit, None)
        self._checked.discard(unit)
