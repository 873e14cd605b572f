"""Rates are chosen by validation rows on a seed of its own; the reported seeds see one rate."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.lab import cell as cells
from eval.lab import execution as running
from eval.lab.execution import Execution
from eval.lab.grid import LADDER, all_records, choose, next_rate, run_tuned
from eval.lab.places import TUNING_SEED, Place, Run
from eval.recall.cell import Cell
from eval.recall.training import Trial


def test_the_middle_of_equally_good_rates_is_taken():
    assert choose({1e-3: 0.5, 1e-2: 0.9, 1e-1: 0.2}).rate == 1e-2
    assert choose({1e-3: 0.999, 1e-2: 0.996, 1e-1: 0.2}).rate == 1e-2  # as good
    assert choose({1e-3: 0.999, 1e-2: 0.993, 1e-1: 0.2}).rate == 1e-3
    assert not choose({1e-2: 0.9}).on_edge  # nothing was chosen


scores = st.dictionaries(st.sampled_from((*LADDER, 2e-3, 4e-3)), st.floats(0, 1), min_size=2)


@given(scores)
def test_beyond_is_the_next_of_the_ladder_outside_of_what_was_tried(tried):
    choice = choose(tried)
    assert tried[choice.rate] >= max(tried.values()) - 0.005
    assert choice.on_edge == (choice.rate in (min(tried), max(tried)))
    if (rate := next_rate(choice)) is None:
        assert not choice.on_edge or choice.rate in (LADDER[0], LADDER[-1])
    else:
        assert rate in LADDER and not min(tried) <= rate <= max(tried)
        assert not any(min(rate, choice.rate) < x < max(rate, choice.rate) for x in LADDER)


def place(rates: tuple[float, ...], seeds: int = 2, trials: int = 1) -> Place:
    cell = Cell("mqar:vocab_size=64", "none", 16, 16, epochs=1, train_examples=8, stop_above=None)
    return Place(Run("MQAR", "d = 16", "none", cell), rates, seeds, trials)


def test_several_seeds_choose_by_their_mean():
    runs = place((1e-3, 1e-2), trials=2).tried_at(1e-3)
    assert [run.cell.seed for run in runs] == [TUNING_SEED, TUNING_SEED + 1]


@pytest.fixture
def imitated(monkeypatch, tmp_path):
    """Cells whose validation is best at a rate, or rises with it, without training; what ran."""
    ran, best = [], {"rate": 3e-2, "rising": 0.0}

    def run(groups, out, device, workers):
        for each in itertools.chain(*groups):
            ran.append((each.cell.lr, each.cell.seed))
            accuracy = 0.9 if each.cell.lr == best["rate"] else 0.5
            accuracy += best["rising"] * LADDER.index(each.cell.lr)
            record = {**each.cell.resolved(), "validation": {"accuracy": accuracy}, "filters": []}
            record |= {"history": [], "steps": 1, "accuracy": 0.5, "tests": {}, "seconds": {}}
            cells._keep(out, each.cell, record | {"cell": each.cell.key()}, device)

    monkeypatch.setattr(running, "execute", run)
    monkeypatch.setattr(running, "hours_by_mixer", lambda groups, _: {"n": sum(map(len, groups))})
    return ran, best


def test_trials_come_first_then_one_beyond_the_edge_then_the_seeds(imitated, tmp_path, capsys):
    ran, best = imitated
    several, one = place((3e-3, 1e-2, 3e-2)), place((1e-3,), seeds=1)
    assert run_tuned("all", [several, one], tmp_path, Execution(estimate_only=True)) is None
    assert not ran and "at most 7.00 cpu hours" in capsys.readouterr().out  # 3 + 1 beyond + 2 + 1
    found = run_tuned("all", [several, one], tmp_path, Execution())
    trials = [(rate, TUNING_SEED) for rate in (3e-3, 1e-2, 3e-2)]
    assert ran == [*trials, (1e-1, TUNING_SEED), (3e-2, 0), (3e-2, 1), (1e-3, 0)]
    assert [(run.cell.lr, run.cell.seed) for run, *_ in found] == ran[-3:]
    # All of them are told where and at which commits they were trained.
    read = list(all_records([several, one], tmp_path))
    assert [(record["cell"]["lr"], record["cell"]["seed"]) for record in read] == ran
    (first, *_, last) = [choice for *_, choice in found]
    assert first.tried == {3e-3: 0.5, 1e-2: 0.5, 3e-2: 0.9, 1e-1: 0.5} and not first.on_edge
    assert last.tried == {} and not last.on_edge
    # Again: nothing to do; with more seeds, those alone.
    run_tuned("all", [several, one], tmp_path, Execution())
    assert "7 runs, 0 to do" in capsys.readouterr().out and len(ran) == 7
    run_tuned("all", [place((3e-3, 1e-2, 3e-2), seeds=3)], tmp_path, Execution())
    assert ran[7:] == [(3e-2, 2)]
    # The best is the one beyond: it stays marked, and no further one is tried.
    best.update(rate=0.0, rising=0.01)
    del ran[:]
    found = run_tuned("other", [several], tmp_path / "other", Execution())
    assert ran[3:] == [(1e-1, TUNING_SEED), (1e-1, 0), (1e-1, 1)]
    assert all(choice.on_edge and choice.rate == 1e-1 for *_, choice in found)


@pytest.mark.parametrize(("stop", "epochs", "chosen"), [(0.99, 4, 3), (0.8, 2, 2), (None, 4, 4)])
def test_validation_chooses_the_step_and_test_is_looked_at_once(stop, epochs, chosen, monkeypatch):
    """Accuracies are given: what is looked at, when, and which model is tested."""
    rows = {"train_examples": 32, "test_examples": 8, "validation_examples": 12, "batch_size": 32}
    cell = Cell("mqar:vocab_size=64", "none", 16, 16, epochs=4, test_lengths=(32,), **rows)
    looked, weights = [], []
    wanted = iter((0.7, 0.9, 0.9, 0.1, 0.0, 0.0))

    def measured(self, examples, *_):
        looked.append(len(examples))
        weights.append(self.model.embedding.weight.detach().clone())
        return {"accuracy": next(wanted)}

    monkeypatch.setattr(Trial, "_measure", measured)
    record = dataclasses.replace(cell, stop_above=stop).run(quiet=True)
    assert looked == [12] * epochs + [8, 8]
    assert record["steps"] == epochs and record["validation"]["step"] == chosen
    assert record["validation"]["accuracy"] == (0.7, 0.9, 0.9, 0.1)[chosen - 1]
    # One model at all lengths: that of the chosen step.
    assert all(tested.equal(weights[chosen - 1]) for tested in weights[epochs:])
    assert not weights[0].equal(weights[1])


def test_splits_of_a_trial_are_apart():
    rows = {"train_examples": 200, "test_examples": 200, "validation_examples": 50}
    trial = Cell("mqar:vocab_size=16,keys=1,filler=zeros", "none", 8, 4, **rows).trial("cpu")
    trial.load()
    parts = [trial.inputs.numpy(), trial.examples["trained length"].inputs, trial.validation.inputs]
    rows = [{tuple(row) for row in part.tolist()} for part in parts]
    assert [len(part) for part in parts] == [200, 200, 50]
    assert not rows[0] & rows[1] and not rows[0] & rows[2] and not rows[1] & rows[2]
