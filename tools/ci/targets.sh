#!/usr/bin/env bash
# Compiles the command with the oldest Rust that Cargo.toml allows (rust-version), and for 64-bit ARM and musl.
# Nothing is to do for the oldest Rust if it is the one that runs: the lanes of .ci/run have compiled everything with it.
# A part whose toolchain or target is not installed is skipped. Without https, whose TLS needs a C compiler for the target.
set -euo pipefail
cd "$(dirname "$0")/../.."
oldest=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
case "$(rustc --version)" in
    "rustc $oldest."*) echo "Rust $oldest: all lanes use it" ;;
    *)
        toolchain=$(rustup toolchain list 2>/dev/null | sed -n "s/^\($oldest\(\.[0-9]*\)\{0,1\}-[^ ]*\).*/\1/p" | head -n 1)
        if [ -n "$toolchain" ]; then
            RUSTUP_TOOLCHAIN=$toolchain cargo check --locked --quiet --workspace --target-dir target/oldest
            echo "Rust $oldest: compiles"
        else
            echo "Rust $oldest: skipped, this is $(rustc --version), and rustup toolchain install $oldest was not run"
        fi
        ;;
esac
for target in aarch64-unknown-linux-gnu x86_64-unknown-linux-musl; do
    if [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ]; then
        cargo check --locked --quiet --target "$target"
        echo "$target: compiles"
    else
        echo "$target: skipped, rustup target add $target was not run"
    fi
done
