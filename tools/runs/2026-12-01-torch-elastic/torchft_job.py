"""The same with torchft: each replica group is a torchrun with one rank; after train_ddp.py of torchft."""
import os
from datetime import timedelta

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import work

net, plain, x, y = work.make()
fd = work.log_file()
group = int(os.environ["REPLICA_GROUP_ID"])


def load_state_dict(state):
    ddp.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


def state_dict():
    return {"model": ddp.state_dict(), "optim": optimizer.state_dict()}


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"train_{group}",
    timeout=timedelta(seconds=30),
)
ddp = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, plain)
while manager.current_step() < work.STEPS:
    # A replica group takes its half of a batch, also when it is alone: so torchft means it.
    a, b = work.batch(x, y, manager.current_step(), group, 2)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(ddp(a), b).backward()
    optimizer.step()
    # Steps, and the batches of replica groups in them.
    if manager.participating_rank() == 0:
        work.log(fd, manager.current_step(), manager.num_participants())
