#!/bin/sh
# Submits the tasks of the workflow @NAME@, each after the tasks that it needs. Arguments are passed to every
# sbatch (--partition=..., --account=...).
set -eu
cd "$(dirname "$0")"
mkdir -p logs results
jobs=

# Submits the task $1 after the jobs $2 (":ID:ID", or nothing) and sets id.
submit() {
    task=$1 after=$2
    shift 2
    [ -z "$after" ] || set -- "--dependency=afterok$after" --kill-on-invalid-dep=yes "$@"
    if id=$(sbatch --parsable "$@" "tasks/$task.sbatch"); then
        id=${id%%;*}
        jobs="$jobs $id"
        echo "task $task: job $id, output in logs/$task.log"
    else
        [ -z "$jobs" ] || scancel $jobs
        exit 1
    fi
}

