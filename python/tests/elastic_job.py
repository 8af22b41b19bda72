"""A training for tools/ci/elastic.py: elastic_job.py FOLDER SAMPLES BATCH EPOCHS [WORKERS [PAUSE]].

Writes what `phalanx train` writes, as far as that script reads it: FOLDER/metrics.jsonl, summary.json, and the samples of each
step in FOLDER.seen.PID.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import late
import phalanx.torch.elastic as elastic

folder, samples, batch, epochs, workers, pause = [*sys.argv[1:], 0, 0][:6]
device = "late" if late.library else "cpu"
torch.manual_seed(7)
x = torch.randn(int(samples), 16, dtype=torch.float64)
y = x.sin().sum(1, keepdim=True)
data = TensorDataset(torch.arange(len(x)), x, y)
sampler = elastic.Sampler(data, global_batch_size=int(batch), seed=3)
loader = DataLoader(data, batch_sampler=sampler, num_workers=int(workers))
# Each process has its own weights at first.
torch.manual_seed(time.time_ns() % 1000 if dist.is_torchelastic_launched() else 11)
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
torch.manual_seed(11)
with torch.no_grad():
    first = [torch.randn_like(p) / 8 for p in net.parameters()]
    if os.environ.get("RANK", "0") == "0" and not os.environ.get("PHALANX_JOIN"):
        for p, value in zip(net.parameters(), first):
            p.copy_(value)
net.to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=200)
# Ranks are killed in backward too.
net[2].register_full_backward_hook(lambda *_: time.sleep(float(pause) / 2))
state = elastic.State(model=net, optimizer=optimizer, scheduler=scheduler, sampler=sampler, losses=[])
os.makedirs(folder, exist_ok=True)
seen = open(f"{folder}.seen.{os.getpid()}", "a")


def write(record):
    print(json.dumps(record), file=seen, flush=True)


@elastic.run(state)
def train(state):
    ddp = DistributedDataParallel(state.model, bucket_cap_mb=0.002)
    if dist.get_rank() == 0:
        open(f"{folder}/metrics.jsonl", "a").close()
    for epoch in range(sampler.epoch, int(epochs)):
        sampler.set_epoch(epoch)
        for ids, a, b in loader:
            # Written before the others can complete the step; the last attempt counts.
            generation = state._member.generation() if state._member else 0
            write({"epoch": epoch + 1, "step": sampler.done, "generation": generation, "samples": ids.tolist()})
            loss = sampler.weighted(torch.nn.functional.mse_loss(ddp(a.to(device)), b.to(device)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            # A rank may be lost here too, after the update.
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            state.losses.append(mean.item())
            time.sleep(float(pause) / 2)
            write({"time": time.time(), "generation": generation})
            state.between_steps()
    if dist.get_rank() == 0:
        weights = [p.detach().flatten().tolist() for p in net.parameters()]
        moments = [v["exp_avg_sq"].flatten().tolist() for v in optimizer.state_dict()["state"].values()]
        with open(f"{folder}/summary.json", "w") as file:
            json.dump({"weights": sum(weights, []), "moments": sum(moments, [])}, file)
        with open(f"{folder}/metrics.jsonl", "w") as file:
            for step, loss in enumerate(state.losses):
                print(json.dumps({"step": step, "loss": loss}), file=file)


train()
