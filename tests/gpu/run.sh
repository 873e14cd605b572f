#!/usr/bin/env bash
# The short run on a GPU: at most ten minutes, what decides most first. See README.md.
#
#   bash tests/gpu/run.sh --short OUT
#
# It runs with PYTHON, or this checkout's .venv, or python3, and installs nothing.
set -uo pipefail

fail() { echo "error: $1" >&2; exit 2; }
if [ "${1-}" != --short ] || [ -z "${2-}" ] || [ $# != 2 ]; then fail "give --short OUT"; fi
out=$(realpath -m -- "$2")
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
# DeepSpeed's processes and torch.compile's find the interpreter's own programs first.
PATH=$(dirname -- "$(command -v -- "$python")"):$PATH
export PATH PYTHONUNBUFFERED=1
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || fail "no CUDA GPU: torch sees none"
mkdir -p -- "$out" || exit
worst=0
SECONDS=0

# NAME SECONDS COMMAND …: a process with its own limit; one that fails or hangs stops no other.
line() {
    local name=$1 limit=$2 left=$((600 - SECONDS)) began=$SECONDS code
    shift 2
    if [ "$left" -lt 5 ]; then echo "$name: not reached"; worst=1; return; fi
    timeout --kill-after=3 "$((limit < left ? limit : left))" "$python" -m "$@" >"$out/$name.log" 2>&1
    code=$?
    if [ "$code" != 0 ]; then worst=1; fi
    echo "$name: ended with $code after $((SECONDS - began)) s; $(tail -n 1 "$out/$name.log")"
}

mapfile -t tests < <(grep -v '^#' tests/gpu/short_tests.txt)
train=(eval.speed train --batch-size 8 --dtype bfloat16 --models)
line doctor 30 launch.doctor
line tests 120 pytest -q -p no:cacheprovider "${tests[@]}"
line train 120 "${train[@]}" pythia,cat --size 370m --repeats 30 --json "$out/train.json"
line step 90 "${train[@]}" pythia,cat --size 370m --optimizer --json "$out/step.json"
line conv 60 eval.speed conv --conv-type qkv,head --windows 4,21 --repeats 30 --json "$out/conv.json"
line sizes 90 "${train[@]}" cat --size 1.4b --optimizer --json "$out/sizes.json"
line decode 60 eval.speed decode --size 370m --dtype bfloat16 --models pythia,cat --prompts 2048 \
    --json "$out/decode.json"
exit "$worst"
