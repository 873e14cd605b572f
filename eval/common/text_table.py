"""Format tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def align_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> str:
    """Return the lines of a table with aligned columns.

    Args:
        left: the columns that are flush left; the others are flush right.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> str:
    """Return a table in Markdown.

    Args:
        right: the columns that are flush right.
    """
    rules = ["---:" if column in right else "---" for column in range(len(header))]
    lines = [[cell.replace("|", r"\|") for cell in row] for row in [header, *rows]]
    lines.insert(1, rules)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
