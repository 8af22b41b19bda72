"""The training of crates/phalanx/examples/nanogpt.rs in PyTorch: `pytorch.py TEXT SAMPLES METRICS STEPS` trains on the windows
that the program logged (`--log-samples`), from the initial weights that PyTorch draws from the same seed, and compares the
losses with those of the program's metrics.jsonl."""

import json
import sys

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT, LAYERS, HEADS, WIDTH = 64, 4, 4, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, bias=False)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
        self.ln_2 = nn.LayerNorm(WIDTH, bias=False)
        self.fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, mask):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.wte = nn.Embedding(vocabulary, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02 / (2 * LAYERS if name.endswith("proj.weight") else 1) ** 0.5)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.wte(tokens) + self.wpe(torch.arange(length))
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x) @ self.wte.weight.T


text, samples, metrics, steps = sys.argv[1:]
steps = int(steps)
text = open(text).read()
characters = sorted(set(text))
data = torch.tensor([characters.index(c) for c in text[: int(0.9 * len(text))]])
torch.set_num_threads(1)
torch.manual_seed(1)
model = Gpt(len(characters))
matrices = [p for p in model.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if p.dim() != 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
warm = max(steps // 20, 1)
schedule = torch.optim.lr_scheduler
schedule = schedule.SequentialLR(
    optimizer,
    [
        schedule.LinearLR(optimizer, 1 / warm, 1.0, warm),
        schedule.CosineAnnealingLR(optimizer, steps - warm + 1, 1e-4),
    ],
    [warm],
)
ours = [json.loads(line) for line in open(metrics)]
ours = [record["loss"] for record in ours if "loss" in record]
worst = 0.0
for line, loss in zip(open(samples), ours):
    windows = json.loads(line)["samples"]
    x = torch.stack([data[i : i + CONTEXT] for i in windows])
    y = torch.stack([data[i + 1 : i + 1 + CONTEXT] for i in windows])
    own = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    own.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    worst = max(worst, abs(own.item() - loss))
    print(f"{own.item():.7f} {loss:.7f}")
print(f"torch {torch.__version__}: {len(ours)} losses, largest difference {worst:.1e}")
