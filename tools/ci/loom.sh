#!/usr/bin/env bash
# Explores the wait protocol and the ring with loom (crates/phalanx-comm/src/wait/README.md, "checked by loom").
# Has a target folder of its own, because --cfg loom rebuilds everything; two minutes on two cores, less when built.
set -euo pipefail
cd "$(dirname "$0")/../.."
export CARGO_TARGET_DIR=target/loom RUSTFLAGS="--cfg loom" CARGO_PROFILE_RELEASE_DEBUG=0
cargo test --locked --release -p phalanx-comm --test loom --no-run
timeout 120 cargo test --locked --release -p phalanx-comm --test loom
