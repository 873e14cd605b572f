"""One pass of a layer's streams: what is known of them, and each operation in its turn."""

from __future__ import annotations

from torch import Tensor

from cat_lm.model.context import Context
from cat_lm.model.streams.base import PackedStreams, SeparateStreams, StreamCall, StreamOp
from cat_lm.model.streams.convolution import Convolution
from cat_lm.model.streams.norm import QueryKeyNorm
from cat_lm.model.streams.rotation import Rotation
from cat_lm.model.streams.weights import StreamWeights


class LayerPass:
    """One pass of a layer's streams through its operations."""

    def __init__(
        self,
        weights: StreamWeights,
        streams: SeparateStreams | PackedStreams,
        norm: QueryKeyNorm | None,
        context: Context,
    ) -> None:
        self.weights, self.streams = weights, streams
        self.norm, self.context = norm, context
        self._before: dict[str, Tensor] | None = None
        self._known: tuple[dict[str, Tensor], ...] | None = None

    # No `functools.cached_property`, which locks, and which torch.compile cannot enter.
    @property
    def before(self) -> dict[str, Tensor]:
        """The W−1 inputs before these, by their names in the state, which gets these for them."""
        if self._before is None:
            self._before = self._exchanged()
        return self._before

    def _exchanged(self) -> dict[str, Tensor]:
        window, names = self.weights.window, self.weights.filtered
        if window == 1 or not names:
            return {}
        found = {
            name: self.context.inputs_before(name, x, window)
            for name, x in self.streams.stored(names).items()
        }
        return {name: x for name, x in found.items() if x is not None}

    @property
    def _parts(self) -> tuple[dict[str, Tensor], ...]:
        """Inputs, biases, and inputs before these, of each stream."""
        if self._known is None:
            before = self.streams.apart(self.before, self.weights.filtered) if self.before else {}
            self._known = self.streams.parts(), self.streams.biases(), before
        return self._known

    def finish(self, stream: str, x: Tensor | None, done: int) -> Tensor:
        """Compute a stream's operations after the first `done`, whose result is x."""
        operations = self.weights.operations[stream]
        if done == len(operations):
            return x
        inputs, biases, before = (each.get(stream) for each in self._parts)
        own = inputs, before, biases, self.weights, self.norm, self.context
        call = StreamCall(stream, *own)
        x = inputs if x is None else x
        while done < len(operations):
            op = operations[done]
            if fuses_rotation(operations[done:]):
                x, done = op(x, call, rotary=self.context.rotary), done + 2
            else:
                x, done = op(x, call), done + 1
        return x


def fuses_rotation(operations: tuple[StreamOp, ...]) -> bool:
    """Return True if the first of the operations is a convolution that a rotation follows."""
    kinds = [type(op) for op in operations[:2]]
    return kinds == [Convolution, Rotation]
