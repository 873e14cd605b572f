"""Join the records of several processes into one: each row as the policy has it that suits it."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from eval.speed.conv.contest import against_rival
from eval.speed.conv.lengths import DIRECTIONS, against_rivals, head_filters
from eval.speed.model.contexts import compared
from eval.speed.model.decode import shortest_prompt
from eval.speed.model.train import relative_speeds
from eval.speed.timing import summary

Records = Mapping[str, list[dict[str, Any]]]  # by policy, in the order of the processes


@dataclass(frozen=True)
class Chosen:
    """A row's medians, one of each process, under the policy that it is best under."""

    policy: str
    values: list[float]
    tried: dict[str, list[float]]

    def record(self) -> dict[str, Any]:
        """Summarize over processes, with what was tried."""
        return {**summary(self.values), "policy": self.policy, "tried": self.tried}


def choose(
    records: Records, read: Callable[[dict[str, Any]], float], *, larger: bool = False
) -> Chosen:
    """Choose the policy with the lowest median, or where `larger` the highest.

    Args:
        read: from a process's record to the row's median in it.
    """
    tried = {policy: [read(record) for record in of_it] for policy, of_it in records.items()}
    best = max if larger else min
    policy = best(tried, key=lambda policy: statistics.median(tried[policy]))
    return Chosen(policy, tried[policy], tried)


def join(records: Records) -> dict[str, Any]:
    """Join records of one benchmark; what is not timed is the first's.

    `processes` of the result says how many there were and what was tried.
    """
    first = next(iter(records.values()))[0]
    joined = copy.deepcopy(first)
    _JOINERS[first["benchmark"]](joined, records)
    of_policies = {
        policy: of_it[0]["device"].get("openmp", {}) for policy, of_it in records.items()
    }
    counted = len(next(iter(records.values())))
    return joined | {"processes": {"of_each_policy": counted, "policies": of_policies}}


def _join_conv(joined: dict[str, Any], records: Records) -> None:
    for number, case in enumerate(joined["cases"]):
        of_case = {
            policy: [record["cases"][number] for record in of_it]
            for policy, of_it in records.items()
        }
        _join_case(case, of_case)
    every = [refused for of_it in records.values() for r in of_it for refused in r["refused"]]
    joined["refused"] = list({(r["case"], r["kernel"]): r for r in every}.values())


def _join_case(case: dict[str, Any], records: Records) -> None:
    """Join one case's rows of kernels; one that any process refused is refused, without times."""
    copies = choose(records, lambda found: found["copy_bytes_per_second"], larger=True)
    case["copy_bytes_per_second"] = statistics.median(copies.values)
    for place, row in enumerate(case["kernels"]):
        found = [record["kernels"][place] for of_it in records.values() for record in of_it]
        row["refused"] = next((r["refused"] for r in found if r["refused"]), None)
    timed = [place for place, row in enumerate(case["kernels"]) if not row["refused"]]
    for direction, floor in case["floor_bytes"].items():

        def read(place: int, record: dict[str, Any], direction: str = direction) -> float:
            return record["kernels"][place][direction]["seconds"]["median"]

        chosen = {place: choose(records, partial(read, place)) for place in timed}
        names = {place: case["kernels"][place]["kernel"] for place in timed}
        compared = against_rival({names[place]: chosen[place].values for place in timed})
        for place in timed:
            rate = floor / statistics.median(chosen[place].values)
            case["kernels"][place][direction] = {
                "seconds": chosen[place].record(),
                "bytes_per_second": rate,
                "of_copy_bandwidth": rate / case["copy_bytes_per_second"],
                **compared[names[place]],
            }


def _join_train(joined: dict[str, Any], records: Records) -> None:
    for of_it in records.values():
        for record in of_it:
            joined["absent"] |= record["absent"]
    rows = joined["results"]
    for name in rows.keys() & joined["absent"].keys():
        del rows[name]  # it could not be made in one of the processes
    chosen = {
        name: choose(records, lambda r, name=name: r["results"][name]["step_seconds"]["median"])
        for name in rows
    }
    seconds = {name: of_it.values for name, of_it in chosen.items()}
    for name, row in rows.items():
        before = row["step_seconds"]["median"]
        row["step_seconds"] = chosen[name].record()
        faster = before / row["step_seconds"]["median"]
        row["tokens_per_second"] *= faster
        row["mfu"] = row["mfu"] and row["mfu"] * faster
        row |= relative_speeds(name, seconds)


def _join_decode(joined: dict[str, Any], records: Records) -> None:
    if "contexts" in joined:
        return _join_contexts(joined, records)
    rates = [f"tokens_per_second_{kind}" for kind in ("cached", "cold", "uncached")]
    for i, row in enumerate(joined["results"]):
        for name in ("prompt_seconds", *rates):
            chosen = choose(
                records,
                lambda record, i=i, name=name: record["results"][i][name]["median"],
                larger=name in rates,
            )
            row[name] = chosen.record()
        with_cache, without = (row[f"tokens_per_second_{k}"] for k in ("cached", "uncached"))
        row["cache_speedup"] = with_cache["median"] / without["median"]
    for i, row in enumerate(joined["results"]):
        if row["of_shortest_prompt"]:
            row["of_shortest_prompt"] = _of_shortest(joined["results"], i, records).record()


def _of_shortest(rows: list[dict[str, Any]], number: int, records: Records) -> Chosen:
    """Choose for both prompts of a ratio the policy under which the shortest is fastest.

    Each prompt's own best would compare two policies, and not two lengths.
    """
    policy = shortest_prompt(rows, rows[number])["tokens_per_second_cached"]["policy"]
    tried = {
        each: [record["results"][number]["of_shortest_prompt"]["median"] for record in of_it]
        for each, of_it in records.items()
    }
    return Chosen(policy, tried[policy], tried)


def _join_contexts(joined: dict[str, Any], records: Records) -> None:
    for number, part in product(range(len(joined["contexts"])), ("layer", "model")):
        row = joined["contexts"][number]

        def read(name: str, record: dict[str, Any], at: int = number, part: str = part) -> float:
            return record["contexts"][at][part]["seconds"][name]["median"]

        chosen = {name: choose(records, partial(read, name)) for name in row[part]["seconds"]}
        row[part] = compared({name: of_it.values for name, of_it in chosen.items()})
        row[part]["seconds"] = {name: of_it.record() for name, of_it in chosen.items()}


def _join_lengths(joined: dict[str, Any], records: Records) -> None:
    """Join contenders' rows; one that any process refused is refused, without times."""
    every = [refused for of_it in records.values() for r in of_it for refused in r["refused"]]
    wrong = {_place(refused): refused for refused in every}
    joined["refused"] = list(wrong.values())
    joined["rows"] = [row for row in joined["rows"] if _place(row) not in wrong]
    by_place = {
        policy: [{_place(row): row for row in record["rows"]} for record in of_it]
        for policy, of_it in records.items()
    }
    head = head_filters(joined["case"]["window"])
    for way in DIRECTIONS:

        def read(place: tuple[int, str], rows: dict[Any, Any], way: str = way) -> float:
            return rows[place][way]["seconds"]["median"]

        places = map(_place, joined["rows"])
        chosen = {place: choose(by_place, partial(read, place)) for place in places}
        for row in joined["rows"]:
            time, name = _place(row)
            seconds = {of: one.values for (at, of), one in chosen.items() if at == time}
            ratios = against_rivals(seconds[name], seconds, head)
            row[way] = {"seconds": chosen[time, name].record(), **ratios}


def _place(row: dict[str, Any]) -> tuple[int, str]:
    return row["time"], row["contender"]


_JOINERS = {
    "conv": _join_conv,
    "lengths": _join_lengths,
    "train": _join_train,
    "decode": _join_decode,
}
