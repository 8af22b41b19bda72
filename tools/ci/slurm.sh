#!/usr/bin/env bash
# Two kinds of Slurm with two nodes, whose names n1 and n2 do not resolve: first both on this host, with one /tmp; then
# network namespaces, each with a /tmp of its own. Jobs without any token, address or port by hand train to the weights
# of one host with four ranks, two at once. In the namespaces a job is cancelled; one comes near its time limit and
# ends with a checkpoint; one is requeued and resumes.
# Usage: slurm.sh path/to/phalanx
set -euo pipefail
phalanx=$(realpath "$1")
skip() { echo "slurm: skipped, $1"; exit 0; }
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins)
programs=(slurmctld slurmd sbatch sbcast srun scontrol nsenter ip)
# shellcheck source=tools/ci/hosts.sh
source "$(dirname "$0")/hosts.sh"
[ "$(id -u)" -eq 0 ] || skip "it needs root"
have "${programs[@]}" || timeout 100 apt-get update -q >/dev/null 2>&1 || true
have "${programs[@]}" || timeout 120 apt-get install -y -q --no-install-recommends "${packages[@]}" iproute2 >/dev/null 2>&1 || true
have "${programs[@]}" || skip "${packages[*]} and iproute2 are not installed and cannot be"
# Not below /tmp: each node has its own.
dir=$(mktemp -d -p /var/tmp)
daemons=()
trap 'kill "${daemons[@]}" 2>/dev/null || true; remove_hosts; rm -rf "$dir"' EXIT
export SLURM_CONF=$dir/slurm.conf

start_slurm() { # start_slurm ADDRESS1 PORT1 ADDRESS2 PORT2 CONTROLLER_PORT: `on NODE COMMAND...` and `login COMMAND...` are defined
    slurm_conf phalanx "$1" "$dir" >"$SLURM_CONF"
    cat >>"$SLURM_CONF" <<CONF
AuthInfo=cred_expire=3
KillWait=5
FirstJobId=$first_job
SlurmctldPort=$5
NodeName=n1 NodeHostname=$(hostname) NodeAddr=$1 Port=$2 CPUs=4
NodeName=n2 NodeHostname=$(hostname) NodeAddr=$3 Port=$4 CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
CONF
    on n1 slurmctld -D >"$dir/slurm.log" 2>&1 &
    daemons+=($!)
    on n1 slurmd -D -N n1 >>"$dir/slurm.log" 2>&1 &
    daemons+=($!)
    on n2 slurmd -D -N n2 >>"$dir/slurm.log" 2>&1 &
    daemons+=($!)
    slurm_is_up login || { cat "$dir/slurm.log"; exit 1; }
    if getent hosts n1 >/dev/null; then echo "n1 resolves here"; exit 1; fi
}
# Token files in /tmp have the job's number, which no other Slurm of this host should have.
first_job=$((1000000 + $$))

small=(train mnist --data synthetic:640 --global-batch-size 64 --epochs 2 --threads 1)
long=(train mnist --data synthetic:640 --global-batch-size 64 --epochs 100000 --threads 1
    --save-every 20 --resume auto)
fail() { # fail MESSAGE LOG...
    echo "$1"
    shift
    tail -n 40 "$@" "$dir/slurm.log"
    exit 1
}
same() { # same FOLDER LOG: it has the weights of one host
    [ "$(weights "$1")" = "$want" ] || fail "$1 has other weights" "$2"
}
until_is() { # until_is SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.2
    done
}
state() { login scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
is() { [ "$(state "$1")" = "$2" ]; }
checkpoint() { [ -n "$(find "$1" -name '*.json' -path '*step*' 2>/dev/null | head -n 1)" ]; }
none_left() { [ -z "$(left)" ]; }

"$phalanx" "${small[@]}" --nproc-per-node 4 --output-dir "$dir/here" >"$dir/here.log" 2>&1 || fail "one host" "$dir/here.log"
want=$(weights "$dir/here")

tasks_and_launchers() { # tasks_and_launchers NAME: tasks as ranks, and one launcher a node, at the same time
    login srun -N2 --ntasks-per-node 2 -c 1 "$phalanx" "${small[@]}" --output-dir "$dir/$1-tasks" >"$dir/tasks.log" 2>&1 &
    local tasks=$!
    login srun -N2 --ntasks-per-node 1 -c 2 "$phalanx" launch --nproc-per-node 2 -- \
        "$phalanx" "${small[@]}" --output-dir "$dir/$1-launch" >"$dir/launch.log" 2>&1 || fail "launch under srun" "$dir/launch.log"
    wait "$tasks" || fail "train under srun" "$dir/tasks.log"
    same "$dir/$1-tasks" "$dir/tasks.log"
    same "$dir/$1-launch" "$dir/launch.log"
    grep -q "4 ranks \(over\|on\)" "$dir/tasks.log" || fail "not four ranks" "$dir/tasks.log"
    until_is 10 none_left || fail "left on the nodes: $(left)" "$dir/tasks.log"
    echo "slurm: $1: tasks as ranks and launchers, two jobs at once: ok"
}

# Both nodes are this host, with its /tmp.
on() { shift && exec env "$@"; }
login() { env "$@"; }
left() { find /tmp -maxdepth 1 -name "phalanx-*-$first_job-*" -o -maxdepth 1 -name "phalanx-*-$((first_job + 1))-*"; }
port=$((20000 + $$ % 10000))
start_slurm 127.0.0.1 $port 127.0.0.1 $((port + 1)) $((port + 2))
tasks_and_launchers "one /tmp"
kill "${daemons[@]}"
wait "${daemons[@]}" || true
daemons=()
rm -rf "$dir"/{state,n1,n2}

why=$(can_make_hosts) || skip "$why"
make_hosts 10.78.0
on() { # Not `ip netns exec`, which hides the cgroups that slurmd wants.
    local ns=$a
    [ "$1" = n1 ] || ns=$b
    shift
    nsenter --net="/run/netns/$ns" unshare --mount sh -c 'mount -t tmpfs phalanx /tmp && exec "$@"' sh "$@"
}
login() { on n1 "$@"; }
left() { # Processes and token files that are left on the nodes
    pgrep -x phalanx | while read -r pid; do
        readlink "/proc/$pid/ns/net"
    done | grep -F -e "$net_a" -e "$net_b" || true
    for node in n1 n2; do
        nsenter --target "$(cat "$dir/$node.pid")" --mount find /tmp -name 'phalanx-*-*'
    done
}
net_a=$(ip netns exec "$a" readlink /proc/self/ns/net)
net_b=$(ip netns exec "$b" readlink /proc/self/ns/net)
start_slurm 10.78.0.1 6818 10.78.0.2 6818 6817
tasks_and_launchers "namespaces"

# PMI-1 of Slurm, and train as the launcher of its node.
login srun --mpi=pmi2 -N2 --ntasks-per-node 2 -c 1 "$phalanx" "${small[@]}" --output-dir "$dir/pmi" >"$dir/pmi.log" 2>&1 &
tasks=$!
login srun -N2 --ntasks-per-node 1 -c 2 "$phalanx" "${small[@]}" --nproc-per-node 2 --output-dir "$dir/train" \
    >"$dir/train.log" 2>&1 || fail "train --nproc-per-node under srun" "$dir/train.log"
wait "$tasks" || fail "srun --mpi=pmi2" "$dir/pmi.log"
same "$dir/pmi" "$dir/pmi.log"
same "$dir/train" "$dir/train.log"
echo "slurm: --mpi=pmi2, train --nproc-per-node: ok"

batch() { # batch NAME OPTION...: a job that trains for a long time, and notes srun's exit code
    local name=$1
    shift
    cat >"$dir/$name.sh" <<JOB
#!/bin/sh
srun "$phalanx" ${long[*]} --output-dir "$dir/$name"
echo \$? >"$dir/$name.code"
JOB
    login sbatch --parsable -N2 --ntasks-per-node 2 -c 1 --open-mode=append -o "$dir/$name.log" "$@" "$dir/$name.sh"
}
cancelled=$(batch cancelled)
# Slurm sends it within a minute before the time that is asked for.
limited=$(batch limited --time 1 --signal USR1@50)
until_is 40 checkpoint "$dir/cancelled" || fail "no checkpoint" "$dir/cancelled.log"
login scancel "$cancelled"
until_is 15 is "$cancelled" CANCELLED || fail "scancel: $(state "$cancelled")" "$dir/cancelled.log"
until_is 40 is "$limited" COMPLETED || fail "time limit: $(state "$limited")" "$dir/limited.log"
[ "$(cat "$dir/limited.code")" = 0 ] || fail "time limit: code $(cat "$dir/limited.code")" "$dir/limited.log"
checkpoint "$dir/limited" || fail "time limit: no checkpoint" "$dir/limited.log"
until_is 10 none_left || fail "left on the nodes: $(left)" "$dir/cancelled.log" "$dir/limited.log"
echo "slurm: scancel, USR1 before the time limit: ok"

requeued=$(batch requeued --requeue)
until_is 40 checkpoint "$dir/requeued" || fail "no checkpoint" "$dir/requeued.log"
login scontrol requeue "$requeued"
until_is 60 grep -q "resum" "$dir/requeued.log" || fail "requeue: no resume" "$dir/requeued.log"
login scancel "$requeued"
until_is 15 is "$requeued" CANCELLED || fail "requeue: $(state "$requeued")" "$dir/requeued.log"
until_is 10 none_left || fail "left on the nodes: $(left)" "$dir/requeued.log"
echo "slurm: requeue resumes: ok"
