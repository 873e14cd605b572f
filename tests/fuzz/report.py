"""What a run of the fuzz test found: counts by target, failures by cause, and their evidence."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cat_lm.core.files import write_json, write_text
from tests.fuzz.cases import INSIDE

SHOWN = 40  # causes
KEPT = 20  # cases of one cause whose evidence is kept


class Report:
    """Counts cases as they come."""

    def __init__(self, out: Path | None, seed: int) -> None:
        self.out, self.seed = out, seed
        self.counts: dict[str, Counter[str]] = {}
        self.causes: dict[str, list[dict[str, Any]]] = {}
        self.cases = 0
        self.seconds: Counter[str] = Counter()

    def add(self, record: dict[str, Any], place: Path) -> None:
        """Counts a case; of one that failed keeps the damaged file, the command and its output."""
        self.cases += 1
        counts = self.counts.setdefault(record["target"], Counter())
        self.seconds[record["target"]] += record["seconds"]
        if not record["failures"]:
            counts["accepted" if record["code"] == 0 else "refused"] += 1
            return
        counts["failed"] += 1
        for failure in record["failures"]:
            counts[f"failed: {failure['kind']}"] += 1
            program = record["target"]
            cause = f"{failure['kind']} | {program} | {failure['cause']}"
            known = self.causes.setdefault(cause, [])
            kept = {key: record[key] for key in ("id", "odd", "command", "code", "seconds")}
            known.append(kept | {"again": self.again(record["id"])})
            if len(known) <= KEPT:
                self._keep(record, place)

    def again(self, identifier: str) -> str:
        return f"python -m tests.fuzz --case {identifier} --seed {self.seed}"

    def _keep(self, record: dict[str, Any], place: Path) -> None:
        if self.out is None:
            return
        folder = self.out / "failures" / record["id"]
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "record.json", record)
        lines = (self.again(record["id"]), record["command"], f"# {record['odd']}")
        write_text(folder / "command.txt", "\n".join(lines) + "\n")
        damaged = place / INSIDE / (record["damaged"] or "")
        if record["damaged"] and damaged.is_file():
            shutil.copyfile(damaged, folder / damaged.name)

    def values(self) -> dict[str, Any]:
        """The report as JSON; causes by their number of cases."""
        by_number = sorted(self.causes.items(), key=lambda item: -len(item[1]))
        return {
            "seed": self.seed,
            "cases": self.cases,
            "failed": sum(counts["failed"] for counts in self.counts.values()),
            "targets": {name: dict(sorted(c.items())) for name, c in sorted(self.counts.items())},
            "seconds": {name: round(s, 1) for name, s in sorted(self.seconds.items())},
            "causes": [
                {"cause": cause, "cases": len(cases), "first": cases[:5]}
                for cause, cases in by_number
            ],
        }

    def write(self) -> None:
        if self.out is not None:
            write_json(self.out / "report.json", self.values())

    def text(self) -> str:
        """Counts, then the causes with a case of each."""
        values = self.values()
        lines = list(_table(values["targets"].items()))
        for cause in values["causes"][:SHOWN]:
            first = cause["first"][0]
            lines += ["", f"{cause['cases']} x {cause['cause']}", f"    {first['again']}"]
            lines += [f"    {_short(first['command'])}", f"    {_short(first['odd'])}"]
        if len(values["causes"]) > SHOWN:
            lines += ["", f"and {len(values['causes']) - SHOWN} more causes in report.json"]
        total = f"{values['cases']} cases, {values['failed']} failed, seed {self.seed}"
        return "\n".join([*lines, "", total])


def _table(rows: Iterable[tuple[str, dict[str, int]]]) -> Iterable[str]:
    yield f"{'target':<20}{'accepted':>10}{'refused':>10}{'failed':>10}  of which"
    for name, counts in rows:
        numbers = "".join(f"{counts.get(k, 0):>10}" for k in ("accepted", "refused", "failed"))
        kinds = {k.removeprefix("failed: "): n for k, n in counts.items() if ": " in k}
        yield f"{name:<20}{numbers}  {', '.join(f'{k} {n}' for k, n in kinds.items())}"


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + " …"
