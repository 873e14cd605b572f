"""Prepared data, opened: a split of a folder or an address, and all that a configuration names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError
from cat_lm.data.corpus import Mixture, TokenCorpus, allow_open_files
from cat_lm.data.loader import TrainLoader
from cat_lm.data.manifest import SPLITS, check_fingerprint, read_manifest
from cat_lm.data.verified import verify

if TYPE_CHECKING:
    from cat_lm.config import RunConfig


def is_remote(folder: Path | str) -> bool:
    """Return True if it is an address, such as s3://bucket/data, and no path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(folder)) is not None


def open_corpus(
    folder: Path | str, split: str, cache_dir: Path | str | None = None, look: bool = True
) -> TokenCorpus:
    """Open a split of prepared data; read the manifest and a header per shard, no tokens.

    Args:
        folder: a folder, or an address (s3://bucket/data): see `cat_lm.data.remote`.
        cache_dir: where the local copies of what is at an address are kept.
        look: at each shard now; else where it is first read, as another process has just looked.

    Raises:
        UserError: there is no such split, or manifest and shards do not belong together.
    """
    if is_remote(folder):
        from cat_lm.data.remote import open_remote

        return open_remote(str(folder), split, cache_dir)
    manifest = read_manifest(folder)
    check_fingerprint(manifest, str(folder))
    corpus = TokenCorpus(Path(folder), split, manifest)
    if look:
        corpus.look()
    return corpus


def open_verified(
    folder: Path | str, split: str, cache_dir: Path | str | None = None
) -> TokenCorpus:
    """Open a split as `open_corpus` does, copied to this machine, and `verify` it."""
    corpus = open_corpus(folder, split, cache_dir)
    corpus.fetch()
    verify([corpus], cache_dir)
    return corpus


def open_splits(
    config: RunConfig, look: bool = True
) -> tuple[TokenCorpus | Mixture, TokenCorpus | Mixture]:
    """Open the training and the validation split as `open_corpus` does, without any order.

    Raises UserError also for a model of too small a vocabulary.
    """
    data, asked, splits = config.data, config.model.vocab_size, []
    for split in SPLITS:
        corpora = [open_corpus(folder, split, data.cache_dir, look) for folder in data.folders]
        mixed = data.mixture is not None
        splits.append(Mixture(corpora, list(data.mixture.values())) if mixed else corpora[0])
        if asked is not None and asked < splits[0].vocab_size:
            raise UserError(
                f"model.vocab_size={asked}: the tokenizer of {splits[0].name} has "
                f"{splits[0].vocab_size} entries; use at least that, or leave the key out"
            )
    # Each on its own may be few enough; all of them stay open together.
    allow_open_files(sum(len(split.shards) for split in splits))
    return splits[0], splits[1]


def open_data(
    config: RunConfig, look: bool = True
) -> tuple[TokenCorpus | Mixture, TokenCorpus | Mixture, TrainLoader]:
    """Open the training and the validation split, and the order of the training samples.

    Raises UserError for data that are not there or do not fit the model or the context length.
    """
    data = config.data
    corpus, held_out = open_splits(config, look)
    loader = TrainLoader(
        corpus,
        data.context_length,
        config.train.global_batch_size,
        config.train.seed,
        mask_documents=data.mask_documents,
        packing=data.packing,
        cache_dir=data.cache_dir,
    )
    if data.mask_documents:
        for split in (corpus, held_out):
            check_ends(split)
    return corpus, held_out, loader


def check_ends(corpus: TokenCorpus | Mixture) -> None:
    """Raise UserError where documents do not end with EOD, by which a stream tells them apart.

    Without it, as in data of other tools, nothing would be masked, and nothing would say so.
    """
    for part in corpus.parts:
        end = part.num_tokens
        if end and part.tokens(end - 1, end)[0] != part.eod_id:
            raise UserError(
                f"data.mask_documents=true: the {part.split} documents of {part.name} do not end "
                f"with EOD ({part.eod_id}), so that their borders are not seen; prepare the data "
                "with an EOD after every document"
            )
