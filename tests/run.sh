#!/usr/bin/env bash
# Environment, style and tests. --all: also those marked long, as in continuous integration;
# --nightly: also those marked nightly. Arguments go to pytest: bash tests/run.sh tests -k loader
# Several tests run at a time, each in a worker process: -n 0 for one after another in one process.
set -euo pipefail

project_root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=launch/environment.sh
source "$project_root/launch/environment.sh"
cd -- "$project_root"
# Tests start some hundred processes; each would compile our modules anew.
unset PYTHONDONTWRITEBYTECODE

style=0
ruff check . || style=$?
ruff format --check . || style=$?

workers=(-n auto)
for argument in "$@"; do
    case $argument in no:xdist | -pno:xdist) workers=() ;; esac
done

tests=0
python -m pytest "${workers[@]}" "$@" || tests=$?
if [ "$tests" -ne 0 ]; then exit "$tests"; fi
if [ "$style" -ne 0 ]; then echo "tests passed; ruff found what its lines above say" >&2; fi
exit "$style"
