#!/bin/sh
# The boot command of a ModelArts training job with one or more nodes:
#   sh modelarts.sh resnet18 --data /home/ma-user/cifar-10 --epochs 10
# Environment variables to set in the job:
#   PHALANX_TOKEN   the text of a file that `phalanx token --out job.token` made
#   RUN             folder for checkpoints and results, on storage that is mounted on the nodes
#                   (default: that of --train_url, which ModelArts appends for an output)
#   RANKS           ranks on each node (default: 2)
# ModelArts sets VC_WORKER_NUM, VC_TASK_INDEX and VC_WORKER_HOSTS, which phalanx reads. Flags that are typed after the recipe
# take precedence over those below.
set -eu
recipe=${1:?the name of a recipe is expected, such as resnet18}
shift
exec phalanx train "$recipe" --nproc-per-node "${RANKS:-2}" --save-every 500 --resume auto ${RUN:+--output-dir "$RUN"} "$@"
