"""Resumed with other numbers of ranks and other ZeRO stages (R16): the same state and losses."""

from __future__ import annotations

import shutil
import zlib
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cat_lm.config import RunConfig
from cat_lm.training.checkpoint import optimizer_state
from cat_lm.training.checkpoint.optimizer_state import seed_of
from tests.checkpoints import seal
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import TERM, error_of
from tests.distributed.trainers import train as run_trainer
from tests.runs import losses, run_values

SAVED_AT, STEPS = 4, 24  # the next 20 losses are compared
STAGES = (0, 1, 2, 3)
CHANGES = ((1, 1), (1, 2), (2, 1), (2, 2))  # of the number of ranks
# Which change goes with stages s -> t: every change with every s, every t, and once with s = t.
SQUARE = ((0, 2, 3, 1), (3, 1, 0, 2), (1, 3, 2, 0), (2, 0, 1, 3))


def load_of(variant: str, s: int, t: int) -> tuple:
    """(variant, ranks and stage that saved, ranks and stage that went on)."""
    before, after = CHANGES[SQUARE[s][t]]
    return (variant, before, s, after, t)


# The short tier has every change of ranks, and every stage that saves and that loads, once.
SHORT = [load_of("fp32", s, t) for s, t in ((0, 3), (1, 2), (2, 1), (3, 0))]
LONG = [load_of("bf16", s, t) for s, t in ((0, 2), (2, 0), (3, 1), (1, 3))]
LONG += [("one", 1, 0, 2, 3), ("one", 2, 3, 1, 2)]
NIGHTLY = [load_of("fp32", s, t) for s in STAGES for t in STAGES]
LOADS = [
    *SHORT,
    *(pytest.param(load, marks=pytest.mark.long) for load in LONG),
    *(pytest.param(load, marks=pytest.mark.nightly) for load in NIGHTLY if load not in SHORT),
]
# What other tests here go on from.
STARTS = {("fp32", 1, 0), ("fp32", 2, 3)}
# What rounding may do in 20 steps: the figures of the checkpoint's docstring. Seen: 5e-7 and 1e-3.
TOLERANCE = {"fp32": 1e-4, "one": 1e-4, "bf16": 1e-2}


def values_of(data: str, run: Path, variant: str, stage: int, **train) -> dict:
    """A model of odd sizes without dropout; `one`: with convolution filters of one element."""
    precision = "bf16" if variant == "bf16" else "fp32"
    train = {"max_steps": STEPS, "zero_stage": stage, "precision": precision, **train}
    values = run_values(data, run, **{"micro_batch_size": 4, **train})
    values["model"] |= {"hidden_size": 12, "intermediate_size": 13, "num_attention_heads": 1}
    values["model"] |= {"conv_window": 1 if variant == "one" else 3, "rotary_pct": 0.5}
    values["model"]["hidden_dropout"] = 0.0
    values["validation"]["every_steps"] = STEPS
    values["checkpoint"] = {"every_steps": 1, "keep_last": 9}  # `train` says at which of them
    return values


def train(ranks, values: dict, save_at: tuple = (), signal_at: int = 0, after_load=None):
    """Run train.py's Trainer; return (exit code, what identifies the samples of each step).

    `after_load` is called with the trainer before its first step.
    """
    samples = []

    def prepare(trainer) -> None:
        step, save = trainer.train_step, trainer.save

        def train_step(batch, waited):
            step(batch, waited)
            rows = (zlib.crc32(row.tobytes()) for row in batch["input_ids"])
            samples.append(ranks.sum(sum(rows))[0])

        def chosen_save():
            if trainer.step in save_at or trainer.agreed_exit_code():
                save()

        trainer.train_step, trainer.save = train_step, chosen_save
        if after_load:
            after_load(trainer)

    # Some parameters are above the threshold under which ZeRO-3 keeps them whole, others below.
    original = RunConfig.deepspeed

    def deepspeed(config, world_size):
        settings = original(config, world_size)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 20
        return settings

    with mock.patch.object(RunConfig, "deepspeed", deepspeed):
        return run_trainer(ranks, values, {signal_at: TERM}, prepare), samples


def straight_runs(ranks, data: str, folder: str, loads: list[tuple]):
    """The uninterrupted runs, which save once on their way."""
    found = {}
    for variant, world_size, stage in sorted({load[:3] for load in loads} | STARTS):
        if world_size == ranks.world_size:
            run = Path(folder) / f"{variant}-{world_size}-{stage}"
            values = values_of(data, run, variant, stage)
            found[run.name] = train(ranks, values, save_at=(SAVED_AT,))[1]
    return found


def resumed_runs(ranks, data: str, folder: str, loads: list[tuple]):
    """The runs that go on from a save of others; they save what they loaded before any step."""
    found = {}
    for variant, *source, world_size, stage in loads:
        if world_size == ranks.world_size:
            start = Path(folder) / f"{variant}-{source[0]}-{source[1]}/checkpoints"
            start /= f"step-{SAVED_AT:08d}"
            run = Path(folder) / f"{variant}-{source[0]}-{source[1]}-to-{world_size}-{stage}"
            values = values_of(data, run, variant, stage, resume=str(start))
            found[run.name] = train(ranks, values, (SAVED_AT,), after_load=save_again)[1]
    if ranks.world_size == 2:
        found["damaged"] = damaged_starts(ranks, data, folder)
        start = str(Path(folder) / f"fp32-1-0/checkpoints/step-{SAVED_AT:08d}")
        run = Path(folder) / "undivided"
        values = values_of(data, run, "fp32", 1, resume=start, micro_batch_size=8)
        found["undivided"] = error_of(ranks, values)
        found["zeros"] = {}
        for stage in STAGES:
            values = values_of(data, Path(folder) / "zeros", "fp32", stage, resume=start)
            values["train"]["max_steps"] = SAVED_AT  # nothing to do
            train(ranks, values, after_load=partial(look_after_load, found))
    return found


def look_after_load(found: dict, trainer) -> None:
    """Note the generator's seed, and whether weights that are all -0.0 are gathered as such."""
    found["seed"] = torch.initial_seed()
    for fragment in optimizer_state.fragments(trainer.engine):
        fragment.of(fragment.stepped).fill_(-0.0)
    weights = optimizer_state.full_precision_weights(trainer.engine).values()
    stage = trainer.config.train.zero_stage
    found["zeros"][stage] = all(w.signbit().all() and not w.any() for w in weights)


def save_again(trainer) -> None:
    trainer.checkpoints._current = None  # it was just loaded, so that it need not be saved
    trainer.save()


@pytest.fixture(scope="module")
def runs(request, tiny_corpus, tmp_path_factory):
    """The folder of all runs that the chosen tests look at, and what each rank of them returned.

    All in four groups of processes: on a busy machine a group takes a minute to start.
    """
    chosen = [item for item in request.session.items if item.path == request.path]
    given = [item.callspec.params for item in chosen if hasattr(item, "callspec")]
    loads = [params["load"] for params in given if "load" in params]
    folder = tmp_path_factory.mktemp("elastic")
    work = ((straight_runs, 2), (straight_runs, 1), (resumed_runs, 2), (resumed_runs, 1))
    return folder, [run_on_ranks(f, n, str(tiny_corpus), str(folder), loads) for f, n in work]


def step_losses(run: Path) -> dict[int, float]:
    return {row[0]: row[1] for row in losses(run) if len(row) == 3}


def assembled(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The whole moments and weights of a checkpoint, put together from its files."""
    pieces = {}
    for path in sorted((checkpoint / "state").iterdir()):
        for key, tensor in load_file(path).items():
            name, _, numbers = key.rpartition("[")
            pieces.setdefault(name, []).append((int(numbers.split(":")[0]), tensor))
    whole = {n: torch.cat([t for _, t in sorted(p, key=lambda x: x[0])]) for n, p in pieces.items()}
    return whole | load_file(checkpoint / "model/model.safetensors")


def optimizer_steps(checkpoint: Path) -> set[str]:
    paths = (checkpoint / "state").iterdir()
    return {safe_open(path, framework="pt").metadata()["step"] for path in paths}


@pytest.mark.parametrize("load", LOADS, ids=lambda load: "-".join(map(str, load)))
def test_every_change_of_ranks_and_stage_goes_on(runs, load):
    """The same moments, weights and step bit for bit; the same samples; the same 20 losses."""
    folder, found = runs
    variant, *source, world_size, stage = load
    straight = folder / f"{variant}-{source[0]}-{source[1]}"
    resumed = folder / f"{straight.name}-to-{world_size}-{stage}"
    step = f"checkpoints/step-{SAVED_AT:08d}"
    expected, loaded = assembled(straight / step), assembled(resumed / step)
    assert expected.keys() == loaded.keys() and len(expected) > 60
    for name, tensor in expected.items():
        assert tensor.view(torch.int32).equal(loaded[name].view(torch.int32)), name
        assert tensor.abs().max() > 0, name
    assert optimizer_steps(straight / step) == optimizer_steps(resumed / step) == {str(SAVED_AT)}

    samples = {name: of_run for part in found for name, of_run in part[0].items()}
    assert samples[resumed.name] == samples[straight.name][SAVED_AT:]
    want, got = step_losses(straight), step_losses(resumed)
    assert list(got) == list(range(SAVED_AT + 1, STEPS + 1))
    if tuple(source) == (world_size, stage):
        assert got == {number: want[number] for number in got}
    else:
        assert got == pytest.approx({n: want[n] for n in got}, abs=TOLERANCE[variant])
    log = (resumed / "train.log").read_text()
    assert (f"train.zero_stage: was {source[1]}, is {stage}" in log) == (source[1] != stage)
    assert (f"ranks: was {source[0]}, is {world_size}; random" in log) == (source[0] != world_size)


def rewrite(path: Path, change) -> None:
    """Store what `change(tensors, metadata)` leaves of a safetensors file."""
    with safe_open(path, framework="pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def cut(tensors, metadata) -> None:
    tensors.pop(next(iter(tensors)))


def doubled(path: Path) -> None:
    """Give the second rank's file the first one's fragments, too."""
    tensors = load_file(path.with_name("rank-00000.safetensors"))
    rewrite(path, lambda own, _: own.update(tensors))


# What is done to the second rank's state file, and what the error then says.
DAMAGES = {
    "missing": (Path.unlink, "rank-00001.safetensors is missing"),
    "header": (lambda p: p.write_bytes(b"\xff" * 64 + p.read_bytes()[64:]), "is damaged"),
    "extra": (lambda p: shutil.copy(p, p.with_name("rank-00002.safetensors")), "not of this save"),
    "doubled": (doubled, "are stored twice"),
    "gap": (lambda p: rewrite(p, cut), "are in no file"),
    "name": (
        lambda p: rewrite(p, lambda t, _: t.update({"exp_avg/other[0:3]": torch.zeros(3)})),
        "the model has no parameter other",
    ),
    "step": (
        lambda p: rewrite(p, lambda _, metadata: metadata.update(step="9")),
        "files are of different steps: [4, 9]",
    ),
    "weights": (
        lambda p: rewrite(p.parents[1] / "model/model.safetensors", cut),
        "the file has none, the model [",
    ),
}


def damaged_starts(ranks, data: str, folder: str) -> dict[str, str]:
    found = {}
    for name, (damage, _) in DAMAGES.items():
        checkpoint = Path(folder) / "damaged" / name / f"step-{SAVED_AT:08d}"
        source = Path(folder) / "fp32-2-3/checkpoints" / checkpoint.name

        def prepare(source=source, checkpoint=checkpoint, damage=damage, name=name):
            shutil.copytree(source, checkpoint)
            damage(checkpoint / "state/rank-00001.safetensors")
            seal(checkpoint)

        ranks.on_rank_zero(prepare)
        run = Path(folder) / f"from-damaged-{name}"
        found[name] = error_of(ranks, values_of(data, run, "fp32", 1, resume=str(checkpoint)))
    return found


def test_starts_that_cannot_be_are_errors_on_every_rank(runs):
    for found in runs[1][2]:
        assert "train.global_batch_size=8" in found["undivided"], found["undivided"]
        assert found["damaged"].keys() == DAMAGES.keys()
        for name, message in found["damaged"].items():
            assert DAMAGES[name][1] in message and len(message.splitlines()) == 1, (name, message)


def test_other_ranks_are_seeded_by_a_function_of_their_numbers(runs):
    assert [found["seed"] for found in runs[1][2]] == [seed_of(0, SAVED_AT, r, 2) for r in (0, 1)]
    numbers = [(0, 4, 0, 2), (0, 4, 1, 2), (0, 5, 0, 2), (0, 4, 0, 3), (1, 4, 0, 2)]
    assert len({seed_of(*of_rank) for of_rank in numbers}) == len(numbers)
    assert seed_of(0, 4, 0, 2) == 6814219399319092787  # the formula must stay


def test_weights_are_gathered_bit_for_bit(runs):
    assert runs[1][2][0]["zeros"] == dict.fromkeys(STAGES, True)
