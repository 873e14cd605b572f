"""The speed of a GPU's training, from a record that `eval.speed train --json` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cat_lm.config import RunConfig
from cat_lm.errors import UserError
from cat_lm.io.readers import Record, read_json
from cat_lm.training.devices import Device, known_device
from launch.plan.costs import Run, Speed, assumed_host_seconds

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Size(Record):
    """The measured models' size."""

    layers: Positive
    hidden_size: Positive
    heads: Positive
    vocab_size: Positive
    window: Positive
    dtype: str


class Case(Record):
    """The settings of a measurement."""

    size: Size
    batch_size: Positive
    context_length: Positive
    optimizer: bool
    compile: bool


class Row(Record):
    """The speed that one model reached."""

    model: str
    tokens_per_second: Rate
    flops_per_step: Rate


class MeasuredOn(Record):
    name: str = "cpu"


class Measured(Record):
    """A record of `eval.speed train --json`, as far as it is read here."""

    benchmark: Literal["train"]
    device: MeasuredOn
    case: Case
    results: dict[str, Row]
    date: str = "no date"


def read_measured(path: Path, config: RunConfig, run: Run, device: Device) -> Speed:
    """The speed that one GPU and its host achieved: what it was, and how it differs.

    The record's model of the same architecture and kind counts. Where its shape is another one, its
    FLOP/s are carried over, which the lines say. The host took no longer than the step did.

    Raises:
        UserError: no such record; of another device or precision; without such a model.
    """
    advice = "give a record of this version's python -m eval.speed train --json"
    record = read_json(path, Measured, advice)
    name, case = record.device.name, record.case
    measured_on = known_device(name)
    if measured_on != device:
        raise UserError(f"--measured {path}: was measured on {name}, not on --device {device.name}")
    if case.size.dtype != DTYPES[config.train.precision]:
        raise UserError(
            f"--measured {path}: was measured in {case.size.dtype}, not in "
            f"train.precision={config.train.precision}"
        )
    row = _row(path, record, config)
    seconds = case.batch_size * case.context_length / row.tokens_per_second
    flops = row.flops_per_step / seconds
    lines = [
        f"measured on one {name} ({path.name}, {record.date}): {row.model}, "
        f"{row.tokens_per_second:,.0f} tokens/s, {flops / 1e12:.0f} TFLOP/s"
    ]
    speed = Speed(flops, assumed_host_seconds(config), tuple(lines + _differences(record, run)))
    if case.compile == config.train.compile:
        speed = speed.with_host_within(seconds / case.size.layers)
    return speed


def _row(path: Path, record: Measured, config: RunConfig) -> Row:
    """The record's model of the same kind; its names are those of `eval.speed`."""
    from eval.speed.choices import models, own_models

    architecture, model = config.architecture, config.model
    like = (architecture.name, architecture.variant(model))
    for name in own_models():
        measured = models()[name]
        if (measured.architecture, measured.variant) == like and name in record.results:
            return record.results[name]
    raise UserError(
        f"--measured {path}: has no model like the configuration's ({architecture.name}, "
        f"{architecture.words(model)}); it has {', '.join(record.results)}"
    )


def _differences(record: Measured, run: Run) -> list[str]:
    case, train, architecture = record.case, run.config.train, run.config.architecture
    size = case.size
    measured = {"layers": size.layers, "hidden size": size.hidden_size, "heads": size.heads}
    measured["window"] = size.window
    pairs = {
        name: (measured[name], value)
        for name, value in architecture.sizes(run.config.model).items()
        if name in measured
    }
    pairs |= {
        "vocabulary": (size.vocab_size, run.model.vocab_size),
        "context": (case.context_length, run.config.data.context_length),
        "batch": (case.batch_size, train.micro_batch_size),
        "compile": (case.compile, train.compile),
    }
    other = [f"{name} {a} there, {b} here" for name, (a, b) in pairs.items() if a != b]
    lines = []
    if other:
        lines.append(f"its FLOP/s are carried over to another case: {'; '.join(other)}")
    if not case.optimizer:
        lines.append("it was measured without the optimizer's update (--optimizer), left out here")
    return lines
