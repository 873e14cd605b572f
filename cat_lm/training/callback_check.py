"""Check on a CPU that a callback keeps the promises of its interface, for `cat_lm.testing`.

The run is simulated: its steps add noise to the weights of a small model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cat_lm.callbacks import Callback, CallbackKind, Run, chosen
from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.registry import describe_plugin_error
from cat_lm.model import CatConfig, CatForCausalLM
from cat_lm.training.checkpoint.callback_state import (
    CallbackState,
    open_state,
    to_stored_state,
    write_callback_states,
)
from cat_lm.training.distributed import Ranks

STEPS, HALF = 6, 3
_SIZES = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 8}
# A record as `Report.record` returns it.
_RECORD = {"tokens": 8, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 80.0}
_RECORD |= {"mfu": None, "data_seconds": 0.01, "step_seconds": 0.1}


class Broken(Exception):
    """A callback breaks a promise; the text is a clause that follows the callback's name."""


@dataclass
class SimulatedRun:
    """A simulated run, with or without a callback."""

    config: RunConfig
    folder: Path
    model: torch.nn.Module
    callback: Callback | None = None
    recorded: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Run:
        ranks = Ranks(0, 0, 1, torch.device("cpu"))
        engine = SimpleNamespace(
            model=self.model, config=self.config, ranks=ranks, optimizer=None, deepspeed=None
        )
        watchdog = SimpleNamespace(progress=lambda what: None)
        nothing = {"log": lambda line: None, "record": self.recorded.append}
        nothing |= {"must_stop": lambda: False, "recorded_step": 0, "corpus": None}
        return Run(self.config, self.folder, ranks, engine, watchdog=watchdog, **nothing)

    def steps(self, first: int, last: int) -> None:
        """Take the steps from `first` to `last`, with a validation and a checkpoint half way."""
        self.call("launch", first - 1)
        for step in range(first, last + 1):
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
            self.call("waits", step)
            self.call("record", {"step": step} | _RECORD | {"loss": 2.0 / step})
            self.call("step", step)
            if step == HALF:
                self._validate(step)
                self.call("checkpoint", step, self.folder)

    def _validate(self, step: int) -> None:
        results = {"val_loss": 1.5}
        self.call("validation", step, results)
        for name, value in results.items():
            is_own = "/" in name and isinstance(value, int | float)
            if not (is_own or (name, value) == ("val_loss", 1.5)):
                raise Broken(f"adds {name}={value!r} to results; must be a number, its name with /")

    def call(self, event: str, *given: Any) -> Any:
        if self.callback is None:
            return None
        before = torch.get_rng_state()
        weights = [parameter.clone() for parameter in self.model.parameters()]
        try:
            result = getattr(self.callback, event)(*given)
        except UserError:
            raise
        except Exception as error:  # A plugin's code may raise anything.
            raise Broken(f"{event} raises {describe_plugin_error(error)}") from error
        if not torch.equal(before, torch.get_rng_state()):
            raise Broken(f"{event} draws from torch's generator, which is training's")
        if not all(map(torch.equal, weights, self.model.parameters())):
            raise Broken(f"{event} changes weights")
        return result


def check_callback(kind: CallbackKind, options: Mapping[str, Any]) -> None:
    """Check a callback's events, that it changes neither weights nor generators, and its state.

    Args:
        options: the callback's options; for a callback that a configuration key chooses, keys such
            as train.ema_decay.

    Raises:
        Broken: the callback breaks a promise.
        UserError: the callback refuses the options.
    """
    config = _build_config(kind, options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        straight = _simulate_run(kind, config, folder)
        straight.steps(1, STEPS)
        wanted = _stored_state(straight)
        straight.call("end", STEPS, 0)
        _check_records(straight.recorded)
        first = _simulate_run(kind, config, folder)
        first.steps(1, HALF)
        state = _stored_state(first)
        first.call("end", HALF, 75)
        second = _simulate_run(kind, config, folder, model=first.model)
        ((path, _),) = write_callback_states(folder, {kind.name: state})
        with open_state(path) as stored:
            second.call("restore", stored)
        second.steps(HALF + 1, STEPS)
        found = _stored_state(second)
        second.call("end", STEPS, 0)
    if found.values != wanted.values or found.tensors.keys() != wanted.tensors.keys():
        raise Broken(f"has the state {found.values} after a restart, else {wanted.values}")
    for key, tensor in wanted.tensors.items():
        if not torch.equal(tensor, found.tensors[key]):
            raise Broken(f"has another {key} in its state after a restart")


def _build_config(kind: CallbackKind, options: Mapping[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "data": {"path": "none", "context_length": 8},
        "optimizer": {"lr": 1e-3},
        "train": {"output_dir": "none", "global_batch_size": 1, "micro_batch_size": 1},
        "logging": {"tensorboard": False},
    }
    values["train"] |= {"max_steps": STEPS, "precision": "fp32", "zero_stage": 0}
    if kind.key:
        for dotted, value in options.items():
            section, _, key = dotted.partition(".")
            values.setdefault(section, {})[key] = value
    else:
        values["train"]["callbacks"] = {kind.name: dict(options)}
    return RunConfig.model_validate(values)


def _simulate_run(
    kind: CallbackKind, config: RunConfig, folder: Path, model: torch.nn.Module | None = None
) -> SimulatedRun:
    if model is None:
        torch.default_generator.manual_seed(0)
        model = CatForCausalLM(CatConfig(**_SIZES, num_hidden_layers=1))
    simulated = SimulatedRun(config, folder, model)
    options = next((given for found, given in chosen(config) if found.name == kind.name), None)
    if options is None:
        raise UserError(f"callback {kind.name}: is not registered, or these keys do not choose it")
    simulated.callback = kind.build(options, simulated.run())
    if not isinstance(simulated.callback, Callback):
        raise Broken(f"build gives a {type(simulated.callback).__name__}; must give a Callback")
    return simulated


def _stored_state(simulated: SimulatedRun) -> CallbackState:
    try:
        return to_stored_state(simulated.call("state"))
    except UserError as error:
        raise Broken(str(error)) from error


def _check_records(records: list[dict[str, Any]]) -> None:
    for record in records:
        names = [name for name in record if "/" not in name and name not in ("step", "tokens")]
        if names or "step" not in record:
            raise Broken(f"records {record}; must hold step, and other names with /")
