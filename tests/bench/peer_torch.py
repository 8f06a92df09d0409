#!/usr/bin/env python3
"""Training steps of examples/gpt.c's model in PyTorch; the last line is "tokens/s N". With --serve
it answers the commands of bench_step.c instead.

The GPT-2 architecture with biases, tied output weights and tanh gelu, as PyTorch 2 does it best on
a CPU: scaled_dot_product_attention, fused AdamW; gradients are clipped to norm 1. --mode f32;
autocast, where weights stay in float32 and products are in bfloat16; or bf16, where all is in
bfloat16 (model.bfloat16()). --compile: torch.compile, which takes its time at the first step.
"""

import argparse
import resource
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.c_attn(x).split(width, dim=2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocabulary, layers, heads, width, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        logits = F.linear(self.ln_f(self.h(x)), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Training:
    def __init__(self, args):
        with open(args.text, encoding="utf-8") as file:
            text = file.read()
        number = {char: i for i, char in enumerate(sorted(set(text)))}
        self.data = torch.tensor([number[char] for char in text])
        self.batch, self.context = args.batch, args.context
        self.model = GPT(max(args.vocabulary, len(number)), args.layers, args.heads, args.width,
                         args.context)
        self.autocast = args.mode == "autocast"
        if args.mode == "bf16":
            self.model.bfloat16()
        if args.compile:
            self.model = torch.compile(self.model)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.99),
                                           fused=True)

    def step(self):
        starts = torch.randint(len(self.data) - self.context - 1, (self.batch,)).tolist()
        ids = torch.stack([self.data[at:at + self.context] for at in starts])
        targets = torch.stack([self.data[at + 1:at + 1 + self.context] for at in starts])
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            loss = self.model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        return loss.item()

    def seconds(self, steps):
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        return time.perf_counter() - begin, loss

    def serve(self):
        for line in sys.stdin:
            name, _, count = line.split()
            if name == "memory":
                print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)
            else:
                print("%.0f" % (1e6 * self.seconds(int(count))[0] / int(count)), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--mode", choices=("f32", "autocast", "bf16"), default="f32")
    for name, value in (("threads", 1), ("layers", 4), ("heads", 4), ("width", 128),
                        ("context", 64), ("batch", 12), ("vocabulary", 0), ("steps", 60),
                        ("warmup", 5)):
        parser.add_argument("--" + name, type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    training = Training(args)
    if args.serve:
        training.serve()
        return
    training.seconds(args.warmup)
    seconds, loss = training.seconds(args.steps)
    print("loss %.4f" % loss)
    print("tokens/s %.0f" % (args.steps * args.batch * args.context / seconds))


if __name__ == "__main__":
    main()
