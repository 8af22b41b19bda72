#!/usr/bin/env bash
# Runs every fuzz target for a short time. Usage: fuzz.sh [SECONDS_PER_TARGET]
# Needs a nightly toolchain, cargo-fuzz and a C++ compiler; skips without them.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-4}
target=$PWD/target/fuzz
for need in "rustup run nightly rustc --version" "cargo fuzz --version" "c++ --version"; do
    $need >/dev/null 2>&1 || { echo "skipped: \`$need\` does not work here"; exit 0; }
done
cargo +nightly fuzz build --fuzz-dir tools/fuzz --target-dir "$target"
built=$target/$(rustup run nightly rustc -vV | sed -n 's/^host: //p')/release
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

one() { # one BINARY TARGET: prints a line, and on a crash what libFuzzer said
    local log=$work/$2.log
    # Temporary files of a target stay in the folder that is removed.
    if (cd "$work" && PHALANX_FUZZ=$2 TMPDIR=$work "$built/$1" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -malloc_limit_mb=512 -max_len=8192 -artifact_prefix="$work/$2-" "$work/corpus/$2" "$work/seeds/$2") >"$log" 2>&1; then
        echo "$2: $(grep -oE 'Done [0-9]+ runs' "$log" | tail -1)"
    else
        echo "$2: FAILED"
        grep -vE '^(#[0-9]+|INFO)' "$log" | tail -40
        for input in "$work/$2"-*; do
            case $input in *.log) ;; *) [ -f "$input" ] && { echo "input: $(basename "$input")"; head -c 600 "$input" | xxd; } ;; esac
        done
        return 1
    fi
}

failed=0
jobs=()
for binary in wire store comm checkpoint data report launch program; do
    PHALANX_FUZZ=seeds:$work/seeds "$built/$binary" >/dev/null
    for name in $(PHALANX_FUZZ=list "$built/$binary"); do
        mkdir -p "$work/corpus/$name"
        one "$binary" "$name" &
        jobs+=($!)
        # Two at a time.
        if [ "${#jobs[@]}" -ge 2 ]; then
            wait "${jobs[0]}" || failed=1
            jobs=("${jobs[@]:1}")
        fi
    done
done
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
[ "$failed" = 0 ] && echo "fuzz: ok"
exit "$failed"
