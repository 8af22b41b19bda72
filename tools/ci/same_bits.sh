#!/usr/bin/env bash
# Usage: tools/ci/same_bits.sh OLD NEW
# Runs fourteen small trainings with two binaries, and compares what they print (without times), the digests of weights,
# optimizer and metrics, and the bytes of their weight files. For changes that must not change a bit. All data is synthetic.
set -euo pipefail
old=$(realpath "$1") new=$(realpath "$2")
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Runs `train "$@"` in the folder $name, whose run folder is `run`.
train() {
    local name=$1
    shift
    mkdir -p "$name"
    (cd "$name" && "$phalanx" train "$@" --threads 1 --output-dir run >>said 2>errors) || { cat "$name/errors"; exit 1; }
}
mnist() {
    local name=$1 world=$2
    shift 2
    train "$name" mnist --data synthetic:960 --global-batch-size 96 --epochs 2 --deterministic shards --shards 6 \
        --nproc-per-node "$world" "$@"
}
gpt() {
    local name=$1 world=$2
    shift 2
    train "$name" gpt --data synthetic:20000 --epochs 1 --nproc-per-node "$world" "$@"
}
all() {
    for transport in thread shm tcp; do
        train "linear-$transport" linear --nproc-per-node 2 --transport "$transport"
    done
    for world in 1 2 3; do
        mnist "mnist-$world" "$world"
    done
    train resnet9-bf16 resnet9 --data-url synthetic:256 --global-batch-size 32 --epochs 1 --precision bf16 --nproc-per-node 2
    gpt gpt-ddp 2
    gpt gpt-data 2 --mesh data=2
    gpt gpt-tensor 4 --mesh data=2,tensor=2
    gpt gpt-sharded 2 --mesh data=2 --fully-sharded
    train mobilenetv2-sbp mobilenetv2 --data-url synthetic:128 --global-batch-size 32 --epochs 1 --parallel sbp --nproc-per-node 2
    mnist resumed 2 --stop-after 13
    mnist resumed 3 --resume auto
}
for side in old new; do
    mkdir "$out/$side"
    cd "$out/$side"
    phalanx=${!side}
    all
    for run in */; do
        {
            echo "== ${run%/}"
            # Without times and what is told by the second; lines of several ranks come in any order.
            grep -vE "images/s|sequences/s| took |^Elapsed" "$run/said" | sed -E 's/[0-9.]+ ?m?s\b/TIME/g' | sort || true
            cat "$run"/run/summary.json 2>/dev/null | tr ',' '\n' | grep -oE '"(weights|optimizer|metrics|samples)_sha256": ?"[0-9a-f]+"' || true
            (cd "$run" && find run -name '*.safetensors' -o -name '*.pt' -o -name '*.pth' | sort | xargs -r sha256sum)
        } >>"$out/$side.txt"
    done
done
diff "$out/old.txt" "$out/new.txt" || { echo "same_bits: different"; exit 1; }
echo "same_bits: $(grep -c '^==' "$out/new.txt") folders, $(grep -cE 'sha256|  run/' "$out/new.txt") digests equal"
