"""`python -m tests.gpu`: what tests/gpu/run.sh runs; see tests/gpu/session.py.

Imports nothing of the project before it is known that what the project imports is there.
"""

from __future__ import annotations

import importlib.util
import sys

# What every step imports. Further modules are a step's own `needs`.
BASE = ("torch", "numpy", "transformers", "pydantic", "yaml", "xxhash", "tqdm")


def main() -> None:
    absent = [name for name in BASE if importlib.util.find_spec(name) is None]
    if absent:
        print(f"error: {sys.executable}: lacks the modules {', '.join(absent)}", file=sys.stderr)
        raise SystemExit(2)
    from tests.gpu.session import main

    main()


if __name__ == "__main__":
    main()
