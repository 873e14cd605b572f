"""SlimPajama's repositories on the Hugging Face Hub, read file by file at one commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from cat_lm.core.errors import UserError
from data_prep.sources.base import Part, in_natural_order
from data_prep.sources.documents import (
    Malformed,
    Reading,
    Record,
    read_records,
    record_of,
    suffix_of,
)
from data_prep.sources.remote import RemoteFile, read_patiently
from data_prep.sources.slimpajama import SlimPajama, is_description

HUB_PREFIX = "hub:"
OPENING_RETRIES = 3  # a command that cannot begin should say so soon
SAMPLE = f"{HUB_PREFIX}DKYoon/SlimPajama-6B"
WHOLE = f"{HUB_PREFIX}gmongaras/SlimPajama-627B_Reupload"
WITHDRAWN = "cerebras/SlimPajama-627B"

T = TypeVar("T")


class Hub(SlimPajama):
    """A repository with SlimPajama's columns: `hub:OWNER/NAME[/FOLDER][@REVISION]`.

    The parts are the repository's files of known kinds, so that each is read, and read again after
    a failure, on its own; the order and the names are those of a local copy. A repository without
    such files is streamed by split through `datasets`.
    """

    def __init__(self, path: str, reading: Reading) -> None:
        self.path = path  # for what `_ask` says
        self.name, self.folder, asked = parse_hub_path(path)
        self.revision = self._ask(lambda: resolve_revision(self.name, asked))
        files, others = self._ask(lambda: list_files(self.name, self.revision, self.folder))
        if not files:  # what is of no kind known here is read by `datasets`
            files, others = self._splits(), []
        super().__init__(path, reading, files, others, _identity)

    def records(self, part: Part) -> Iterator[Record | Malformed]:
        if part.size is None:
            return self._stream(part)
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

    def _splits(self) -> list[Part]:
        import datasets

        if self.folder:
            raise UserError(f"--path {self.path}: no file of a known kind in that folder")
        splits = self._ask(
            lambda: datasets.get_dataset_split_names(self.name, revision=self.revision)
        )
        if "train" not in splits:
            raise UserError(f"--path {self.path}: no train split; it has {', '.join(splits)}")
        return [Part(name, name) for name in ("train", "validation") if name in splits]

    def _stream(self, part: Part) -> Iterator[Record | Malformed]:
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


def _identity(part: Part) -> str:
    """Return what files of one content share: in the cache of a download they are one file."""
    return part.sha256 if part.sha256 and part.size else part.name


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
            parts.append(Part(url, file_name, None, entry.size, digest))
        elif known or not hidden:
            others.append(file_name)
    return in_natural_order(parts), sorted(others)


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
