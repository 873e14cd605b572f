"""LRA's own ListOps: listops-1000/basic_{train,val,test}.tsv, columns Source and Target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from cat_lm.core.readers import clipped, read_text
from eval.long_range.tasks.official import LRA, MAX_FILE_BYTES, Layout

LAYOUT = Layout("listops", ("listops-1000", "lra_release/listops-1000", "listops", ""), LRA)
FILES = {
    split: (f"basic_{name}.tsv",)
    for split, name in {"train": "train", "validation": "val", "test": "test"}.items()
}


def read_rows(
    path: Path,
    encode: Callable[[str], bytes],
    answer: Callable[[bytes], int | None],
    max_tokens: int,
) -> Iterator[tuple[int, bytes]]:
    """Read a file: for each row its class and its ids.

    Raises:
        UserError: another header, a row without both columns, another token, no whole tree or
            another answer than its; a row of more than `max_tokens` ids.
    """
    lines = read_text(path, limit=MAX_FILE_BYTES).splitlines()
    if not lines or lines[0].split("\t") != ["Source", "Target"]:
        LAYOUT.refuse(
            path,
            f"begins with {clipped(lines[0] if lines else '')!r}, must begin with "
            "the columns Source and Target",
        )
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}, line {number}"
        source, _, target = line.rpartition("\t")
        if not source or target not in "0123456789" or len(target) != 1:
            LAYOUT.refuse(where, "is truncated or another file: must be a row and its digit")
        try:
            ids = encode(source)
        except KeyError as error:
            LAYOUT.refuse(where, f"has the token {clipped(str(error.args[0]))!r}")
        if len(ids) > max_tokens:
            LAYOUT.refuse(where, f"has {len(ids):,} tokens, must have at most {max_tokens:,}")
        if (found := answer(ids)) != int(target):
            is_tree = f"gives {found}, and has the answer {target}"
            LAYOUT.refuse(where, "is no whole tree" if found is None else is_tree)
        yield int(target), ids
    if len(lines) == 1:
        LAYOUT.refuse(path, "has no row")
