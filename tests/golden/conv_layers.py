#!/usr/bin/env python3
"""Writes two files beside itself: conv_model.safetensors, the state_dict of a small network of
PyTorch's convolutions, and conv_layers.safetensors, an input, the output and the gradients of the
sum of its squares.

    python3 tests/golden/conv_layers.py      (torch 2.13 and safetensors)
"""

import os

import torch
from safetensors.torch import save_file
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    torch.manual_seed(3)
    net = nn.ModuleDict({
        "stem": nn.Conv2d(3, 6, 3, stride=2, padding=1),
        "up": nn.ConvTranspose2d(6, 4, (2, 3), stride=2, output_padding=1, groups=2),
        "line": nn.Conv1d(4, 5, 3, padding=1, dilation=1, bias=False),
        "back": nn.ConvTranspose1d(5, 2, 2, stride=2),
    })
    x = torch.randn(2, 3, 7, 6)
    y = net["up"](torch.relu(net["stem"](x)))
    y = net["back"](net["line"](y.flatten(2)))
    (y * y).sum().backward()
    save_file({k: v.contiguous() for k, v in net.state_dict().items()},
              os.path.join(HERE, "conv_model.safetensors"))
    tensors = {name + ".grad": p.grad for name, p in net.named_parameters()}
    tensors |= {"net.in": x, "net.out": y.detach()}
    save_file({k: v.contiguous() for k, v in tensors.items()},
              os.path.join(HERE, "conv_layers.safetensors"))


if __name__ == "__main__":
    main()
