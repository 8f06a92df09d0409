#!/usr/bin/env python3
"""Writes channel_norm.safetensors beside itself: batch, group and instance norm by PyTorch.

    python3 tests/golden/channel_norm.py        (PyTorch 2.13)

Of every case of an op: x, weight and bias, the gradient g of the output, and what PyTorch gives:
y, dx, dw, db, and the running statistics after the call. "steps" is nn.BatchNorm1d over three
batches in training and one in evaluation, "average" the same with momentum=None. Gradients and
values are computed in double and rounded once. tests/op/test_channel_norm.c and
tests/layer/test_norm_layers.c compare.
"""

import random

import torch
import torch.nn.functional as F

from generate import write

SHAPES = {"rows": (5, 3), "wide": (6, 70), "runs": (4, 3, 7), "images": (2, 4, 5, 9),
          "long": (3, 2, 100), "volume": (2, 4, 2, 3, 2), "one": (1, 4, 6)}
tensors = {}


def real(case, key, shape, low=-2.0, high=2.0, shift=0.0):
    rng = random.Random("%s.%s" % (case, key))
    count = torch.Size(shape).numel()
    t = torch.tensor([rng.uniform(low, high) + shift for _ in range(count)], dtype=torch.float32)
    tensors["%s.%s" % (case, key)] = t.reshape(shape)
    return t.reshape(shape).double()


def keep(case, **values):
    for key, t in values.items():
        tensors["%s.%s" % (case, key)] = t if t.dtype == torch.int64 else t.float()


def inputs(case, shape, affine, shift=0.0):
    x = real(case, "x", shape, shift=shift).requires_grad_()
    w = real(case, "w", (shape[1],)).requires_grad_() if affine else None
    b = real(case, "b", (shape[1],)).requires_grad_() if affine else None
    return x, w, b, real(case, "g", shape)


def gradients(case, y, x, w, b, g):
    y.backward(g)
    keep(case, y=y, dx=x.grad)
    if w is not None:
        keep(case, dw=w.grad, db=b.grad)


def batch(case, shape, training, affine=True, shift=0.0, **options):
    x, w, b, g = inputs(case, shape, affine, shift)
    mean = real(case, "mean", (shape[1],))
    var = real(case, "var", (shape[1],), 0.5, 2.0)
    y = F.batch_norm(x, mean, var, w, b, training, **options)
    gradients(case, y, x, w, b, g)
    keep(case, mean_after=mean, var_after=var)


def group(case, shape, groups, affine=True, shift=0.0, **options):
    x, w, b, g = inputs(case, shape, affine, shift)
    gradients(case, F.group_norm(x, groups, w, b, **options), x, w, b, g)


def steps(case, momentum):
    layer = torch.nn.BatchNorm1d(4, momentum=momentum).double()
    with torch.no_grad():
        layer.weight.copy_(real(case, "weight", (4,)))
        layer.bias.copy_(real(case, "bias", (4,)))
    for i in range(4):
        if i == 3:
            layer.eval()
        x = real(case, "x%d" % i, (5, 4, 3), shift=i).requires_grad_()
        y = layer(x)
        y.backward(real(case, "g%d" % i, (5, 4, 3)))
        keep(case, **{"y%d" % i: y, "dx%d" % i: x.grad})
    keep(case, dweight=layer.weight.grad, dbias=layer.bias.grad, running_mean=layer.running_mean,
         running_var=layer.running_var, num_batches_tracked=layer.num_batches_tracked)


for name, shape in SHAPES.items():
    batch("train_" + name, shape, True)
    batch("eval_" + name, shape, False)
batch("train_plain", (4, 3, 7), True, affine=False)
batch("eval_plain", (4, 3, 7), False, affine=False)
batch("train_options", (4, 3, 7), True, momentum=0.25, eps=0.5)
batch("eval_options", (4, 3, 7), False, eps=0.5)
batch("train_far", (8, 3, 40), True, shift=1000.0)
for name in ("runs", "images", "long", "volume", "one"):
    group("group_" + name, SHAPES[name], 2 if SHAPES[name][1] % 2 == 0 else 3)
group("group_rows", (5, 6), 3)
group("group_all", (4, 6, 7), 1)
group("group_plain", (4, 6, 7), 3, affine=False, eps=0.5)
group("group_far", (2, 4, 50), 2, shift=1000.0)
for name in ("runs", "images", "long"):
    case = "instance_" + name
    x, w, b, g = inputs(case, SHAPES[name], True)
    gradients(case, F.instance_norm(x, None, None, w, b), x, w, b, g)
steps("steps", 0.1)
steps("average", None)
print(write("channel_norm", tensors), "bytes")
