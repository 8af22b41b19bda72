"""Starts a script once for each rank, as torchrun would on one host."""
import os
import socket
import subprocess
import sys


def start(world, threads, **variables):
    """Starts this script with its arguments and `variables` as `world` ranks, and ends with their code."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS=str(threads),
               GLOO_SOCKET_IFNAME="lo", **variables)
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=dict(env, RANK=str(r))) for r in range(world)]
    sys.exit(max(abs(r.wait()) for r in ranks))
