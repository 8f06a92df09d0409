#!/usr/bin/env python3
"""Writes elementwise.safetensors beside itself: what PyTorch computes for the ops of
tests/op/test_elementwise.c, with values where functions have edges, ties, infinities and NaN.

    python3 tests/golden/elementwise.py        (PyTorch 2.13)

The format is that of generate.py.
"""

import math

import torch
import torch.nn.functional as F

from generate import Cases, write

NAN, INF = math.nan, math.inf
EDGES = [NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.0, -3.0, 6.0, -6.0, 1e-6,
         -1e-6, 1e-3, -1e-3, 20.5, -20.5, 0.1, 0.9, 1.1]
UNARY = {
    "abs": torch.abs, "sign": torch.sign, "sin": torch.sin, "cos": torch.cos, "floor": torch.floor,
    "ceil": torch.ceil, "round": torch.round, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "log1p": torch.log1p, "expm1": torch.expm1, "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, beta=2.5), "elu": F.elu,
    "elu_alpha": lambda x: F.elu(x, alpha=-0.7), "leaky_relu": F.leaky_relu,
    "leaky_relu_slope": lambda x: F.leaky_relu(x, 0.3),
    "leaky_relu_zero": lambda x: F.leaky_relu(x, 0.0), "selu": F.selu, "mish": F.mish,
    "relu6": F.relu6, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
    "log_sigmoid": F.logsigmoid, "clamp": lambda x: torch.clamp(x, -1.5, 2.5),
    "clamp_min": lambda x: torch.clamp(x, min=0.5), "clamp_max": lambda x: torch.clamp(x, max=0.0),
    "clamp_crossed": lambda x: torch.clamp(x, 2.5, -1.5)}
FAR = [1e4, -1e4, 1e5, -99999.7, 1e6, 1e9, -3e12, 1e20, 3.4e38, -2.7e30, 4.2e8, 355.0]


def maps(c):
    for name, fn in UNARY.items():
        edges = [x for x in EDGES if not (name == "mish" and math.isinf(x))]  # torch: NaN
        edges += [0.3, 0.7] * (len(edges) % 2)
        c.add(name, fn, torch.cat([torch.tensor(edges[:22]).reshape(2, 11),
                                   c.real(name, "more", (2, 11), -5, 5)], 0).reshape(4, 11))
    c.add("sin_far", torch.sin, torch.tensor(FAR).reshape(3, 4))
    c.add("cos_far", torch.cos, torch.tensor(FAR).reshape(3, 4))
    a = torch.tensor([1.0, 2.0, 2.0, NAN, 1.0, NAN, INF, -INF, 0.0]).reshape(3, 3)
    b = torch.tensor([2.0, 1.0, 2.0, 1.0, NAN, NAN, INF, 3.0, 0.0]).reshape(3, 3)
    for name, fn in {"maximum": torch.maximum, "minimum": torch.minimum}.items():
        c.add(name, fn, a, b)
        c.add(name + "_row", fn, (3, 5), (1, 5))
        c.add(name + "_column", fn, (3, 1), (4, 3, 5))
    mask = torch.tensor([[1, 0, 0, 2], [0, 0, -1, 0]])
    c.add("masked_fill", lambda x, m: x.masked_fill(m != 0, 0.75), (2, 4), mask)
    c.add("masked_fill_row", lambda x, m: x.masked_fill(m != 0, -INF), (3, 2, 4), mask)
    c.add("masked_fill_wide", lambda x, m: x.masked_fill(m != 0, 2), (1, 4), mask)


ROWS = [
    [NAN, 1, 2], [INF, 1, 2], [-INF, 1, 2], [-INF, -INF, -INF], [0, 0, 0], [0, -2, 0], [3, -3, 3],
    [2, 1, 1], [1, NAN, NAN], [-INF, INF, 0], [1e-12, 1e-12, 2e-12], [0, 3, 0]]
INFINITE = 9  # the row for which torch multiplies 0 by infinity if p is 1/2
REDUCTIONS = {
    "min": lambda x, d, k: torch.min(x, d, k)[0], "argmin": torch.argmin,
    "logsumexp": torch.logsumexp, "var": lambda x, d, k: torch.var(x, d, keepdim=k),
    "var_zero": lambda x, d, k: torch.var(x, d, correction=0, keepdim=k),
    "var_three": lambda x, d, k: torch.var(x, d, correction=3, keepdim=k),
    "std": lambda x, d, k: torch.std(x, d, keepdim=k),
    "prod": torch.prod}
for p, name in ((0.0, "0"), (0.5, "half"), (1.0, "1"), (1.5, "3_2"), (2.0, "2"), (3.0, "3"),
                (-1.0, "minus"), (INF, "inf"), (-INF, "least")):
    REDUCTIONS["norm_" + name] = lambda x, d, k, p=p: torch.linalg.vector_norm(x, p, d, k)


def reductions(c):
    rows = torch.tensor(ROWS, dtype=torch.float32)
    for name, fn in REDUCTIONS.items():
        c.add(name, lambda x: fn(x, 1, False), (4, 7, 3))
        c.add(name + "_keep", lambda x: fn(x, -1, True), (3, 70))
        edges = rows if name != "norm_half" else torch.cat([rows[:INFINITE], rows[INFINITE + 1:]])
        c.add(name + "_edges", lambda x: fn(x, 1, False), edges)
        if name not in ("min", "prod", "argmin"):  # torch.min(x): a gradient for all ties
            c.add(name + "_all", lambda x: fn(x, (0, 1), False), (5, 9))
    for name in ("var", "std"):
        c.add(name + "_one", lambda x: REDUCTIONS[name](x, 1, False), (3, 1))
        c.add(name + "_same", lambda x: REDUCTIONS[name](x, 1, False), torch.full((2, 5), 1.5))
        c.add(name + "_far", lambda x: REDUCTIONS[name](x, 1, False),
              c.real(name, "far", (3, 40)) + 1000)
    c.add("prod_all", torch.prod, (3, 4))
    c.add("cumsum", lambda x: torch.cumsum(x, 1), (4, 7, 3))
    c.add("cumsum_last", lambda x: torch.cumsum(x, -1), (37, 5))
    c.add("cumsum_first", lambda x: torch.cumsum(x, 0), (6, 50))
    c.add("cumsum_edges", lambda x: torch.cumsum(x, 1), rows)
    c.add("cumsum_integers", lambda x: torch.cumsum(x, 0),
          torch.tensor([[3, -1, 1 << 40], [1, 1, 1 << 40], [0, -7, 5]]))


def main():
    c = Cases()
    maps(c)
    reductions(c)
    print("elementwise.safetensors: %d bytes" % write("elementwise", c.tensors))


if __name__ == "__main__":
    main()
