"""Download tokenizers from the Hugging Face Hub by their names, OWNER/NAME[@REVISION]."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from cat_lm.core.errors import UserError, reason_of
from cat_lm.core.hub import explain_gated_access, resolve_commit

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?:@[\w./-]+)?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
FAST, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json")


def is_hub_name(spec: str) -> bool:
    """Return True if a tokenizer SPEC looks like a Hub name and is no existing path."""
    return (
        bool(_NAME.fullmatch(spec))
        and not spec.endswith((".json", ".model"))
        and not os.path.exists(spec)
    )


def pin(spec: str, earlier: Iterable[object] = ()) -> str:
    """Return a Hub name with its revision replaced by the commit; other SPECs are unchanged.

    Args:
        earlier: pinned SPECs; a name without a revision keeps the commit that it has in them.

    Raises:
        UserError: the Hub has no such repository or revision, or cannot be reached.
    """
    name, _, revision = spec.partition("@")
    if not is_hub_name(spec) or _COMMIT.fullmatch(revision):
        return spec
    known = (found for found in earlier if str(found).startswith(f"{name}@") and not revision)
    try:
        return next(known, None) or f"{name}@{resolve_commit(name, revision or None, 'model')}"
    except (OSError, ValueError) as error:
        raise _unavailable(spec, error) from error


def hub_files(spec: str) -> list[Path]:
    """Return the paths of a pinned SPEC's tokenizer files in the Hub's cache, downloading them.

    The first is `tokenizer.json`, or the sentencepiece model of a repository without it.

    Raises:
        UserError: the repository has neither, or the Hub cannot be reached and they are not cached.
    """
    name, _, commit = spec.partition("@")
    try:
        with explain_gated_access(name, "model"):
            main = _download_file(name, commit, FAST) or _download_file(name, commit, SENTENCEPIECE)
            others = [_download_file(name, commit, file) for file in SETTINGS]
    except (OSError, ValueError) as error:
        raise _unavailable(spec, error) from error
    if main is None:
        raise UserError(f"--tokenizer {spec}: has neither {FAST} nor {SENTENCEPIECE} on the Hub")
    return [main, *filter(None, others)]


def _download_file(name: str, commit: str, file: str) -> Path | None:
    """Return the cached path of a file, downloading it; None if the repository has no such file."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(name, file, revision=commit)
    if cached is not None:  # It is a path, or the library's marker of an absent file.
        return Path(cached) if isinstance(cached, str) else None
    try:
        return Path(hf_hub_download(name, file, revision=commit))
    except LocalEntryNotFoundError:  # The Hub cannot be reached.
        raise
    except EntryNotFoundError:
        return None


def _unavailable(spec: str, error: Exception) -> UserError:
    return UserError(
        f"--tokenizer {spec}: no such file or folder here, and the Hub does not give it "
        f"({reason_of(error)})"
    )
