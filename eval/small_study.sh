#!/usr/bin/env bash
# The small study, from a checkout: a question's models and seeds, their sweeps, tables and a figure.
# `bash eval/small_study.sh --help` lists the options; a stopped study goes on where it was.
set -euo pipefail

project_root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=launch/environment.sh
source "$project_root/launch/environment.sh"
# Relative folders are meant from where the user stands, whose own modules are not wanted (-P).
PYTHONPATH=$project_root exec python -P -m eval.small_study "$@"
