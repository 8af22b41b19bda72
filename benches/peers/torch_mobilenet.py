#!/usr/bin/env python3
"""Whole training steps of MobileNetV2 (the network of crates/phalanx-nn/tests/fixtures/make_mobilenet.py, which needs
no torchvision) on 32x32 noise by PyTorch: forward, backward, SGD with momentum, loss.item(). One JSON line.

    python torch_mobilenet.py BATCH THREADS [channels-last]
"""
import json
import pathlib
import resource
import statistics
import sys
import time

import torch
from torch import nn

FIXTURE = pathlib.Path(__file__).parents[2] / "crates/phalanx-nn/tests/fixtures/make_mobilenet.py"
names = {"__file__": str(FIXTURE)}
exec(FIXTURE.read_text().split("\nwant, initial, net = run(")[0], names)  # its classes, not its run

batch, threads, last = int(sys.argv[1]), int(sys.argv[2]), "channels-last" in sys.argv
torch.set_num_threads(threads)
torch.manual_seed(1)
net = names["MobileNetV2"](10)
net.classifier[0].p = 0.2
x, y = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
if last:
    net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
times = []
for i in range(20):
    began = time.perf_counter()
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    times.append(time.perf_counter() - began)
step = statistics.median(times[5:])
print(json.dumps({"peer": "torch " + torch.__version__, "channels_last": last, "threads": threads, "batch": batch,
                  "step_ms_median": step * 1e3, "images_per_s": batch / step,
                  "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
