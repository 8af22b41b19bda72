#!/usr/bin/env bash
# Usage: tools/ci/new_project.sh PHALANX
# What a user does with `phalanx new`, outside the workspace: the project builds, passes its test, trains on two
# ranks, is killed, and resumes to the weights of a run that was not. Builds offline, with the workspace's versions.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
phalanx=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$phalanx" new my-net --path "$root"
cd my-net
cp "$root/Cargo.lock" .
export CARGO_TARGET_DIR="$root/target/new-project"
cargo test --release --offline --quiet
my_net="$CARGO_TARGET_DIR/release/my-net"

train() { "$my_net" --nproc-per-node 2 --points 60000 --epochs 3 --output-dir "$@" >>out 2>&1; }
weights() { grep -o '"weights_sha256": "[0-9a-f]*"' "$1/summary.json"; }
train whole
"$my_net" --nproc-per-node 2 --points 60000 --epochs 3 --output-dir killed --save-every 20 >>out 2>&1 &
while ! compgen -G "killed/checkpoints/*.json" >/dev/null; do
    kill -0 $! 2>/dev/null || { cat out; exit 1; }
    sleep 0.01
done
# Its ranks end with it.
kill -9 $!
wait $! 2>/dev/null || true
train killed --save-every 20 --resume auto
grep -q "^resumed  after" out || { echo "it did not resume"; cat out; exit 1; }
[ "$(weights whole)" = "$(weights killed)" ] || { echo "other weights after the resume"; exit 1; }
# As a rank of our launcher.
"$phalanx" launch --nproc-per-node 2 -- "$my_net" --points 60000 --epochs 3 --output-dir launched >>out 2>&1
[ "$(weights whole)" = "$(weights launched)" ] || { echo "other weights under the launcher"; exit 1; }
echo "new project: trained, killed, resumed and launched to the same weights"
