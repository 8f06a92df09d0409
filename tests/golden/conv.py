#!/usr/bin/env python3
"""Writes conv.safetensors beside itself: convolutions, pools and interpolation as PyTorch computes
them, with their gradients.

    python3 tests/golden/conv.py      (torch 2.13 and safetensors)

A case has in0, in1, in2 (input, weight, bias), out, g (the gradient of out) and grad0, grad1, grad2;
and options, the numbers that the test's tables of options are made of. Convolutions are of small
integers, so their sums are exact in any order.
"""

import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
random = torch.Generator().manual_seed(5)
tensors = {}


def integers(*shape):
    return torch.randint(-3, 4, shape, generator=random).float()


def reals(*shape):
    return torch.randn(*shape, generator=random)


def add(name, options, fn, inputs, g=integers):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    upstream = g(*out.shape)
    out.backward(upstream)
    tensors[name + ".options"] = torch.tensor(options, dtype=torch.int64)
    tensors[name + ".out"] = out.detach()
    tensors[name + ".g"] = upstream
    for i, leaf in enumerate(leaves):
        tensors[f"{name}.in{i}"] = leaf.detach()
        tensors[f"{name}.grad{i}"] = leaf.grad


# batch, in, out, size, kernel, stride, padding, output_padding, dilation, groups, bias
CONVS = [
    (2, 3, 5, (6, 7), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1, True),
    (1, 2, 3, (5, 5), (1, 1), (1, 1), (0, 0), (0, 0), (1, 1), 1, False),
    (3, 4, 6, (9, 8), (3, 2), (2, 1), (1, 0), (1, 0), (1, 1), 2, True),
    (2, 3, 4, (11, 13), (3, 3), (2, 2), (2, 3), (1, 1), (2, 1), 1, True),
    (2, 4, 4, (7, 6), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 4, True),
    (2, 3, 6, (8, 9), (3, 3), (2, 2), (1, 1), (1, 0), (1, 1), 3, False),
    (2, 1, 3, (8, 40), (5, 5), (1, 2), (2, 2), (0, 1), (1, 1), 1, True),
    (1, 3, 2, (9, 40), (2, 3), (3, 3), (0, 1), (2, 2), (1, 2), 1, True),
    (2, 5, 14, (4, 4), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1, True),
    (1, 2, 3, (4, 3), (2, 2), (3, 3), (0, 0), (0, 0), (1, 1), 1, True),
    (2, 2, 2, (33, 34), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1, False),
]


def convolutions():
    for i, (n, ins, outs, size, kernel, s, p, op, d, groups, bias) in enumerate(CONVS):
        options = [*s, *p, *op, *d, groups]
        for dims in (1, 2):
            end = 2 if dims == 2 else 1
            x = integers(n, ins, *size[2 - end:])
            kw = dict(stride=s[2 - end:], padding=p[2 - end:], dilation=d[2 - end:], groups=groups)
            mine = options if dims == 2 else [v for k in range(4) for v in (options[2 * k + 1], 0)]
            mine = mine if dims == 2 else mine + [groups]
            ways = [("conv", F.conv1d if dims == 1 else F.conv2d,
                     integers(outs, ins // groups, *kernel[2 - end:]), 0)]
            ways.append(("convT", F.conv_transpose1d if dims == 1 else F.conv_transpose2d,
                         integers(ins, outs // groups, *kernel[2 - end:]), 1))
            for name, fn, w, transposed in ways:
                b = [integers(outs)] if bias else []
                more = dict(kw, output_padding=op[2 - end:]) if transposed else kw
                own = list(mine)
                if not transposed:
                    own[4:6] = [0, 0]
                add(f"{name}{dims}d_{i}", own,
                    lambda x, w, *b, fn=fn, more=more: fn(x, w, b[0] if b else None, **more),
                    [x, w, *b])


def main():
    convolutions()
    for name, t in tensors.items():
        tensors[name] = t.contiguous()
    save_file(tensors, os.path.join(HERE, "conv.safetensors"))


if __name__ == "__main__":
    main()
