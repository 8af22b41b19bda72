#!/usr/bin/env bash
# Runs one workflow with the local engine, with flytekit, as Kubernetes Jobs (a stand-in runs them here) and on a
# Slurm of two nodes, and compares the outputs.
# Usage: flow_export.sh path/to/phalanx path/to/python (one that has flytekit, PyYAML and kubernetes-validate)
# A part whose tools are missing is skipped. Slurm: root, packages slurmctld slurmd slurm-client slurm-wlm-basic-plugins.
set -euo pipefail
phalanx=$(realpath "$1")
python=$(command -v "$2")
here=$(realpath "$(dirname "$0")")
helper=$here/flow_export.py
# shellcheck source=tools/ci/hosts.sh
source "$here/hosts.sh"
dir=$(mktemp -d)
started=()
cleanup() {
    if [ ${#started[@]} -gt 0 ]; then
        kill "${started[@]}" 2>/dev/null || true
        wait "${started[@]}" 2>/dev/null || true
    fi
    rm -rf "$dir"
}
trap cleanup EXIT
cd "$dir"
mkdir -p flow/data
cp "$here/flow_export.toml" flow/flow.toml
echo "a file's content" >flow/data/file
export TRIES=$dir/tries EXPORT_KEY="it's \"secret\""

# export_to ENGINE: the files, in the folder ENGINE
export_to() {
    rm -f "$TRIES"
    "$phalanx" flow export --to "$1" --output "$1" flow >"$1.log" 2>&1 || { cat "$1.log"; exit 1; }
}

# compare NAME FILE: FILE is what the local run has written
compare() {
    cmp local.txt "$2" || { diff local.txt "$2"; exit 1; }
    [ -z "$(find . -name pwned)" ] || { echo "$1: an input was run as a command"; exit 1; }
    echo "$1: ok"
}

"$phalanx" flow --store store run flow >/dev/null 2>local.log || { cat local.log; exit 1; }
cp "$("$phalanx" flow --store store show last --json | "$python" "$helper" local)" local.txt
compare local local.txt

if "$python" -c 'import flytekit' 2>/dev/null; then
    export_to flyte
    # flytekit's local run does not retry.
    echo 1 >"$TRIES"
    PYTHONPATH=flyte FLYTE_LOCAL_CACHE_ENABLED=0 "$python" "$helper" flyte flyte.txt
    compare flyte flyte.txt
else
    echo "flyte: skipped, $2 has no flytekit"
fi

if "$python" -c 'import kubernetes_validate, yaml' 2>/dev/null; then
    export_to kubernetes
    "$python" -m kubernetes_validate --strict --quiet kubernetes/*.yaml kubernetes/tasks/*.yaml
    mkdir bin volume
    printf '#!/bin/sh\nexec "%s" "%s" kubectl "%s" "$@"\n' "$python" "$helper" "$dir/volume" >bin/kubectl
    chmod +x bin/kubectl
    # As the notes say.
    mkdir -p "volume/inputs$dir/flow"
    cp -r flow/data "volume/inputs$dir/flow/"
    PATH=$dir/bin:$PATH timeout 60 sh kubernetes/submit.sh >kubernetes.log 2>&1 || { cat kubernetes.log; exit 1; }
    compare kubernetes volume/results/*/print/all
else
    echo "kubernetes: skipped, $2 has no kubernetes_validate or no yaml"
fi

if [ "$(id -u)" -ne 0 ] || ! have slurmctld slurmd sbatch; then
    echo "slurm: skipped, it needs root, slurmctld, slurmd and sbatch"
    exit
fi
ports=($("$python" -c 'import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in sockets))'))
export SLURM_CONF=$dir/slurm.conf
slurm_conf flow 127.0.0.1 "$dir/slurm-state" >slurm.conf
cat >>slurm.conf <<CONF
SlurmctldPort=${ports[0]}
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=2 RealMemory=4000 TmpDisk=4000
NodeName=n2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=2 RealMemory=4000 TmpDisk=4000
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
slurmctld -D >slurm.log 2>&1 &
started+=($!)
for node in n1 n2; do
    slurmd -D -N "$node" >>slurm.log 2>&1 &
    started+=($!)
done
slurm_is_up || { cat slurm.log; exit 1; }
export_to slurm
sh slurm/submit.sh >submit.log 2>&1 || { cat submit.log slurm.log; exit 1; }
for _ in $(seq 150); do
    [ -n "$(squeue -h 2>/dev/null)" ] || break
    sleep 0.2
done
grep -q "attempt 1 of 4 ended with exit code 7" slurm/logs/float.log || { tail -n 20 slurm/logs/* slurm.log; exit 1; }
compare slurm slurm/results/print/all
