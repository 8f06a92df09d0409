#!/usr/bin/env python3
"""Writes vit.safetensors beside itself: how PyTorch trains the vision transformer of
examples/FROM_PYTORCH.md from the weights with which examples/06_vit_train.c begins.

    python3 tests/golden/vit.py        (PyTorch 2.13 and safetensors; a C compiler)

Model, images and optimiser are the Python of that page. "f32.loss" has the loss of every step,
"f32.right" how many of 500 new images are read right at the end, both in float32; "f64.loss" and
"f64.right" are the same in float64. tests/layer/test_vit.c compares.
"""

import os
import re
import subprocess
import tempfile

import torch
from safetensors.torch import load_file

from generate import write

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SAVE = """#define TSHARD_IMPLEMENTATION
#include "%s/examples/vit.h"
static int save(tsh_ctx *ctx, void *path) {
    add_vit(tsh_add_module(tsh_root(ctx), "vit", NULL));
    return tsh_save(tsh_root(ctx), (const char *)path, NULL) != TSH_OK;
}
int main(int argc, char **argv) { return argc < 2 || tsh_run(NULL, save, argv[1]); }
"""


def initial_weights(real, folder):
    """What a program with tsh_real `real` begins with."""
    source, program, weights = (os.path.join(folder, real + end) for end in (".c", "", ".weights"))
    with open(source, "w", encoding="ascii") as file:
        file.write(SAVE % TOP)
    subprocess.check_call(["cc", "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-DTSHARD_REAL=" + real,
                           "-O1", source, "-o", program, "-lm", "-pthread"])
    subprocess.check_call([program, weights])
    return {name[len("vit."):]: t for name, t in load_file(weights).items()}


def the_page():
    """The Python of the page up to its training loop: one program."""
    with open(os.path.join(TOP, "examples", "FROM_PYTORCH.md"), encoding="utf-8") as file:
        pieces = re.findall(r"^```python\n(.*?)^```$", file.read(), re.M | re.S)
    return "\n".join(pieces[:3])


def train(weights, dtype):
    torch.set_default_dtype(dtype)
    page = {}
    exec(the_page(), page)
    model, optim, cosine = page["model"], page["optim"], page["cosine"]
    model.load_state_dict(weights)
    losses = []
    for step in range(page["STEPS"]):
        x, target = page["images"](step, page["BATCH"])
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        cosine.step()
        optim.zero_grad()
        losses.append(loss.item())
    x, target = page["images"](123456789, 500)
    with torch.no_grad():
        right = (model(x).argmax(-1) == target).sum()
    print(dtype, "losses", losses[0], losses[-1], "right", right.item())
    return torch.tensor(losses, dtype=torch.float32), right.reshape(1)


def main():
    torch.set_num_threads(1)
    tensors = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, real, dtype in (("f32", "float", torch.float32),
                                  ("f64", "double", torch.float64)):
            tensors[name + ".loss"], tensors[name + ".right"] = train(
                initial_weights(real, folder), dtype)
    print("%d bytes" % write("vit", tensors))


if __name__ == "__main__":
    main()
