"""Data set repositories, local or on the Hub at one commit, in SlimPajama's or any other layout.

Files are parquet, JSON lines or text in any folders. Names of files and folders decide the split if
they contain it, such as `train/`, `validation/`, `test/` or `data/SPLIT-00000-of-….parquet`.
Otherwise documents are held out by their hash. A local copy and the Hub give the same parts.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TypeVar

from cat_lm.core.errors import UserError
from cat_lm.core.hub import resolve_commit
from data_prep.sources.base import (
    UNKNOWN_SET,
    LeftOut,
    Part,
    Source,
    in_hash_order,
    read_once,
    set_name,
)
from data_prep.sources.documents import (
    BLOCK,
    KNOWN_KINDS,
    Document,
    Malformed,
    Reading,
    Record,
    read_file,
    read_records,
    suffix_of,
)
from data_prep.sources.hub import fetch_range, is_description, list_files, parse_hub_path
from data_prep.sources.local import Found, describe_unread, exclude_matches, find_files
from data_prep.sources.presets import PRESETS
from data_prep.sources.remote import RemoteFile, call_with_retries

# The values of meta.redpajama_set_name in SlimPajama.
KNOWN_SETS = (
    "RedPajamaArXiv",
    "RedPajamaBook",
    "RedPajamaC4",
    "RedPajamaCommonCrawl",
    "RedPajamaGithub",
    "RedPajamaStackExchange",
    "RedPajamaWikipedia",
)
# Words in folder or file names that decide the split, as in the Hub's `datasets` library.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
OPENING_RETRIES = 3  # few, so that a command that cannot start fails soon
WITHDRAWN = "cerebras/SlimPajama-627B"

T = TypeVar("T")


class Repository(Source):
    """A source of files whose names may decide their split; `kind` is "hub" or "slimpajama".

    A document's set is the value of the set key, or else the SlimPajama set in the names of its
    file's folders. Test files are left out, for evaluation. Subclasses implement `_find`, which
    returns the files, and `records`.
    """

    def __init__(
        self, kind: str, path: str, reading: Reading, exclude: Sequence[str], preset: str | None
    ) -> None:
        """Find the files and set the parts.

        Args:
            exclude: patterns of files to leave out.
            preset: the name of a known data set, or None.

        Raises:
            UserError: no file is left for training, or a training file is also a validation file.
        """
        self.kind, self.path, self.reading, self.preset = kind, path, reading, preset
        self.share: dict | None = None
        (found,) = exclude_matches([self._find()], exclude)
        files = found.parts
        chosen = assign_splits(files)
        self.parts, repeated = read_once(chosen)
        names = {part.name for part in chosen}
        nameless = [f.name for f in files if f.name not in names and not split_of_name(f.name)]
        reason = "left out, no split in the name beside others that say train"
        self.left_out = [*describe_unread(found.others), *LeftOut.of(reason, nameless), *repeated]
        if not any(part.split != "validation" for part in self.parts):
            raise UserError(f"--path {path}: its files are all held out, none is for training")

    def _find(self) -> Found:
        """Return the files of known types, and the names of other files without descriptions."""
        raise NotImplementedError

    def keep_share(self, share: float, seed: int) -> None:
        """Keep this share of the training files (at least one), by a hash of their names."""
        files = in_hash_order(self.parts, seed)
        kept = {part.name for part in files[: ceil(Fraction(str(share)) * len(files))]}
        self.share = {"share": share, "files": len(kept), "of": len(files)}
        self.parts = [p for p in self.parts if p.split == "validation" or p.name in kept]

    def records(self, part: Part) -> Iterator[Record | Malformed]:
        """Yield (text, record) for the documents of a part in order."""
        raise NotImplementedError

    def read(self, part: Part) -> Iterator[Document | Malformed]:
        folders = part.name.split("/")[:-1]
        default = next((name for name in folders if name in KNOWN_SETS), UNKNOWN_SET)
        for item in self.records(part):
            if isinstance(item, Malformed):
                yield item
            else:
                yield Document(item[0], set_name(item[1], self.reading, default), part.split)

    def notes(self, held_out: float) -> list[str]:
        lines = super().notes(held_out)
        if self.preset:
            preset, size = PRESETS[self.preset], sum(part.size for part in self.parts)
            whole = (preset.file_bytes or 0) / 1e9
            known = f" (the whole set: about {whole:,.0f} GB)" if whole else ""
            lines.append(f"{self.preset}: {size / 1e9:,.3f} GB{known}; licence: {preset.licence}")
        if self.share:
            lines.append(
                "files: {files:,} of {of:,}, by a hash of their names".format(**self.share)
            )
        if not self.has_validation:
            lines.append(
                f"held out: {100 * held_out:.4g}% of the documents of {self.path}, by a hash of "
                "their text (--validation-fraction); it has no validation split"
            )
        return lines

    def describe(self) -> dict:
        description = {**super().describe(), "path": self.path}
        if self.preset:
            licence = PRESETS[self.preset].licence
            description |= {"preset": self.preset, "licence": licence}
        return description | ({"files_share": self.share} if self.share else {})


class Snapshot(Repository):
    """A local copy of a repository, of a folder of it, or of some of its files."""

    def _find(self) -> Found:
        path, root = self.path, Path(self.path)
        # The Hub's cache has a folder for each downloaded revision.
        if (root / "blobs").is_dir() and (revisions := sorted(root.glob("snapshots/*/"))):
            raise UserError(f"--path {path}: is a cache of the Hub's; give {revisions[-1]}")
        found = find_files(path, "--path")
        files = [file for file in found.parts if not is_description(file.name)]
        if not files:
            raise UserError(f"--path {path}: no file of a known kind in it but descriptions (.md)")
        return replace(found, parts=files)

    def records(self, part: Part) -> Iterator[Record | Malformed]:
        return read_file(part.path, part.name, part.size, self.reading)


def split_of_name(name: str) -> str | None:
    """Return the split in the names of a file's folders (outermost first) or of the file."""
    for component in name.lower().split("/"):
        words = set(re.findall("[a-z]+", component))
        for split, known in SPLIT_WORDS.items():
            if words.intersection(known):
                return split
    return None


def assign_splits(files: list[Part]) -> list[Part]:
    """Return training files, then validation files, without test files and files of no split.

    If no file is named for training, the files of no split are for training. Without validation
    files the split stays undecided.
    """
    splits = [split_of_name(file.name) for file in files]
    training = "train" if "train" in splits else None
    by_split = {
        wanted: [file for file, split in zip(files, splits, strict=True) if split == wanted]
        for wanted in (training, "validation")
    }
    if not by_split["validation"]:
        return by_split[training]
    return [
        replace(file, split=split or "train") for split, own in by_split.items() for file in own
    ]


class Hub(Repository):
    """A repository on the Hub: `hub:OWNER/NAME[/FOLDER][@REVISION]`.

    The parts are its files of known types, each of which is read, and retried, separately. Order
    and names are those of a local copy.
    """

    def __init__(
        self,
        kind: str,
        path: str,
        reading: Reading,
        exclude: Sequence[str],
        preset: str | None,
        commit: str | None,
    ) -> None:
        """List the files at `commit`; None stands for the present commit of the revision."""
        self.path = path  # The messages of `_ask_hub` need it.
        self.name, self.folder, asked = parse_hub_path(path)
        self.revision = commit or self._ask_hub(lambda: resolve_commit(self.name, asked, "dataset"))
        super().__init__(kind, path, reading, exclude, preset)

    def _find(self) -> Found:
        files, others = self._ask_hub(lambda: list_files(self.name, self.revision, self.folder))
        if not files:
            raise UserError(f"--path {self.path}: no file of a known kind in it ({KNOWN_KINDS})")
        return Found(files, others)

    def records(self, part: Part) -> Iterator[Record | Malformed]:
        where = f"{part.path}: cannot be read"
        file = RemoteFile(self._range_reader(part), where, part.size, part.sha256)
        if self.scratch is None or suffix_of(part.path) != ".parquet":
            yield from read_records(file, str(part.path), part.name, self.reading)
            return
        # Parquet is not read sequentially, so that only a local copy can be verified.
        with tempfile.TemporaryFile(dir=self.scratch) as copy:
            shutil.copyfileobj(file, copy, BLOCK)
            copy.seek(0)
            yield from read_records(copy, str(part.path), part.name, self.reading)

    def describe(self) -> dict:
        return {**super().describe(), "revision": self.revision}

    def _range_reader(self, part: Part) -> Callable[[int, int], bytes]:
        file = f"{self.folder}/{part.name}" if self.folder else part.name
        return lambda start, stop: fetch_range(self.name, self.revision, file, start, stop)

    def _ask_hub(self, action: Callable[[], T]) -> T:
        what = f"--path {self.path}: cannot be read from the Hub"
        if self.name.lower() == WITHDRAWN.lower():
            copy = PRESETS["slimpajama-627b"].path
            what += f", which has not had this repository at all times since 2026; {copy} is a copy"
        return call_with_retries(action, what, OPENING_RETRIES)
