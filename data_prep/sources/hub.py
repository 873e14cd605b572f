"""Read data set repositories on the Hub: addresses, listings and ranges of files."""

from __future__ import annotations

from cat_lm.core.errors import UserError
from cat_lm.core.hub import explain_gated_access
from data_prep.sources.base import Part, in_natural_order
from data_prep.sources.documents import suffix_of
from data_prep.sources.presets import HUB_PREFIX


def parse_hub_path(path: str) -> tuple[str, str, str | None]:
    """Split `hub:OWNER/NAME[/FOLDER][@REVISION]` into name, folder ("" for all) and revision."""
    place, _, revision = path.removeprefix(HUB_PREFIX).partition("@")
    pieces = place.strip("/").split("/")
    if len(pieces) < 2 or not all(pieces):
        raise UserError(f"--path {path}: give {HUB_PREFIX}OWNER/NAME[/FOLDER][@REVISION]")
    return "/".join(pieces[:2]), "/".join(pieces[2:]), revision or None


def is_description(name: str) -> bool:
    """Return True if a file is a description, such as README.md, and no data."""
    return name.lower().endswith(".md")


def list_files(name: str, revision: str, folder: str) -> tuple[list[Part], list[str]]:
    """Return (the files of known types in a folder of a repository, the names of other files).

    The files are in natural order and have no splits. Descriptions are in neither list.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    with explain_gated_access(name, "dataset"):
        tree = list(
            HfApi().list_repo_tree(
                name, folder or None, recursive=True, revision=revision, repo_type="dataset"
            )
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
            # In the cache of a download, files with the same content are one file.
            identity = digest if digest and entry.size else file_name
            parts.append(Part(url, file_name, None, entry.size, digest, identity=identity))
        elif known or not hidden:
            others.append(file_name)
    return in_natural_order(parts), sorted(others)


def fetch_range(name: str, revision: str, file: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a file by a single request, without retries."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(name, file, repo_type="dataset", revision=revision)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    response = get_session().get(url, headers=headers, timeout=timeout)
    with explain_gated_access(name, "dataset"):
        hf_raise_for_status(response)
    return response.content
