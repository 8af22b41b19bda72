#!/bin/sh
# The task @TASK@ of the workflow @NAME@; submit.sh submits it.
@OPTIONS@
set -u
[ -f tasks/@TASK@.sh ] || { echo "$(hostname) cannot read tasks/@TASK@.sh: this folder must be shared" >&2; exit 1; }
export FLOW_RESULTS="$PWD/results" FLOW_FOLDER=@FOLDER@
attempt=1
pause=@PAUSE@
while :; do
    @LIMIT@sh tasks/@TASK@.sh && exit 0
    code=$?
    echo "task @TASK@: attempt $attempt of @ATTEMPTS@ ended with exit code $code" >&2
    case $code in @UNRECOVERABLE@) exit "$code" ;; esac
    [ "$attempt" -lt @ATTEMPTS@ ] || exit "$code"
    sleep "$pause"
    attempt=$((attempt + 1))
    pause=$((pause < 1800 ? pause * 2 : 3600))
done
