#!/usr/bin/env python3
"""Trains the model of build/muon (muon.c) with torch.optim.Muon: 300 steps from the same weights
with the same batches.

    python3 tests/bench/muon.py TEXT

Prints the largest difference of a step's loss from PyTorch's: of PyTorch itself when its weights
are changed by 6e-8 of their size, then of tshard at each degree. Last, the validation loss of
Muon and AdamW at several rates.
"""

import subprocess
import sys
import tempfile

import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

STEPS, BATCH, CONTEXT, HEADS, LAYERS = 300, 12, 64, 4, 4
SIGNS = 4  # changed starts


def ours(folder, kind, text, *flags):
    out = subprocess.run(["build/muon", folder, kind, "--text", text, "--chars", "--steps",
                          str(STEPS), *flags], check=True, capture_output=True, text=True).stdout
    return [float(line) for line in out.split()]


def block(w, x, i):
    def linear(x, name):
        return x @ w[f"h.{i}.{name}.weight"] + w[f"h.{i}.{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"h.{i}.{name}.weight"], w[f"h.{i}.{name}.bias"])
    width = x.shape[-1]
    q, k, v = (part.view(*x.shape[:2], HEADS, width // HEADS).transpose(1, 2)
               for part in linear(norm(x, "ln_1"), "attn.c_attn").split(width, dim=2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
    x = x + linear(y, "attn.c_proj")
    hidden = F.gelu(linear(norm(x, "ln_2"), "mlp.c_fc"), approximate="tanh")
    return x + linear(hidden, "mlp.c_proj")


def loss_of(w, ids):
    x = w["wte.weight"][ids[:, :-1]] + w["wpe.weight"][:CONTEXT]
    for i in range(LAYERS):
        x = block(w, x, i)
    x = F.layer_norm(x, x.shape[-1:], w["ln_f.weight"], w["ln_f.bias"])
    return F.cross_entropy((x @ w["wte.weight"].T).flatten(0, 1), ids[:, 1:].flatten())


def theirs(weights, batches, change=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w = {}
    for name, value in weights.items():
        if name == "lm_head.weight":  # tied
            continue
        sign = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        w[name] = (value.double() * (1 + change * sign)).float().requires_grad_()
    muon = [t for name, t in w.items() if t.dim() == 2 and name.startswith("h.")]
    decayed = [w["wte.weight"], w["wpe.weight"]]
    plain = [t for t in w.values() if t.dim() == 1]
    optims = [torch.optim.Muon(muon, lr=1e-3),
              torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                                 {"params": plain, "weight_decay": 0.0}], lr=1e-3,
                                betas=(0.9, 0.99))]
    losses = []
    for ids in batches:
        loss = loss_of(w, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    text = sys.argv[1]
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        ours(folder, "init", text, "--ranks", "1")
        weights = load_file(folder + "/weights.safetensors")
        batches = torch.from_numpy(numpy.fromfile(folder + "/batches.bin", numpy.int32).astype(
            numpy.int64).reshape(STEPS, BATCH, CONTEXT + 1))
        reference = theirs(weights, batches)

        def difference(losses):
            return max(abs(a - b) for a, b in zip(losses, reference))
        for seed in range(SIGNS):
            own = difference(theirs(weights, batches, 6e-8, seed))
            print(f"PyTorch, start changed by 6e-8: {own:.3g}", flush=True)
        for name, *flags in (("tp 1", "--ranks", "1"), ("tp 2", "--ranks", "2"),
                             ("tp 3", "--ranks", "3"),
                             ("dp 2, zero", "--ranks", "2", "--tp", "1", "--dp", "2", "--zero"),
                             ("tp 2, dp 2, zero", "--ranks", "4", "--tp", "2", "--zero")):
            losses = ours(folder, "muon", text, *flags)
            print(f"tshard, {name}: {difference(losses):.3g}; loss of step 1 {losses[0]:.6f}, "
                  f"of step {STEPS} {losses[STEPS - 1]:.4f}", flush=True)
        for kind, rates in (("muon", (3e-3, 1e-2, 2e-2)),
                            ("adamw", (5e-4, 1e-3, 2e-3))):
            for rate in rates:
                print(f"{kind}, rate {rate:g}: validation loss "
                      f"{ours(folder, kind, text, '--lr', str(rate))[-1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
