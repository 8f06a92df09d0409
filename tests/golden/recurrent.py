#!/usr/bin/env python3
"""Writes recurrent.safetensors beside itself: nn.LSTM and nn.GRU by PyTorch.

    python3 tests/golden/recurrent.py        (PyTorch 2.13)

Of every case: x, the parameters by their names, h0 and c0 if they are given, the gradients gy, gh
and gc of the outputs, and what PyTorch gives: y, h, c, and the gradients of all inputs, "d" before
their names. Computed in double and rounded once. tests/op/test_recurrent.c has the list of cases
and compares.
"""

import random

import torch

from generate import write

tensors = {}


def real(case, key, shape, bound=1.5):
    rng = random.Random("%s.%s" % (case, key))
    count = torch.Size(shape).numel()
    t = torch.tensor([rng.uniform(-bound, bound) for _ in range(count)], dtype=torch.float32)
    tensors["%s.%s" % (case, key)] = t.reshape(shape)
    return t.reshape(shape).double()


def run(case, steps=4, batch=3, features=3, hidden=5, state=False, flat=False, **options):
    lstm = case.startswith("lstm")
    net = (torch.nn.LSTM if lstm else torch.nn.GRU)(features, hidden, **options).double()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(real(case, name, p.shape, 0.7))
    first = options.get("batch_first", False)
    shape = (steps, features) if flat else (batch, steps, features) if first \
        else (steps, batch, features)
    x = real(case, "x", shape).requires_grad_()
    many = net.num_layers * (2 if net.bidirectional else 1)
    size = (many, hidden) if flat else (many, batch, hidden)
    states = []
    if state:
        states = [real(case, key, size).requires_grad_() for key in ("h0", "c0")[:1 + lstm]]
    y, last = net(x, None if not state else tuple(states) if lstm else states[0])
    last = last if lstm else (last,)
    loss = (y * real(case, "gy", y.shape)).sum()
    for key, t in zip(("h", "c"), last):
        loss = loss + (t * real(case, "g" + key, t.shape)).sum()
        tensors["%s.%s" % (case, key)] = t.float()
    loss.backward()
    tensors[case + ".y"] = y.float()
    tensors[case + ".dx"] = x.grad.float()
    for key, t in zip(("h0", "c0"), states):
        tensors["%s.d%s" % (case, key)] = t.grad.float()
    for name, p in net.named_parameters():
        tensors["%s.d%s" % (case, name)] = p.grad.float()


for kind in ("lstm", "gru"):
    run(kind + "_plain")
    run(kind + "_state", state=True)
    run(kind + "_free", bias=False, state=True)
    run(kind + "_first", batch_first=True, state=True)
    run(kind + "_both", bidirectional=True, state=True)
    run(kind + "_two", num_layers=2, state=True)
    run(kind + "_all", num_layers=2, bidirectional=True, batch_first=True, state=True)
    run(kind + "_all_free", num_layers=2, bidirectional=True, bias=False)
    run(kind + "_step", steps=1, state=True)
    run(kind + "_one", batch=1, state=True)
    run(kind + "_flat", flat=True, state=True)
    run(kind + "_wide", steps=3, batch=13, features=7, hidden=37, state=True)
print(write("recurrent", tensors), "bytes")
