#!/usr/bin/env bash
# Every test of the process groups with all ranks on one core, where spin bugs live: 4 and 8 ranks over every transport
# end in a bounded time, or this fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo test --locked -p phalanx-comm --no-run
core=$(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')
timeout 180 taskset -c "$core" cargo test --locked -p phalanx-comm --lib --test it
