#!/usr/bin/env python3
"""GFLOP/s of torch.nn.functional.linear in bf16, which is oneDNN's product: as bench_gemm's `bf16`.

usage: peer_linear.py ROUNDS THREADS [f32] MxNxK...
Prints a line "MxNxK_tTHREADS onednn rate" per product and round; with f32 also one of floats, whose
second word is torch_f32."""
import sys
import time

import torch

MEASURED = 0.04  # seconds

rounds, threads = map(int, sys.argv[1:3])
shapes = sys.argv[3:]
kinds = {"onednn": torch.bfloat16}
if shapes[:1] == ["f32"]:
    kinds["torch_f32"] = torch.float32
    shapes.pop(0)
torch.set_num_threads(threads)
for shape in shapes:
    m, n, k = map(int, shape.split("x"))
    flop = 2e-9 * m * n * k
    for who, dtype in kinds.items():
        x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        with torch.no_grad():
            for i in range(rounds + 1):  # the first one warms up
                times, start = 0, time.perf_counter()
                while time.perf_counter() - start < MEASURED:
                    torch.nn.functional.linear(x, w)
                    times += 1
                if i:
                    rate = flop * times / (time.perf_counter() - start)
                    print("%s_t%d %s %.2f" % (shape, threads, who, rate))
