"""Open prepared data: a split of one folder or address, or all data of a configuration."""

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
    """Return True for an address such as s3://bucket/data, False for a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(folder)) is not None


def open_corpus(
    folder: Path | str, split: str, cache_dir: Path | str | None = None, look: bool = True
) -> TokenCorpus:
    """Open a split of prepared data by reading the manifest and the header of every shard.

    Args:
        folder: a folder, or an address such as s3://bucket/data (see `cat_lm.data.remote`).
        cache_dir: folder of local copies of data at an address.
        look: read the headers of all shards now; otherwise when a shard is first read, because
            another process has just checked them.

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
    """Open a split as `open_corpus` does, copy it to this machine, and check its checksums."""
    corpus = open_corpus(folder, split, cache_dir)
    corpus.fetch()
    verify([corpus], cache_dir)
    return corpus


def open_splits(
    config: RunConfig, look: bool = True
) -> tuple[TokenCorpus | Mixture, TokenCorpus | Mixture]:
    """Open the training and the validation split of a configuration, as `open_corpus` does.

    Raises UserError also if the model's vocabulary is smaller than the tokenizer's.
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
    # The limit applies to the shards of all corpora together.
    allow_open_files(sum(len(split.shards) for split in splits))
    return splits[0], splits[1]


def open_data(
    config: RunConfig, look: bool = True
) -> tuple[TokenCorpus | Mixture, TokenCorpus | Mixture, TrainLoader]:
    """Open the training split, the validation split and the loader of training batches.

    Raises UserError for data that are missing or do not fit the model or the context length.
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
    """Raise UserError unless documents end with EOD, by which masking finds their ends.

    Data of other tools may have no EOD; nothing would be masked then, without any error.
    """
    for part in corpus.parts:
        end = part.num_tokens
        if end and part.tokens(end - 1, end)[0] != part.eod_id:
            raise UserError(
                f"data.mask_documents=true: the {part.split} documents of {part.name} do not end "
                f"with EOD ({part.eod_id}), so that their borders are not seen; prepare the data "
                "with an EOD after every document"
            )
