#!/usr/bin/env bash
# Usage: tools/ci/own_program.sh PHALANX
# Training programs outside the workspace. A project of `phalanx new` builds and passes its own test.
# tools/own_program trains on two ranks, is killed and resumes to the weights of a run that was not killed, and gets the same
# weights under `phalanx launch`. Builds offline, with the workspace's versions.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
phalanx=$(realpath "$1")
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# The workspace's folder and profile, so that what it has built is used.
export CARGO_TARGET_DIR="$root/target"
sed -n '/^\[profile\.release\]/,/^\[profile\.profiling\]/{/^\[profile\.profiling\]/!p}' "$root/Cargo.toml" >"$out/profile.toml"
quick=(--release --offline --quiet --config "$out/profile.toml")

cp "$root/Cargo.lock" "$root/tools/own_program/"
cargo build "${quick[@]}" --manifest-path "$root/tools/own_program/Cargo.toml"
cd "$out"
"$phalanx" new my-net --path "$root"
cp "$root/Cargo.lock" my-net/
cargo test "${quick[@]}" --manifest-path my-net/Cargo.toml

program="$CARGO_TARGET_DIR/release/own-program"
train() { "$program" --nproc-per-node 2 --output-dir "$@" >>log 2>&1 || { cat log; exit 1; }; }
weights() { grep -o '"weights_sha256": "[0-9a-f]*"' "$1/summary.json"; }
train whole
"$program" --nproc-per-node 2 --output-dir killed --save-every 20 >>log 2>&1 &
while ! compgen -G "killed/checkpoints/*.json" >/dev/null; do
    kill -0 $! 2>/dev/null || { cat log; exit 1; }
    sleep 0.01
done
# Its ranks end with it.
kill -9 $!
wait $! 2>/dev/null || true
train killed --save-every 20 --resume auto
grep -q "^resumed  after" log || { echo "it did not resume"; cat log; exit 1; }
[ "$(weights whole)" = "$(weights killed)" ] || { echo "other weights after the resume"; exit 1; }
"$phalanx" launch --nproc-per-node 2 -- "$program" --output-dir launched >>log 2>&1 || { cat log; exit 1; }
[ "$(weights whole)" = "$(weights launched)" ] || { echo "other weights under the launcher"; exit 1; }
echo "own program: trained, killed, resumed and launched to the same weights"
