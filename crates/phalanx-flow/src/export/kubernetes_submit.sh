#!/bin/sh
# Creates the Job of each task of the workflow @NAME@ when the Jobs that it needs are complete. Ends when all are
# complete (exit code 0) or one has failed (1). Started again, it continues: complete Jobs stay. An export with other
# inputs or commands has Jobs and results of its own; those of this one have @RUN@ in their names.
# To run everything again: kubectl delete job -l phalanx-flow=@ALL@
set -eu
cd "$(dirname "$0")"
kubectl apply -f volume.yaml
kubectl create configmap @ALL@-scripts-@RUN@@SCRIPTS@ --dry-run=client -o yaml | kubectl apply -f -

# Sets job to the Job of the task $1, and needs to the tasks that it needs.
look_up() {
    case $1 in
@CASES@    esac
}

# Sets state to that of the task $1: complete, failed, running or absent.
look_at() {
    look_up "$1"
    case $states in
        *"[$job=1,"*) state=complete ;;
        *"[$job=,True]"*) state=failed ;;
        *"[$job="*) state=running ;;
        *) state=absent ;;
    esac
}

while :; do
    states=$(kubectl get jobs -l phalanx-flow=@ALL@ -o \
        'jsonpath={range .items[*]}[{.metadata.name}={.status.succeeded},{.status.conditions[?(@.type=="Failed")].status}]{end}')
    left=
    for task in@TASKS@; do
        look_at "$task"
        if [ "$state" = failed ]; then
            echo "task $task failed: kubectl logs job/$job" >&2
            exit 1
        fi
        [ "$state" = complete ] || left="$left $task"
        [ "$state" = absent ] || continue
        for need in $needs; do
            look_at "$need"
            [ "$state" = complete ] || continue 2
        done
        kubectl apply -f "tasks/$task.yaml"
    done
    [ -n "$left" ] || break
    sleep 2
done
@OUTPUTS@