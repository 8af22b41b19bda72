#!/usr/bin/env bash
# Five rounds in turns: all-reduce in registered memory, and barriers. Arguments: the programs from bench.rs of before and after.
mpi() { mpirun --allow-run-as-root --oversubscribe -n "$@" 2>/dev/null; }
for _ in $(seq 5); do
    for program in "$1" "$2"; do
        "$program" 2 reg 65536,262144,1048576,4194304,26214400 3 | sed "s|^|$program |"
    done
    for ranks in 4 8; do
        mpi $ranks /tmp/t/mpi/b barrier 4
        mpi $ranks ./mpi_barriers
        mpi $ranks /tmp/t/mpi/b all-to-all 1024
    done
    for ranks in 2 4 8; do
        for program in "$1" "$2"; do
            "$program" $ranks barrier 0 5 | tail -n 4 | sed "s|^|$program |"
            "$program" $ranks ops 1024 3 | sed "s|^|$program |"
        done
    done
done
