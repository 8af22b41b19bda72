#!/usr/bin/env bash
# Licences, bans and sources of all dependencies, as deny.toml allows them, and advisories against them where the RustSec
# database can be fetched. Installs cargo-deny if it is missing (a minute on two cores). A missing network is no failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
install=(cargo install cargo-deny@0.20.2 --locked --debug)
if ! cargo deny --version >/dev/null 2>&1 &&
    ! CARGO_PROFILE_DEV_DEBUG=0 timeout 240 "${install[@]}" >/dev/null 2>&1; then
    echo "skipped: cargo-deny is not installed, and '${install[*]}' failed or took more than four minutes"
    exit 0
fi
# A build fetches the crates of its own target only; the check is of all targets' crates.
if ! timeout 120 cargo fetch --locked >/dev/null 2>&1; then
    echo "skipped: 'cargo fetch --locked' failed or took more than two minutes"
    exit 0
fi
deny() { cargo deny --color never --locked --offline check --hide-inclusion-graph "$@"; }
deny licenses bans sources
if timeout 60 cargo deny --locked fetch db >/dev/null 2>&1; then
    deny advisories
else
    echo "advisories: skipped, the RustSec database cannot be fetched"
fi
