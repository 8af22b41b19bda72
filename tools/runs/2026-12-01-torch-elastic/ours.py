"""Training with phalanx.torch.elastic, under `phalanx launch --elastic`."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import phalanx.torch.elastic as elastic
import work

net, optimizer, x, y = work.make()
every = int(os.environ.get("K", "0"))
more = {"folder": os.environ["FOLDER"], "save_every": every, "resume": True} if every else {}
state = elastic.State(model=net, optimizer=optimizer, step=0, **more)
fd = work.log_file()


@elastic.run(state)
def train(state):
    ddp = DistributedDataParallel(state.model)
    rank, world = dist.get_rank(), dist.get_world_size()
    while state.step < work.STEPS:
        a, b = work.batch(x, y, state.step, rank, world)
        torch.nn.functional.cross_entropy(ddp(a), b).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        state.between_steps()
        if rank == 0:
            work.log(fd, state.step, world)


train()
