"""Stacks: many models trained as one are the models trained one by one."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from cat_lm import mixers
from cat_lm.mixers import make_mixer
from eval.lab import cell as cells
from eval.lab.execution import Execution, run_unfinished, stacks
from eval.lab.places import Run
from eval.recall import cell as recall_cell
from eval.recall import training
from eval.recall.cell import Cell
from eval.recall.language import LanguageCell
from eval.recall.training import run_stack

BASE = Cell(
    "mqar:vocab_size=32",
    "cat:dropout=0",
    16,
    16,
    epochs=2,
    train_examples=80,  # the last batch of an epoch is a short one
    test_examples=40,
    validation_examples=40,
    batch_size=32,
    eval_steps=2,
    stop_above=None,
)


def three(**changes):
    """Different rates and seeds; two share a seed."""
    base = dataclasses.replace(BASE, **changes)
    settings = ((1e-3, 0), (1e-2, 1), (3e-2, 0))
    return [dataclasses.replace(base, lr=lr, seed=seed) for lr, seed in settings]


@pytest.fixture
def no_dropout(monkeypatch):
    """Draws that a stack and its models alone do not share. Mixers have an option for theirs."""
    monkeypatch.setitem(recall_cell.DROPOUT, "layer", 0.0)


def assert_same(stacked, alone, rtol=1e-4):
    """Two records of a cell, up to the rounding of fp32."""
    assert set(stacked) == {*alone, "stacked"}
    for name in ("cell", "task", "mixer", "layers", "parameters", "steps"):
        assert stacked[name] == alone[name]
    assert len(stacked["history"]) == len(alone["history"])
    for point, expected in zip(stacked["history"], alone["history"], strict=True):
        assert point == pytest.approx(expected, rel=rtol, abs=1e-5)
    assert stacked["tests"].keys() == alone["tests"].keys()
    for name, found in stacked["tests"].items():
        assert found == pytest.approx(alone["tests"][name], abs=1e-9)
    for layer, expected in zip(stacked["filters"], alone["filters"], strict=True):
        for stream, taps in layer.items():
            torch.testing.assert_close(
                torch.tensor(taps), torch.tensor(expected[stream]), rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("name", mixers.names())
def test_a_stack_equals_its_models_alone(name, no_dropout):
    mixer = name
    if hasattr(make_mixer(name).options, "dropout"):
        mixer = f"{name}:dropout=0"
    alike = three(mixer=mixer, test_lengths=(12, 24), epochs=1)
    torch._C._functorch._set_vmap_fallback_warning_enabled(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop")  # a loop over models
            found = dict(run_stack(alike))
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)
    assert list(found) == alike
    for cell, record in found.items():
        assert record["stacked"] == 3
        assert_same(record, cell.run(quiet=True))
    losses = [record["history"][-1]["loss"] for record in found.values()]
    assert len(set(losses)) == 3


def test_answers_fed_back_equal_those_of_a_model_alone(no_dropout):
    task = {"task": "selective-copy:copies=4,signals=4", "seq_len": 24, "test_lengths": (32,)}
    for cell, record in run_stack(three(**task, epochs=1)):
        assert len(record["tests"]) == 2
        assert all("free_running_accuracy" in test for test in record["tests"].values())
        assert_same(record, cell.run(quiet=True))


@pytest.mark.parametrize("where", ["embedding", "attention"])
def test_every_model_draws_its_own_dropout(where, monkeypatch):
    monkeypatch.setitem(recall_cell.DROPOUT, "layer", 0.5 if where == "embedding" else 0.0)
    mixer = f"cat:dropout={0.5 if where == 'attention' else 0}"
    first, second = (record for _, record in run_stack([three(mixer=mixer)[0]] * 2))
    assert first["history"][-1]["loss"] != second["history"][-1]["loss"]
    again = next(iter(run_stack([three(mixer=mixer)[0]] * 2)))[1]
    assert again["history"] == first["history"]


def test_who_stops_early_leaves_and_changes_nothing_for_the_others(no_dropout):
    alike = three(stop_above=0.06, epochs=6)
    alone = {cell: cell.run(quiet=True) for cell in alike}
    assert len({record["steps"] for record in alone.values()}) == 3
    found = dict(run_stack(alike))
    assert list(found) == sorted(alike, key=lambda cell: alone[cell]["steps"])
    for cell, record in found.items():
        assert_same(record, alone[cell])
    seconds = [record["seconds"] for record in found.values()]
    together = [s["training of the stack"] for s in seconds]
    assert together == sorted(together)
    # The shares are all of the time, and each is at most what passed.
    assert sum(s["training"] for s in seconds) == pytest.approx(together[-1], abs=0.05)


def test_a_model_that_diverges_does_not_touch_its_neighbours(no_dropout):
    tame = three(mixer="deltanet", epochs=2)[:2]
    wild = dataclasses.replace(tame[0], lr=1e3)
    found = dict(run_stack([tame[0], wild, tame[1]]))
    last = found[wild]["history"][-1]["loss"]
    assert not last < 1e3  # huge, infinite or not a number
    for cell in tame:
        assert_same(found[cell], cell.run(quiet=True))


def test_a_killed_stack_keeps_who_had_stopped(no_dropout, tmp_path, monkeypatch):
    alike = three(stop_above=0.06, epochs=6)
    update, left = training.Stack.update, []

    def killed(stack, batches):
        if len(batches) < 3:
            left.extend(trial.cell for trial in stack.trials)
            raise KeyboardInterrupt
        return update(stack, batches)

    with monkeypatch.context() as patched:
        patched.setattr(training.Stack, "update", killed)
        with pytest.raises(KeyboardInterrupt):
            cells.run_together(tmp_path, alike, "cpu")
    assert [cells.finished(tmp_path, cell) is None for cell in alike] == [c in left for c in alike]
    (first,) = (cell for cell in alike if cell not in left)
    before = cells.cell_path(tmp_path, first).stat().st_mtime_ns
    began = []
    monkeypatch.setattr(
        cells, "run", lambda _, cell, *__, **___: cells.finished(tmp_path, cell)
    )  # nobody trains alone
    monkeypatch.setattr(
        training, "Trial", lambda cell, *rest: began.append(cell) or _trial(cell, *rest)
    )
    records = cells.run_together(tmp_path, alike, "cpu")
    assert began == left and cells.cell_path(tmp_path, first).stat().st_mtime_ns == before
    assert [record["cell"]["lr"] for record in records] == [cell.lr for cell in alike]
    assert [r["stacked"] for r in records] == [2 if cell in left else 3 for cell in alike]
    assert all(record["delays"] and record["provenance"] for record in records)


_trial = training.Trial


def test_one_cell_alone_is_not_a_stack_and_kinds_do_not_mix(tmp_path):
    (record,) = cells.run_together(tmp_path, [BASE], "cpu")
    assert "stacked" not in record
    with pytest.raises(ValueError, match="learning rate and seed alone"):
        next(run_stack([BASE, dataclasses.replace(BASE, weight_decay=0.0)]))


def test_a_grid_runs_in_stacks_in_processes(tmp_path, capsys):
    runs = [Run("MQAR", "d = 16", "cat", cell) for cell in three(epochs=1)]
    runs.append(Run("again", "d = 16", "cat", runs[0].cell))  # one cell in two places runs once
    runs.append(Run("MQAR", "d = 16", "none", dataclasses.replace(BASE, mixer="none", epochs=1)))
    assert not run_unfinished("all", runs, tmp_path, Execution(estimate_only=True))
    assert not list(tmp_path.iterdir())
    assert run_unfinished("all", runs, tmp_path, Execution(stack=4))
    said = capsys.readouterr().out
    assert "4 runs, 4 to do" in said and "1 stacks of up to 3 models, 1 models alone" in said
    assert "hours by mixer: cat" in said and "4/4 " in said
    records = [cells.finished(tmp_path, run.cell) for run in runs]
    assert [record.get("stacked") for record in records] == [3, 3, 3, 3, None]
    assert run_unfinished("all", runs, tmp_path, Execution(stack=4))
    assert "4 runs, 0 to do" in capsys.readouterr().out


def test_groups_are_of_one_kind_and_even():
    alike = [dataclasses.replace(BASE, seed=seed) for seed in range(7)]
    other = [dataclasses.replace(BASE, d_model=32, seed=seed) for seed in range(2)]
    text = LanguageCell("data", "0", "cat", 16, 32, 1, 10, 1e-3)
    mixed = [alike[0], other[0], text, *alike[1:], other[1]]
    groups = stacks(mixed, Execution(stack=3))
    assert sorted(map(len, groups)) == [1, 2, 2, 2, 3]
    assert all(len({getattr(c, "kind", c) for c in group}) == 1 for group in groups)
    assert sorted(c.seed for group in groups for c in group) == sorted(c.seed for c in mixed)
    assert all(len(group) == 1 for group in stacks(mixed, Execution()))  # auto on a CPU


def test_as_many_as_fit_into_a_gpu_beside_the_other_workers(monkeypatch):
    alike = [dataclasses.replace(BASE, seed=seed) for seed in range(8)]
    gpu = Execution("cuda", workers=2)
    for fits, largest in ((3.5, 3), (0.5, 1), (100, 8)):
        free = int(fits * 2 / 0.8 * BASE.bytes_needed()) + 1
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 10**12))
        assert max(map(len, stacks(alike, gpu))) == largest
    big = dataclasses.replace(BASE, task="mqar:vocab_size=8192", d_model=128, seq_len=512)
    assert big.bytes_needed() > 100 * BASE.bytes_needed()


@pytest.mark.parametrize("name", mixers.names())
def test_a_model_keeps_less_than_is_set_aside_for_it(name):
    rows, tokens = 4, 1024
    cell = dataclasses.replace(
        BASE, task=f"mqar:vocab_size={tokens},keys=4", mixer=name, d_model=32, seq_len=64
    )
    cell = dataclasses.replace(cell, train_examples=rows, batch_size=rows, test_examples=1)
    trial, kept = training.Trial(cell, "cpu"), {}
    inputs, positions, _ = trial.imitate(rows)

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trial.model.train()
        logits = training.Stack([trial])(inputs[None], positions[None])
    # The moments, the gradients and two more of the logits' size come on top.
    others = 3 * 4 * sum(p.numel() for p in trial.model.parameters()) + 2 * 4 * logits.numel()
    assert sum(kept.values()) + others < cell.bytes_needed()
