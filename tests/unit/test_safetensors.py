#!/usr/bin/env python3
"""Files of tsh_save as another reader takes them, and files of another writer as tsh_load does:
json and struct, by the text of the format. Reports in cmocka's words. For another processor: CC
compiles for it (it may have flags), TESTS_RUN runs its programs."""

import json
import os
import struct
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "support"))
from scripts import check, run_tests
SHAPES = {"h.qkv.weight": [9, 4], "h.qkv.bias": [9], "h.été \"row\".weight": [4, 3],
          "h.été \"row\".bias": [4]}


def once(pairs):
    check(len(dict(pairs)) == len(pairs), "a key is there twice:", pairs)
    return dict(pairs)


def read(path):
    """Metadata, and {name: (shape, values)}, strictly."""
    with open(path, "rb") as file:
        data = file.read()
    length, = struct.unpack("<Q", data[:8])
    check((8 + length) % 8 == 0 and length <= 100000000, "header of", length)
    text = data[8:8 + length]
    check(text[:1] == b"{" and text.rstrip(b" ")[-1:] == b"}", "header", text)
    header = json.loads(text.decode("utf-8", "strict"), object_pairs_hook=once)
    metadata = header.pop("__metadata__")
    check(all(isinstance(value, str) for value in metadata.values()), metadata)
    at, tensors = 0, {}
    for name, entry in header.items():
        check(set(entry) == {"dtype", "shape", "data_offsets"}, entry)
        begin, end = entry["data_offsets"]
        count = 1
        for size in entry["shape"]:
            count *= size
        check(entry["dtype"] == "F32" and begin == at and end == begin + 4 * count, name, entry)
        values = data[8 + length + begin:8 + length + end]
        tensors[name] = (entry["shape"], struct.unpack("<%df" % count, values))
        at = end
    check(8 + length + at == len(data), "bytes after the values")
    return metadata, tensors


def write(path, tensors, **json_style):
    header, values = {"__metadata__": {"format": "pt", "by": "a test"}}, b""
    for name, (shape, numbers) in tensors.items():
        begin = len(values)
        values += struct.pack("<%df" % len(numbers), *numbers)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(values)]}
    text = json.dumps(header, **json_style).encode("utf-8")
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + values)


def build(folder):
    """The path of the tool."""
    tool = os.path.join(folder, "tool")
    subprocess.check_call(os.environ.get("CC", "cc").split()
                          + ["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O0",
                             os.path.join(HERE, "safetensors_tool.c"), "-o", tool, "-lm",
                             "-pthread"])
    return tool


def run(tool, *words):
    """What the tool prints of each parameter, as {name: values}."""
    done = subprocess.run(os.environ.get("TESTS_RUN", "").split() + [tool]
                          + [str(word) for word in words], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=60)
    check(done.returncode == 0, words, done.stderr.decode())
    shown = {}
    for line in done.stdout.decode("utf-8").splitlines():
        name = next(name for name in SHAPES if line.startswith(name + " "))
        shown[name] = tuple(map(float, line[len(name):].split()))
    check(set(shown) == set(SHAPES), shown)
    return shown


def single(values):
    """Nine digits of a float, read back as a float."""
    return struct.unpack("<%df" % len(values), struct.pack("<%df" % len(values), *values))


def another_reader_takes_what_tsh_save_writes(folder):
    tool = build(folder)
    for ranks in (1, 2, 4):
        path = os.path.join(folder, "saved%d" % ranks)
        shown = run(tool, "save", path, ranks)
        metadata, tensors = read(path)
        for name, shape in SHAPES.items():
            check(tensors[name] == (shape, single(shown[name])), ranks, name, tensors[name])
        for name in ("h.qkv.weight", "h.qkv.bias"):
            check(tensors["optim.first." + name][0] == SHAPES[name], "first moment")
            check(min(tensors["optim.second." + name][1]) > 0, "second moment")
        check(len(tensors) == len(SHAPES) + 4, list(tensors))
        check(metadata["tshard.optim"] == "adam" and metadata["tshard.optim.steps"] == "1"
              and metadata["tshard.optim.steps.h.qkv.bias"] == "1"
              and metadata["tshard.optim.steps.h.été \"row\".bias"] == "0", metadata)


def tsh_load_takes_what_another_writer_writes(folder):
    tool = build(folder)
    path = os.path.join(folder, "written")
    tensors, value = {}, 0
    for name in sorted(SHAPES, reverse=True):  # an order of its own
        count = 1
        for size in SHAPES[name]:
            count *= size
        tensors[name] = (SHAPES[name], tuple(float(value + i) / 8 for i in range(count)))
        value += count
    for style in ({}, {"separators": (",", ":"), "ensure_ascii": False}, {"indent": 3}):
        write(path, tensors, **style)
        for ranks in (1, 3, 4):
            shown = run(tool, "load", path, ranks)
            for name in SHAPES:
                check(shown[name] == tensors[name][1], style, ranks, name, shown[name])


TESTS = [another_reader_takes_what_tsh_save_writes, tsh_load_takes_what_another_writer_writes]

if __name__ == "__main__":
    sys.exit(run_tests("safetensors", TESTS))
