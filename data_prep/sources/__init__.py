"""Sources of documents: the standard library, files, SlimPajama here or on the Hub."""

from data_prep.sources.base import UNKNOWN_SET, Part, Source, sample_texts
from data_prep.sources.open import open_source
from data_prep.sources.slimpajama import KNOWN_SETS

__all__ = ["KNOWN_SETS", "UNKNOWN_SET", "Part", "Source", "open_source", "sample_texts"]
