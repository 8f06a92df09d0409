#!/usr/bin/env python3
"""Writes outer.safetensors beside itself: outer steps of replicas that train apart, in double, with
optimisers of PyTorch 2.13; the bits of the doubles are written as int64. test_outer.c computes the
same.

    python3 tests/golden/outer.py

DiLoCo is algorithm 1 of arXiv 2311.08105, Streaming DiLoCo algorithm 2 of arXiv 2501.18512. The
gradient of element e of all parameters of replica m in step s is
x - sin(0.37 e e + 0.3 s e + s + 1.7 m).

"case.outer": the outer weights after STEPS steps, parameters one after the other. "case.replica":
what replica 0 has.
"""

import math
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from generate import write

SHAPES = [(7, 10), (7,), (10, 7), (10,)]
STEPS = 24
torch.set_default_dtype(torch.float64)


def begin():
    first, out = 0, []
    for shape in SHAPES:
        n = math.prod(shape)
        out.append(torch.tensor([0.1 * math.cos(0.7 * e) for e in range(first, first + n)])
                   .reshape(shape))
        first += n
    return out


def give(params, s, m):
    first = 0
    for p in params:
        n = p.numel()
        target = torch.tensor([math.sin(0.37 * e * e + 0.3 * s * e + s + 1.7 * m)
                               for e in range(first, first + n)]).reshape(p.shape)
        p.grad = p.detach() - target
        first += n


def deal(fragments):
    """Each parameter to the fragment with the fewest elements so far."""
    load, of = [0] * fragments, []
    for shape in SHAPES:
        least = load.index(min(load))
        of.append(least)
        load[least] += math.prod(shape)
    return of


def train(replicas, every, inner, lr=0.7, momentum=0.9, fragments=1, delay=0, mix=0.0):
    outer = [torch.nn.Parameter(t) for t in begin()]
    of = deal(fragments)
    steps = [torch.optim.SGD([p for p, f in zip(outer, of) if f == i], lr=lr, momentum=momentum,
                             nesterov=momentum > 0)
             for i in range(fragments)]
    local = [[torch.nn.Parameter(t) for t in begin()] for _ in range(replicas)]
    optims = [inner(params) for params in local]
    flying = []  # (step at which it is used, fragment, outer gradients)
    for s in range(1, STEPS + 1):
        for m in range(replicas):
            give(local[m], s, m)
            optims[m].step()
        sent = s * fragments // every
        if sent > (s - 1) * fragments // every:
            i = (sent - 1) % fragments
            mine = [k for k in range(len(SHAPES)) if of[k] == i]
            changes = {k: sum(outer[k].detach() - local[m][k].detach() for m in range(replicas)) /
                       replicas for k in mine}
            flying.append((s + delay, i, changes))
        for due, i, changes in [f for f in flying if f[0] == s]:
            for k, change in changes.items():
                outer[k].grad = change
            steps[i].step()
            for k in changes:
                for m in range(replicas):
                    local[m][k].data = mix * local[m][k].data + (1 - mix) * outer[k].data
        flying = [f for f in flying if f[0] > s]
    return outer, local


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


CASES = {
    "usual2": (2, 6, adamw, {}),
    "usual3": (3, 6, adamw, {}),
    "usual4": (4, 5, adamw, {}),
    "average": (2, 1, sgd, {"lr": 1.0, "momentum": 0.0}),
    "fragments": (2, 6, adamw, {"fragments": 3}),
    "streams2": (2, 6, adamw, {"fragments": 2, "delay": 2, "mix": 0.5}),
    "streams3": (3, 7, adamw, {"fragments": 3, "delay": 5, "mix": 0.25, "lr": 0.4,
                               "momentum": 0.8}),
}


def main():
    tensors = {}
    for name, (replicas, every, inner, options) in CASES.items():
        outer, local = train(replicas, every, inner, **options)
        tensors[name + ".outer"] = torch.cat([p.detach().reshape(-1) for p in outer])
        tensors[name + ".replica"] = torch.cat([p.detach().reshape(-1) for p in local[0]])
    write("outer", {key: t.view(torch.int64) for key, t in tensors.items()})


if __name__ == "__main__":
    main()
