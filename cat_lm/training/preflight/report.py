"""What a preflight found: problems, warnings and notes, each with the ranks that it is about."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cat_lm.core.errors import SharedError, shared_error
from cat_lm.training.preflight.bandwidth import Transport, least_bandwidth
from cat_lm.training.preflight.facts import Facts

HOSTS_NAMED = 8


@dataclass
class PreflightReport:
    """Problems and notes, each with the ranks that it is about.

    Attributes:
        passing: those of the problems that may be gone at the next start, with nothing changed.
    """

    facts: Sequence[Facts]
    problems: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    warnings: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)
    passing: set[str] = field(default_factory=set)

    def error(self) -> SharedError:
        """Make one error of all problems, temporary where all of them may pass."""
        return shared_error(self.message(), temporary=self.problems.keys() <= self.passing)

    def message(self) -> str:
        """All problems, a line each, for one error."""
        lines = self._grouped(self.problems)
        text = f" {lines[0]}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
        return f"preflight:{text}"

    def lines(self) -> list[str]:
        """Return the lines for the log."""
        warnings = [f"warning: {line}" for line in self._grouped(self.warnings)]
        return [f"preflight: {line}" for line in (*self.notes, *warnings)]

    def _grouped(self, found: dict[str, list[int]]) -> list[str]:
        return [f"{self._who(ranks)}: {text}" for text, ranks in found.items()]

    def _who(self, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self.facts) > 1:
            return "all ranks"
        of_host = defaultdict(list)
        for rank in ranks:
            of_host[self.facts[rank].host].append(rank)
        named = [f"{host} {ranges(of_host[host])}" for host in list(of_host)[:HOSTS_NAMED]]
        more = len(of_host) - len(named)
        return ", ".join([*named, f"and {more} more hosts"] if more > 0 else named)

    def add_transport(self, transport: Transport | None) -> None:
        if transport is None:
            return
        speed, per_host = transport.bus_bandwidth, Counter(fact.host for fact in self.facts)
        least = least_bandwidth(self.facts[0].device, len(per_host), min(per_host.values()))
        self.notes.append(
            f"all-reduce of {transport.bytes_ / 2**20:.0f} MiB among {transport.world_size} "
            f"ranks: {transport.seconds * 1e3:.1f} ms, {speed / 1e9:.2f} GB/s on the bus"
        )
        if speed < least:
            text = (
                f"the all-reduce's {speed / 1e9:.3g} GB/s are very little, {least / 1e9:.3g} or "
                "more are usual; is the fast network used (NCCL_DEBUG=INFO, GLOO_SOCKET_IFNAME "
                "tell and choose)?"
            )
            self.warnings[text] += range(len(self.facts))


def ranges(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 24–31`, `ranks 0, 2–3`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    several = len(runs) > 1 or len(runs[0]) > 1
    parts = (f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"rank{'s' if several else ''} {', '.join(parts)}"
