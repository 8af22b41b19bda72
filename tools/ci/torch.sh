#!/usr/bin/env bash
# PyTorch's programs under our launcher, and ours under PyTorch's.
# Usage: torch.sh path/to/phalanx path/to/python (one that has torch)
set -euo pipefail
phalanx=$(realpath "$1")
python=$2
cd "$(dirname "$0")"
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export GLOO_SOCKET_IFNAME=lo

# expect TEXT COUNT FILE
expect() {
    [ "$(grep -c "$1" "$3")" = "$2" ] || { echo "not $2 times \"$1\" in:"; cat "$3"; exit 1; }
}

timeout 100 "$phalanx" launch --nproc-per-node 2 -- "$python" torch_launch.py >"$dir/one"
expect "sum of 2" 2 "$dir/one"
echo "one node: ok"

timeout 100 "$phalanx" launch --nproc-per-node 2 --max-restarts 1 -- "$python" torch_launch.py fail >"$dir/again"
expect "sum of 2" 2 "$dir/again"
echo "after a restart: ok"

"$phalanx" token --out "$dir/token"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
node() {
    timeout 100 "$phalanx" launch --nnodes 2 --node-rank "$1" --master-addr 127.0.0.1 --master-port "$port" --token-file "$dir/token" -- \
        "$python" torch_launch.py >"$dir/node$1"
}
node 0 &
node 1
wait $!
expect "sum of 2" 1 "$dir/node0"
expect "sum of 2" 1 "$dir/node1"
echo "two nodes: ok"

PHALANX_TOKEN_FILE=$dir/token timeout 100 "$python" -m torch.distributed.run --nproc-per-node 2 --no-python "$phalanx" \
    train linear --init-timeout 30 --output-dir "$dir/run" >"$dir/ours"
[ -f "$dir/run/summary.json" ] || { echo "no summary of our training under torchrun:"; cat "$dir/ours"; exit 1; }
echo "ours under torchrun: ok"

"$python" torchrun_table.py "$phalanx" "$python"
