#!/usr/bin/env bash
# What --deterministic shards costs: MNIST CNN, synthetic digits, global batch 128, one thread a rank.
# Usage: run.sh PHALANX   (a release or test-profile binary)
set -euo pipefail
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
for i in 1 2 3; do
  for world in 1 2; do
    for mode in ranks "shards --shards 8" "shards --shards 2"; do
      # shellcheck disable=SC2086 # the mode is several words
      "$1" train mnist --nproc-per-node "$world" --threads 1 --synthetic-samples 6400 --epochs 1 \
        --global-batch-size 128 --deterministic $mode --output-dir "$out" > /dev/null 2>&1
      echo "$world $mode $(grep -h 'images_per_s\|exposed_comm' "$out/summary.json" | tr -d '\n')"
    done
  done
done
