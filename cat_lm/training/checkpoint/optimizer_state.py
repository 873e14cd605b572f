"""Store the optimizer's state in files that any number of ranks and any ZeRO stage can read.

DeepSpeed keeps master weights and moments in flat tensors, whose layout depends on the stage and
the number of ranks. The files name the parameter and its elements instead:

    state/rank-00000.safetensors     KIND/NAME[START:STOP], fp32; AdamW has exp_avg and exp_avg_sq
    model/model.safetensors          the whole master weights by the same names, and buffers
    random-00000.pt                  the states of a rank's random generators (dropout)

A *fragment* is a range of a parameter's elements on one rank. The fragments of all ranks cover
every element exactly once, which is checked on reading. Each rank writes its own fragments, without
any communication, and reads only the ranges that it needs. At stage 0, where every rank has
everything, the ranks write equal parts.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from cat_lm.core.errors import UserError, describe_os_error, file_error
from cat_lm.core.files import os_error, raising_os_errors
from cat_lm.core.readers import read_bytes

if TYPE_CHECKING:
    from cat_lm.config import RunConfig
    from cat_lm.training.distributed import Ranks

_KEY = re.compile(r"([A-Za-z0-9_]+)/(.+)\[([0-9]{1,18}):([0-9]{1,18})\]")


# The names of the tensors that an optimizer keeps of a parameter, such as exp_avg.
Kinds = tuple[str, ...]


class Trained(Protocol):
    """The attributes of the `Engine` that this module uses."""

    model: nn.Module
    optimizer: Any
    deepspeed: Any
    config: RunConfig
    ranks: Ranks


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of a flattened parameter, and their place in this rank's optimizer."""

    name: str
    start: int
    stop: int
    stepped: torch.Tensor  # the fp32 tensor that the optimizer steps, with many parameters
    offset: int  # the index of element `start` in `stepped`

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this fragment's elements of `stepped` or of one of its moments, a flat view."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.stop - self.start]

    def part(self, start: int, stop: int) -> Fragment:
        """Return the fragment of the elements that are also in [start, stop); it may be empty."""
        start = max(start, self.start)
        stop = max(start, min(stop, self.stop))
        return Fragment(self.name, start, stop, self.stepped, self.offset + start - self.start)


def shapes(engine: Trained) -> dict[str, torch.Size]:
    """Return the full shapes of parameters by name; ZeRO-3 replaces parameters by empty tensors."""
    named = engine.model.named_parameters()
    return {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in named}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a model by name, which are saved.

    Models of this project have none; a plugin's may have random features, a codebook, statistics.
    A buffer that changes in training must change equally on all ranks.
    """
    saved = model.state_dict().keys()
    named = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in named if name in saved}


def fragments(engine: Trained) -> list[Fragment]:
    """Return the non-empty fragments of this rank, in the order of the model's parameters."""
    stage = engine.config.train.zero_stage
    find = _zero0_fragment if stage == 0 else _zero3_fragment if stage == 3 else _zero2_fragment
    found = (find(engine, name, p) for name, p in engine.model.named_parameters())
    return [fragment for fragment in found if fragment and fragment.start < fragment.stop]


def _zero0_fragment(engine: Trained, name: str, parameter: nn.Parameter) -> Fragment:
    return Fragment(name, 0, parameter.numel(), parameter, 0)


def _zero2_fragment(engine: Trained, name: str, parameter: nn.Parameter) -> Fragment | None:
    """Return a parameter's fragment in this rank's flat master weights, for ZeRO-1 and 2."""
    link = parameter._hp_mapping
    if link is None:
        return None  # All of it is on other ranks.
    (stepped,) = engine.optimizer.param_groups[link.param_group_index]["params"]
    address = link.lp_fragment_address
    stop = address.start + address.numel
    return Fragment(name, address.start, stop, stepped, link.hp_fragment_address.start)


def _zero3_fragment(engine: Trained, name: str, parameter: nn.Parameter) -> Fragment:
    """Return a parameter's fragment at ZeRO-3, which cuts parameters into equal partitions."""
    optimizer = engine.optimizer
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(engine.ranks.rank * size, parameter.ds_numel)
    stop = min(start + size, parameter.ds_numel)
    return Fragment(name, start, stop, optimizer.fp32_partitioned_groups_flat[group], offset)


def stepped_tensors(engine: Trained) -> list[tuple[torch.Tensor, Kinds]]:
    """Return the tensors that the optimizer steps, each with the kinds of its states.

    ZeRO-3 hides these tensors from the optimizer between steps; all have the same kinds there.
    """
    groups = engine.optimizer.param_groups
    if engine.config.train.zero_stage == 3:
        (kinds,) = {group["kinds"] for group in groups}
        return [(tensor, kinds) for tensor in engine.optimizer.fp32_partitioned_groups_flat]
    return [(tensor, group["kinds"]) for group in groups for tensor in group["params"]]


def state_kinds(engine: Trained) -> dict[str, Kinds]:
    """Return the kinds of optimizer state of every parameter by name."""
    groups = engine.optimizer.param_groups
    return {name: group["kinds"] for group in groups for name in group["names"]}


def fragments_to_write(engine: Trained) -> list[Fragment]:
    """Return the fragments that this rank writes, so that every element is written once."""
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


def full_precision_weights(engine: Trained) -> dict[str, torch.Tensor]:
    """Return the fp32 master weights and persistent buffers by name, on rank 0 (a collective).

    They are on the CPU, 4 bytes per parameter. Other ranks return {}, and need memory for one
    parameter at a time.
    """
    held = {fragment.name: fragment for fragment in fragments(engine)}
    parts = {name: (fragment, fragment.of(fragment.stepped)) for name, fragment in held.items()}
    weights = gather_whole(engine, parts, alone=engine.config.train.zero_stage == 0)
    if engine.ranks.is_first:
        held = persistent_buffers(engine.model).items()
        # safetensors writes contiguous tensors only.
        weights |= {n: b.detach().to("cpu", copy=True).contiguous() for n, b in held}
    return weights


def gather_whole(
    engine: Trained, parts: Mapping[str, tuple[Fragment, torch.Tensor]], alone: bool = False
) -> dict[str, torch.Tensor]:
    """Return one fp32 tensor per parameter, joined from all ranks' parts, on rank 0 (a collective).

    Args:
        parts: name -> this rank's fragment, and its elements.
        alone: whether rank 0 already has all elements.
    """
    alone = alone or engine.ranks.world_size == 1
    joined = {}
    for name, shape in shapes(engine).items():
        if alone and not engine.ranks.is_first:
            continue
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=engine.ranks.device)
        if name in parts:
            fragment, elements = parts[name]
            whole[fragment.start : fragment.stop] = elements
        if not alone:
            # Only one rank has other bits than zeros. Sum as integers, which keeps -0.0.
            torch.distributed.reduce(whole.view(torch.int32), dst=0)
        if engine.ranks.is_first:
            joined[name] = whole.view(shape).cpu()
    return joined


def fill_weights(engine: Trained, weights: Mapping[str, torch.Tensor] | None) -> None:
    """Copy rank 0's fp32 weights into the master weights of all ranks (a collective).

    Other ranks pass None, and need memory for one parameter at a time.
    """
    held = {fragment.name: fragment for fragment in fragments(engine)}
    for name, shape in shapes(engine).items():
        if engine.ranks.is_first:
            whole = weights[name].reshape(-1).to(engine.ranks.device, torch.float32)
        else:
            whole = torch.empty(shape.numel(), dtype=torch.float32, device=engine.ranks.device)
        if engine.ranks.world_size > 1:
            torch.distributed.broadcast(whole, src=0)
        if name in held:
            fragment = held[name]
            fragment.of(fragment.stepped).copy_(whole[fragment.start : fragment.stop])


def optimizer_step(engine: Trained) -> int:
    """Return the optimizer's number of steps, on which its bias correction depends.

    It is the same for all parameters, because each has a gradient in every step.
    """
    states = (engine.optimizer.state.get(tensor) for tensor, _ in stepped_tensors(engine))
    steps = {int(state["step"]) for state in states if state}
    if len(steps) > 1:
        raise RuntimeError(f"parameters have taken different numbers of steps: {sorted(steps)}")
    return steps.pop() if steps else 0


def state_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _key(kind: str, name: str, start: int, stop: int) -> str:
    return f"{kind}/{name}[{start}:{stop}]"


def write_state(engine: Trained, folder: Path) -> dict[str, torch.Tensor]:
    """Write this rank's fragments of the moments, and return the tensors of the file by key."""
    ranks, tensors, kinds = engine.ranks, {}, state_kinds(engine)
    for fragment in fragments_to_write(engine):
        state = engine.optimizer.state.get(fragment.stepped)
        for kind in kinds[fragment.name]:
            # Before its first step the optimizer has no moments, which would start as zeros.
            moment = state[kind] if state else torch.zeros_like(fragment.stepped)
            key = _key(kind, fragment.name, fragment.start, fragment.stop)
            tensors[key] = fragment.of(moment).cpu()
    numbers = {"rank": ranks.rank, "ranks": ranks.world_size, "step": optimizer_step(engine)}
    path = folder / state_file(ranks.rank)
    with raising_os_errors(path):
        save_file(tensors, path, {name: str(number) for name, number in numbers.items()})
    return tensors


def find_nonfinite(engine: Trained) -> list[str]:
    """Return the names of up to ten weights, moments and buffers that are not finite.

    Every element is checked on the rank that would write it.
    """
    found, kinds = [], state_kinds(engine)
    for fragment in fragments_to_write(engine):
        parts = {"weights": fragment.of(fragment.stepped)}
        if state := engine.optimizer.state.get(fragment.stepped):
            parts |= {kind: fragment.of(state[kind]) for kind in kinds[fragment.name]}
        found += [f"{kind} of {fragment.name}" for kind, t in parts.items() if not _is_finite(t)]
        if len(found) >= 10:
            break
    held = persistent_buffers(engine.model).items()
    found += [f"buffer {name}" for name, buffer in held if not buffer.isfinite().all()]
    return found[:10]


def check_stored(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare a safetensors file with tensors bit for bit. Raises OSError if it differs."""

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    with open_safetensors(path) as stored:
        wrong = set(stored.keys()) ^ tensors.keys()
        for name in tensors.keys() - wrong:
            found, wanted = stored.get_tensor(name), tensors[name]
            same = found.dtype == wanted.dtype and found.shape == wanted.shape
            if not (same and as_bytes(found).equal(as_bytes(wanted))):
                wrong.add(name)
    if wrong:
        raise OSError(f"{path.name}: {min(wrong)} was not stored as it is")


def _is_finite(tensor: torch.Tensor) -> bool:
    # A sum is ten times as fast to compute. If it is finite, all elements are; if not, it may just
    # have overflowed.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


# A stored range of elements: start, stop, rank in the file's name.
Range = tuple[int, int, int]


@dataclass(frozen=True)
class StateIndex:
    """The content of a checkpoint's state files, as their headers list it."""

    step: int  # the optimizer's number of steps
    # (kind of state, parameter) -> its ranges in ascending order
    ranges: dict[tuple[str, str], list[Range]]


def read_index(folder: Path, world_size: int, engine: Trained) -> StateIndex:
    """Return the index of the state files that `world_size` ranks wrote, from their headers.

    Raises:
        UserError: a file is missing, damaged or of another save, or an element of the model's
            parameters is stored never or twice.
    """
    sizes = {name: shape.numel() for name, shape in shapes(engine).items()}
    found = {path.name for path in folder.glob("*.safetensors")}
    expected = {state_file(rank) for rank in range(world_size)}
    for names, what in ((expected - found, "missing"), (found - expected, "not of this save")):
        if names:
            raise UserError(f"{folder}: {min(names)} is {what} ({world_size} ranks wrote it)")
    ranges: dict[tuple[str, str], list[Range]] = {
        (kind, name): [] for name, kinds in state_kinds(engine).items() for kind in kinds
    }
    steps = set()
    for rank in range(world_size):
        with open_safetensors(folder / state_file(rank)) as stored:
            steps.add(int((stored.metadata() or {}).get("step", -1)))
            for key in stored.keys():  # noqa: SIM118 (not a dictionary)
                match = _KEY.fullmatch(key)
                if match is None or match[2] not in sizes:
                    name = match[2] if match else key
                    raise UserError(f"{folder}: the model has no parameter {name}")
                if (match[1], match[2]) not in ranges:
                    raise UserError(
                        f"{folder}: {match[1]} of {match[2]} is no state of "
                        f"optimizer.name={engine.config.optimizer.name}"
                    )
                ranges[match[1], match[2]].append((int(match[3]), int(match[4]), rank))
    if len(steps) > 1:
        raise UserError(f"{folder}: its files are of different steps: {sorted(steps)}")
    for (kind, name), parts in ranges.items():
        parts.sort()
        _check_tiling(f"{folder}: {kind} of {name}", parts, sizes[name])
    return StateIndex(steps.pop(), ranges)


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file. Raises UserError for damage, TemporaryError for transient errors."""
    try:
        with safe_open(path, framework="pt") as stored:
            yield stored
    except (SafetensorError, OSError, RuntimeError) as error:
        if (cause := os_error(error, path)) is not None:
            raise file_error(f"{path}: {describe_os_error(cause)}", cause) from error
        if isinstance(error, RuntimeError):
            raise
        raise UserError(f"{path}: is damaged: {' '.join(str(error).split())}") from error


def _check_tiling(what: str, parts: list[Range], size: int) -> None:
    position = 0
    for start, stop, _ in [*parts, (size, size, -1)]:
        if start > position:
            raise UserError(f"{what}: elements {position} to {start} of {size} are in no file")
        if start < position:
            raise UserError(f"{what}: elements {start} to {position} of {size} are stored twice")
        position = stop


def read_state(engine: Trained, index: StateIndex, state: Path, weights: Path) -> None:
    """Restore this rank's master weights, moments, number of steps, and all persistent buffers.

    Only the ranges of this rank are read, one at a time. `refresh_model` must follow.

    Args:
        index: the index of the folder `state`.
        weights: the file of whole weights, which `check_weights` has checked.
    """
    for tensor, kinds in stepped_tensors(engine):
        moments = engine.optimizer.state[tensor]
        for kind in kinds:
            if kind not in moments:
                moments[kind] = torch.zeros_like(tensor, requires_grad=False)
        # The fused AdamW needs an fp32 tensor on the parameter's device.
        moments["step"] = torch.tensor(float(index.step), device=tensor.device)
    held = fragments(engine)
    _read_weights(engine, held, weights)
    _read_moments(engine, held, index, state)


def check_weights(engine: Trained, path: Path) -> None:
    """Compare the names and shapes in the file of whole weights and buffers with the model.

    Raises UserError if one is missing or has another shape.
    """
    expected = {name: list(shape) for name, shape in shapes(engine).items()}
    expected |= {n: list(b.shape) for n, b in persistent_buffers(engine.model).items()}
    with open_safetensors(path) as stored:
        found = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"{path}: {name}: the file has {found.get(name, 'none')}, the model "
                f"{expected.get(name, 'none')}"
            )


def _read_weights(engine: Trained, held: list[Fragment], path: Path) -> None:
    expected = shapes(engine)
    with open_safetensors(path) as stored:
        for fragment in held:
            # safetensors reads whole rows: read those that contain the elements.
            row = math.prod(expected[fragment.name][1:])
            first, end = fragment.start // row, -(-fragment.stop // row)
            read = stored.get_slice(fragment.name)[first:end].reshape(-1)
            part = read[fragment.start - first * row : fragment.stop - first * row]
            fragment.of(fragment.stepped).copy_(part)
        for name, buffer in persistent_buffers(engine.model).items():
            buffer.copy_(stored.get_tensor(name))


def _read_moments(engine: Trained, held: list[Fragment], index: StateIndex, folder: Path) -> None:
    by_file: dict[int, list[tuple[str, Fragment, int, int]]] = {}
    kinds = state_kinds(engine)
    for fragment in held:
        for kind in kinds[fragment.name]:
            # A state that is reset has no ranges, and stays zero.
            for start, stop, rank in index.ranges.get((kind, fragment.name), ()):
                if start < fragment.stop and fragment.start < stop:
                    by_file.setdefault(rank, []).append((kind, fragment, start, stop))
    for rank, parts in by_file.items():
        with open_safetensors(folder / state_file(rank)) as stored:
            for kind, fragment, start, stop in parts:
                wanted = fragment.part(start, stop)
                key = _key(kind, fragment.name, start, stop)
                read = stored.get_slice(key)[wanted.start - start : wanted.stop - start]
                wanted.of(engine.optimizer.state[wanted.stepped][kind]).copy_(read)


@torch.no_grad()
def refresh_model(engine: Trained, step: int, skipped: int) -> None:
    """Copy the master weights into the parameters that the model computes with (a collective).

    DeepSpeed's counters are set as well; only its log and profilers read them.
    """
    stage, optimizer = engine.config.train.zero_stage, engine.optimizer
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer.checkpoint_event_prologue()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        # Gather small parameters again, which ZeRO-3 keeps whole on every rank.
        optimizer.checkpoint_event_epilogue()
    engine.deepspeed.global_steps, engine.deepspeed.skipped_steps = step, skipped
    engine.deepspeed.global_samples = step * engine.deepspeed.train_batch_size()


def save_random_states(path: Path) -> None:
    """Write the states of this rank's random generators. Raises OSError."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    content = io.BytesIO()
    torch.save(states, content)
    with raising_os_errors(path):
        path.write_bytes(content.getvalue())


def restore_random_states(path: Path) -> None:
    """Restore the random generators; that of a device without a stored state is not changed.

    Raises UserError if the file has no states of this machine's generators.
    """
    content = io.BytesIO(read_bytes(path))
    try:
        states = torch.load(content, map_location="cpu", weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except Exception as error:  # A damaged file may raise anything.
        raise UserError(
            f"{path}: cannot be read as states of generators ({type(error).__name__})"
        ) from None


def seed_of(seed: int, step: int, rank: int, world_size: int) -> int:
    """Return the 63-bit seed of a rank's generators after the number of ranks has changed.

    It is the first 8 bytes, little endian and without the highest bit, of the SHA-256 of the text
    `seed step rank world_size` in decimal.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank} {world_size}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def reseed(seed: int, step: int, rank: int, world_size: int) -> None:
    """Seed the generators of all devices after a change of the number of ranks."""
    torch.manual_seed(seed_of(seed, step, rank, world_size))
