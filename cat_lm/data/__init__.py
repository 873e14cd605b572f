"""Prepared text: token shards, the corpus that they form, and the loader of training batches.

Importing this package imports no library but numpy. Tokenizers are in `cat_lm.data.tokenizers`.
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
