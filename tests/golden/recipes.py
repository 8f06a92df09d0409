#!/usr/bin/env python3
"""What PyTorch computes where examples/RECIPES.md has a recipe, as recipes.json: lists of numbers
under the names that tests/compile/recipes.c prints. Needs PyTorch."""

import json
import math
import os

import torch
from torch.nn import functional as F

HERE = os.path.dirname(os.path.abspath(__file__))


def inputs():
    """x (2, 3), v (3), w (4), as recipes.c makes them."""
    x = (torch.arange(6, dtype=torch.float32).reshape(2, 3) - 2) * 0.5
    return x, x[1] * 2, torch.arange(4, dtype=torch.float32) - 1


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
        "unfold": x.unfold(1, 2, 1), "identity": x,
        "scatter": x.scatter(1, index, torch.tensor([[7.0, 8.0], [9.0, 10.0]])),
        "masked_scatter": w.masked_scatter(mask, torch.tensor([5.0, 6.0, 7.0]))}
    with open(os.path.join(HERE, "recipes.json"), "w", encoding="utf-8") as out:
        rows = ['"%s": %s' % (name, json.dumps([float("%.7g" % e) for e in
                                                value.to(torch.float64).flatten().tolist()]))
                for name, value in found.items()]
        out.write("{" + ",\n ".join(rows) + "}\n")


if __name__ == "__main__":
    main()
