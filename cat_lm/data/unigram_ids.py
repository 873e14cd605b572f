"""Sentencepiece's own ids where a unigram model of `tokenizers` gives others.

`tokenizers` looks for every piece of a unigram model in a text; so it takes a literal "</s>" or
"<0x0A>" for the piece of that name. Sentencepiece never does: it spells such a text out. A document
whose ids hold none but normal pieces has the same ids from both; any other one is left to
sentencepiece, byte pieces included, which both use rightly for a character that no piece has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cat_lm.data.sentencepiece_models import NORMAL, SentencePieceModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class UnigramIds:
    """The correction of a tokenizer's ids; `UnigramIds.of` says whether it needs one."""

    def __init__(self, model: SentencePieceModel, eod_id: int) -> None:
        self._processor = model.processor
        self._eod_id = eod_id
        self._special = np.array([kind != NORMAL for _, _, kind in model.pieces])

    @classmethod
    def of(cls, model_file: Path, tokenizer: Tokenizer, eod_id: int) -> UnigramIds | None:
        """For a unigram tokenizer that was made from the sentencepiece model beside it."""
        if type(tokenizer.model).__name__ != "Unigram" or not model_file.is_file():
            return None
        return cls(SentencePieceModel.read(model_file), eod_id)

    def corrected(
        self, texts: Sequence[str], tokens: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of texts, each closed by EOD, uint32, and how many each has, int32."""
        ends = np.cumsum(lengths, dtype=np.int64)
        special = self._special[tokens]
        special[ends - 1] = False
        found = np.unique(np.searchsorted(ends, np.flatnonzero(special), side="right")).tolist()
        if not found:
            return tokens, lengths
        documents = np.split(tokens, ends[:-1])
        for index in found:
            ids = self._processor.encode(texts[index])
            documents[index] = np.array([*ids, self._eod_id], np.uint32)
        return np.concatenate(documents), np.array([len(d) for d in documents], np.int32)
