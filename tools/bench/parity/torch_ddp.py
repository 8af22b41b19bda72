#!/usr/bin/env python3
"""PyTorch's side of `run.py`: the documents' networks trained by DistributedDataParallel on Gloo, on the real data.

    torch_ddp.py mnist    --data ../shared/data/mnist   --world 2 --epochs 3 --out there.json
    torch_ddp.py resnet18 --data ../shared/data/cifar-10 --world 1 --steps 20 --dtype f64 --out there.json

Weights come from `torch.manual_seed`, the order of samples from `DistributedSampler(seed=...)` with `set_epoch` counted
from 0; both are what `phalanx train --seed ... --sampler torch` has. Writes the SHA-256 of the initial weights, rank 0's
loss of every step and, after whole epochs, the accuracy on the test set.
"""
import argparse
import gzip
import json
import os
import pathlib
import pickle
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
import ranks  # noqa: E402

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("program", choices=["mnist", "resnet18"])
p.add_argument("--data", required=True, type=pathlib.Path)
p.add_argument("--world", type=int, default=1)
p.add_argument("--threads", type=int, default=1)
p.add_argument("--dtype", choices=["f32", "f64"], default="f32")
p.add_argument("--seed", type=int, default=1)
p.add_argument("--lr", type=float, required=True)
p.add_argument("--momentum", type=float, default=0.9, help="mnist")
p.add_argument("--dropout", default="0.25,0.5", help="mnist")
p.add_argument("--batch-size", type=int, default=64)
p.add_argument("--epochs", type=int, default=1)
p.add_argument("--steps", type=int, help="stop after so many, without a test")
p.add_argument("--out", required=True)
args = p.parse_args()


def idx(name, skip):
    import numpy as np
    with gzip.open(args.data / f"{name}.gz") as file:
        return np.frombuffer(file.read()[skip:], dtype=np.uint8)


def data():
    """Images and labels, training and test, as the documents' loaders give them."""
    import numpy as np
    import torch
    if args.program == "mnist":
        sets = []
        for part in ("train", "t10k"):
            pixels = torch.from_numpy(idx(f"{part}-images-idx3-ubyte", 16).copy()).view(-1, 1, 28, 28)
            images = (pixels.float() / 255 - 0.1307) / 0.3081       # ToTensor, Normalize
            labels = torch.from_numpy(idx(f"{part}-labels-idx1-ubyte", 8).copy()).long()
            sets.append(torch.utils.data.TensorDataset(images, labels))
        return sets
    sets = []
    for files in ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]):
        images, labels = [], []
        for name in files:
            with open(args.data / "cifar-10-batches-py" / name, "rb") as file:
                batch = pickle.load(file, encoding="bytes")
            images.append(batch[b"data"].reshape(-1, 3, 32, 32) / 255)
            labels += batch[b"labels"]
        images = torch.from_numpy(np.concatenate(images)).float()
        sets.append(torch.utils.data.TensorDataset(images, torch.tensor(labels)))
    return sets


def worker():
    rank = int(os.environ["RANK"])
    import torch
    import torch.nn.functional as F
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    import models
    torch.set_num_threads(args.threads)
    dtype = {"f32": torch.float32, "f64": torch.float64}[args.dtype]
    import torch.distributed as dist
    dist.init_process_group("gloo")
    train_set, test_set = data()
    sampler = torch.utils.data.distributed.DistributedSampler(train_set, seed=args.seed)
    document = args.program == "resnet18"
    loader = torch.utils.data.DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=document)
    test_loader = torch.utils.data.DataLoader(test_set, batch_size=500)

    torch.manual_seed(args.seed)
    if document:
        net, loss_of = models.ResNet18(), F.cross_entropy
    else:
        net, loss_of = models.Mnist([float(v) for v in args.dropout.split(",")]), F.nll_loss
    initial = models.digest(net)
    net = net.to(dtype)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    if document:
        optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=args.momentum)
    torch.manual_seed(args.seed + 1000 * (rank + 1))  # dropout masks of its own on each rank

    losses, accuracies, began = [], [], time.time()
    done = False
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(ddp(images.to(dtype)), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            done = len(losses) == args.steps
            if done:
                break
        if done:
            break
        if rank == 0:
            # Without the wrapper, whose buffers would be broadcast.
            net.eval()
            with torch.no_grad():
                right = sum((net(x.to(dtype)).argmax(1) == y).sum().item() for x, y in test_loader)
            accuracies.append(right / len(test_set))
        dist.barrier()
    if rank == 0:
        pathlib.Path(args.out).write_text(json.dumps({
            "torch": torch.__version__, "initial_sha256": initial, "losses": losses, "accuracies": accuracies,
            "seconds": time.time() - began}))
    dist.barrier()
    dist.destroy_process_group()


if "PARITY_RANK" in os.environ:
    worker()
    sys.exit()
ranks.start(args.world, args.threads, PARITY_RANK="1", OMP_WAIT_POLICY="passive")
