#!/usr/bin/env bash
# The short run on a GPU: at most ten minutes, the decisive numbers first. See README.md.
#
#   bash tests/gpu/run.sh --short OUT [--packages DIR] [--cache DIR] [--dry-run]
#   bash tests/gpu/run.sh --make-cache DIR [--packages DIR]
#
# It runs with PYTHON, or this checkout's .venv, or python3, and installs nothing.
set -uo pipefail

# NAME SECONDS: each is a process with its own limit, in the order of what it decides.
lines=(
    "versions 20" "ceilings 25" "tests 70" "train 90" "step 60" "conv 45"
    "sizes 60" "decode 55" "hazard 50" "compiled 50" "rows 60"
)
most=600

fail() { echo "error: $1" >&2; exit 2; }
out="" packages="" cache="" new_cache="" dry=""
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=yes; shift; continue ;;
        --short | --packages | --cache | --make-cache) [ -n "${2-}" ] || fail "$1: needs a folder" ;;
        *) fail "$1: is no option; there are --short OUT, --packages, --cache, --dry-run, --make-cache" ;;
    esac
    folder=$(realpath -m -- "$2")
    case $1 in
        --short) out=$folder ;;
        --packages) packages=$folder ;;
        --cache) cache=$folder ;;
        --make-cache) new_cache=$folder ;;
    esac
    shift 2
done
[ -n "$out$new_cache" ] || fail "give --short OUT or --make-cache DIR"
for folder in $packages $cache; do
    [ -d "$folder" ] || fail "$folder: no such folder"
done

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
# DeepSpeed's processes and torch.compile's find the interpreter's own programs first.
PATH=$(dirname -- "$(command -v -- "$python")"):$PATH
export PATH PYTHONUNBUFFERED=1
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT

if [ -n "$packages" ]; then
    # Wheels are archives; what is no wheel is there as it is imported.
    for wheel in "$packages"/*.whl; do
        if [ -e "$wheel" ]; then "$python" -m zipfile -e "$wheel" "$scratch/packages" || exit; fi
    done
    export PYTHONPATH=$scratch/packages:$packages${PYTHONPATH:+:$PYTHONPATH}
    ptxas=$(find -L "$scratch/packages" "$packages" -name ptxas -type f 2>/dev/null | head -n 1)
    if [ -n "$ptxas" ]; then
        chmod +x "$ptxas" 2>/dev/null
        export TRITON_PTXAS_PATH=${TRITON_PTXAS_PATH:-$ptxas}
    fi
fi
if [ -n "$new_cache" ]; then
    mkdir -p -- "$new_cache" && "$python" -m tests.gpu.kernels "$new_cache"
    exit
fi
if [ -n "$cache" ]; then
    # A copy: what is missing is compiled into it.
    cp -r -- "$cache" "$scratch/cache" && "$python" -m tests.gpu.kernels "$scratch/cache" relocate || exit
    export TRITON_CACHE_DIR=$scratch/cache
fi
if [ -n "$dry" ]; then
    "$python" -m tests.gpu.lines plan "${TRITON_CACHE_DIR-}" "${lines[@]}"
    exit
fi

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || fail "no CUDA GPU: torch sees none"
mkdir -p -- "$out" || exit
record=$out/short.json log=$out/short.log worst=0
SECONDS=0
: >"$log"
for line in "${lines[@]}"; do
    read -r name limit <<<"$line"
    left=$((most - SECONDS))
    if [ "$left" -lt 5 ]; then
        echo "$name: not reached" | tee -a "$log"
        continue
    fi
    if [ "$left" -lt "$limit" ]; then limit=$left; fi
    began=$SECONDS
    timeout --kill-after=3 "$limit" "$python" -m tests.gpu.lines "$name" "$record" >>"$log" 2>&1
    code=$?
    case $code in
        0) said="done" ;;
        124 | 137) said="ended after $limit s" worst=1 ;;
        *) said="failed with $code: $(tail -n 1 "$log")" worst=1 ;;
    esac
    echo "$name: $said, $((SECONDS - began)) s" | tee -a "$log"
done
"$python" -m tests.gpu.lines table "$record"
exit "$worst"
