"""The same with Gloo, under torchrun; a checkpoint every K steps."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import work

net, optimizer, x, y = work.make()
every, path = int(os.environ.get("K", "0")), os.environ["FOLDER"] + "/checkpoint.pt"
fd = work.log_file()
dist.init_process_group("gloo")
step = 0
if every and os.path.exists(path):
    saved = torch.load(path)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
ddp = DistributedDataParallel(net)
rank, world = dist.get_rank(), dist.get_world_size()
while step < work.STEPS:
    a, b = work.batch(x, y, step, rank, world)
    torch.nn.functional.cross_entropy(ddp(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if every and step % every == 0 and rank == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".new")
        os.rename(path + ".new", path)
    if rank == 0:
        work.log(fd, step, world)
