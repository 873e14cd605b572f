"""The Hugging Face Hub: commits of branches, and errors of gated repositories."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cat_lm.core.errors import UserError

PAGES = {"dataset": "datasets/", "model": ""}


def resolve_commit(name: str, revision: str | None, kind: str) -> str:
    """Return the commit that a branch, tag or None (the default branch) stands for now.

    Args:
        kind: "dataset" or "model".
    """
    from huggingface_hub import HfApi

    with explain_gated_access(name, kind):
        return HfApi().repo_info(name, revision=revision, repo_type=kind).sha


@contextlib.contextmanager
def explain_gated_access(name: str, kind: str) -> Iterator[None]:
    """Replace the error of a gated repository by a UserError that says where to ask for access.

    Errors of the connection become OSErrors, which the library's HTTP client does not raise.

    Args:
        kind: "dataset" or "model".
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError

    try:
        yield
    except GatedRepoError as error:
        raise UserError(
            f"{name} is gated on the Hub: ask for access at "
            f"{constants.ENDPOINT}/{PAGES[kind]}{name}, and log in by `hf auth login` or HF_TOKEN"
        ) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("httpx", "httpx2"):
            raise ConnectionError(str(error)) from error
        raise
