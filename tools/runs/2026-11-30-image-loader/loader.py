#!/usr/bin/env python3
"""loader.py FOLDER PROGRAM WORKERS ROUNDS: images per second of PyTorch's DataLoader over torchvision's ImageFolder and of PROGRAM
(our example `image_loader`), in turn: decode, RandomResizedCrop(64), flip, normalize; batches of 64, as many workers."""
import statistics
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

folder, program, workers, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chain = transforms.Compose([
    transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
    transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
])
data = datasets.ImageFolder(folder, chain)
torch.set_num_threads(1)
loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=workers, persistent_workers=True)


def theirs():
    began = time.perf_counter()
    count = sum(len(labels) for _, labels in loader)
    return count / (time.perf_counter() - began)


def ours():
    return float(subprocess.run([program, folder, str(workers)], capture_output=True, text=True, check=True).stdout)


theirs()
pairs = [(ours(), theirs()) for _ in range(rounds)]
for mine, other in pairs:
    print(f"{mine:8.0f} images/s, DataLoader {other:8.0f}, ratio {mine / other:.2f}")
print(f"median ratio {statistics.median(mine / other for mine, other in pairs):.2f} with {workers} workers, torch {torch.__version__}")
