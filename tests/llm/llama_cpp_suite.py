#!/usr/bin/env python3
"""The vocabulary suite of llama.cpp: tokenizer.h gives the ids that llama.cpp records for texts.
The files, models/ggml-vocab-*.gguf with .inp and .out beside them, are read from the source package
of llama-cpp-python, which is not part of this project:

    pip download --no-deps --no-binary :all: llama-cpp-python
    tests/llm/llama_cpp_suite.py llama_cpp_python-*.tar.gz
"""

import os
import subprocess
import sys
import tarfile
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
BETWEEN = "\n__ggml_vocab_test__\n"
SUFFIX = ".gguf.inp"


def build(folder):
    """tokenize.c, which opens a vocabulary once for all of its texts."""
    program = os.path.join(folder, "tokenize")
    subprocess.check_call([os.environ.get("CC", "cc"), "-O2", "-o", program,
                           os.path.join(HERE, "tokenize.c"), "-lcjson", "-lpcre2-8", "-lm"])
    return program


def compare(program, path):
    """How many texts of a vocabulary give the recorded ids, and of how many."""
    with open(path + ".inp", encoding="utf-8", newline="") as file:
        whole = file.read()
    with open(path + ".out", encoding="ascii") as file:
        wants = [line.split() for line in file]
    done = subprocess.run([program, path, "--no-special", "--between", BETWEEN],
                          input=whole.encode("utf-8"), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=120)
    if done.returncode != 0:
        print(done.stderr.decode("utf-8", "replace").strip())
    gots = [line.split() for line in done.stdout.decode("ascii").splitlines()]
    for text, got, want in zip(whole.split(BETWEEN), gots, wants):
        if got != want:
            print("%s: %r\n  gives  %s\n  not    %s" % (os.path.basename(path), text, got, want))
    return sum(got == want for got, want in zip(gots, wants)), len(wants)


def main(package):
    failed = 0
    with tempfile.TemporaryDirectory() as folder, tarfile.open(package) as tar:
        program = build(folder)
        files = [m for m in tar.getmembers() if "/models/ggml-vocab-" in m.name and m.isfile()]
        for member in files:
            member.name = os.path.basename(member.name)
            tar.extract(member, folder)
        for name in sorted(m.name for m in files if m.name.endswith(SUFFIX)):
            path = os.path.join(folder, name[:-len(".inp")])
            right, count = compare(program, path)
            print("%-34s %d of %d" % (os.path.basename(path), right, count), flush=True)
            failed += right < count
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) > 0 if len(sys.argv) == 2 else __doc__)
