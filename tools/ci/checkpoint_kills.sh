#!/usr/bin/env bash
# Kills a process at random moments while it saves checkpoints; after each, the newest complete one must load.
# Usage: checkpoint_kills.sh [KILLS]
set -euo pipefail
cd "$(dirname "$0")/../.."
# The whole workspace, so that what `cargo test --workspace` built is used.
PHALANX_KILLS=${1:-200} cargo test --workspace --locked --test it -- --exact --nocapture \
    state::after_a_kill_at_any_moment_the_newest_checkpoint_loads
echo "checkpoint kills: ok"
