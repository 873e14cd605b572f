"""SlimPajama in the layouts in which it can be had, here or on the Hub at one commit.

The original, and MBZUAI-LLM/SlimPajama-627B-DC, have folders `train/`, `validation/` and `test/` of
jsonl.zst files; DKYoon/SlimPajama-6B and gmongaras/SlimPajama-627B_Reupload have parquet files
`data/SPLIT-00000-of-….parquet`. The names of folders and files tell the split in all of them, and
a local copy and the Hub give the same parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cat_lm.core.errors import UserError
from data_prep.sources.base import (
    UNKNOWN_SET,
    LeftOut,
    Part,
    Source,
    in_natural_order,
    read_once,
    set_name,
)
from data_prep.sources.documents import (
    KNOWN_KINDS,
    Document,
    Malformed,
    Reading,
    Record,
    read_file,
    read_records,
    suffix_of,
)
from data_prep.sources.local import describe_unread, find_files
from data_prep.sources.remote import RemoteFile, read_patiently

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
HUB_PREFIX = "hub:"
OPENING_RETRIES = 3  # a command that cannot begin should say so soon
SAMPLE = f"{HUB_PREFIX}DKYoon/SlimPajama-6B"
WHOLE = f"{HUB_PREFIX}gmongaras/SlimPajama-627B_Reupload"
WITHDRAWN = "cerebras/SlimPajama-627B"

T = TypeVar("T")


class SlimPajama(Source):
    """Documents with SlimPajama's columns, out of files whose names tell their split.

    A document's set is what it names under the set key (`meta`, an object or JSON text), or else
    the folder of a set that its file is in. Test files are left for evaluation.
    Subclasses find the files and implement `records`.
    """

    kind = "slimpajama"

    def __init__(
        self, path: str, reading: Reading, files: list[Part], others: Sequence[str]
    ) -> None:
        """Choose the parts.

        Args:
            files: those of known kinds.
            others: the names of those that are not read, but for descriptions.

        Raises:
            UserError: no file is left for training, or one is held out under another name.
        """
        self.path = path
        self.reading = reading
        chosen = with_splits(files)
        self.parts, repeated = read_once(chosen)
        names = {part.name for part in chosen}
        nameless = [f.name for f in files if f.name not in names and not split_of_name(f.name)]
        reason = "left out, no split in the name beside others that say train"
        self.left_out = [*describe_unread(others), *LeftOut.of(reason, nameless), *repeated]
        if not any(part.split != "validation" for part in self.parts):
            raise UserError(f"--path {path}: its files are all held out, none is for training")

    def records(self, part: Part) -> Iterator[Record | Malformed]:
        """Yield the texts and records of a part, in order."""
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
        """Find the files. Raises UserError where there are none."""
        root = Path(path)
        # In the Hub's cache each revision that was downloaded has a folder of its own.
        if (root / "blobs").is_dir() and (revisions := sorted(root.glob("snapshots/*/"))):
            raise UserError(f"--path {path}: is a cache of the Hub's; give {revisions[-1]}")
        found = find_files(path, "--path")
        files = [file for file in found.parts if not is_description(file.name)]
        if not files:
            raise UserError(f"--path {path}: no file of a known kind in it but descriptions (.md)")
        super().__init__(path, reading, files, found.others)

    def records(self, part: Part) -> Iterator[Record | Malformed]:
        return read_file(part.path, part.name, part.size, self.reading)


def is_description(name: str) -> bool:
    """Return True if a file is what a repository says of itself."""
    return name.lower().endswith(".md")


def split_of_name(name: str) -> str | None:
    """Return the split that a file's folders (outermost first) or its own name speak of."""
    for component in name.lower().split("/"):
        words = set(re.findall("[a-z]+", component))
        for split, known in SPLIT_WORDS.items():
            if words.intersection(known):
                return split
    return None


def with_splits(files: list[Part]) -> list[Part]:
    """Return training files, then validation files; test files, and others, are left out.

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
        replace(file, split=split or "train") for split, own in by_split.items() for file in own
    ]


class Hub(SlimPajama):
    """A repository with SlimPajama's columns: `hub:OWNER/NAME[/FOLDER][@REVISION]`.

    The parts are the repository's files of known kinds, so that each is read, and read again after
    a failure, on its own; the order and the names are those of a local copy.
    """

    def __init__(self, path: str, reading: Reading) -> None:
        self.path = path  # for what `_ask` says
        self.name, self.folder, asked = parse_hub_path(path)
        self.revision = self._ask(lambda: resolve_revision(self.name, asked))
        files, others = self._ask(lambda: list_files(self.name, self.revision, self.folder))
        if not files:
            raise UserError(f"--path {path}: no file of a known kind in it ({KNOWN_KINDS})")
        super().__init__(path, reading, files, others)

    def records(self, part: Part) -> Iterator[Record | Malformed]:
        where = f"{part.path}: cannot be read"
        file = RemoteFile(self._fetching(part), where, part.size, part.sha256)
        return read_records(file, str(part.path), part.name, self.reading)

    def describe(self) -> dict:
        return {**super().describe(), "revision": self.revision}

    def _fetching(self, part: Part) -> Callable[[int, int], bytes]:
        file = f"{self.folder}/{part.name}" if self.folder else part.name
        return lambda start, stop: fetch_range(self.name, self.revision, file, start, stop)

    def _ask(self, action: Callable[[], T]) -> T:
        what = f"--path {self.path}: cannot be read from the Hub"
        if self.name.lower() == WITHDRAWN.lower():
            what += (
                f", which has not had this repository at all times since 2026; {WHOLE} is a copy"
            )
        return read_patiently(action, what, OPENING_RETRIES)


def parse_hub_path(path: str) -> tuple[str, str, str | None]:
    """Split `hub:OWNER/NAME[/FOLDER][@REVISION]` into name, folder ("" for all) and revision."""
    place, _, revision = path.removeprefix(HUB_PREFIX).partition("@")
    pieces = place.strip("/").split("/")
    if len(pieces) < 2 or not all(pieces):
        raise UserError(f"--path {path}: give {HUB_PREFIX}OWNER/NAME[/FOLDER][@REVISION]")
    return "/".join(pieces[:2]), "/".join(pieces[2:]), revision or None


def resolve_revision(name: str, revision: str | None) -> str:
    """Return the commit that a branch, tag or nothing (the default branch) stands for now."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(name, revision=revision).sha


def list_files(name: str, revision: str, folder: str) -> tuple[list[Part], list[str]]:
    """Return the files of known kinds in a folder of a repository, and the names of others.

    The former are in natural order and without splits. Descriptions are neither.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    tree = HfApi().list_repo_tree(
        name, folder or None, recursive=True, revision=revision, repo_type="dataset"
    )
    parts, others = [], []
    for entry in tree:
        file_name = entry.path.removeprefix(f"{folder}/") if folder else entry.path
        hidden = any(piece.startswith(".") for piece in file_name.split("/"))
        known = suffix_of(entry.path)
        if not isinstance(entry, RepoFile) or is_description(file_name):
            continue
        if known and not hidden:
            url = f"hf://datasets/{name}@{revision}/{entry.path}"
            digest = entry.lfs.sha256 if entry.lfs else None
            # In the cache of a download files of one content are one file.
            identity = digest if digest and entry.size else file_name
            parts.append(Part(url, file_name, None, entry.size, digest, identity=identity))
        elif known or not hidden:
            others.append(file_name)
    return in_natural_order(parts), sorted(others)


def fetch_range(name: str, revision: str, file: str, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file, by one request that is not repeated here."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(name, file, repo_type="dataset", revision=revision)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    response = get_session().get(url, headers=headers, timeout=timeout)
    hf_raise_for_status(response)
    return response.content
