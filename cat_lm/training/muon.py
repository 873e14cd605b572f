"""Muon for the matrices of the layers, AdamW for all other parameters.

Each matrix W with gradient g keeps one momentum m (Jordan et al. 2024; Liu et al. 2502.16982):

    m <- m + (1 - mu) (g - m),  u = g + mu (m - g),  W <- W (1 - lr wd) - lr c NS(u)

NS, a few Newton-Schulz iterations, brings all singular values of u near 1. The factor c is
0.2 sqrt(max(rows, columns)) for `match_rms_adamw`, with which the learning rate and weight decay of
AdamW can be kept, and sqrt(max(1, rows / columns)) for `original`.

The matrices are the weights of `nn.Linear` inside the layers. The weight of a module whose
class has `muon = ()` is updated by AdamW. Packed queries, keys and values are three matrices.
AdamW also updates filters, Canon layers, embeddings, the output layer, norms and biases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cat_lm import architectures
from cat_lm.training.checkpoint.optimizer_state import Fragment, fragments, shapes

if TYPE_CHECKING:
    from cat_lm.training.checkpoint.optimizer_state import Trained

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7


def matrices(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers whose weights Muon updates, by the weights' names."""
    inside = architectures.of_config(model.config).layer_weight.partition("{layer}")[0]
    return {
        f"{place}.weight": module
        for place, module in model.named_modules()
        if place.startswith(inside)
        and isinstance(module, nn.Linear)
        and "weight" in getattr(module, "muon", ("weight",))
    }


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of Newton-Schulz: bf16 on a GPU, fp32 on a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def newton_schulz(update: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix with all singular values near 1, by a quintic iteration in `dtype`."""
    a, b, c = _COEFFICIENTS
    is_tall = update.size(0) > update.size(1)
    x = update.to(dtype)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(update.dtype)


def scale_factor(rows: int, columns: int, scale: str) -> float:
    """Return the factor c of an orthogonalised matrix."""
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


@dataclass(frozen=True)
class Matrix:
    """A matrix that Muon updates, and the elements of it that each rank has.

    Attributes:
        packed: (H, P) if the rows are [H, P, D], P matrices packed head by head; otherwise (1, 1).
        ranges: rank -> elements [start, stop) that it has.
        owner: the rank that orthogonalizes a matrix that no rank has as a whole.
    """

    name: str
    shape: torch.Size
    packed: tuple[int, int]
    ranges: dict[int, tuple[int, int]]

    @property
    def owner(self) -> int:
        sizes = {rank: stop - start for rank, (start, stop) in self.ranges.items()}
        return max(sizes, key=lambda rank: (sizes[rank], -rank))

    @property
    def is_split(self) -> bool:
        """Return True if no rank has the whole matrix; at stage 0 every rank has it."""
        return all(stop - start < self.shape.numel() for start, stop in self.ranges.values())

    def size_on(self, rank: int) -> int:
        start, stop = self.ranges.get(rank, (0, 0))
        return stop - start

    def direction(self, update: Tensor, steps: int, scale: str) -> Tensor:
        """Return c NS(u), flattened, for the whole update u.

        Matrices are never stacked: a batched product may sum in another order, and results would
        depend on the number of ranks.
        """
        (rows, columns), (heads, count) = self.shape, self.packed
        parts = update.view(heads, count, rows // (heads * count), columns).transpose(0, 1)
        dtype, found = compute_dtype(update.device), []
        for part in parts:
            part = part.reshape(-1, columns)
            factor = scale_factor(*part.shape, scale)
            found.append(newton_schulz(part, steps, dtype).mul_(factor))
        whole = torch.stack(found).view(count, heads, -1, columns).transpose(0, 1)
        return whole.reshape(-1)


class MuonWithAdamW(torch.optim.AdamW):
    """An optimizer that steps groups with `momentum` by Muon, and others by fused AdamW."""

    def __init__(
        self, groups: list[dict], momentum: float, ns_steps: int, scale: str, **adamw: Any
    ) -> None:
        self._momentum, self._ns_steps, self._scale = momentum, ns_steps, scale
        self._fragments: dict[int, list[Fragment]] = {}
        self._matrices: dict[str, Matrix] = {}
        self._rank, self._ranks = 0, 1
        super().__init__(groups, **adamw)

    def attach(
        self, held: Iterable[Fragment], found: Iterable[Matrix], rank: int, ranks: int
    ) -> None:
        """Set the fragments of this rank and the matrices with the ranges of all ranks."""
        self._matrices = {matrix.name: matrix for matrix in found}
        self._fragments, self._rank, self._ranks = {}, rank, ranks
        for fragment in held:
            if fragment.name in self._matrices:
                self._fragments.setdefault(id(fragment.stepped), []).append(fragment)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the present groups; ZeRO-1 in fp32 shows the optimizer one group at a time."""
        groups = self.param_groups
        for group in groups:
            if "momentum" in group["kinds"]:
                self._step_matrices(group)
        try:
            self.param_groups = [group for group in groups if "momentum" not in group["kinds"]]
            super().step(closure)
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict) -> None:
        """Step this rank's elements of a group's matrices (a collective if matrices are split)."""
        found_inf = getattr(self, "found_inf", None)
        device = group["params"][0].device
        skips = torch.as_tensor(False if found_inf is None else found_inf > 0, device=device)
        split: dict[str, tuple[Fragment, Tensor]] = {}
        for tensor in group["params"]:
            state = self.state[tensor]
            if not state:
                state["momentum"] = torch.zeros_like(tensor, requires_grad=False)
                state["step"] = torch.zeros((), device=device)
            state["step"] += ~skips
            for fragment in self._fragments.get(id(tensor), ()):
                update = self._update_momentum(fragment, state["momentum"], skips)
                matrix = self._matrices[fragment.name]
                if matrix.is_split:
                    split[fragment.name] = fragment, update
                else:
                    direction = matrix.direction(update, self._ns_steps, self._scale)
                    _apply_update(fragment, direction, group, skips)
        names = [name for name in group["names"] if self._matrices[name].is_split]
        if names:
            updates = {name: update for name, (_, update) in split.items()}
            found = self._exchange_updates(
                [self._matrices[name] for name in names], updates, device
            )
            for name, (fragment, _) in split.items():
                _apply_update(fragment, found[name], group, skips)

    def _update_momentum(self, fragment: Fragment, momenta: Tensor, skips: Tensor) -> Tensor:
        """Update a fragment's momentum unless `skips`, and return its update u."""
        stop = fragment.offset + fragment.stop - fragment.start
        gradient = fragment.stepped.grad.reshape(-1)[fragment.offset : stop]
        momentum = fragment.of(momenta)
        new = momentum.lerp(gradient, 1 - self._momentum)
        momentum.copy_(torch.where(skips, momentum, new))
        return gradient.lerp(new, self._momentum)

    def _exchange_updates(
        self, split: list[Matrix], updates: dict[str, Tensor], device: torch.device
    ) -> dict[str, Tensor]:
        """Send the parts of u to the matrices' owners, and return this rank's parts of c NS(u)."""
        me, ranks = self._rank, range(self._ranks)
        by_owner = [[m for m in split if m.owner == rank] for rank in ranks]
        send_sizes = [[m.size_on(me) for m in owned] for owned in by_owner]
        receive_sizes = [[m.size_on(rank) for m in by_owner[me]] for rank in ranks]
        pieces = [updates[m.name] for owned in by_owner for m in owned if m.name in updates]
        received = _all_to_all(pieces, send_sizes, receive_sizes, device)
        answers: list[list[Tensor]] = [[] for _ in ranks]
        for number, matrix in enumerate(by_owner[me]):
            whole = torch.empty(matrix.shape.numel(), dtype=torch.float32, device=device)
            for rank, (start, stop) in matrix.ranges.items():
                whole[start:stop] = received[rank][number]
            whole = matrix.direction(whole, self._ns_steps, self._scale)
            for rank, (start, stop) in matrix.ranges.items():
                answers[rank].append(whole[start:stop])
        back = _all_to_all([p for part in answers for p in part], receive_sizes, send_sizes, device)
        return {
            matrix.name: piece
            for owned, part in zip(by_owner, back, strict=True)
            for matrix, piece in zip(owned, part, strict=True)
            if matrix.name in updates
        }


def _apply_update(fragment: Fragment, direction: Tensor, group: dict, skips: Tensor) -> None:
    """Apply weight decay and the step along c NS(u) to a fragment's weights, unless `skips`."""
    weights, lr = fragment.of(fragment.stepped), group["lr"]
    new = weights * (1 - lr * group["weight_decay"])
    new.add_(direction, alpha=-lr)
    weights.copy_(torch.where(skips, weights, new))


def _all_to_all(
    pieces: list[Tensor],
    send_sizes: list[list[int]],
    receive_sizes: list[list[int]],
    device: torch.device,
) -> list[list[Tensor]]:
    """Send `pieces`, ordered by receiving rank, and return the received ones of each rank.

    Args:
        send_sizes: for each rank, the sizes of the pieces to send to it.
        receive_sizes: for each rank, the sizes of the pieces to receive from it.
    """
    sent = torch.cat(pieces) if pieces else torch.empty(0, device=device)
    sizes = [sum(part) for part in receive_sizes]
    received = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    torch.distributed.all_to_all_single(received, sent, sizes, [sum(part) for part in send_sizes])
    parts = zip(received.split(sizes), receive_sizes, strict=True)
    return [list(part.split(each)) for part, each in parts]


def attach(optimizer: MuonWithAdamW, engine: Trained) -> None:
    """Set in the optimizer which elements of the matrices each rank has (a collective)."""
    held, ranks = fragments(engine), engine.ranks
    layout = ranks.gather({fragment.name: (fragment.start, fragment.stop) for fragment in held})
    found, sizes = [], shapes(engine)
    for name, module in matrices(engine.model).items():
        ranges = {rank: part[name] for rank, part in enumerate(layout) if name in part}
        packed = getattr(module, "packed_rows", (1, 1))
        found.append(Matrix(name, sizes[name], packed, ranges))
    optimizer.attach(held, found, ranks.rank, ranks.world_size)
