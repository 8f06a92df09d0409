#!/usr/bin/env python3
"""Writes lora.safetensors beside itself: a linear layer with adapters of low rank, by PyTorch.

    python3 tests/golden/lora.py      (torch, transformers, peft 0.21 and safetensors)

y = x W^T + b + s (x A^T) B^T, as in PEFT, and the gradients of sum(g y). Values of W, W4 and b
have few bits: quantised to 8 and to 4 bits they stay as they are ("w" in q8_0 and bf16, "w4" in
q4_0).
"rs": s is alpha / sqrt(rank). "parts": the layer is three of a file, with an A and B each. "train":
losses of five steps of AdamW on mean(y^2), from B = 0, and y after them.

Writes peft.safetensors, too: adapter_model.safetensors as PEFT saves it, of a small model with
torch's Linear and GPT-2's Conv1D; "peft" has the model's weights, an input and its output.
"""

import os
import shutil
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

HERE = os.path.dirname(os.path.abspath(__file__))
IN, OUT, RANK, ALPHA = 64, 12, 3, 8
PARTS = (6, 4, 2)


def coarse(rows, low, high, scale):
    """Integers from low to high, times scale; each block of 32 has the one of largest magnitude."""
    w = torch.randint(low, high + 1, (rows, IN))
    w[:, ::32] = low
    return (w * scale).double()


def layer(x, w, b, adapters, s):
    y = x @ w.T + b
    return y + s * torch.cat([x @ a.T @ bb.T for a, bb in adapters], -1)


def gradients(to, name, x, w, b, adapters, s, g):
    """Writes y and the gradients of x, and of every A and B."""
    leaves = [x] + [t for pair in adapters for t in pair]
    leaves = [t.clone().requires_grad_() for t in leaves]
    pairs = list(zip(leaves[1::2], leaves[2::2]))
    y = layer(leaves[0], w, b, pairs, s)
    (y * g).sum().backward()
    to[name + ".y"], to[name + ".dx"] = y.detach(), leaves[0].grad
    for i, (a, bb) in enumerate(pairs):
        to[f"{name}.da{i}"], to[f"{name}.db{i}"] = a.grad, bb.grad


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = torch.nn.Linear(IN, OUT)
        self.c_fc = Conv1D(9, OUT)

    def forward(self, x):
        return self.c_fc(torch.relu(self.q_proj(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList([Block()])
        self.head = torch.nn.Linear(9, 4)

    def forward(self, x):
        return self.head(self.h[0](x))


def peft(out, x):
    """A model with adapters by PEFT, whose B are not 0, and the file that PEFT writes."""
    model = Model().float()
    for name, t in model.named_parameters():
        out["peft." + name] = t.detach().clone()
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "c_fc"])
    model = get_peft_model(model, config)
    for name, t in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(t)
    out["peft.y"] = model(x.float()).detach()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shutil.copyfile(os.path.join(folder, "adapter_model.safetensors"),
                        os.path.join(HERE, "peft.safetensors"))


def main():
    torch.manual_seed(46)
    randn = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    x, b, g = randn(2, 5, IN), (randn(OUT) * 16).round() / 16, randn(2, 5, OUT)
    w, w4 = coarse(OUT, -127, 127, 1 / 128), coarse(OUT, -8, 7, 1 / 16)
    a, bb = randn(RANK, IN) / 8, randn(OUT, RANK)
    s = ALPHA / RANK
    out = {"base.x": x, "base.bias": b, "base.g": g, "base.w": w, "base.w4": w4}
    for name in ("one", "four", "rs"):
        out[name + ".a0"], out[name + ".b0"] = a, bb
    gradients(out, "one", x, w, b, [(a, bb)], s, g)
    gradients(out, "four", x, w4, b, [(a, bb)], s, g)
    gradients(out, "rs", x, w, b, [(a, bb)], ALPHA / RANK ** 0.5, g)
    pairs = [(randn(RANK, IN) / 8, randn(n, RANK)) for n in PARTS]
    for i, (pa, pb) in enumerate(pairs):
        out[f"parts.a{i}"], out[f"parts.b{i}"] = pa, pb
    gradients(out, "parts", x, w, b, pairs, s, g)
    out["one.merged"] = w + s * bb @ a
    ta, tb = a.clone().requires_grad_(), torch.zeros(OUT, RANK, dtype=torch.float64,
                                                    requires_grad=True)
    optim = torch.optim.AdamW([ta, tb], lr=0.01, weight_decay=0.1)
    losses = []
    for _ in range(5):
        loss = (layer(x, w, b, [(ta, tb)], s) ** 2).mean()
        losses.append(loss.item())
        optim.zero_grad()
        loss.backward()
        optim.step()
    out["train.losses"] = torch.tensor(losses, dtype=torch.float64)
    out["train.y"] = layer(x, w, b, [(ta, tb)], s).detach()
    peft(out, x)
    save_file({k: v.float().contiguous() for k, v in out.items()},
              os.path.join(HERE, "lora.safetensors"))


if __name__ == "__main__":
    main()
