#!/usr/bin/env bash
# The main job, from an empty machine to a trained, exported and evaluated language model.
# Every stage that an earlier run finished is taken as it is; a stage that was cut off continues.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: bash launch/quickstart.sh [--compare] [--out DIR] [--data DIR] [-- section.key=value ...]

Makes the environment (.venv), prepares the standard library's source code as text, trains a small
CAT language model on it, exports it, evaluates it, and draws DIR/index.html.

options:
  --compare             train Pythia and CAT without positions for the same budget as well
  --out DIR             folder of the runs and of the report (default: runs/quickstart)
  --data DIR            prepared text, made there if it is missing (default: data/quickstart)
  -- section.key=value  changes of configs/quickstart.yaml, such as train.max_steps=100
  -h, --help            show this and exit

PYTHON=/path/to/python3.12 chooses the interpreter. Stopped by Ctrl-C or killed, the same command
continues.
EOF
}

fail_usage() {
    echo "error: $1; see bash launch/quickstart.sh --help" >&2
    exit 2
}

# What cat_lm/core/numbers.py takes for an address.
scheme='[A-Za-z][A-Za-z0-9+.-]+'
address="^(\\./+)*(($scheme::)*$scheme:/|[^/@:]+@[^/@:]+:)"
project_root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
out=$project_root/runs/quickstart
data=$project_root/data/quickstart
runs=(cat)
overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --compare) runs=(pythia cat cat-nope) ;;
        --out | --data)
            if [ $# -lt 2 ] || [[ ! $2 =~ [^[:space:]] ]]; then fail_usage "$1 needs a folder"; fi
            if [[ $2 =~ $address ]]; then
                fail_usage "$1 $2: is an address; give a folder of this machine"
            fi
            # A relative folder is meant from where the user stands.
            case $2 in
                /*) folder=$2 ;;
                *) folder=$PWD/$2 ;;
            esac
            if [ "$1" = --out ]; then out=$folder; else data=$folder; fi
            shift
            ;;
        -h | --help) usage && exit 0 ;;
        --) shift && overrides=("$@") && break ;;
        *) fail_usage "unknown argument $1" ;;
    esac
    shift
done

for override in ${overrides[@]+"${overrides[@]}"}; do
    case $override in
        data.path=*) fail_usage "data.path is given by --data" ;;
        train.output_dir=* | train.resume=*) fail_usage "${override%%=*} is given by this script" ;;
        *.*=*) ;;
        *) fail_usage "$override is not section.key=value" ;;
    esac
done

# Overrides that make each run from configs/quickstart.yaml.
run_overrides() {
    case $1 in
        pythia) echo model.conv_type=none ;;
        cat-nope) echo model.position_embedding=none ;;
    esac
}

stage_number=0
stage_count=$((3 + 2 * ${#runs[@]}))

# stage TITLE COMMAND...: a numbered heading, the command, its time.
stage() {
    local title=$1 started=$SECONDS code=0
    shift
    stage_number=$((stage_number + 1))
    printf '\n[%d/%d] %s\n' "$stage_number" "$stage_count" "$title"
    "$@" || code=$?
    case $code in
        0) printf '[%d/%d] %d s\n' "$stage_number" "$stage_count" $((SECONDS - started)) ;;
        75 | 130 | 143) stopped "$code" ;;
        *)
            echo "error: stage $stage_number ($title) ended with code $code" >&2
            exit "$code"
            ;;
    esac
}

stopped() {
    printf '\nStopped; the same command continues from here.\n' >&2
    exit "$1"
}
trap 'stopped 130' INT

prepare_environment() {
    # shellcheck source=launch/environment.sh
    source "$project_root/launch/environment.sh"
}

train() {
    # shellcheck disable=SC2046  # one override or none, without spaces
    python train.py configs/quickstart.yaml $(run_overrides "$1") ${overrides[@]+"${overrides[@]}"} \
        "data.path=$data" "train.output_dir=$out/$1" train.resume=auto
}

started=$SECONDS
stage "Environment" prepare_environment
cd -- "$project_root"
stage "Data: the standard library's source code as tokens, in $data" \
    python -m data_prep.prepare --source python-stdlib --tokenizer train:sentencepiece:4096 \
    --validation-fraction 0.02 --out "$data"
folders=()
for run in "${runs[@]}"; do
    stage "Training $run, in $out/$run" train "$run"
    stage "Export, to $out/$run/model" python -m cat_lm.export "$out/$run" "$out/$run/model"
    folders+=("$out/$run")
done
stage "Evaluation and report" python -m eval.quickstart "${folders[@]}" --out "$out"

printf '\nDone in %d s. Open %s\n' $((SECONDS - started)) "$out/index.html"
python - "$out/summary.json" "$data/manifest.json" <<'EOF'
import json
import sys

summary, manifest = (json.load(open(path, encoding="utf-8")) for path in sys.argv[1:])
print(f"Held-out text: a unigram model has loss {manifest['unigram_loss']:.3f} nats a token;")
for run in summary["runs"]:
    print(
        f"{run['run']} after {run['tokens']:,} tokens: loss {run['val_loss']:.3f}, perplexity "
        f"{run['val_perplexity']:.1f}, {run['val_bits_per_byte']:.3f} bits per byte"
    )
EOF
