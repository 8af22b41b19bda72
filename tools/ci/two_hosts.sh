#!/usr/bin/env bash
# Two launchers on two hosts, which are network namespaces joined by a veth
# pair, train MNIST together over TCP. Then the link between them goes down, and all processes of a host
# are killed at once: the launchers must name the other node. Then four ranks without a launcher train, and
# one host vanishes: all others must notice within a minute, by themselves.
# Usage: two_hosts.sh path/to/phalanx [data]
set -euo pipefail
phalanx=$(realpath "$1")
data=${2:-synthetic:6000}
# shellcheck source=tools/ci/hosts.sh
source "$(dirname "$0")/hosts.sh"
work=$(mktemp -d)
trap 'remove_hosts; rm -rf "$work"' EXIT
make_hosts 10.77.0

"$phalanx" token --out "$work/job.token"
node() { # node NAMESPACE NODE_RANK
    ip netns exec "$1" timeout 300 "$phalanx" launch --nnodes 2 --node-rank "$2" --nproc-per-node 1 \
        --master-addr 10.77.0.1 --token-file "$work/job.token" -- \
        "$phalanx" train mnist --data "$data" --epochs 2 --threads 1 --output-dir "$work/run"
}
node "$b" 1 >"$work/b.log" 2>&1 &
second=$!
node "$a" 0 2>&1 | tee "$work/a.log"
wait "$second"
grep -q "2 ranks over TCP" "$work/a.log" || { echo "the ranks did not use TCP"; exit 1; }
python3 -c 'import json, sys; s = json.load(open(sys.argv[1])); assert s["world_size"] == 2 and s["accuracy"] > 0.85, s' \
    "$work/run/summary.json"

# A launcher that trains until something happens; its output and exit code are in files of its namespace.
endless() { # endless NAMESPACE NODE_RANK NAME
    local code=0
    # --foreground: in a process group of its own, the stopped launcher would get SIGHUP when `timeout` is killed first,
    # and could run until its own SIGKILL.
    ip netns exec "$1" timeout --foreground 300 "$phalanx" train mnist --data synthetic:60000 --epochs 2000 --threads 1 \
        --nnodes 2 --node-rank "$2" --nproc-per-node 2 --master-addr 10.77.0.1 --token-file "$work/job.token" --timeout 8 \
        --output-dir "$work/$3" >"$work/$3.$2" 2>&1 || code=$?
    echo "$code" >"$work/$3.$2.code"
}
start_both() { # start_both NAME
    endless "$b" 1 "$1" &
    endless "$a" 0 "$1" &
    until grep -qs "Train Epoch" "$work/$1.0"; do
        [ ! -e "$work/$1.0.code" ] || { cat "$work/$1.0"; exit 1; }
        sleep 0.1
    done
}
expect() { # expect NAME NODE_RANK CODE BEGIN: of the last error
    local line
    line=$(grep "^error: " "$work/$1.$2" | tail -n1)
    [[ "$(cat "$work/$1.$2.code")" = "$3" && "$line" = "error: $4"* ]] ||
        { echo "$1: node $2 ended with $(cat "$work/$1.$2.code"):"; cat "$work/$1.$2"; exit 1; }
}
host=$(hostname)
start_both link
ip -n "$b" link set "v$$b" down
wait
expect link 0 3 "lost the connection to node 1 (host $host, 10.77.0.2, ranks 2 and 3): nothing has come from it for "
expect link 1 3 "lost the connection to node 0 (host $host, 10.77.0.1, ranks 0 and 1): nothing has come from it for "
ip -n "$b" link set "v$$b" up
start_both killed
ip netns pids "$b" | xargs kill -STOP
ip netns pids "$b" | xargs kill -KILL
wait
expect killed 0 3 "lost node 1 (host $host, 10.77.0.2, ranks 2 and 3): "

mkdir "$work/a" "$work/b"
echo same | tee "$work/a/x" >"$work/b/x"
echo more >"$work/b/y"
doctor() { # doctor NAMESPACE NODE_RANK DATA
    ip netns exec "$1" timeout 300 "$phalanx" doctor --json --nnodes 2 --node-rank "$2" --nproc-per-node 2 \
        --master-addr 10.77.0.1 --token-file "$work/job.token" --output-dir "$work" --data "$3"
}
doctor "$b" 1 "$work/b" >/dev/null 2>&1 &
second=$!
code=0
doctor "$a" 0 "$work/a" >"$work/doctor.json" || code=$?
wait "$second" || true
[ "$code" = 1 ] || { echo "doctor ended with $code"; cat "$work/doctor.json"; exit 1; }
python3 -c '
import json, sys
r = json.load(open(sys.argv[1]))
assert [h["address"] for h in r["hosts"]] == ["10.77.0.1", "10.77.0.2"], r["hosts"]
assert [h["ranks"] for h in r["hosts"]] == [[0, 1], [2, 3]], r["hosts"]
job = {c["name"]: c for c in r["job"]}
assert [n for n, c in job.items() if c["status"] == "problem"] == ["same_data"], job
assert "y: 5 bytes on 10.77.0.2, none on 10.77.0.1" in job["same_data"]["found"], job
assert job["clocks"]["status"] == "ok", job
pairs = {(p["from"], p["to"]): p["transport"] for p in r["pairs"]}
assert pairs == {(0, 1): "shm", (0, 2): "tcp", (2, 3): "shm"}, pairs
' "$work/doctor.json"

rank() { # rank NAMESPACE RANK
    ip netns exec "$1" timeout 300 "$phalanx" train mnist --data synthetic:60000 --epochs 200 \
        --threads 1 --timeout 200 --init-method tcp://10.77.0.1:29600 --rank "$2" --world-size 4 \
        --output-dir "$work/long" >"$work/rank-$2.log" 2>&1
}
export PHALANX_TOKEN_FILE=$work/job.token
pids=()
for number in 0 1 2 3; do
    ns=$a
    [ "$number" -lt 2 ] || ns=$b
    rank "$ns" "$number" &
    pids+=($!)
done
until grep -q "Train Epoch" "$work/rank-0.log"; do
    kill -0 "${pids[0]}" || { cat "$work/rank-0.log"; exit 1; }
    sleep 0.1
done
ip -n "$b" link set "v$$b" down
start=$SECONDS
for number in 0 1 2 3; do
    code=0
    wait "${pids[$number]}" || code=$?
    took=$((SECONDS - start))
    { [ "$code" = 3 ] && [ "$took" -ge 20 ] && [ "$took" -le 60 ]; } ||
        { echo "rank $number ended with $code after $took s"; cat "$work/rank-$number.log"; exit 1; }
done
grep -q "rank 2 is gone: its host does not answer" "$work/rank-0.log" || { cat "$work/rank-0.log"; exit 1; }
echo "two hosts: ok, a vanished one was noticed within $took s"
