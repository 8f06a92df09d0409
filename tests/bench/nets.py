#!/usr/bin/env python3
"""What build/nets (nets.c) does, with PyTorch, by turns with it: the ratio of their medians.

    python3 tests/bench/nets.py THREADS ROUNDS TURNS NAME...

Prints per name the medians in ms and PyTorch's divided by ours: above 1, ours is faster. PyTorch
runs with its faster memory format.
"""

import statistics
import subprocess
import sys
import time

import torch
from torch import nn

BATCH, ROWS, COLUMNS = 16, 65536, 64


class Block(nn.Module):
    def __init__(self, ins, outs):
        super().__init__()
        stride = 1 if ins == outs else 2
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outs)
        self.downsample = nn.Sequential() if ins == outs else nn.Sequential(
            nn.Conv2d(ins, outs, 1, 2, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def resnet(image):
    small = image == 32
    widths = [64, 64, 128, 256, 512]
    parts = [nn.Conv2d(3, 64, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False),
             nn.BatchNorm2d(64), nn.ReLU()]
    if not small:
        parts.append(nn.MaxPool2d(3, 2, 1))
    for i in range(1, 5):
        parts += [Block(widths[i - 1], widths[i]), Block(widths[i], widths[i])]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(512, 10 if small else 1000))


def resnet_step(image, form):
    net = resnet(image).to(memory_format=form)
    optim = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(BATCH, 3, image, image).to(memory_format=form)
    classes = torch.randint(0, 10 if image == 32 else 1000, (BATCH,))

    def step():
        nn.functional.cross_entropy(net(x), classes).backward()
        optim.step()
        optim.zero_grad()
    return step


def gradients(forward, *tensors):
    def step():
        forward().sum().backward()
        for t in tensors:
            t.grad = None
    return step


def steps(name):
    """The ways to run one round; the fastest counts."""
    if name.startswith("resnet"):
        return [resnet_step(int(name[6:]), form)
                for form in (torch.contiguous_format, torch.channels_last)]
    if name == "lstm":
        lstm = nn.LSTM(256, 256)
        x = torch.randn(64, 32, 256, requires_grad=True)
        return [gradients(lambda: lstm(x)[0], x, *lstm.parameters())]
    if name == "topk":
        x = torch.rand(64, 50257, requires_grad=True)
        return [gradients(lambda: torch.topk(x, 50).values, x)]
    dim = int(name[-1])
    x, y = (torch.rand(ROWS, COLUMNS, requires_grad=True) for _ in range(2))
    index = torch.randint(0, COLUMNS if dim else ROWS, (ROWS, COLUMNS))
    if name.startswith("gather"):
        return [gradients(lambda: torch.gather(x, dim, index), x)]
    return [gradients(lambda: torch.scatter_add(x, dim, index, y), x, y)]


def measure(step, rounds):
    times = []
    for r in range(-2, rounds):
        begin = time.perf_counter()
        step()
        if r >= 0:
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main():
    threads, rounds, turns = (int(x) for x in sys.argv[1:4])
    torch.set_num_threads(threads)
    for name in sys.argv[4:]:
        ways = steps(name)
        ours, theirs = [], [[] for _ in ways]
        for _ in range(turns):
            line = subprocess.run(["build/nets", str(threads), str(rounds), name], check=True,
                                  capture_output=True, text=True).stdout
            ours.append(float(line.split()[1]))
            for way, times in zip(ways, theirs):
                times.append(measure(way, rounds))
        best = min(theirs, key=statistics.median)
        pairs = sorted(b / a for a, b in zip(ours, best))
        print(f"{name:10} {statistics.median(ours):9.2f} ms {statistics.median(best):9.2f} ms   "
              f"{statistics.median(pairs):.2f} ({pairs[0]:.2f} to {pairs[-1]:.2f})", flush=True)


if __name__ == "__main__":
    main()
