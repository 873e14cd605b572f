"""Prepared text: token shards, the corpus they make up, and the loader that serves batches of it.

Importing this package costs numpy and nothing more; the tokenizers live in
`cat_lm.data.tokenizers`.
"""

from cat_lm.data.corpus import Mixture, TokenCorpus
from cat_lm.data.loader import TrainLoader, ValidationWindows
from cat_lm.data.manifest import read_manifest
from cat_lm.data.opening import open_corpus

__all__ = [
    "Mixture",
    "TokenCorpus",
    "TrainLoader",
    "ValidationWindows",
    "open_corpus",
    "read_manifest",
]
