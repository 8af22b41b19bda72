#!/usr/bin/env bash
# Tests of the fold kernels and of the engine's kernels for 64-bit ARM, under qemu, and a training step whose bits must be those of
# this machine. Needs the Rust target
# aarch64-unknown-linux-gnu and the Debian packages gcc-aarch64-linux-gnu,
# libc6-dev-arm64-cross and qemu-user-static; says so and succeeds without them.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=aarch64-unknown-linux-gnu
if ! command -v aarch64-linux-gnu-gcc >/dev/null || ! command -v qemu-aarch64-static >/dev/null ||
    ! rustup target list --installed 2>/dev/null | grep -qx "$target"; then
    echo "skipped: needs $target, aarch64-linux-gnu-gcc and qemu-aarch64-static"
    exit 0
fi
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64-static
export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
cargo test --locked --target "$target" -p phalanx-fold --lib
# Those that take seconds; all of them take four minutes, and the step below uses most kernels.
cargo test --locked --target "$target" -p phalanx-kernels --lib -- vector:: math:: activation:: max_pool:: \
    element product::tests::bits
# Prints a digest of losses, gradients and statistics, in fp32 and bf16.
bits() {
    PHALANX_NN_ISA_BITS=1 cargo test --locked --quiet "$@" -p phalanx-nn --test it -- --nocapture \
        --exact isa_bits::every_instruction_set_gives_the_same_bits | grep '^bits '
}
# By the instruction set that, like those of ARM, does not multiply bf16: others have bits of their own.
here=$(PHALANX_ISA=avx2 bits)
there=$(bits --target "$target")
echo "$(uname -m): $here"
echo "$target: $there"
[ "$here" = "$there" ]
