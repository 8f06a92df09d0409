#!/usr/bin/env python3
"""What PyTorch computes where examples/RECIPES.md has a recipe, as recipes.json: lists of numbers
under the names that tests/compile/recipes.c prints. Needs PyTorch."""

import json
import math
import os

import torch
from torch import nn
from torch.nn import functional as F

HERE = os.path.dirname(os.path.abspath(__file__))


def inputs():
    """x (2, 3), v (3), w (4), as recipes.c makes them."""
    x = (torch.arange(6, dtype=torch.float32).reshape(2, 3) - 2) * 0.5
    return x, x[1] * 2, torch.arange(4, dtype=torch.float32) - 1


def model():
    """A chain of two linears, 3 to 4 to 2, with weights by arithmetic."""
    def layer(n_in, n_out, bias=True):
        made = nn.Linear(n_in, n_out, bias=bias)
        with torch.no_grad():
            made.weight.copy_((torch.arange(n_in * n_out).reshape(n_out, n_in) % 5 - 2) * 0.25)
            if bias:
                made.bias.copy_(torch.arange(n_out) * 0.5)
        return made
    return layer


def frozen(x):
    """The gradients of the loss where the first of two layers is frozen."""
    layer = model()
    first, second = layer(3, 4), layer(4, 2)
    first.requires_grad_(False)
    (second(torch.tanh(first(x))) ** 2).sum().backward()
    assert first.weight.grad is None
    return second.weight.grad


def lora(x):
    """y = base(x) + alpha / rank b(a(x)), and the gradient of b."""
    layer = model()
    base, a, b = layer(3, 4), layer(3, 2, bias=False), layer(2, 4, bias=False)
    base.requires_grad_(False)
    y = base(x) + 8 / 2 * b(a(x))
    (y ** 2).sum().backward()
    return torch.cat((y.detach().flatten(), b.weight.grad.flatten()))


def main():
    x, v, w = inputs()
    odd = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    mesh = torch.meshgrid(v, w, indexing="ij")
    index = torch.tensor([[2, 0], [1, 2]])
    mask = torch.tensor([True, False, True, True])
    found = {
        "repeat": x.repeat(1, 3), "repeat_interleave": x.repeat_interleave(2, 1),
        "any": torch.stack((x.any(), torch.zeros(3).any())),
        "all": torch.stack((x.all(), torch.ones(3).all())),
        "meshgrid": torch.stack(mesh), "linspace": torch.linspace(-1, 2, 7), "eye": torch.eye(3),
        "normalize": F.normalize(torch.cat((x, torch.zeros(1, 3))), dim=-1),
        "is_finite": torch.isfinite(odd), "is_inf": torch.isinf(odd), "is_nan": torch.isnan(odd),
        "unfold": x.unfold(1, 2, 1), "identity": x, "freeze": frozen(x), "lora": lora(x),
        "scatter": x.scatter(1, index, torch.tensor([[7.0, 8.0], [9.0, 10.0]])),
        "masked_scatter": w.masked_scatter(mask, torch.tensor([5.0, 6.0, 7.0]))}
    with open(os.path.join(HERE, "recipes.json"), "w", encoding="utf-8") as out:
        rows = ['"%s": %s' % (name, json.dumps([float("%.7g" % e) for e in
                                                value.to(torch.float64).flatten().tolist()]))
                for name, value in found.items()]
        out.write("{" + ",\n ".join(rows) + "}\n")


if __name__ == "__main__":
    main()
