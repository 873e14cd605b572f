"""What a cell of a grid says of itself: a task, a mixer, a width, a learning rate, a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

from cat_lm.core.readers import Versioned


class AnyCell(Protocol):
    """All that decides a result: a frozen dataclass, whose key names its file.

    Attributes:
        task, mixer: specifications such as `mqar:keys=8`, `cat:streams=k`.
        d_model, seq_len, lr, seed: in the file's name too.
        shape: what every record of this kind holds.
    """

    task: str
    mixer: str
    d_model: int
    seq_len: int
    lr: float
    seed: int
    shape: ClassVar[type[Versioned]]

    def key(self) -> dict[str, Any]:
        """Return all that decides the result and names its file."""

    @property
    def all_steps(self) -> int:
        """Steps without an early stop."""

    @property
    def tested_rows(self) -> float:
        """Rows of the trained length that cost as much as those of all tests do."""

    @property
    def kind(self) -> AnyCell:
        """Equal for cells that can be trained as one stack; the cell itself where none can."""

    def resolved(self) -> dict[str, Any]:
        """The task and the mixer with all options, and the model's, defaults too; plain values."""

    def timed(self) -> AnyCell:
        """As short as can be; equal for cells whose steps cost the same."""

    def seconds(self, size: int, device: str) -> tuple[float, float]:
        """Time a step of `size` cells that are trained as one, and one row of it."""

    def bytes_needed(self) -> int:
        """Estimate the bytes that training takes at most; of cells that can be stacked."""

    def run(self, device: str, *, quiet: bool = False) -> dict[str, Any]:
        """Train and test; the record."""

    @staticmethod
    def run_stack(
        cells: Sequence[AnyCell], device: str
    ) -> Iterator[tuple[AnyCell, dict[str, Any]]]:
        """Train and test cells of one kind as one; each with its record when it has stopped."""

    def derived(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return what follows from a record and is written with it."""

    def score(self, record: dict[str, Any]) -> float:
        """Return what a rate is chosen by, more being better; never of a test."""

    def told(self, record: dict[str, Any]) -> str:
        """Describe the result in a few words."""
