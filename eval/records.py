"""`python -m eval.records`: the reports of committed records, made from their JSON alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cat_lm.core.cli import Parser, path
from cat_lm.core.errors import UserError, command
from cat_lm.core.files import write_text

FOLDER = Path(__file__).with_name("records")
_NOTE_WORDS = 120
_DPI, _COLOURS = 90, 96  # of pictures


@command
def main() -> None:
    parser = Parser(prog="python -m eval.records", description="Reports of committed records.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "render",
        help="write NAME.md for each record, and an index",
        description="Writes the report NAME.md of each study's record NAME.json, with the note "
        "NAME.note.md where there is one, and README.md, an index.",
    )
    one.add_argument("--check", action="store_true", help="compare with what is there")
    one.add_argument("--folder", type=path, default=FOLDER, metavar="DIR", help="of the records")
    arguments = parser.parse_args()
    _render(arguments)


def _render(arguments: argparse.Namespace) -> None:
    texts = render(arguments.folder)
    if not arguments.check:
        for name, text in texts.items():
            write_text(arguments.folder / name, text)
        _draw(arguments.folder)
        print(f"{arguments.folder}: {len(texts) - 1} reports")
        return
    other = [
        name
        for name, text in texts.items()
        if not (arguments.folder / name).is_file()
        or (arguments.folder / name).read_text(encoding="utf-8") != text
    ]
    if other:
        raise UserError(
            f"{', '.join(other)}: not as their records say; python -m eval.records render"
        )
    print(f"{len(texts) - 1} reports are as their records say")


def render(folder: Path) -> dict[str, str]:
    """Return the reports of a folder's records of studies, and the index, by file names.

    Raises:
        UserError: a record cannot be read, or a note is too long.
    """
    from eval.lab.page import report
    from eval.studies import STUDIES

    texts, rows = {}, []
    for file, record in _studies(folder):
        note = _note(file.with_suffix(".note.md"))
        texts[f"{file.stem}.md"] = report(STUDIES.get(record["study"]), record, file.stem) + note
        rows.append(_row(file.stem, record))
    head = "# Records of studies\n\nMade by `python -m eval.records render`.\n\n"
    table = "| record | study | scale | commit |\n| --- | --- | --- | --- |\n"
    texts["README.md"] = head + table + "\n".join(rows) + "\n"
    return texts


def _draw(folder: Path) -> None:
    """Draw the pictures of all reports."""
    import io

    from PIL import Image

    from cat_lm.core.files import atomic_write
    from eval.lab.run import pictures
    from eval.studies import STUDIES

    for file, record in _studies(folder):
        for ending, picture in pictures(STUDIES.get(record["study"]), record).items():
            picture.savefig(drawn := io.BytesIO(), format="png", dpi=_DPI)
            # Few colours are enough, and a third of the bytes.
            with atomic_write(folder / f"{file.stem}{ending}.png", "wb") as out:
                Image.open(drawn).convert("RGB").quantize(_COLOURS).save(out, "png", optimize=True)


def _studies(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a folder's records of studies, with their files."""
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(record, dict) and "study" in record:
            yield file, record


def _row(name: str, record: dict[str, Any]) -> str:
    from eval.studies import STUDIES

    title = STUDIES.get(record["study"]).title
    return f"| [{name}]({name}.md) | {title} | {record['scale']} | {(record['commit'] or '')[:9]} |"


def _note(file: Path) -> str:
    if not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8").strip()
    if len(text.split()) > _NOTE_WORDS:
        raise UserError(f"{file}: has more than {_NOTE_WORDS} words")
    return f"\n## Note\n\n{text}\n"


if __name__ == "__main__":
    main()
