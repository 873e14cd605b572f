"""`python -m eval.records`: pages of committed records, made from their JSON and notes alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cat_lm.core.cli import Parser, announce, path
from cat_lm.core.errors import UserError, command
from cat_lm.core.files import write_text
from eval.common.text_table import markdown_table

FOLDER = Path(__file__).with_name("records")
_NOTE_WORDS = 120
_DPI, _COLOURS = 90, 96  # The resolution and number of colours of pictures.


@command
def main() -> None:
    parser = Parser(prog="python -m eval.records", description="Reports of committed records.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "render",
        help="write NAME.md for each record, and an index",
        description="Writes the report NAME.md of each study's record NAME.json, with the note "
        "NAME.note.md where there is one, a page for each other record that has a note, and "
        "README.md, an index of all.",
    )
    one.add_argument("--check", action="store_true", help="only compare with the files that exist")
    one.add_argument(
        "--folder", type=path, default=FOLDER, metavar="DIR", help="folder of the records"
    )
    arguments = parser.parse_args()
    _render(arguments)


def _render(arguments: argparse.Namespace) -> None:
    announce(f"{arguments.folder}: rendering the reports")
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
    """Return the pages of a folder's records, and the index, by file names.

    Raises:
        UserError: a record cannot be read, or a note is too long.
    """
    from eval.lab.page import report
    from eval.studies import STUDIES

    texts, studies, others = {}, [], []
    for file, record in read_records(folder):
        note = _note(file.with_suffix(".note.md"))
        if _is_study(record):
            study = STUDIES.get(record["study"])
            texts[f"{file.stem}.md"] = report(study, record, file.stem) + note
            studies.append([_link(file, "md"), study.title, record["scale"], _commit(record)])
            continue
        made = _find_provenance(record)
        if note:
            texts[f"{file.stem}.md"] = _page(file, made) + note
        link = _link(file, "md" if note else "json")
        others.append([link, made.get("machine", ""), made.get("date", "")[:10], _commit(made)])
    texts["README.md"] = "\n".join((
        "# Records\n\nMade by `python -m eval.records render`.\n\n## Studies\n",
        markdown_table(["record", "study", "scale", "commit"], studies),
        "\n## Other measurements\n",
        markdown_table(["record", "machine", "date", "commit"], others) + "\n",
    ))  # fmt: skip
    return texts


def _draw(folder: Path) -> None:
    """Draw the pictures of all reports."""
    import io

    from PIL import Image

    from cat_lm.core.files import atomic_write
    from eval.lab.run import pictures
    from eval.studies import STUDIES

    for file, record in filter(lambda pair: _is_study(pair[1]), read_records(folder)):
        for ending, picture in pictures(STUDIES.get(record["study"]), record).items():
            picture.savefig(drawn := io.BytesIO(), format="png", dpi=_DPI)
            # Few colours are enough, and a third of the bytes.
            with atomic_write(folder / f"{file.stem}{ending}.png", "wb") as out:
                Image.open(drawn).convert("RGB").quantize(_COLOURS).save(out, "png", optimize=True)


def read_records(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Yield a folder's records with their files."""
    for file in sorted(folder.glob("*.json")):
        yield file, json.loads(file.read_text(encoding="utf-8"))


def _is_study(record: Any) -> bool:
    return isinstance(record, dict) and "study" in record


def _find_provenance(record: Any) -> dict[str, Any]:
    """Return the first part of a record that says when and where it was measured, or {}."""
    if isinstance(record, dict) and {"date", "machine"} <= record.keys():
        return record
    parts = record.values() if isinstance(record, dict) else record
    found = (_find_provenance(part) for part in parts if isinstance(part, dict | list))
    return next(filter(None, found), {})


def _page(file: Path, made: dict[str, Any]) -> str:
    """Return the Markdown page of a record without a study, which links to its JSON."""
    picture = f"\n![{file.stem}]({file.stem}.png)\n" if file.with_suffix(".png").is_file() else ""
    command = f"\n`{made['command']}`\n" if made.get("command") else ""
    commit = f" at commit {_commit(made)}" if _commit(made) else ""
    return (
        f"# {file.stem}\n\nMeasured on {made['date'][:10]}{commit}; {made['machine']}. "
        f"All values are in [{file.name}]({file.name}).\n{command}{picture}"
    )


def _link(file: Path, ending: str) -> str:
    return f"[{file.stem}]({file.stem}.{ending})"


def _commit(made: dict[str, Any]) -> str:
    return (made.get("commit") or "")[:9]


def _note(file: Path) -> str:
    if not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8").strip()
    if len(text.split()) > _NOTE_WORDS:
        raise UserError(f"{file}: has more than {_NOTE_WORDS} words")
    return f"\n## Note\n\n{text}\n"


if __name__ == "__main__":
    main()
