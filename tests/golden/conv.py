#!/usr/bin/env python3
"""Writes conv.safetensors beside itself: convolutions, pools and interpolation as PyTorch computes
them, with their gradients.

    python3 tests/golden/conv.py      (torch 2.13 and safetensors)

A case has in0, in1, in2 (input, weight, bias), out, g (the gradient of out) and grad0, grad1,
grad2; and options, integers as the fields of the op's descriptor. Convolutions are of small
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
    (2, 4, 6, (7, 6), (3, 2), (2, 1), (1, 0), (1, 0), (1, 1), 2, True),
    (1, 2, 4, (9, 11), (3, 3), (2, 2), (2, 3), (1, 1), (2, 1), 1, True),
    (2, 4, 4, (7, 6), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 4, True),
    (1, 3, 6, (8, 9), (3, 3), (2, 2), (1, 1), (1, 0), (1, 1), 3, False),
    (1, 1, 3, (8, 40), (5, 5), (1, 2), (2, 2), (0, 1), (1, 1), 1, True),
    (1, 2, 2, (4, 40), (2, 3), (3, 3), (0, 1), (2, 2), (1, 2), 1, True),
    (2, 3, 14, (4, 4), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1, True),
    (1, 2, 3, (4, 3), (2, 2), (3, 3), (0, 0), (0, 0), (1, 1), 1, True),
    (1, 2, 2, (20, 34), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1, False),
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


# size, kernel, stride, padding, dilation, ceil_mode
POOLS = [
    ((7, 8), (3, 3), (2, 2), (1, 1), (1, 1), 0),
    ((7, 9), (2, 3), (2, 1), (0, 1), (1, 1), 1),
    ((9, 8), (3, 2), (3, 3), (1, 1), (2, 3), 1),
    ((5, 37), (2, 5), (1, 2), (1, 2), (1, 1), 0),
    ((6, 6), (2, 2), (2, 2), (0, 0), (1, 1), 0),
    ((4, 3), (2, 2), (3, 3), (1, 1), (1, 1), 1),
]


def pools():
    for i, (size, kernel, s, p, d, ceil) in enumerate(POOLS):
        for dims in (1, 2):
            end = 2 - dims
            x = integers(1, 2, *size[end:])  # with ties
            if i == 3:
                x[0, 0, 0] = float("nan")
            one = dict(kernel_size=kernel[end:], stride=s[end:], padding=p[end:],
                       ceil_mode=bool(ceil))
            pair = [v for t in (kernel, s, p, d) for v in (t if dims == 2 else (t[1], 0))]
            most = F.max_pool1d if dims == 1 else F.max_pool2d
            add(f"max{dims}d_{i}", [*pair, ceil, 0, 0],
                lambda x, most=most, one=one, d=d, end=end: most(x, dilation=d[end:], **one), [x])
            if i == 2:
                continue
            x = reals(1, 2, *size[end:])
            mean = F.avg_pool1d if dims == 1 else F.avg_pool2d
            for include in (True, False):
                add(f"avg{dims}d_{i}_{int(include)}",
                    [*pair[:6], 0, 0, ceil, 0 if include else 2, 0],
                    lambda x, mean=mean, one=one, c=include: mean(x, count_include_pad=c, **one),
                    [x], reals)
    add("avg2d_6_1", [3, 3, 2, 2, 1, 1, 0, 0, 0, 0, 5],
        lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), [reals(1, 2, 6, 7)], reals)
    for i, (size, to) in enumerate([((7, 7), (1, 1)), ((7, 9), (3, 4)), ((5, 4), (8, 4)),
                                    ((6, 40), (3, 2))]):
        add(f"adaptive2d_{i}", to, lambda x, to=to: F.adaptive_avg_pool2d(x, to),
            [reals(2, 3, *size)], reals)
        add(f"adaptive1d_{i}", to, lambda x, to=to: F.adaptive_avg_pool1d(x, to[1]),
            [reals(2, 3, size[1])], reals)


def interpolations():
    for i, (size, to, scale) in enumerate([
            ((4, 5), (7, 9), None), ((7, 9), (3, 4), None), ((5, 6), None, (2.0, 1.5)),
            ((5, 6), None, (0.6, 2.7)), ((4, 4), (4, 1), None), ((1, 3), (5, 6), None)]):
        for dims, linear in ((1, "linear"), (2, "bilinear")):
            end = 2 - dims
            for mode, align in (("nearest", None), (linear, False), (linear, True)):
                kw = dict(size=to[end:] if to else None,
                          scale_factor=scale[end:] if scale else None, mode=mode,
                          align_corners=align)
                own = (list(to) if to else [0, 0])[end:] + [0] * end
                hundredths = [round(100 * v) for v in (scale or (0, 0))][end:] + [0] * end
                way = 0 if mode == "nearest" else 1 + align
                add(f"interpolate{dims}d_{i}_{way}", own + hundredths + [way > 0, way == 2],
                    lambda x, kw=kw: F.interpolate(x, **kw), [reals(2, 2, *size[end:])], reals)
    add("shuffle_0", [2], lambda x: F.pixel_shuffle(x, 2), [reals(2, 8, 3, 2)], reals)
    add("shuffle_1", [3], lambda x: F.pixel_shuffle(x, 3), [reals(1, 9, 2, 3)], reals)


def main():
    convolutions()
    pools()
    interpolations()
    for name, t in tensors.items():
        tensors[name] = t.contiguous()
    save_file(tensors, os.path.join(HERE, "conv.safetensors"))


if __name__ == "__main__":
    main()
