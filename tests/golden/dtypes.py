#!/usr/bin/env python3
"""Writes dtypes.safetensors beside itself: values in each of four floating dtypes, and the same in
each of the others.

    python3 tests/golden/dtypes.py        (PyTorch and safetensors)

"f64.values" has 96 values in float64: such as lie midway between two of a shorter format, just
beside the middle, at the ends of ranges, and random ones; "f32.values", "bf16.values" and
"f16.values" have 96 of their own. "f64_as_bf16.values" is "f64.values" rounded once, to nearest
even, and so on for all pairs. PyTorch rounds f64 to 16 bits by way of f32, twice; so this does it
by fractions. tests/unit/test_io_dtype.c compares.
"""

import math
import os
import random
from fractions import Fraction

import torch
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
COUNT = 96
# name: torch's dtype, bits of the fraction, the exponents of the least and of the greatest binade
FORMATS = {"f32": (torch.float32, 23, -126, 127), "f64": (torch.float64, 52, -1022, 1023),
           "bf16": (torch.bfloat16, 7, -126, 127), "f16": (torch.float16, 10, -14, 15)}


def rounded(x, name):
    """The float64 x as the nearest value of a format, ties to even."""
    _, fraction, least, greatest = FORMATS[name]
    if x == 0 or not math.isfinite(x):
        return x
    exponent = max(math.frexp(abs(x))[1] - 1, least)
    step = Fraction(2) ** (exponent - fraction)
    nearest = round(Fraction(abs(x)) / step) * step  # round() of a fraction: ties to even
    if nearest >= Fraction(2) ** (greatest + 1):
        return math.copysign(math.inf, x)
    return math.copysign(float(nearest), x)


def interesting(name, rng):
    """Values that are hard to round to the formats shorter than `name`."""
    values = [0.0, -0.0, math.inf, -math.inf, 1.0, -2.5]
    for short in FORMATS:
        _, fraction, least, greatest = FORMATS[short]
        ulp = 2.0 ** -fraction
        for tiny in (0.0, 2.0 ** -22, -2.0 ** -22, 2.0 ** -40, -2.0 ** -40):
            values += [1 + ulp / 2 + tiny, -(1 + 3 * ulp / 2 + tiny)]
        if greatest < 1023:
            values += [2.0 ** greatest * (2 - ulp), 2.0 ** greatest * (2 - ulp / 2),
                       2.0 ** (least - fraction), 1.5 * 2.0 ** (least - fraction),
                       2.0 ** (least - fraction - 1), 2.0 ** (least - fraction - 2)]
    values += [rng.gauss(0, 1) * 10.0 ** rng.randint(-9, 9) for _ in range(COUNT)]
    return [rounded(value, name) for value in values][:COUNT]


def main():
    rng, tensors = random.Random(30), {}
    for name, (dtype, _, _, _) in FORMATS.items():
        values = interesting(name, rng)
        tensors[name + ".values"] = torch.tensor(values, dtype=torch.float64).to(dtype)
        assert tensors[name + ".values"].double().tolist() == values
        for other, (to, _, _, _) in FORMATS.items():
            if other != name:
                want = [rounded(value, other) for value in values]
                tensors["%s_as_%s.values" % (name, other)] = torch.tensor(
                    want, dtype=torch.float64).to(to)
                assert tensors["%s_as_%s.values" % (name, other)].double().tolist() == want
    save_file(tensors, os.path.join(HERE, "dtypes.safetensors"))


if __name__ == "__main__":
    main()
