"""Documents to ids by a table of words: several times as fast as the library, with its ids.

A tokenizer made from a sentencepiece model cuts a text before each run of spaces and encodes what
lies between on its own (`SentencePieceModel.fast_tokenizer`). So a word's ids never depend on the
text around it, and most words have been seen before: the library encodes each new one once, and a
document's ids are gathered from a table.
"""

from __future__ import annotations

import copy
import json
import re
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cat_lm.data.sentencepiece_models import SPACE, split_pattern

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What the table may hold before it is begun anew: some 100 MB.
MAX_WORDS = 1 << 19
MAX_IDS = 1 << 22


class WordCache:
    """The table of one tokenizer; `WordCache.of` says whether it may have one."""

    def __init__(self, tokenizer: Tokenizer, eod_id: int, space: str, prefix: bool) -> None:
        # A copy that takes a word as it is.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.normalizer = None
        self._tokenizer.pre_tokenizer = None
        self._eod_id = eod_id
        self._space = space
        self._prefix = " " if prefix else ""
        self._words_of = re.compile(split_pattern(" ")).findall
        self.clear()

    @classmethod
    def of(cls, tokenizer: Tokenizer, eod_id: int) -> WordCache | None:
        """The cache of a tokenizer, None where words may depend on each other, or do not exist."""
        settings = json.loads(tokenizer.to_str())
        steps = settings["normalizer"]
        steps = [] if steps is None else steps.get("normalizers", [steps])
        escape = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prefix = {"type": "Prepend", "prepend": SPACE}
        space = SPACE if steps else " "
        split = {
            "type": "Split",
            "pattern": {"Regex": split_pattern(space)},
            "behavior": "Isolated",
            "invert": False,
        }
        fits = (
            steps in ([], [escape], [prefix, escape])
            and settings["pre_tokenizer"] == split
            and settings["truncation"] is settings["padding"] is None
            and not settings["model"].get("dropout")
            and all(token["special"] for token in settings["added_tokens"])
        )
        return cls(tokenizer, eod_id, space, prefix in steps) if fits else None

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, each closed by EOD, uint32; and how many each has, int32."""
        words: list[str | None] = []
        starts = np.empty(len(texts), np.int64)
        for number, text in enumerate(texts):
            starts[number] = len(words)
            if self._space == SPACE:  # to such a model both are the same sign
                text = text.replace(SPACE, " ")
            words += self._words_of(self._prefix + text if text else "")
            words.append(None)  # stands for EOD
        if not words:
            return np.empty(0, np.uint32), np.empty(0, np.int32)
        self._learn(words)
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths)
        # Where each id lies in the table: a run of places for each word.
        places = np.repeat(self._starts[numbers] - (ends - lengths), lengths)
        places += np.arange(len(places))
        tokens = self._ids[places]
        documents = np.add.reduceat(lengths, starts).astype(np.int32)
        if len(self._numbers) > MAX_WORDS or len(self._ids) > MAX_IDS:
            self.clear()
        return tokens, documents

    def _learn(self, words: Sequence[str | None]) -> None:
        """Adds the words that are new to the table."""
        known = self._numbers
        new = list(dict.fromkeys(word for word in words if word not in known))
        if not new:
            return
        inputs = [word.replace(" ", self._space) for word in new]
        encodings = self._tokenizer.encode_batch_fast(inputs, add_special_tokens=False)
        ids, lengths = array("I"), []
        for encoding in encodings:
            found = encoding.ids
            ids.fromlist(found)
            lengths.append(len(found))
        lengths = np.array(lengths, np.int64)
        starts = len(self._ids) + np.cumsum(lengths) - lengths
        self._ids = np.concatenate([self._ids, np.frombuffer(ids, np.uint32)])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._starts = np.concatenate([self._starts, starts])
        known.update(zip(new, range(len(known), len(known) + len(new)), strict=True))

    def clear(self) -> None:
        """Begins the table anew: EOD alone is in it."""
        self._numbers: dict[str | None, int] = {None: 0}
        self._ids = np.array([self._eod_id], np.uint32)
        self._lengths = np.ones(1, np.int64)
        self._starts = np.zeros(1, np.int64)
