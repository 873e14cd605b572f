"""Measure in separate processes under each of OpenMP's policies; keep what each row is fastest in.

A policy that helps one contender can slow another down several times (`OMP_WAIT_POLICY=PASSIVE` the
backward pass of torch's conv1d), so none is chosen for all. A process is measured as without
`--processes`. Its medians are the values that are joined: of every row those under the policy whose
median over the processes is best. A ratio is taken within a round of processes; its range is that
of the rounds.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from cat_lm.errors import UserError
from eval.common.interrupts import terminated_as_interrupt
from eval.speed.progress import say
from eval.speed.run import measure

# What waiting threads do (of libgomp: spin a while and sleep, sleep, spin), and where they run.
POLICIES: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
    "bound": {"OMP_PROC_BIND": "TRUE"},
}
_TRIED = {name for variables in POLICIES.values() for name in variables}


def measure_in_processes(options: argparse.Namespace) -> dict[str, Any]:
    """Give the joined record of `options.processes` processes under each policy, taking turns.

    On a GPU the policies decide nothing, and the default is the only one.

    Raises:
        UserError: as `measure`; a process died.
    """
    from eval.common.provenance import command_line
    from eval.speed.join import join

    records: dict[str, list[dict[str, Any]]] = {}
    policies = list(POLICIES)
    for number in range(options.processes):
        for policy in policies:
            if policy in policies_for(records):
                say(f"process {number + 1} of {options.processes}, OpenMP's policy {policy}")
                records.setdefault(policy, []).append(_measure_apart(options, policy))
                options = copy.copy(options)
                options.peak_memory = False  # once is enough
    return join(records) | {"command": command_line()}


def policies_for(records: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """List the policies that are worth trying, as far as the first record shows."""
    first = next(iter(records.values()), None)
    if first is None or first[0]["device"]["type"] == "cpu":
        return list(POLICIES)
    return ["default"]


def _measure_apart(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    # Not a pool's worker, which may have no processes of its own.
    with (
        terminated_as_interrupt(),
        _environment(POLICIES[policy]),
        ProcessPoolExecutor(1, mp_context=spawn) as executor,
    ):
        try:
            return executor.submit(measure, options).result()
        except KeyboardInterrupt:
            # The signal may be this process's alone; the executor would wait for the measurement.
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        except BrokenProcessPool:
            raise UserError(
                "--processes: a measuring process died (the system ends one that takes too much "
                "memory); use smaller sizes or fewer models"
            ) from None


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Put these in the place of all that policies set, for processes that are started within."""
    kept = {name: os.environ.pop(name) for name in _TRIED if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(kept)
