"""Data sets on the Hugging Face Hub, read file by file at one commit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from cat_lm.errors import UserError
from data_prep.documents import (
    Document,
    Malformed,
    Reading,
    read_records,
    record_of,
    suffix_of,
)
from data_prep.remote import RemoteFile, retrying
from data_prep.sources import HUB_PREFIX, Part, Source, in_natural_order, set_name

OPENING_RETRIES = 3  # a command that cannot begin should say so soon
# The folder or file name that says what a file is for, as the Hub's own library reads them.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


T = TypeVar("T")


class Hub(Source):
    """A data set with SlimPajama's columns: `hub:OWNER/NAME[/FOLDER][@REVISION]`.

    The parts are the repository's files of known kinds, so that each is read, and read again after
    a failure, on its own; the order and the names are those of a local copy. A repository without
    such files is streamed by split through `datasets`.
    """

    kind = "slimpajama"

    def __init__(self, path: str, reading: Reading) -> None:
        self.path = path
        self.reading = reading
        self.name, self.folder, asked = parse_hub_path(path)
        self.revision = self._ask(lambda: resolve_revision(self.name, asked))
        files = self._ask(lambda: list_files(self.name, self.revision, self.folder))
        self.parts = _with_splits(files) if files else self._splits()
        if not any(part.split != "validation" for part in self.parts):
            raise UserError(f"--path {path}: its files are all held out, none is for training")

    def read(self, part: Part) -> Iterator[Document | Malformed]:
        where = f"{part.path}: cannot be read"
        if part.size is None:
            records = self._stream(part)
        else:
            file = RemoteFile(self._fetching(part), where, part.size, part.sha256)
            records = read_records(file, str(part.path), part.name, self.reading)
        for item in records:
            if isinstance(item, Malformed):
                yield item
            else:
                yield Document(item[0], set_name(item[1], self.reading), part.split)

    def describe(self) -> dict:
        return {**super().describe(), "path": self.path, "revision": self.revision}

    def _fetching(self, part: Part) -> Callable[[int, int], bytes]:
        file = f"{self.folder}/{part.name}" if self.folder else part.name
        return lambda start, stop: fetch_range(self.name, self.revision, file, start, stop)

    def _ask(self, action: Callable[[], T]) -> T:
        return retrying(action, f"--path {self.path}: cannot be read from the Hub", OPENING_RETRIES)

    def _splits(self) -> list[Part]:
        import datasets

        if self.folder:
            raise UserError(f"--path {self.path}: no file of a known kind in that folder")
        splits = self._ask(
            lambda: datasets.get_dataset_split_names(self.name, revision=self.revision)
        )
        if "train" not in splits:
            raise UserError(f"--path {self.path}: no train split; it has {', '.join(splits)}")
        if "validation" not in splits:
            return [Part("train", "train")]
        return [Part(name, name, name) for name in ("train", "validation")]

    def _stream(self, part: Part) -> Iterator[tuple[str, dict] | Malformed]:
        """A split through `datasets`, which retries by itself."""
        import datasets

        try:
            rows = datasets.load_dataset(
                self.name, split=part.name, streaming=True, revision=self.revision
            )
            for number, row in enumerate(rows, 1):
                yield record_of(row, f"{part.name}: row {number}", self.reading)
        except Exception as error:  # the library raises many kinds, network errors among them
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"--path {self.path}: streaming stopped ({reason})") from None


def parse_hub_path(path: str) -> tuple[str, str, str | None]:
    """`hub:OWNER/NAME[/FOLDER][@REVISION]` as the name, the folder ("" for all), the revision."""
    place, _, revision = path.removeprefix(HUB_PREFIX).partition("@")
    pieces = place.strip("/").split("/")
    if len(pieces) < 2 or not all(pieces):
        raise UserError(f"--path {path}: give {HUB_PREFIX}OWNER/NAME[/FOLDER][@REVISION]")
    return "/".join(pieces[:2]), "/".join(pieces[2:]), revision or None


def resolve_revision(name: str, revision: str | None) -> str:
    """The commit that a branch, tag or nothing (the default branch) stands for now."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(name, revision=revision).sha


def list_files(name: str, revision: str, folder: str) -> list[Part]:
    """The files of known kinds in a folder of a repository, in natural order, without splits."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    tree = HfApi().list_repo_tree(
        name, folder or None, recursive=True, revision=revision, repo_type="dataset"
    )
    parts = []
    for entry in tree:
        file_name = entry.path.removeprefix(f"{folder}/") if folder else entry.path
        readme = file_name.lower().endswith(".md")  # what a repository says of itself
        hidden = file_name.rpartition("/")[2].startswith(".")
        if isinstance(entry, RepoFile) and suffix_of(entry.path) and not readme and not hidden:
            url = f"hf://datasets/{name}@{revision}/{entry.path}"
            digest = entry.lfs.sha256 if entry.lfs else None
            parts.append(Part(url, file_name, None, entry.size, digest))
    return in_natural_order(parts)


def fetch_range(name: str, revision: str, file: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, in one request that is not repeated here."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(name, file, repo_type="dataset", revision=revision)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    response = get_session().get(url, headers=headers, timeout=timeout)
    hf_raise_for_status(response)
    return response.content


def split_of_name(name: str) -> str | None:
    """The split that a file's folders (outermost first) or its own name speak of."""
    for component in name.lower().split("/"):
        words = set(re.findall("[a-z]+", component))
        for split, known in SPLIT_WORDS.items():
            if words.intersection(known):
                return split
    return None


def _with_splits(files: list[Part]) -> list[Part]:
    """Training files, then validation files; test files, and others beside those, are left out.

    Without any training file in name, all that is not held out is training text.
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
