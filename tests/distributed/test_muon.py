"""Muon: torch's results, the same on any number of ranks, and exact and elastic resuming."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from cat_lm.training import muon
from cat_lm.training.building import build_model
from cat_lm.training.checkpoint.optimizer_state import full_precision_weights
from cat_lm.training.engine import Engine
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_elastic import assembled, save_again, step_losses
from tests.distributed.test_engine import ROWS, VOCAB, global_batch, make_config, rows_of
from tests.distributed.trainers import TERM, error_of, train
from tests.runs import losses, run_values

STEPS, SAVED_AT = 6, 3
# (ranks, stage, precision) that save, and that go on from there.
RESUMES = [
    ((1, 0, "fp32"), (2, 1, "fp32")),
    ((3, 1, "fp32"), (1, 0, "fp32")),
    ((2, 1, "fp32"), (3, 1, "fp32")),
    ((2, 1, "bf16"), (2, 1, "bf16")),
]
STRAIGHT = sorted({start for start, _ in RESUMES} | {(2, 0, "fp32")})
# What rounding may do to losses in six steps. Seen: 1.6e-7.
TOLERANCE = 2e-6


def muon_config():
    config = make_config(0, ROWS)
    update = {"name": "muon", "muon_lr": 2e-3, "momentum": 0.9}
    optimizer = config.optimizer.model_copy(update=update)
    return config.model_copy(update={"optimizer": optimizer})


def engine_loop(ranks) -> dict[str, torch.Tensor]:
    """Train 20 steps under stage 0, with Newton-Schulz in bf16 as torch computes it."""
    config = muon_config()
    with mock.patch.object(muon, "compute_dtype", lambda _: torch.bfloat16):
        engine = Engine(build_model(config, VOCAB), config, ranks)
        for step in range(20):
            engine.train_step(rows_of(global_batch(step), ranks), 1e-3)
        # A step that is not finite changes nothing.
        before = full_precision_weights(engine)
        engine._forward = partial(not_finite, engine._forward)
        assert engine.train_step(rows_of(global_batch(0), ranks), 1e-3).skipped
    after = full_precision_weights(engine)
    assert all(after[name].equal(weight) for name, weight in before.items())
    return after


def not_finite(outputs, *given, **named):
    found = outputs(*given, **named)
    found.loss = found.loss * float("nan")
    return found


def test_stage_0_matches_torch_muon():
    """Packed queries, keys and values are three parameters of torch's Muon."""
    (found,) = run_on_ranks(engine_loop, 1)
    config = muon_config()
    model = build_model(config, VOCAB).train()
    chosen = muon.matrices(model)
    heads = model.config.num_attention_heads
    parts = {}
    for name, module in chosen.items():
        weight, packed = module.weight.detach(), "query_key_value" in name
        shape = (heads, 3, -1, weight.size(1)) if packed else (1, 1, *weight.shape)
        views = weight.view(shape).unbind(1)
        parts[name] = shape, [torch.nn.Parameter(v.reshape(-1, weight.size(1))) for v in views]
    others = {name: p for name, p in model.named_parameters() if name not in chosen}
    decayed = [p for name, p in others.items() if name.startswith(("gpt_neox.embed", "lm_head"))]
    exempt = [p for p in others.values() if all(p is not d for d in decayed)]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": exempt, "weight_decay": 0.0}],
        lr=1e-3,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )
    reference = torch.optim.Muon(
        [p for _, held in parts.values() for p in held],
        lr=2e-3,
        weight_decay=0.1,
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(20):
        batch = {k: torch.from_numpy(v) for k, v in global_batch(step).items()}
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        model.zero_grad()
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten()
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        for name, (shape, held) in parts.items():
            for part, gradient in zip(
                held, chosen[name].weight.grad.view(shape).unbind(1), strict=True
            ):
                part.grad = gradient.reshape(part.shape)
        adamw.step()
        reference.step()
        for name, (shape, held) in parts.items():
            whole = chosen[name].weight.data.view(shape)
            for number, part in enumerate(held):
                whole[:, number] = part.data.view(shape[0], -1, shape[3])
    for name, parameter in model.named_parameters():
        # Rounding of gradients turns into steps of bf16 in Newton-Schulz. Seen: 2.5e-4 and 1.1e-5.
        most = 5e-4 if name in chosen else 3e-5
        torch.testing.assert_close(found[name], parameter.detach(), atol=most, rtol=0, msg=name)


def values_of(data: str, run: Path, stage: int, precision: str, **changes) -> dict:
    sizes = {"global_batch_size": 6, "micro_batch_size": 1, "max_steps": STEPS}
    values = run_values(data, run, zero_stage=stage, precision=precision, **sizes | changes)
    # With one layer of these sizes two and three ranks hold parts of matrices.
    values["model"] |= {"hidden_size": 24, "intermediate_size": 84, "num_hidden_layers": 1}
    values["model"] |= {"hidden_dropout": 0.0, "rotary_pct": 0.5}
    values["optimizer"] |= {"name": "muon", "lr_groups": {"*embed_in*": 0.5}}
    values["checkpoint"] = {"every_steps": SAVED_AT, "keep_last": 9}
    return values


def name_of(case: tuple) -> str:
    return "-".join(map(str, case))


def straight_runs(ranks, data: str, folder: str) -> None:
    for case in STRAIGHT:
        if case[0] == ranks.world_size:
            assert train(ranks, values_of(data, Path(folder) / name_of(case), *case[1:])) == 0


def resumed_runs(ranks, data: str, folder: str) -> dict[str, str]:
    """Go on from others' checkpoints, which are saved again first; return errors by name."""
    errors = {}
    for source, case in RESUMES:
        if case[0] == ranks.world_size:
            start = Path(folder) / name_of(source) / f"checkpoints/step-{SAVED_AT:08d}"
            run = Path(folder) / f"{name_of(source)}-to-{name_of(case)}"
            values = values_of(data, run, *case[1:], resume=str(start))
            assert train(ranks, values, prepare=save_again) == 0
    if ranks.world_size == 1:
        start = str(Path(folder) / f"1-0-fp32/checkpoints/step-{SAVED_AT:08d}")
        values = values_of(data, Path(folder) / "other", 0, "fp32", resume=start)
        values["optimizer"]["name"] = "adamw"
        errors["other"] = error_of(ranks, values)
        values["train"] |= {"reset_optimizer": True, "max_steps": SAVED_AT + 1}
        errors["reset"] = error_of(ranks, values)
        values["train"] |= {"resume": "auto", "max_steps": SAVED_AT + 2}
        errors["auto"] = error_of(ranks, values)
    if ranks.world_size == 2:  # ended by a signal, and resumed
        values = values_of(data, Path(folder) / "ended", 1, "bf16")
        assert train(ranks, values, {2: TERM}) != 0
        values["train"]["resume"] = "auto"
        assert train(ranks, values) == 0
    return errors


@pytest.fixture(scope="module")
def runs(tiny_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    given = str(tiny_corpus), str(folder)
    for ranks in (1, 2, 3):
        run_on_ranks(straight_runs, ranks, *given)
    return folder, [run_on_ranks(resumed_runs, ranks, *given)[0] for ranks in (1, 2, 3)]


def split_matrices(run: Path) -> set[str]:
    """Return the matrices whose momentum lies in more than one rank's file."""
    files = (run / f"checkpoints/step-{SAVED_AT:08d}/state").iterdir()
    keys = [key for file in files for key in safe_open(file, framework="pt").keys()]  # noqa: SIM118
    names = [key.partition("[")[0] for key in keys if key.startswith("momentum/")]
    return {name for name in names if names.count(name) > 1}


@pytest.mark.long
def test_stages_and_ranks_agree(runs):
    folder, _ = runs
    expected = step_losses(folder / "1-0-fp32")
    assert len(expected) == STEPS
    for case in STRAIGHT:
        if case[2] == "fp32":
            found = step_losses(folder / name_of(case))
            assert found == pytest.approx(expected, abs=TOLERANCE), case
        assert case[1] == 0 or split_matrices(folder / name_of(case))


@pytest.mark.long
@pytest.mark.parametrize(("source", "case"), RESUMES)
def test_resume_keeps_the_state_and_goes_on(runs, source, case):
    folder, _ = runs
    straight, resumed = folder / name_of(source), folder / f"{name_of(source)}-to-{name_of(case)}"
    step = f"checkpoints/step-{SAVED_AT:08d}"
    expected, loaded = assembled(straight / step), assembled(resumed / step)
    assert expected.keys() == loaded.keys()
    for name, tensor in expected.items():
        assert tensor.view(torch.int32).equal(loaded[name].view(torch.int32)), name
    kinds = {key.partition("/")[0] for key in expected if "query_key_value.weight" in key}
    assert "momentum" in kinds and "exp_avg" not in kinds
    want, found = step_losses(straight), step_losses(resumed)
    assert list(found) == list(range(SAVED_AT + 1, STEPS + 1))
    limit = 0 if source == case else TOLERANCE
    assert found == pytest.approx({n: want[n] for n in found}, abs=limit, rel=0)


@pytest.mark.long
def test_a_run_that_a_signal_ended_goes_on_to_the_bit(runs):
    folder, _ = runs
    steps = [row for row in losses(folder / "ended") if len(row) == 3]
    assert steps == [row for row in losses(folder / "2-1-bf16") if len(row) == 3]


@pytest.mark.long
def test_another_optimizer_needs_reset_optimizer(runs):
    _, (errors, *_) = runs
    assert "optimizer.name was muon, is adamw; train.reset_optimizer=true" in errors["other"]
    # The state of the new optimizer is kept by later launches with the same key.
    assert (errors["reset"], errors["auto"]) == ("finished", "finished")
