"""SlimPajama in the layouts in which it can be had: which files are of which split, and the sets.

The original, and MBZUAI-LLM/SlimPajama-627B-DC, have folders `train/`, `validation/` and `test/` of
jsonl.zst files; DKYoon/SlimPajama-6B and gmongaras/SlimPajama-627B_Reupload have parquet files
`data/SPLIT-00000-of-….parquet`. The names of folders and files tell the split in all of them, and
a local copy and the Hub give the same parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path

from cat_lm.core.errors import UserError
from data_prep.sources.base import UNKNOWN_SET, LeftOut, Part, Source, read_once, set_name
from data_prep.sources.documents import Document, Malformed, Reading, Record, read_file
from data_prep.sources.local import describe_unread, find_files

# The sets that SlimPajama's documents name in meta.redpajama_set_name.
KNOWN_SETS = (
    "RedPajamaArXiv",
    "RedPajamaBook",
    "RedPajamaC4",
    "RedPajamaCommonCrawl",
    "RedPajamaGithub",
    "RedPajamaStackExchange",
    "RedPajamaWikipedia",
)
# The folder or file name that says what a file is for, as the Hub's own library reads them.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


class SlimPajama(Source):
    """Documents with SlimPajama's columns, out of files whose names tell their split.

    A document's set is what it names under the set key (`meta`, an object or JSON text), or else
    the folder of a set that its file is in. Test files are left for evaluation.
    Subclasses find the files and implement `records`.
    """

    kind = "slimpajama"

    def __init__(
        self,
        path: str,
        reading: Reading,
        files: list[Part],
        others: Sequence[str],
        identity: Callable[[Part], Hashable],
    ) -> None:
        """Choose the parts.

        Args:
            files: those of known kinds.
            others: the names of those that are not read, but for descriptions.
            identity: what is equal for all names of a file.

        Raises:
            UserError: no file is left for training, or one is held out under another name.
        """
        self.path = path
        self.reading = reading
        chosen = with_splits(files)
        self.parts, repeated = read_once(chosen, identity)
        names = {part.name for part in chosen}
        nameless = [f.name for f in files if f.name not in names and not split_of_name(f.name)]
        reason = "left out, no split in the name beside others that say train"
        self.left_out = [*describe_unread(others), *LeftOut.of(reason, nameless), *repeated]
        if not any(part.split != "validation" for part in self.parts):
            raise UserError(f"--path {path}: its files are all held out, none is for training")

    def records(self, part: Part) -> Iterator[Record | Malformed]:
        """The texts and records of a part, in order."""
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
        if not self.has_validation:
            lines.append(
                f"held out: {100 * held_out:.4g}% of the documents of {self.path}, by a hash of "
                "their text (--validation-fraction); it has no validation split"
            )
        return lines

    def describe(self) -> dict:
        return {**super().describe(), "path": self.path}


class Snapshot(SlimPajama):
    """A local copy: of a repository as a whole, of a folder of it, or of some of its files."""

    def __init__(self, path: str, reading: Reading) -> None:
        """Raises `UserError` where there are no such files.

        So for the Hub's cache: in it, each revision that was downloaded has a folder of its own.
        """
        root = Path(path)
        if (root / "blobs").is_dir() and (revisions := sorted(root.glob("snapshots/*/"))):
            raise UserError(f"--path {path}: is a cache of the Hub's; give {revisions[-1]}")
        found = find_files(path, "--path")
        files = [file for file in found.parts if not is_description(file.name)]
        if not files:
            raise UserError(f"--path {path}: no file of a known kind in it but descriptions (.md)")
        super().__init__(path, reading, files, found.others, found.identity)

    def records(self, part: Part) -> Iterator[Record | Malformed]:
        return read_file(part.path, part.name, part.size, self.reading)


def is_description(name: str) -> bool:
    """Return True if a file is what a repository says of itself."""
    return name.lower().endswith(".md")


def split_of_name(name: str) -> str | None:
    """The split that a file's folders (outermost first) or its own name speak of."""
    for component in name.lower().split("/"):
        words = set(re.findall("[a-z]+", component))
        for split, known in SPLIT_WORDS.items():
            if words.intersection(known):
                return split
    return None


def with_splits(files: list[Part]) -> list[Part]:
    """Training files, then validation files; test files, and others beside those, are left out.

    Without any training file in name, all that is not held out is training text. Without any
    validation file, the split is left open.
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
        Part(file.path, file.name, split or "train", file.size, file.sha256)
        for split, members in by_split.items()
        for file in members
    ]
