#!/usr/bin/env bash
# The virtual environment of this checkout (.venv): made where it is missing, brought up to date
# where it is stale, and put first on PATH. quickstart.sh and tests/run.sh source this file;
# `bash launch/environment.sh` only sets up.
#
# PYTHON=/path/to/python3.12 names the interpreter to make it with. Otherwise it is the first
# Python 3.11 or 3.12 that has a torch in the range of setup.cfg, or else the first one at all.
set -euo pipefail

project_root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# Another environment's modules must not be imported in the place of ours.
unset PYTHONPATH PYTHONHOME

# Print why an interpreter cannot be used and fail, or print the version of its torch, if any.
probe_python() {
    local version
    # `python3.12` may be a version manager's stand-in that only prints a message.
    if ! version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        echo "does not run"
        return 1
    fi
    case $version in
        3.11 | 3.12) "$1" "$project_root/launch/environment.py" --probe ;;
        *) echo "is Python $version" && return 1 ;;
    esac
}

find_python() {
    local candidate answer first='' reasons=''
    local candidates=("$project_root/.venv/bin/python" python3.12 python3.11 python3 python)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if answer=$(probe_python "$candidate"); then
            if [ -n "$answer" ]; then
                printf '%s\n' "$candidate"
                return
            fi
            first=${first:-$candidate}
        else
            reasons+="; $candidate $answer"
        fi
    done
    if [ -z "$first" ]; then
        local looked="no Python 3.11 or 3.12 found"
        if [ -n "${PYTHON:-}" ]; then looked="PYTHON=$PYTHON cannot be used"; fi
        echo "environment: $looked${reasons:-; no such command}. Install Python 3.11 or 3.12" \
            "with its venv module, or name one by PYTHON=/path/to/python3.12" >&2
        return 1
    fi
    printf '%s\n' "$first"
}

set_up_environment() {
    local venv_python=$project_root/.venv/bin/python python
    # The usual case first, without a search: everything is in place.
    if [ -z "${PYTHON:-}" ] && [ -x "$venv_python" ] &&
        "$venv_python" "$project_root/launch/environment.py" --check 2>/dev/null; then
        return
    fi
    python=$(find_python) || return
    "$python" "$project_root/launch/environment.py"
}

set_up_environment || exit
export VIRTUAL_ENV=$project_root/.venv
export PATH=$VIRTUAL_ENV/bin:$PATH
# OpenMP's threads sleep instead of spinning while they wait: one that spins stops the one that
# works, where another program shares the cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
