#!/usr/bin/env python3
"""GFLOP/s of torch.nn.functional.linear in bf16, which is oneDNN's product: as bench_gemm's `bf16`.

usage: peer_linear.py ROUNDS THREADS MxNxK...
Prints a line "MxNxK_tTHREADS onednn rate" per product and round."""
import sys
import time

import torch

MEASURED = 0.04  # seconds

rounds, threads = map(int, sys.argv[1:3])
torch.set_num_threads(threads)
for shape in sys.argv[3:]:
    m, n, k = map(int, shape.split("x"))
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    flop = 2e-9 * m * n * k
    with torch.no_grad():
        for i in range(rounds + 1):  # the first one warms up
            times, start = 0, time.perf_counter()
            while time.perf_counter() - start < MEASURED:
                torch.nn.functional.linear(x, w)
                times += 1
            if i:
                rate = flop * times / (time.perf_counter() - start)
                print("%s_t%d onednn %.2f" % (shape, threads, rate))
