#!/usr/bin/env bash
# The GPU tests and every benchmark, with JSON records: bash tests/gpu/run.sh [OUT] [--minutes 20]
# [--rehearse]; --help says more. Installs nothing: it runs with PYTHON, or this checkout's .venv,
# or python3, and the packages that are there.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
# DeepSpeed's processes and torch.compile's find the interpreter's own programs first.
PATH=$(dirname -- "$(command -v -- "$python")"):$PATH exec "$python" -m tests.gpu "$@"
