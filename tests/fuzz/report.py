"""What a run of the fuzz test found: counts by target, failures by cause, and their evidence."""

from __future__ import annotations

import shutil
from collections import Counter
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

    @property
    def cases(self) -> int:
        return sum(counts.total() for counts in self.counts.values())

    @property
    def failed(self) -> int:
        return sum(counts["failed"] for counts in self.counts.values())

    def add(self, record: dict[str, Any], place: Path) -> None:
        """Count a case; of one that failed keep the damaged file, the command and its output."""
        how = "failed" if record["failures"] else "refused" if record["code"] else "accepted"
        self.counts.setdefault(record["target"], Counter())[how] += 1
        for failure in record["failures"]:
            cause = f"{failure['kind']} | {record['target']} | {failure['cause']}"
            known = self.causes.setdefault(cause, [])
            kept = {key: record[key] for key in ("id", "odd", "command", "code", "seconds")}
            again = f"python -m tests.fuzz --case {record['id']} --seed {self.seed}"
            known.append(kept | {"again": again})
            if self.out is not None and len(known) <= KEPT:
                folder = self.out / "failures" / record["id"]
                write_json(folder / "record.json", record)
                lines = (again, record["command"], f"# {record['odd']}")
                write_text(folder / "command.txt", "\n".join(lines) + "\n")
                damaged = place / INSIDE / (record["damaged"] or "")
                if damaged.is_file():
                    shutil.copyfile(damaged, folder / damaged.name)

    def write(self) -> None:
        """Write the report as JSON, causes by their number of cases."""
        if self.out is None:
            return
        causes = sorted(self.causes.items(), key=lambda item: -len(item[1]))
        values = {
            **{"seed": self.seed, "cases": self.cases, "failed": self.failed},
            "targets": {name: dict(counts) for name, counts in sorted(self.counts.items())},
            "causes": [{"cause": c, "cases": len(own), "first": own[:5]} for c, own in causes],
        }
        write_json(self.out / "report.json", values)

    def text(self) -> str:
        """Return counts, then the causes with a case of each."""
        hows = ("accepted", "refused", "failed")
        lines = [f"{'target':<20}{''.join(f'{how:>10}' for how in hows)}"]
        for name, counts in sorted(self.counts.items()):
            lines.append(f"{name:<20}{''.join(f'{counts[how]:>10}' for how in hows)}")
        causes = sorted(self.causes.items(), key=lambda item: -len(item[1]))
        for cause, cases in causes[:SHOWN]:
            first = cases[0]
            lines += ["", f"{len(cases)} x {cause}", f"    {first['again']}"]
            lines += [f"    {first['command'][:300]}", f"    {first['odd'][:300]}"]
        if len(causes) > SHOWN:
            lines += ["", f"and {len(causes) - SHOWN} more causes in report.json"]
        total = f"{self.cases} cases, {self.failed} failed, seed {self.seed}"
        return "\n".join([*lines, "", total])
