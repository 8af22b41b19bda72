#!/usr/bin/env bash
# The adapters for other engines: their lints, tests and examples, which train, go on from a checkpoint on another number of
# ranks, run under `phalanx launch`, and get the same weights on one rank with accumulation, on two ranks of a host and on two
# hosts (network namespaces). Burn's on Mesa's software GPU too, and a recipe by phalanx-nn on Burn's devices.
# Usage: tools/ci/adapters.sh PHALANX
# Skips where a crate cannot be had, the two hosts where namespaces cannot be made, and the software GPU where Mesa cannot be
# installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
phalanx=$(realpath "$1")
# shellcheck source=tools/ci/hosts.sh
source tools/ci/hosts.sh
out=$(mktemp -d)
trap 'remove_hosts; rm -rf "$out"' EXIT
export CARGO_TARGET_DIR="$root/target/other"
cd adapters
cargo fmt --all --check
if ! timeout 200 cargo fetch --quiet --locked >"$out/fetch" 2>&1; then
    # Also where a crate that they stand on has another dependency.
    ! grep -e --locked "$out/fetch" || { echo "adapters/Cargo.lock is out of date"; exit 1; }
    echo "the adapters: skipped, their crates cannot be fetched: $(tail -n 1 "$out/fetch")"
    exit
fi
# Crates that only the binary `phalanx` needs.
cargo tree --locked --edges normal --prefix none -p phalanx-candle -p phalanx-burn >"$out/tree"
if grep -E '^(phalanx-(cli|data|flow|http|nn|report|track|train)|hyper|prost|tokio) ' "$out/tree"; then
    echo "the adapters bring dependencies of the binary"
    exit 1
fi
# Mesa's software GPU.
has_mesa() { compgen -G "/usr/share/vulkan/icd.d/lvp_icd.*" >/dev/null; }
has_mesa || timeout 100 apt-get update -q >/dev/null 2>&1 || true
has_mesa || timeout 120 apt-get install -y -q --no-install-recommends mesa-vulkan-drivers >/dev/null 2>&1 || true
export XDG_RUNTIME_DIR="$out" LP_NUM_THREADS=1
# The feature cuda downloads LLVM, and vulkan compiles for minutes.
features=(--features phalanx-burn/train,phalanx-burn/nn)
built=("${features[@]}")
! has_mesa || built=("${features[@]},phalanx-burn/wgpu")
cargo clippy --workspace --all-targets "${features[@]}" --locked --quiet -- -D warnings
cargo test --workspace "${built[@]}" --locked --quiet
RUSTDOCFLAGS="-D warnings" cargo doc --workspace "${features[@]}" --no-deps --locked --quiet
candle=$CARGO_TARGET_DIR/debug/examples/mnist_candle
burn=$CARGO_TARGET_DIR/debug/examples/mnist_burn
cd "$out"
short=(--samples 400 --checkpoint candle.safetensors)
run() { timeout 300 "$@" >>log 2>&1 || { cat log; exit 1; }; }
run "$candle" --nproc-per-node 2 --epochs 1 "${short[@]}"
cp candle.safetensors first
run "$phalanx" launch --nproc-per-node 3 -- "$candle" --epochs 2 "${short[@]}"
run "$candle" --epochs 2 "${short[@]}"
[ "$(grep -c "epoch " log)" = 2 ] || { echo "not one line for each of two epochs:"; cat log; exit 1; }
run "$burn" --nproc-per-node 2 --epochs 1 --samples 400
[ "$(grep -c "epoch " log)" = 3 ] || { echo "no line of the third training:"; cat log; exit 1; }
if "$candle" --elastic >refused 2>&1 || [ "$(wc -l <refused)" != 1 ]; then
    echo "--elastic was not refused in one line:"; cat refused; exit 1
fi
hosts=yes
why=$(can_make_hosts) || { hosts=; echo "the adapters on two hosts: skipped, $why"; }
[ -z "$hosts" ] || make_hosts 10.78.0
"$phalanx" token --out token
: >second
node() { # node NAMESPACE NODE_RANK COMMAND...
    ip netns exec "$1" timeout 300 "${@:3}" --nnodes 2 --node-rank "$2" --master-addr 10.78.0.1 --token-file token
}
# candle's first weights cannot be seeded: its trainings go on from a checkpoint.
for train in "$candle --epochs 2 --checkpoint CHECKPOINT" "$burn --epochs 1"; do
    for at in accumulated ranks hosts; do
        cp first "$at.safetensors"
        read -ra command <<<"${train/CHECKPOINT/$at.safetensors} --samples 400 --dropout 0"
        code=0
        case $at in
            accumulated) timeout 300 "${command[@]}" --micro-batches 2 >"$at.log" 2>&1 || code=$? ;;
            ranks) timeout 300 "${command[@]}" --nproc-per-node 2 >"$at.log" 2>&1 || code=$? ;;
            hosts)
                [ -n "$hosts" ] || continue
                node "$b" 1 "${command[@]}" >second 2>&1 &
                node "$a" 0 "${command[@]}" >"$at.log" 2>&1 || code=$?
                wait $! || code=$?
                ;;
        esac
        [ "$code" = 0 ] || { echo "$at: ${command[*]} ended with $code:"; cat "$at.log" second; exit 1; }
        sed -n 's/.*  weights //p' "$at.log" | tail -n 1 >>weights
    done
done
[[ "$(wc -l <weights)" = $((${#hosts} ? 6 : 4)) && "$(uniq weights | wc -l)" = 2 ]] ||
    { echo "not the same weights in each way of two trainings:"; cat weights; exit 1; }
# Burn by wgpu on the software GPU, and a recipe on it.
if has_mesa; then
    if "$burn" --device wgpu >refused 2>&1 || ! grep -q "; --device wgpu:cpu uses it" refused; then
        echo "--device wgpu was not refused:"; cat refused; exit 1
    fi
    gpu=("$burn" --device wgpu:cpu --epochs 1 --samples 128 --batch-size 32 --dropout 0)
    run "${gpu[@]}" --nproc-per-node 2
    run "${gpu[@]}" --micro-batches 2
    [ "$(sed -n 's/.*  weights //p' log | tail -n 2 | uniq | wc -l)" = 1 ] ||
        { echo "not the same weights on a software GPU:"; tail -n 4 log; exit 1; }
    cnn=("$CARGO_TARGET_DIR/debug/examples/mnist_cnn_burn" --data synthetic:32 --epochs 1 --global-batch-size 16)
    digest() { sed -n 's/.*"weights_sha256": "\(.*\)".*/\1/p' "$1/summary.json"; }
    run "${cnn[@]}" --device wgpu:cpu --nproc-per-node 2 --output-dir two
    run "${cnn[@]}" --device wgpu:cpu --accumulate 2 --output-dir one
    [ "$(digest two)" = "$(digest one)" ] || { echo "mnist_cnn_burn: not the same weights:"; cat log; exit 1; }
    run "${cnn[@]}" --device wgpu:cpu --nproc-per-node 2 --stop-after 1 --output-dir resumed
    run "${cnn[@]}" --device cpu --resume auto --output-dir resumed
    [ -n "$(digest resumed)" ] || { echo "mnist_cnn_burn: not resumed on the CPU:"; cat log; exit 1; }
else
    echo "Burn on a software GPU: skipped, mesa-vulkan-drivers is not installed and cannot be"
fi
# The first programs of the guide, as projects of their own.
for engine in candle burn; do
    page=$root/docs/guide/$engine.md
    mkdir -p "$engine/src"
    sed -n '/^```rust,ignore$/,/^```$/{/^```$/q;/^```/d;p}' "$page" >"$engine/src/main.rs"
    {
        printf '[package]\nname = "first-%s"\nedition = "2024"\n\n' "$engine"
        sed -n '/^```toml$/,/^```$/p' "$page" | sed "/^\`\`\`/d; s|\"phalanx/|\"$root/|"
        # As the crates were built above.
        sed -n '/^\[profile/,$p' "$root/adapters/Cargo.toml"
    } >"$engine/Cargo.toml"
    cp "$root/adapters/Cargo.lock" "$engine/"
    cargo build --offline --quiet --manifest-path "$engine/Cargo.toml"
    run "$CARGO_TARGET_DIR/debug/first-$engine" --nproc-per-node 2
done
[ "$(grep -c "^step 100  loss 0.0" log)" = 2 ] || { echo "no two small losses in:"; cat log; exit 1; }
echo "the adapters: ok"
