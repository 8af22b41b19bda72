#!/usr/bin/env bash
# Usage: tools/ci/object_store.sh
# Streams from S3, and runs that are kept there, on the server of moto, which it installs.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
if ! { python3 -m venv "$out/moto" && timeout 200 "$out/moto/bin/pip" install -q 'moto[server]'; } >/dev/null 2>&1; then
    echo "skipped: moto[server] cannot be installed"
    exit
fi
# Built by the tests before.
PHALANX_TEST_S3=$out/moto/bin/moto_server cargo test --workspace --locked --quiet -- s3_of_moto output_url::
