"""The networks of the benchmarks: the documents' (../parity/models.py), GPTs, and MobileNetV2 (the network of
crates/phalanx-nn/tests/fixtures/make_mobilenet.py, which needs no torchvision)."""
import pathlib
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "parity"))
from models import Mnist, ResNet18  # noqa: E402


def mobilenetv2():
    fixture = pathlib.Path(__file__).parents[3] / "crates/phalanx-nn/tests/fixtures/make_mobilenet.py"
    names = {"__file__": str(fixture)}
    exec(fixture.read_text().split("\nwant, initial, net = run(")[0], names)  # its classes, not its run
    net = names["MobileNetV2"](10)
    net.classifier[0].p = 0.2
    return net


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        apart = lambda t: t.unflatten(2, (self.heads, -1)).transpose(1, 2)
        q, k, v = map(apart, self.attn(self.ln_1(x)).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2's network, as nanoGPT builds it, with an output layer of its own; the scores, a row for each place."""

    def __init__(self, vocab, context, layers, heads, width):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[GptBlock(width, heads) for _ in range(layers)])
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        return self.head(self.ln_f(self.blocks(x))).flatten(0, 1)


# Name, then what builds the network and the shape of one of its images; of a GPT, length of a sequence and vocabulary.
MODELS = {"mnist": (Mnist, (1, 28, 28)), "resnet18": (ResNet18, (3, 32, 32)), "mobilenetv2": (mobilenetv2, (3, 32, 32)),
          "gpt": (lambda: Gpt(65, 64, 4, 4, 128), (64, 65)), "gpt2": (lambda: Gpt(50257, 64, 12, 12, 768), (64, 50257))}
