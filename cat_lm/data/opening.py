"""The data that a configuration names, opened: what every rank and every check begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm.data.corpus import TokenCorpus
from cat_lm.data.loader import TrainLoader
from cat_lm.errors import UserError

if TYPE_CHECKING:
    from cat_lm.config import RunConfig


def open_data(config: RunConfig) -> tuple[TokenCorpus, TokenCorpus, TrainLoader]:
    """The training and the validation split, and the order of the training samples.

    Raises:
        UserError: there is no such data, or it does not fit the model or the context length.
    """
    data, asked = config.data, config.model.vocab_size
    corpus = TokenCorpus.open(data.path, "train")
    if asked is not None and asked < corpus.vocab_size:
        raise UserError(
            f"model.vocab_size={asked}: the tokenizer of {data.path} has {corpus.vocab_size} "
            "entries; use at least that, or leave the key out"
        )
    batch_size, seed = config.train.global_batch_size, config.train.seed
    loader = TrainLoader(corpus, data.context_length, batch_size, seed, data.mask_documents)
    return corpus, TokenCorpus.open(data.path, "validation"), loader
