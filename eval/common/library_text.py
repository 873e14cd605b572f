"""The text of studies that are given none: the standard library's source, without codec tables."""

from __future__ import annotations

from pathlib import Path

from cat_lm.errors import UserError

# Codec tables, a fifth of the library's source: near-copies of each other, which are in both
# splits, so that they inflate copying and make errors over documents too small.
EXCLUDED = "encodings/*"
LIBRARY = ("--source", "python-stdlib", "--exclude", EXCLUDED)  # of data_prep.prepare


def refuse_codec_tables(data: Path) -> None:
    """Raise UserError where a folder has text of before, or other text than LIBRARY prepares."""
    from cat_lm.data.manifest import MANIFEST, read_manifest

    if not (data / MANIFEST).is_file():
        return
    if read_manifest(data).get("arguments", {}).get("exclude") != [EXCLUDED]:
        raise UserError(
            f"{data}: was not prepared with --exclude '{EXCLUDED}', so that it may hold codec "
            f"tables; move it away, or give --data {data} to read it as it is"
        )
