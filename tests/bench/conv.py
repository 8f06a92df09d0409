#!/usr/bin/env python3
"""The layers of conv.c with PyTorch: forward and backward, in the faster memory format.

    python3 tests/bench/conv.py ROUNDS THREADS 32       (or 224)
    python3 tests/bench/conv.py ROUNDS 1 32 cpu
"""

import sys
import time

import torch

rounds, threads, image = (int(x) for x in sys.argv[1:4])
torch.set_num_threads(threads)
now = time.process_time if len(sys.argv) > 4 else time.perf_counter


def layers():
    base = 32 if image == 32 else image // 4
    yield (3, 64, 32, 3, 1, 1, 1) if image == 32 else (3, 64, 224, 7, 2, 3, 1)
    yield 64, 64, base, 3, 1, 1, 4
    c, size = 64, base
    for _ in range(3):
        yield c, 2 * c, size, 3, 2, 1, 1
        yield c, 2 * c, size, 1, 2, 0, 1
        yield 2 * c, 2 * c, size // 2, 3, 1, 1, 3
        c, size = 2 * c, size // 2


def measure(ins, outs, size, kernel, stride, padding, stem, form):
    x = torch.randn(16, ins, size, size).to(memory_format=form)
    w = torch.randn(outs, ins, kernel, kernel).to(memory_format=form)
    y = torch.conv2d(x, w, None, stride, padding)
    g = torch.ones_like(y)
    best = [1e9] * 3
    for _ in range(rounds):
        for i in range(2):
            if i == 0 and stem:
                best[1] = 0
                continue
            x.requires_grad_(i == 0)
            w.requires_grad_(i == 1)
            begin = now()
            y = torch.conv2d(x, w, None, stride, padding)
            middle = now()
            best[0] = min(best[0], 1e3 * (middle - begin))
            middle = now()
            y.backward(g)
            best[1 + i] = min(best[1 + i], 1e3 * (now() - middle))
            x.grad = w.grad = None
    return best


def main():
    forward = backward = 0
    for i, (ins, outs, size, kernel, stride, padding, count) in enumerate(layers()):
        ways = [measure(ins, outs, size, kernel, stride, padding, i == 0, form)
                for form in (torch.contiguous_format, torch.channels_last)]
        best = min(ways, key=sum)
        print(f"{kernel}x{kernel}_s{stride}_{ins}_{outs}_{size} {count} " +
              " ".join(f"{ms:.3f}" for ms in best) +
              ("  nchw" if best is ways[0] else "  channels_last"), flush=True)
        forward += count * best[0]
        backward += count * (best[1] + best[2])
    print(f"sum {forward:.2f} {backward:.2f} {forward + backward:.2f}")


if __name__ == "__main__":
    main()
