#!/usr/bin/env bash
# Usage: tools/ci/flow_kills.sh [KILLS] [SEED]
# Kills workflow engines at random moments (100 by default), also while they copy files and folders into the store, and
# continues each run; about one minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
export FLOW_KILLS=${1:-100} FLOW_SEED=${2:-$RANDOM}
echo "$FLOW_KILLS kills, seed $FLOW_SEED"
cargo test --locked -p phalanx-cli --test it -- --exact flow::no_kill_loses_or_repeats_what_was_recorded
