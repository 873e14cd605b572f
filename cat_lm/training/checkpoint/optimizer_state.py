"""The optimizer's state as files that any number of ranks and any ZeRO stage can read.

DeepSpeed keeps master weights and moments in flat tensors, laid out by stage and number of ranks;
the files name the parameter and the elements instead:

    state/rank-00000.safetensors     KIND/NAME[START:STOP], fp32; of AdamW exp_avg and exp_avg_sq
    model/model.safetensors          the master weights, whole, by the same names; and buffers
    random-00000.pt                  the states of a rank's generators, which draw the dropout

The fragments of all ranks tile every parameter exactly once; reading checks it. Each rank writes
what it holds, without any communication, and reads only the ranges that it will hold. Where every
rank holds everything (stage 0), equal shares are written.
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
    """A model with its optimizer, as the `Engine` has them."""

    model: nn.Module
    optimizer: Any
    deepspeed: Any
    config: RunConfig
    ranks: Ranks


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


def shapes(engine: Trained) -> dict[str, torch.Size]:
    """The whole parameters' shapes by name; ZeRO-3 leaves an empty tensor in their place."""
    named = engine.model.named_parameters()
    return {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in named}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to the model's state, which is saved.

    Models of this project have none; a plugin's may: drawn features, a codebook, statistics. One
    that changes in training must change alike on all ranks, which sums over them do.
    """
    saved = model.state_dict().keys()
    named = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in named if name in saved}


def fragments(engine: Trained) -> list[Fragment]:
    """Return the fragments of this rank's optimizer, in the order of the model's parameters."""
    stage = engine.config.train.zero_stage
    find = _whole if stage == 0 else _partition if stage == 3 else _linked
    found = (find(engine, name, p) for name, p in engine.model.named_parameters())
    return [fragment for fragment in found if fragment and fragment.start < fragment.stop]


def _whole(engine: Trained, name: str, parameter: nn.Parameter) -> Fragment:
    return Fragment(name, 0, parameter.numel(), parameter, 0)


def _linked(engine: Trained, name: str, parameter: nn.Parameter) -> Fragment | None:
    """ZeRO-1 and 2: DeepSpeed links a parameter to its piece of this rank's flat masters."""
    link = parameter._hp_mapping
    if link is None:
        return None  # wholly on other ranks
    (stepped,) = engine.optimizer.param_groups[link.param_group_index]["params"]
    address = link.lp_fragment_address
    stop = address.start + address.numel
    return Fragment(name, address.start, stop, stepped, link.hp_fragment_address.start)


def _partition(engine: Trained, name: str, parameter: nn.Parameter) -> Fragment:
    """ZeRO-3: every parameter is cut into equal partitions, the last of them padded."""
    optimizer = engine.optimizer
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(engine.ranks.rank * size, parameter.ds_numel)
    stop = min(start + size, parameter.ds_numel)
    return Fragment(name, start, stop, optimizer.fp32_partitioned_groups_flat[group], offset)


def stepped_tensors(engine: Trained) -> list[tuple[torch.Tensor, Kinds]]:
    """Return the tensors that the optimizer has states of, and the kinds of these.

    Between steps ZeRO-3 hides the tensors from the optimizer, and has all of one kind.
    """
    groups = engine.optimizer.param_groups
    if engine.config.train.zero_stage == 3:
        (kinds,) = {group["kinds"] for group in groups}
        return [(tensor, kinds) for tensor in engine.optimizer.fp32_partitioned_groups_flat]
    return [(tensor, group["kinds"]) for group in groups for tensor in group["params"]]


def state_kinds(engine: Trained) -> dict[str, Kinds]:
    """Return the kinds of state of every parameter by its name."""
    groups = engine.optimizer.param_groups
    return {name: group["kinds"] for group in groups for name in group["names"]}


def share(engine: Trained) -> list[Fragment]:
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


def full_precision_weights(engine: Trained) -> dict[str, torch.Tensor]:
    """Gather the fp32 master weights and persistent buffers by their names (a collective).

    Whole on the CPU of the first rank, 4 bytes a parameter; other ranks get an empty dictionary and
    hold one parameter at a time.
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
    """Join the ranks' parts of one fp32 tensor for each parameter on the first rank (a collective).

    Args:
        parts: name -> the fragment that this rank has, and its elements.
        alone: the first rank has all of them.
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
            # Of all ranks one adds other bits than zeros. As integers, or -0.0 would become 0.0.
            torch.distributed.reduce(whole.view(torch.int32), dst=0)
        if engine.ranks.is_first:
            joined[name] = whole.view(shape).cpu()
    return joined


def fill_weights(engine: Trained, weights: Mapping[str, torch.Tensor] | None) -> None:
    """Copy the first rank's fp32 weights into the master weights (a collective).

    Other ranks give None, and hold one parameter at a time.
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
    """Return how many steps the optimizer has taken, which its bias correction depends on.

    It is the same number for all parameters: each has a gradient in every step.
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
    """Write this rank's fragments of the moments, and return them as the file must hold them."""
    ranks, tensors, kinds = engine.ranks, {}, state_kinds(engine)
    for fragment in share(engine):
        state = engine.optimizer.state.get(fragment.stepped)
        for kind in kinds[fragment.name]:
            # Before its first step the optimizer has no moments; they would begin with zeros.
            moment = state[kind] if state else torch.zeros_like(fragment.stepped)
            key = _key(kind, fragment.name, fragment.start, fragment.stop)
            tensors[key] = fragment.of(moment).cpu()
    numbers = {"rank": ranks.rank, "ranks": ranks.world_size, "step": optimizer_step(engine)}
    path = folder / state_file(ranks.rank)
    with raising_os_errors(path):
        save_file(tensors, path, {name: str(number) for name, number in numbers.items()})
    return tensors


def not_finite(engine: Trained) -> list[str]:
    """Name what this rank holds of weights, moments and buffers that is not finite, at most ten.

    Every element is looked at on the rank that would write it.
    """
    found, kinds = [], state_kinds(engine)
    for fragment in share(engine):
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
    """Compare a safetensors file with memory, bit for bit. Raises OSError where it differs."""

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    with opened(path) as stored:
        wrong = set(stored.keys()) ^ tensors.keys()
        for name in tensors.keys() - wrong:
            found, wanted = stored.get_tensor(name), tensors[name]
            same = found.dtype == wanted.dtype and found.shape == wanted.shape
            if not (same and as_bytes(found).equal(as_bytes(wanted))):
                wrong.add(name)
    if wrong:
        raise OSError(f"{path.name}: {min(wrong)} was not stored as it is")


def _is_finite(tensor: torch.Tensor) -> bool:
    # A sum is ten times as fast. One that is finite had no other terms; one that is not may only
    # have been too large.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


# (start, stop, rank of the file)
Range = tuple[int, int, int]


@dataclass(frozen=True)
class StateIndex:
    """Hold what the headers of a checkpoint's state files say."""

    step: int  # of the optimizer
    # (moment, parameter) to its ranges in ascending order
    ranges: dict[tuple[str, str], list[Range]]


def read_index(folder: Path, world_size: int, engine: Trained) -> StateIndex:
    """Read the headers of the state files that `world_size` ranks wrote.

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
    ranges: dict[tuple[str, str], list[Range]] = {
        (kind, name): [] for name, kinds in state_kinds(engine).items() for kind in kinds
    }
    steps = set()
    for rank in range(world_size):
        with opened(folder / state_file(rank)) as stored:
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
def opened(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file; raise UserError for damage, temporary where it may be read later."""
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
    """Fill this rank's optimizer: master weights, moments and number of steps.

    Reads only the ranges that this rank holds, one at a time, from the folder `state`, which
    `index` describes, and from the file of whole weights, which `check_weights` has seen; and all
    buffers that are stored. `refresh_model` must follow.
    """
    for tensor, kinds in stepped_tensors(engine):
        moments = engine.optimizer.state[tensor]
        for kind in kinds:
            if kind not in moments:
                moments[kind] = torch.zeros_like(tensor, requires_grad=False)
        # As the fused AdamW makes it: on the parameter's device, in fp32.
        moments["step"] = torch.tensor(float(index.step), device=tensor.device)
    held = fragments(engine)
    _read_weights(engine, held, weights)
    _read_moments(engine, held, index, state)


def check_weights(engine: Trained, path: Path) -> None:
    """Compare the header of the whole master weights and the buffers with the model.

    Raises UserError where one is missing or of another shape.
    """
    expected = {name: list(shape) for name, shape in shapes(engine).items()}
    expected |= {n: list(b.shape) for n, b in persistent_buffers(engine.model).items()}
    with opened(path) as stored:
        found = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"{path}: {name}: the file has {found.get(name, 'none')}, the model "
                f"{expected.get(name, 'none')}"
            )


def _read_weights(engine: Trained, held: list[Fragment], path: Path) -> None:
    expected = shapes(engine)
    with opened(path) as stored:
        for fragment in held:
            # Slices are of whole rows; those that contain the elements.
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
            # A reset state has no ranges, and stays zero.
            for start, stop, rank in index.ranges.get((kind, fragment.name), ()):
                if start < fragment.stop and fragment.start < stop:
                    by_file.setdefault(rank, []).append((kind, fragment, start, stop))
    for rank, parts in by_file.items():
        with opened(folder / state_file(rank)) as stored:
            for kind, fragment, start, stop in parts:
                wanted = fragment.part(start, stop)
                key = _key(kind, fragment.name, start, stop)
                read = stored.get_slice(key)[wanted.start - start : wanted.stop - start]
                wanted.of(engine.optimizer.state[wanted.stepped][kind]).copy_(read)


@torch.no_grad()
def refresh_model(engine: Trained, step: int, skipped: int) -> None:
    """Make the working parameters what the master weights say (a collective).

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
    engine.deepspeed.global_samples = step * engine.deepspeed.train_batch_size()


def save_random_states(path: Path) -> None:
    """Write the states. Raises OSError where they could not be written."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    content = io.BytesIO()
    torch.save(states, content)
    with raising_os_errors(path):
        path.write_bytes(content.getvalue())


def restore_random_states(path: Path) -> None:
    """Continue the generators bit for bit; one of a device that was not there is left alone.

    Raises UserError where the file holds no states of this machine's generators.
    """
    content = io.BytesIO(read_bytes(path))
    try:
        states = torch.load(content, map_location="cpu", weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except Exception as error:  # whatever a damaged archive makes of its reader
        raise UserError(
            f"{path}: cannot be read as states of generators ({type(error).__name__})"
        ) from None


def seed_of(seed: int, step: int, rank: int, world_size: int) -> int:
    """Return the seed of a rank whose generators have no past: 63 bits.

    The first 8 bytes of SHA-256 over the decimal numbers `seed step rank world_size`, little
    endian, without the highest bit.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank} {world_size}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def reseed(seed: int, step: int, rank: int, world_size: int) -> None:
    """Seed the generators of all devices after a change of the number of ranks."""
    torch.manual_seed(seed_of(seed, step, rank, world_size))
