#!/usr/bin/env bash
# Usage: tools/ci/mlflow.sh PHALANX PYTHON
# Trains with --mlflow against a real server, which is stopped and started again in the middle; then without a server, and
# uploads afterwards. Every number of metrics.jsonl must be on the server with its step. PYTHON needs `pip install mlflow`.
set -euo pipefail
phalanx=$(realpath "$1") python=$2 here=$(dirname "$(realpath "$0")")
"$python" -c "import mlflow" 2>/dev/null || { echo "skipped: $python has no mlflow"; exit 0; }
out=$(mktemp -d)
server=
stop() {
    [ -z "$server" ] || kill -- "-$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    server=
}
trap 'stop; rm -rf "$out"' EXIT
cd "$out"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
uri=http://127.0.0.1:$port
check() { "$python" "$here/mlflow_check.py" "$uri" "$@"; }
same() { check same "$@" || { cat "$1.log"; exit 1; }; }
start() {
    MLFLOW_DISABLE_TELEMETRY=true setsid "$python" -m mlflow server --backend-store-uri "sqlite:///$out/mlflow.db" \
        --artifacts-destination "$out/artifacts" --host 127.0.0.1 --port "$port" --workers 1 >>server.log 2>&1 &
    server=$!
    for _ in $(seq 300); do
        ! check up 2>/dev/null || return 0
        kill -0 "$server" 2>/dev/null || break
        sleep 0.5
    done
    cat server.log
    exit 1
}
train() {
    MLFLOW_EXPERIMENT_NAME="of phalanx" "$phalanx" train mnist --nproc-per-node 2 --data synthetic:640 \
        --global-batch-size 64 --log-interval 1 "$@"
}

start
train --epochs "${EPOCHS:-300}" --output-dir away --mlflow "$uri" >away.log 2>&1 &
training=$!
for _ in $(seq 600); do check some away 2>/dev/null && break; sleep 0.2; done
stop
lines=$(wc -l <away/metrics.jsonl)
until [ "$(wc -l <away/metrics.jsonl)" -gt $((lines + 50)) ] || ! kill -0 $training 2>/dev/null; do sleep 0.2; done
start
until grep -q "records are delivered again" away.log || ! kill -0 $training 2>/dev/null; do sleep 0.2; done
kill -0 $training 2>/dev/null || { echo "the training was too short; set EPOCHS above 300"; exit 1; }
wait $training || { cat away.log; exit 1; }
grep -q "trying again while the training continues" away.log || { echo "no warning"; cat away.log; exit 1; }
same away FINISHED

# A resumed training goes on with the same run.
train --epochs 2 --stop-after 13 --tag base --tag kind=x --note "it's a note" --output-dir resumed --mlflow "$uri" >resumed.log 2>&1
same resumed KILLED
train --epochs 3 --resume auto --tag kind=longer --output-dir resumed --mlflow "$uri" >>resumed.log 2>&1
same resumed FINISHED

# Resumed from an earlier step with another learning rate, it has a run of its own.
train --epochs 2 --save-every 5 --stop-after 13 --output-dir branched --mlflow "$uri" >branched.log 2>&1
same branched KILLED
train --epochs 2 --lr 0.01 --resume branched/checkpoints/step-000000010.json --mlflow "$uri" >>branched.log 2>&1
same branched FINISHED

stop
train --epochs 2 --output-dir without --mlflow "$uri" >without.log 2>&1 || { cat without.log; exit 1; }
later=$(grep -c "; later: phalanx report without --upload $uri\$" without.log) || true
[ "$later" = 1 ] || { echo "no line that says how to upload later"; cat without.log; exit 1; }
start
MLFLOW_EXPERIMENT_NAME="of phalanx" "$phalanx" report without --upload "$uri"
same without FINISHED
"$phalanx" report without --tag late --note later --upload "$uri"
same without FINISHED
echo "MLflow: every metric, parameter, status and file is on the server"
