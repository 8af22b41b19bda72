#!/bin/sh
# Trains with Open MPI or MPICH: RANKS ranks, PER_HOST of them on each host of the file HOSTS (one name a line).
#   sh mpirun.sh                                               two ranks on this host
#   HOSTS=hosts RANKS=4 PER_HOST=2 sh mpirun.sh --data /shared/mnist
# Token, address and port need no setting: rank 0 sends them through mpirun.
set -eu
run=${RUN:-$PWD/runs/mnist}
set -- phalanx train mnist --save-every 500 --resume auto --output-dir "$run" "$@"

if mpirun --version 2>&1 | grep -q "Open MPI"; then
    # Without --bind-to none Open MPI pins each rank to one core.
    exec mpirun -n "${RANKS:-2}" ${HOSTS:+--hostfile "$HOSTS"} --map-by "ppr:${PER_HOST:-2}:node" --bind-to none "$@"
else
    exec mpirun -n "${RANKS:-2}" ${HOSTS:+-f "$HOSTS"} -ppn "${PER_HOST:-2}" "$@"
fi
