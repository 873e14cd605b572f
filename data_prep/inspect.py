"""What is in prepared data, and whether it is intact: python -m data_prep.inspect DIR."""

from __future__ import annotations

import argparse
from pathlib import Path

from cat_lm.errors import UserError, command


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.inspect",
        description="Shows the manifest, the counts per source, the lengths of the documents and "
        "some decoded samples of prepared data, and checks that they are intact. Exit code 0 "
        "means intact, 2 anything else.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what data_prep.prepare made")
    parser.add_argument(
        "--samples", type=int, default=2, metavar="N", help="documents of each split to show"
    )
    parser.add_argument(
        "--no-checksums",
        action="store_true",
        help="check sizes and headers only, without reading the shards as a whole",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings here")
    arguments = parser.parse_args(argv)
    if arguments.samples < 0:
        raise UserError(f"--samples {arguments.samples}: must be at least 0")
    return arguments


@command
def main() -> None:
    arguments = parse_arguments()
    from data_prep.inspection import inspect

    inspect(arguments.folder, arguments.samples, not arguments.no_checksums, arguments.json)


if __name__ == "__main__":
    main()
