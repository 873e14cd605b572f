#!/usr/bin/env bash
# Environment, style and all tests. Arguments go to pytest: bash tests/run.sh tests/unit -k loader
set -euo pipefail

project_root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=launch/environment.sh
source "$project_root/launch/environment.sh"
cd -- "$project_root"

style=0
ruff check . || style=$?
ruff format --check . || style=$?

tests=0
python -m pytest "$@" || tests=$?
if [ "$tests" -ne 0 ]; then exit "$tests"; fi
if [ "$style" -ne 0 ]; then echo "tests passed; ruff found what its lines above say" >&2; fi
exit "$style"
