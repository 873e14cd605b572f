"""Texts of letters: bytes as the Long Range Arena reads them, or characters as S4 does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from eval.long_range.tasks.base import PAD, Task

LEVELS = ("characters", "bytes")
_UNKNOWN, _END, _FIRST = 1, 2, 3  # ids of characters; 0 is padding


class Encoder(Protocol):
    """Turns a text into ids, a byte for each id less one."""

    def encode(self, text: str) -> bytes: ...


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes; ids are 1 to 256.

    Attributes:
        length: bytes that are kept, from the beginning; a character may be cut.
    """

    vocabulary: ClassVar[int] = 257
    length: int

    def encode(self, text: str) -> bytes:
        return text.encode()[: self.length]


class Characters:
    """The characters of the training texts that are frequent enough, an unknown one, and an end.

    Ids are 3 and up in the order of frequency; a text is cut so that its end is kept.
    """

    vocabulary = 256

    def __init__(self, texts: Iterable[str], length: int, least: int = 1) -> None:
        """Count characters.

        Args:
            texts: of training; cut as they will be read.
            length: positions of a text, its end among them.
            least: times that a character must be there; the rarest beyond 253 are unknown too.
        """
        seen: Counter[str] = Counter()
        for text in texts:
            seen.update(text[: length - 1])
        frequent = [pair for pair in seen.items() if pair[1] >= least]
        frequent.sort(key=lambda pair: (-pair[1], pair[0]))
        known = [character for character, _ in frequent[: self.vocabulary - _FIRST]]
        self.characters = "".join(known)
        self._length = length
        self._bytes = _Table({ord(c): chr(_FIRST - 1 + i) for i, c in enumerate(known)})

    def encode(self, text: str) -> bytes:
        return text[: self._length - 1].translate(self._bytes).encode("latin-1") + bytes([_END - 1])


@dataclass(frozen=True)
class TextTask(Task):
    """What tasks on texts share.

    Attributes:
        level: characters, S4's, with an end; or bytes, LRA's.
        max_length: positions of a text that are read, from its beginning.
    """

    level: str = "characters"
    max_length: int = 2_048

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level={self.level}: choose {' or '.join(LEVELS)}")
        if self.max_length < 1:
            raise ValueError(f"max_length={self.max_length}: must be at least 1")

    @property
    def length(self) -> int:
        return self.max_length

    @property
    def vocabulary(self) -> int:
        return Characters.vocabulary if self.level == "characters" else Bytes.vocabulary

    @property
    def classes(self) -> int:
        return 2

    def shown(self, inputs: np.ndarray, origin: Mapping[str, Any]) -> str:
        if self.level == "bytes":
            return bytes(int(i) - 1 for i in inputs if i).decode("utf-8", "replace")
        special = {PAD: "", _UNKNOWN: "\N{REPLACEMENT CHARACTER}", _END: ""}
        known = origin["characters"]
        return "".join(special[i] if i < _FIRST else known[i - _FIRST] for i in inputs)


class _Table(dict):
    def __missing__(self, character: int) -> str:
        return chr(_UNKNOWN - 1)
