#!/usr/bin/env bash
# Attacks a live training job for some seconds; about 40 s in all with the
# default. Usage: attacks.sh path/to/phalanx [SECONDS]
set -euo pipefail
phalanx=$(realpath "$1")
cd "$(dirname "$0")/../.."
exec cargo run --release --locked --quiet -p phalanx-attacks -- --phalanx "$phalanx" --seconds "${2:-12}"
