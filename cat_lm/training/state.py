"""The optimizer's state as files that any number of ranks and any ZeRO stage can read.

Each rank holds *fragments*: elements [start, stop) of a flattened parameter, with their fp32 master
weight and AdamW's two moments. DeepSpeed keeps them in flat tensors of its own, laid out by stage
and number of ranks; the files name the parameter and the elements instead:

    state/rank-00000.safetensors     exp_avg/NAME[START:STOP], exp_avg_sq/NAME[START:STOP], fp32
    model/model.safetensors          the master weights, whole, by the same names

The fragments of all ranks tile every parameter exactly once; reading checks it. Each rank writes
what it holds, without any communication, and reads only the ranges that it will hold. Where every
rank holds everything (stage 0), equal shares are written.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cat_lm.errors import UserError

if TYPE_CHECKING:
    from cat_lm.training.engine import Engine

MOMENTS = ("exp_avg", "exp_avg_sq")
_KEY = re.compile(r"(exp_avg|exp_avg_sq)/(.+)\[(\d+):(\d+)\]")


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of a flattened parameter, and where this rank's optimizer has them."""

    name: str
    start: int
    stop: int
    stepped: torch.Tensor  # the fp32 tensor that the optimizer steps: masters of many parameters
    offset: int  # of element `start` in it

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This fragment's elements of `stepped` or of a moment of it, as a flat view."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.stop - self.start]

    def part(self, start: int, stop: int) -> Fragment:
        """The elements that are also in [start, stop); may be none."""
        start = max(start, self.start)
        stop = max(start, min(stop, self.stop))
        return Fragment(self.name, start, stop, self.stepped, self.offset + start - self.start)


def shapes(engine: Engine) -> dict[str, torch.Size]:
    """The whole parameters' shapes by name; ZeRO-3 leaves an empty tensor in their place."""
    named = engine.model.named_parameters()
    return {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in named}


def fragments(engine: Engine) -> list[Fragment]:
    """What this rank's optimizer holds, in the order of the model's parameters."""
    stage = engine.config.train.zero_stage
    find = _whole if stage == 0 else _partition if stage == 3 else _linked
    found = (find(engine, name, p) for name, p in engine.model.named_parameters())
    return [fragment for fragment in found if fragment and fragment.start < fragment.stop]


def _whole(engine: Engine, name: str, parameter: torch.nn.Parameter) -> Fragment:
    return Fragment(name, 0, parameter.numel(), parameter, 0)


def _linked(engine: Engine, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
    """ZeRO-1 and 2: DeepSpeed links a parameter to its piece of this rank's flat masters."""
    link = parameter._hp_mapping
    if link is None:
        return None  # wholly on other ranks
    (stepped,) = engine.optimizer.param_groups[link.param_group_index]["params"]
    address = link.lp_fragment_address
    stop = address.start + address.numel
    return Fragment(name, address.start, stop, stepped, link.hp_fragment_address.start)


def _partition(engine: Engine, name: str, parameter: torch.nn.Parameter) -> Fragment:
    """ZeRO-3: every parameter is cut into equal partitions, the last of them padded."""
    optimizer = engine.optimizer
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(engine.ranks.rank * size, parameter.ds_numel)
    stop = min(start + size, parameter.ds_numel)
    return Fragment(name, start, stop, optimizer.fp32_partitioned_groups_flat[group], offset)


def _stepped_tensors(engine: Engine) -> list[torch.Tensor]:
    """The tensors that the optimizer has states of; between steps ZeRO-3 hides them from it."""
    if engine.config.train.zero_stage == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [tensor for group in engine.optimizer.param_groups for tensor in group["params"]]


def full_precision_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """The fp32 master weights by their names in the model (a collective).

    Whole on the CPU of the first rank, 4 bytes a parameter; other ranks get an empty dictionary and
    hold one parameter at a time.
    """
    held = {fragment.name: fragment for fragment in fragments(engine)}
    alone = engine.ranks.world_size == 1 or engine.config.train.zero_stage == 0
    weights = {}
    for name, shape in shapes(engine).items():
        if alone and not engine.ranks.is_first:
            continue
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=engine.ranks.device)
        if name in held:
            fragment = held[name]
            whole[fragment.start : fragment.stop] = fragment.of(fragment.stepped)
        if not alone:
            # Of all ranks one adds other bits than zeros. As integers, or -0.0 would become 0.0.
            torch.distributed.reduce(whole.view(torch.int32), dst=0)
        if engine.ranks.is_first:
            weights[name] = whole.view(shape).cpu()
    return weights


def optimizer_step(engine: Engine) -> int:
    """How many steps the optimizer has taken, which its bias correction depends on.

    Raises:
        RuntimeError: not the same number for all parameters, which the files cannot express.
    """
    states = (engine.optimizer.state.get(tensor) for tensor in _stepped_tensors(engine))
    steps = {int(state["step"]) for state in states if state}
    if len(steps) > 1:
        raise RuntimeError(f"the optimizer took different numbers of steps: {sorted(steps)}")
    return steps.pop() if steps else 0


def state_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_state(engine: Engine, folder: Path) -> None:
    """Writes this rank's fragments of the moments, and reads them again.

    Raises:
        OSError: they could not be written, or are not in the file as they are.
    """
    ranks, tensors = engine.ranks, {}
    for fragment in _share(engine):
        state = engine.optimizer.state.get(fragment.stepped)
        for kind in MOMENTS:
            # Before its first step the optimizer has no moments; they would begin with zeros.
            moment = state[kind] if state else torch.zeros_like(fragment.stepped)
            key = f"{kind}/{fragment.name}[{fragment.start}:{fragment.stop}]"
            tensors[key] = fragment.of(moment).cpu()
    numbers = {"rank": ranks.rank, "ranks": ranks.world_size, "step": optimizer_step(engine)}
    path = folder / state_file(ranks.rank)
    save_file(tensors, path, {name: str(number) for name, number in numbers.items()})
    verify_tensors(path, tensors)


def _share(engine: Engine) -> list[Fragment]:
    """The fragments that this rank writes, so that every element is written once."""
    held, ranks = fragments(engine), engine.ranks
    if engine.config.train.zero_stage > 0:
        return held
    total = sum(fragment.stop for fragment in held)
    first, end = (total * r // ranks.world_size for r in (ranks.rank, ranks.rank + 1))
    parts, position = [], 0
    for fragment in held:
        parts.append(fragment.part(first - position, end - position))
        position += fragment.stop
    return [part for part in parts if part.start < part.stop]


def verify_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raises OSError unless the file holds these fp32 tensors bit for bit."""
    with safe_open(path, framework="pt") as stored:
        for name, tensor in tensors.items():
            if not stored.get_tensor(name).view(torch.int32).equal(tensor.view(torch.int32)):
                raise OSError(f"{path.name}: {name} was not stored as it is")


@dataclass(frozen=True)
class StateIndex:
    """What the state files of a checkpoint hold, from their headers alone."""

    step: int  # of the optimizer
    # (moment, parameter) to its ranges in ascending order: (start, stop, rank of the file)
    ranges: dict[tuple[str, str], list[tuple[int, int, int]]]


def read_index(folder: Path, world_size: int, engine: Engine) -> StateIndex:
    """Reads the headers of the state files that `world_size` ranks wrote.

    Raises:
        UserError: a file is missing, damaged or of another save, or the files do not hold every
            element of every parameter of the model exactly once.
    """
    sizes = {name: shape.numel() for name, shape in shapes(engine).items()}
    found = {path.name for path in folder.glob("*.safetensors")}
    expected = {state_file(rank) for rank in range(world_size)}
    for names, what in ((expected - found, "missing"), (found - expected, "not of this save")):
        if names:
            raise UserError(f"{folder}: {min(names)} is {what} ({world_size} ranks wrote it)")
    ranges: dict[tuple[str, str], list[tuple[int, int, int]]] = {
        (kind, name): [] for name in sizes for kind in MOMENTS
    }
    steps = set()
    for rank in range(world_size):
        with _opened(folder / state_file(rank)) as stored:
            numbers = stored.metadata() or {}
            writer = tuple(numbers.get(name) for name in ("rank", "ranks"))
            if writer != (str(rank), str(world_size)):
                raise UserError(
                    f"{folder / state_file(rank)}: was written by rank {writer[0]} of {writer[1]}, "
                    f"not by rank {rank} of {world_size}"
                )
            steps.add(int(numbers["step"]))
            for key in stored.keys():  # noqa: SIM118 (not a dictionary)
                kind, name, start, stop = _KEY.fullmatch(key).groups()
                if name not in sizes:
                    raise UserError(f"{folder}: the model has no parameter {name}")
                ranges[kind, name].append((int(start), int(stop), rank))
    if len(steps) > 1:
        raise UserError(f"{folder}: its files are of different steps: {sorted(steps)}")
    for (kind, name), parts in ranges.items():
        parts.sort()
        _check_tiling(f"{folder}: {kind} of {name}", parts, sizes[name])
    return StateIndex(steps.pop(), ranges)


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is damaged: {error}") from error


def _check_tiling(what: str, parts: list[tuple[int, int, int]], size: int) -> None:
    position = 0
    for start, stop, _ in [*parts, (size, size, -1)]:
        if start > position:
            raise UserError(f"{what}: elements {position} to {start} of {size} are in no file")
        if start < position:
            raise UserError(f"{what}: elements {start} to {position} of {size} are stored twice")
        position = stop


def read_state(engine: Engine, index: StateIndex, state: Path, weights: Path) -> None:
    """Fills this rank's optimizer: master weights, moments and number of steps.

    Reads only the ranges that this rank holds, one at a time. `refresh_model` must follow.

    Args:
        state: the folder that `index` describes.
        weights: the safetensors file of the whole master weights.

    Raises:
        UserError: a file is damaged, or a weight is missing or has another shape.
    """
    for tensor in _stepped_tensors(engine):
        moments = engine.optimizer.state[tensor]
        for kind in MOMENTS:
            if kind not in moments:
                moments[kind] = torch.zeros_like(tensor, requires_grad=False)
        # As the fused AdamW makes it: on the parameter's device, in fp32.
        moments["step"] = torch.tensor(float(index.step), device=tensor.device)
    held = fragments(engine)
    _read_weights(engine, held, weights)
    _read_moments(engine, held, index, state)


def _read_weights(engine: Engine, held: list[Fragment], path: Path) -> None:
    expected = {name: list(shape) for name, shape in shapes(engine).items()}
    with _opened(path) as stored:
        found = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise UserError(
                    f"{path}: {name}: the file has {found.get(name, 'none')}, the model "
                    f"{expected.get(name, 'none')}"
                )
        for fragment in held:
            # Slices are of whole rows; those that contain the elements.
            row = math.prod(expected[fragment.name][1:])
            first, end = fragment.start // row, -(-fragment.stop // row)
            read = stored.get_slice(fragment.name)[first:end].reshape(-1)
            part = read[fragment.start - first * row : fragment.stop - first * row]
            fragment.of(fragment.stepped).copy_(part)


def _read_moments(engine: Engine, held: list[Fragment], index: StateIndex, folder: Path) -> None:
    by_file: dict[int, list[tuple[str, Fragment, int, int]]] = {}
    for fragment in held:
        for kind in MOMENTS:
            for start, stop, rank in index.ranges[kind, fragment.name]:
                if start < fragment.stop and fragment.start < stop:
                    by_file.setdefault(rank, []).append((kind, fragment, start, stop))
    for rank, parts in by_file.items():
        with _opened(folder / state_file(rank)) as stored:
            for kind, fragment, start, stop in parts:
                wanted = fragment.part(start, stop)
                key = f"{kind}/{fragment.name}[{start}:{stop}]"
                read = stored.get_slice(key)[wanted.start - start : wanted.stop - start]
                wanted.of(engine.optimizer.state[wanted.stepped][kind]).copy_(read)


@torch.no_grad()
def refresh_model(engine: Engine, step: int, skipped: int) -> None:
    """Makes the working parameters what the master weights say (a collective).

    Also sets DeepSpeed's own counters, which only its log and profilers read.
    """
    stage, optimizer = engine.config.train.zero_stage, engine.optimizer
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer.checkpoint_event_prologue()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        # Small parameters are kept whole on every rank, so they are gathered again.
        optimizer.checkpoint_event_epilogue()
    engine.deepspeed.global_steps, engine.deepspeed.skipped_steps = step, skipped
    engine.deepspeed.global_samples = step * engine.config.train.global_batch_size
