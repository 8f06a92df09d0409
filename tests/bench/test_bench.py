#!/usr/bin/env python3
"""Runs the benchmarks of a model at sizes that take no time: what they print is not judged, but
that it is there. Reports in cmocka's words."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import check, run_tests
C = [os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O1"]
TINY = "--layers 2 --heads 2 --width 16 --context 8 --batch 4 --chars --ranks 2".split()


def output_of(program, args, told):
    done = subprocess.run([program] + args, input=told, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, universal_newlines=True, timeout=100)
    check(done.returncode == 0, args, "exit code", done.returncode, done.stdout)
    return done.stdout


def printed(folder, name, args, told):
    program = os.path.join(folder, "program")
    subprocess.run(C + ["-o", program, os.path.join(HERE, name), "-lm", "-pthread"], check=True,
                   timeout=300)
    return output_of(program, args, told)


def steps_are_timed(folder):
    told = ["step", "comm", "held", "held_comm", "memory", "moments"]
    text = printed(folder, "bench_step.c", TINY + ["--text", os.path.join(TOP, "tshard.h")],
                   "".join(name + " 0 2\n" for name in told))
    numbers = [int(line) for line in text.split("\n") if re.fullmatch(r"\d+", line)]
    check(len(numbers) == len(told), "answers:", text)
    check(numbers[0] > 0 and numbers[4] > 0 and numbers[5] > 0, "answers:", text)


def parts_of_a_model_are_timed(folder):
    text = printed(folder, "bench_model.c", ["1", "64"], "")
    rows = dict(re.findall(r"^(\w+) \S+ ours (\S+)$", text, re.M))
    check(set(rows) == {"op_overhead", "attention_T64", "attention_back_T64", "attention_bf16_T64",
                        "attention_back_bf16_T64", "decode_gpt2"}, text)
    check(all(float(value) > 0 for value in rows.values()), text)
    for shape, weights, ranks in (("stories260K", "f32", "2"), ("babyllama", "q4_0", "1")):
        told = ["--model", shape, "--weights", weights, "--tokens", "2", "--rounds", "1", "--ranks",
                ranks]
        text = output_of(os.path.join(folder, "program"), told + ["--prefill", "3"], "")
        names = re.findall(r"^(\w+) tokens/s (\w+) [1-9]", text, re.M)
        row = "_%s_%s" % (shape, weights)
        check(names == [("decode" + row, "ours"), ("decode" + row, "limit"),
                        ("prefill" + row, "ours")], text)
    text = output_of(os.path.join(folder, "program"),
                     ["--serve", "--model", "stories260K"], "decode 0 3\nprefill 4 2\nread 0 2\n")
    check(len(re.findall(r"^[1-9]\d*\.\d$", text, re.M)) == 3, text)


def plot(folder, rows, *flags):
    """Exit code and output of plot.py, and the rows of the picture: {what: length of its bar}."""
    data, picture = os.path.join(folder, "bench.json"), os.path.join(folder, "speed.svg")
    with open(data, "w", encoding="utf-8") as out:
        json.dump(rows, out)
    done = subprocess.run([sys.executable, os.path.join(HERE, "plot.py"), "--json", data, "--svg",
                           picture, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=60)
    bars = {}
    if os.path.exists(picture):
        tree = xml.etree.ElementTree.parse(picture)
        name = "{http://www.w3.org/2000/svg}"
        whats = [text.text for text in tree.iter(name + "text") if not text.get("class")][1:]
        lengths = [float(rect.get("width")) for rect in tree.iter(name + "rect")
                   if rect.get("class")]
        check(len(whats) == len(lengths), "names and bars:", whats, lengths)
        bars = dict(zip(whats, lengths))
        os.remove(picture)
    return done.returncode, done.stdout, bars


def the_picture_shows_what_was_measured(folder):
    """A bar is as long as the ratio to the best peer; rows that are missing are left out."""
    step = {"name": "step_gpt2_T64", "unit": "s", "ours": 1.0,
            "peers": {"torch_f32": 1.5, "limit": 0.5}}
    tcp = {"name": "allreduce_tcp_2_64MiB", "unit": "us", "ours": 2e4,
           "peers": {"gloo": 6e4, "openmpi_tcp": 8e4, "limit": 1e4}}
    alone = {"name": "decode_llama1b_bf16", "unit": "tokens/s", "ours": 9,
             "peers": {"limit": 10}}
    code, _, bars = plot(folder, [step, tcp, alone])
    check(code == 0 and len(bars) == 2, "rows", code, bars)
    lengths = [bars["GPT-2 step, 4 x 64 tokens"], bars["all-reduce 64 MiB, 2 ranks, TCP"]]
    check(abs(lengths[1] / lengths[0] - 3 / 1.5) < 0.01, "lengths", bars)
    code, text, bars = plot(folder, [step, tcp], "--table")
    check(code == 0 and not bars, "exit code", code)
    check(re.search(r"4 x 64 tokens +\| 1 s +\| 1.5 s PyTorch 2.13 +\| 1.5 +\|", text), text)
    check(re.search(r"\| 20 ms +\| 60 ms gloo +\| 3 +\| `make bench-comm` +\|", text), text)
    code, _, bars = plot(folder, [alone])
    check(code == 1 and not bars, "no row is left", code, bars)


def the_better_of_two_programs_counts(_):
    """Eager or compiled, by the median; each peer for itself."""
    sys.path.insert(0, HERE)
    from run import better
    values, chosen = better({"ours": {0: 1, 1: 1}, "torch_f32": {0: 3, 1: 3},
                             "torch_f32_compiled": {0: 2, 1: 2.5}, "torch_bf16": {1: 1},
                             "torch_bf16_compiled": {0: 9, 1: 2}})
    check(values == {"ours": {0: 1, 1: 1}, "torch_f32": {0: 2, 1: 2.5}, "torch_bf16": {1: 1}},
          values)
    check(chosen == {"ours": "ours", "torch_f32": "torch_f32_compiled",
                     "torch_bf16": "torch_bf16"}, chosen)


def goals_name_peers_that_stand_in_their_rows(_):
    sys.path.insert(0, HERE)
    from run import figures_of
    check(set(figures_of("step_gpt2_bf16_T256")) == {"torch_autocast", "torch_bf16", "f32",
                                                        "limit"}, "bf16")
    check(set(figures_of("step_gpt2_T1024")) == {"torch_f32", "limit"}, "f32")
    check(figures_of("decode_llama1b_q4_0") == {"llamacpp": 1, "limit": 0.7}, "q4_0")
    check(figures_of("decode_gpt2_bf16_tcp") == {"threads": 0.9}, "tcp")
    check(figures_of("decode_babyllama_f32_tp2") == {"runc": 1}, "run.c")
    check(figures_of("decode_gpt2_bf16") == {"llamacpp": 1, "limit": 0.9}, "bf16")
    check(figures_of("prefill_llama1b_q8_0_128") == {"llamacpp": 1}, "prefill")
    check(figures_of("first_smollm2_q4_1_512") == {"llamacpp": 1}, "the first token")
    check(figures_of("decode_smollm2_bf16_tcp") == {"threads": 0.9}, "processes")
    check(figures_of("cores_product_bf16_256x768x768_t16") == {"onednn": 0.9}, "a product")
    check(figures_of("cores_product_f32_256x768x768_t16") == {}, "a product of floats")
    check(figures_of("cores_gpt2_bf16_4x4") == {}, "one configuration")
    check(figures_of("cores_gpt2_bf16_best2") == {"torch_autocast": 1.25, "torch_bf16": 1.25},
          "the best in bf16")
    check(figures_of("cores_gpt2_f32_best16") == {"torch_f32": 1 / 0.47}, "the best in f32")
    check(figures_of("cores_prompt_q8_0_16") == {"llamacpp": 1}, "a prompt")


SERVES = """#!/bin/sh
case "$*" in *--ranks\ 2\ *) us=500;; *) us=1000;; esac
while read -r line; do echo $us; done
"""
MULTIPLIES = """#!/bin/sh
threads=$2
shift 3
for shape; do
    echo "${shape}_t$threads f32 10"
    echo "${shape}_t$threads bf16 20"
done
"""


def all_cores_are_measured_without_peers(folder):
    """The rows of the part cores on a machine of 4 cores, by programs that only answer."""
    sys.path.insert(0, HERE)
    import run
    check(run.grids(1) == [(1, 1)], run.grids(1))
    check(run.grids(12) == [(1, 1), (12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)],
          run.grids(12))
    check(run.rank_counts(1) == [1] and run.rank_counts(12) == [1, 2, 4, 8, 12], "ranks")
    check(1 <= run.count_cores() <= os.cpu_count(), "cores", run.count_cores())
    check(run.that_fit([1, 2, 3], 2, 4.5) == [1, 2] and run.that_fit([1], 2, 0.1) == [1], "memory")
    programs = {}
    for name, script in (("bench_step", SERVES), ("bench_model", SERVES),
                         ("bench_gemm", MULTIPLIES)):
        programs[name] = os.path.join(folder, name)
        with open(programs[name], "w", encoding="utf-8") as file:
            file.write(script)
        os.chmod(programs[name], 0o755)
    run.has_torch = run.has_llama = lambda: False
    run.count_cores, run.free_gigabytes = lambda: 4, lambda: float("inf")
    args = argparse.Namespace(programs=programs, rounds=2, end=time.monotonic() + 60,
                              text=os.path.join(TOP, "README.md"))
    rows = {}
    for samples in run.cores(args):
        for (name, unit), values in samples.items():
            rows[name], _ = run.row_of(name, unit, values)
    names = {"cores_product_%s_%s_t%d" % (dtype, shape, threads) for dtype in ("f32", "bf16")
             for shape in run.CORES_SHAPES for threads in (1, 4)}
    names |= {"cores_gpt2_%s_%s" % (dtype, grid) for dtype in ("f32", "bf16")
              for grid in ("1x1", "4x1", "2x2", "1x4", "best4")}
    names |= {"cores_%s_%s" % (kind, row) for kind in ("prompt", "decode")
              for row in ("bf16_1", "bf16_2", "bf16_4", "q8_0_4", "q4_0_4")}
    check(set(rows) == names, "rows", sorted(set(rows) ^ names))
    check(rows["cores_product_bf16_256x768x768_t4"]["peers"] == {"f32": 10}, "a product")
    for name, ours in (("2x2", 0.0005), ("best4", 0.0005), ("4x1", 0.001)):
        row = rows["cores_gpt2_bf16_" + name]
        check(row["ours"] == ours and row["peers"] == {"one_core": 0.001}, row)
    check(rows["cores_prompt_bf16_2"]["ours"] == 2000 * run.CORES_PROMPT and
          rows["cores_decode_q4_0_4"]["ours"] == 1000, "tokens/s")


def readme_shows_the_rows_of_the_picture(_):
    """README.md's table of speed has the rows, in the order and with the commands of plot.py."""
    sys.path.insert(0, HERE)
    from plot import ROWS
    with open(os.path.join(TOP, "README.md"), encoding="utf-8") as file:
        found = re.findall(r"^\| (.+?) +\|.*\| `make (bench.*?)` +\|$", file.read(), re.M)
    check(found == [(what, command) for _, what, command in ROWS], "README.md has", found)


if __name__ == "__main__":
    sys.exit(run_tests("bench", [steps_are_timed, parts_of_a_model_are_timed,
                                 the_picture_shows_what_was_measured,
                                 the_better_of_two_programs_counts,
                                 goals_name_peers_that_stand_in_their_rows,
                                 all_cores_are_measured_without_peers,
                                 readme_shows_the_rows_of_the_picture]))
