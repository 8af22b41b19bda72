"""A program that does not know of Phalanx: unnamed.py FOLDER, under torchrun. Each rank writes what it got to FOLDER/RANK.

``test_as_gloo.py`` runs it on Gloo and in its place.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg
from torch.utils.data import DataLoader

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


def kind(group=None, device="cpu"):
    group = dist.group.WORLD if group is None else group
    return type(group._get_backend(torch.device(device))).__name__


def results(group=None):
    """Of sums that are exact in any order."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    summed = torch.arange(6.0) * (rank + 1)
    dist.all_reduce(summed, group=group)
    parts = [torch.empty(3, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(parts, torch.arange(3) + rank, group=group)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    torch.manual_seed(3)
    model = DistributedDataParallel(Net(), process_group=group)
    model(torch.full((2, 4), float(rank))).sum().backward()
    gradient = model.module.layer.weight.grad.tolist()
    return [dist.get_backend(group), summed.tolist(), [part.tolist() for part in parts], objects, gradient]


def spawned(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/spawned{RANK}", rank=rank, world_size=2)
    with open(f"{folder}/spawned{RANK}.{rank}", "w") as file:
        json.dump([kind(), results()], file)
    dist.destroy_process_group()


class Asks(torch.utils.data.Dataset):
    """Asks a worker."""

    def __len__(self):
        return 1

    def __getitem__(self, _):
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return kind()


def main(folder):
    names = {
        "none": (),
        "of_device": (dist.get_default_backend_for_device("cpu"),),
        "gloo": ("gloo",),
        "upper": ("GLOO",),
        "attribute": (dist.Backend.GLOO,),
        "cpu": ("cpu:gloo",),
        "mixed": ("cpu:gloo,cuda:fake",),
    }
    kinds, got = {}, {}
    workers = DataLoader(Asks(), num_workers=1, batch_size=None, multiprocessing_context="fork")
    kinds["worker"] = next(iter(workers))
    for name, given in names.items():
        dist.init_process_group(*given, init_method=f"file://{folder}/{name}", rank=RANK, world_size=WORLD)
        kinds[name], got[name] = kind(), results()
        if name == "mixed":
            assert kind(device="cuda") == "FakeProcessGroup"
        group = dist.new_group(backend="gloo")
        kinds[name + " group"], got[name + " group"] = kind(group), results(group)
        dist.destroy_process_group()
    dist.init_process_group(backend="fake", store=fake_pg.FakeStore(), rank=RANK, world_size=WORLD)
    assert kind() == "FakeProcessGroup"
    dist.destroy_process_group()
    mesh = init_device_mesh("cpu", (WORLD,))
    kinds["mesh"], got["mesh"] = kind(mesh.get_group()), results(mesh.get_group())
    multiprocessing.spawn(spawned, (folder,), nprocs=2)
    for rank in range(2):
        with open(f"{folder}/spawned{RANK}.{rank}") as file:
            kinds[f"spawned {rank}"], got[f"spawned {rank}"] = json.load(file)
    with open(f"{folder}/{RANK}", "w") as file:
        json.dump([kinds, got, sys.argv[2:]], file)


if __name__ == "__main__":
    main(sys.argv[1])
