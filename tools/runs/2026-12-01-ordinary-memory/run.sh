#!/usr/bin/env bash
# Ten rounds of all-reduce in ordinary memory: before, after, Open MPI and Gloo, in turns. Arguments: the two programs.
mpi() { mpirun --allow-run-as-root --oversubscribe -n "$1" /tmp/t/mpi/b all-reduce 65536 1048576 26214400 2>/dev/null | sed "s/^/open-mpi /"; }
ours() { "$2" bench all-reduce --nproc-per-node "$1" --bytes 64KiB,1MiB,25MiB ${4:-} | tail -n 3 | sed "s/^/$3 $1 ranks /"; }
for round in $(seq 10); do
    echo "round $round, load $(cut -d' ' -f1 /proc/loadavg)"
    for ranks in 2 4; do
        ours $ranks "$1" before
        ours $ranks "$2" after
        ours $ranks "$2" registered --registered
        mpi $ranks
    done
    [ $((round % 3)) = 1 ] && /tmp/t/venv/bin/python /work/wfp/tools/bench/peers/gloo_collectives.py all-reduce --world 2 --bytes 65536,1048576,26214400 --seconds 0.5 | sed 's/^/gloo 2 ranks /'
done
