#!/usr/bin/env python3
"""Writes quant.safetensors beside itself: the bytes that ggml's Python package makes of weights.

    python3 tests/golden/quant.py      (gguf 0.19 and safetensors)

"q8_0", "q4_0" and "q4_1" have in0, weights of shape (rows, 64); out, the bytes of each row, a
number per byte; and back, the values that these bytes stand for. Among the rows are ties, blocks of
zeros, extremes of either sign, and scales that are small, subnormal and infinite in f16.
"""

import os

import numpy as np
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))


def rows():
    random = np.random.default_rng(30)
    ties = np.arange(-16, 16) / 2  # ends at 7.5; with -8 the scale of 4 bits is 1
    wide = np.arange(-63.5, 63.5, 127 / 32)
    wide[5] = 127  # the scale of 8 bits is 1
    return np.array([
        *(scale * random.standard_normal(64) for scale in (1, 1, 1, 0.02, 30, 1e-4, 1e-7, 1e4)),
        np.concatenate([ties, -ties]),
        np.concatenate([wide, -wide]),
        np.concatenate([np.round(wide) + 0.5 * (np.arange(32) != 5), 254 * random.random(32)]),
        np.concatenate([np.zeros(32), np.ones(32)]),
        np.concatenate([-np.ones(32), np.where(np.arange(32) % 2, 3.0, -3.0)]),
        np.concatenate([np.where(np.arange(32) % 2, -3.0, 3.0), 1e8 * random.standard_normal(32)]),
    ], dtype=np.float32)


def main():
    tensors, x = {}, rows()
    for name in ("Q8_0", "Q4_0", "Q4_1"):
        kind = GGMLQuantizationType[name]
        with np.errstate(over="ignore"):
            out = quants.quantize(x, kind)
        tensors[name.lower() + ".in0"] = x
        tensors[name.lower() + ".out"] = out.astype(np.float32)
        tensors[name.lower() + ".back"] = quants.dequantize(out, kind)
    save_file(tensors, os.path.join(HERE, "quant.safetensors"))


if __name__ == "__main__":
    main()
