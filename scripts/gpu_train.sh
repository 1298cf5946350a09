#!/usr/bin/env bash
# Trains a drafter from start to finish on one GPU and leaves everything in one folder; bounded by the clock.
#
#   scripts/gpu_train.sh TARGET.gguf OUT PROMPTS_DIR EVAL_DIR [MINUTES_GENERATE] [MINUTES_TRAIN] [OPTION ...]
#
# Run it from the repository root; it can be sent to the background: setsid scripts/gpu_train.sh ... </dev/null &
# OUT/log.txt shows the progress, OUT/status the stage (ending in "done" or "failed: STAGE"), OUT/drafter the result.
# The same command continues an interrupted run. Further options go to train-drafter as they are (--rows 4096).
set -u -o pipefail

if [ "$#" -lt 4 ]; then
    sed -n '2,9p' "$0" >&2
    exit 2
fi
target=$1 out=$2 prompts=$3 evaluation=$4 generate=${5:-4.5} train=${6:-14.5}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TOKENIZERS_PARALLELISM=true

options=(--out "$out" --model "$target" --minutes-generate "$generate" --minutes-train "$train" --max-bytes 32000000)
for file in "$prompts"/*.jsonl; do options+=(--prompts "$file"); done
for file in "$evaluation"/*.jsonl; do options+=(--exclude "$file"); done
options+=(--data-list scripts/training_data.json "${@:7}")

stage() {
    echo "$1" >"$out/status"
    python3 -m runtime.train_commands "${options[@]}" --stage "$1" >>"$out/run.txt" 2>&1 && return
    echo "failed: $1" >"$out/status"
    tail -n 20 "$out/run.txt" >&2
    exit 1
}

nvidia-smi --query-gpu=name,memory.total,memory.used --format=csv,noheader >>"$out/run.txt" 2>&1 || true
for each in responses train export; do stage "$each"; done
echo "done" >"$out/status"
