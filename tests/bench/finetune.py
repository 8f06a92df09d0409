#!/usr/bin/env python3
"""Fine-tuning by LoRA beside transformers and PEFT, by turns: tokens/s, processor seconds of a step
and peak memory of a process. And the memory of a Llama of 1.1 B parameters in Q8_0, by --plan and
by the system.

    finetune.py DIR TEXT [--ways bf16,f32,..] [--turns N] [--steps N] [--batch N] [--context N]
    finetune.py --memory            writes a model of 2.2 GB, all of holes, to a temporary folder

DIR is a model's folder, TEXT what is learnt. Rank 8 on all linear layers but the head, AdamW,
gradients clipped to a norm of 1; ours on all cores, by default as replicas, theirs on --threads
with sdpa. Needs torch, transformers and peft, and build/llm. A way of theirs is f32, autocast
(weights of f32, products of bf16) or bf16, with "-compiled" by torch.compile. Ours has the dtype
f32 beside f32 and autocast, and bf16 beside all of them. Both sides' best step of all turns counts;
a step's processor seconds are those of all threads, waiting in a loop included, of all steps but
the first.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
LLM = os.environ.get("TSHARD_LLM") or os.path.join(TOP, "build", "llm")
WAYS = "bf16,bf16-compiled,autocast,autocast-compiled,f32,f32-compiled"
RANK = 8


def peak():
    """Bytes that this process had at most."""
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", file.read()).group(1))


# -- theirs: a process that takes a number of steps on its input, and answers with a line ---------

def peer(args):
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model
    torch.set_num_threads(args.threads)
    way, compiled = args.peer.split("-")[0], args.peer.endswith("-compiled")
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, attn_implementation="sdpa")
    # "all-linear" is all linear layers but the head
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear",
                        task_type="CAUSAL_LM")
    model = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optim = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0, fused=True)
    with open(args.text, encoding="utf-8") as file:
        text = file.read(8 * args.batch * args.context)
    ids = transformers.AutoTokenizer.from_pretrained(args.model)(text).input_ids
    ids = torch.tensor(ids[:args.batch * args.context]).view(args.batch, args.context)
    run = torch.compile(model) if compiled else model

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optim.step()
        optim.zero_grad()
        return loss.item()

    step()
    step()
    for line in sys.stdin:
        best, cpu = 1e9, time.process_time()
        for _ in range(int(line)):
            begin = time.perf_counter()
            loss = step()
            best = min(best, time.perf_counter() - begin)
        cpu = (time.process_time() - cpu) / int(line)
        print(json.dumps([args.batch * args.context / best, cpu, peak(), loss]), flush=True)


class Peer:
    def __init__(self, args, way):
        command = [sys.executable, __file__, args.model, args.text, "--peer", way, "--batch",
                   str(args.batch), "--context", str(args.context), "--threads", str(args.threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, universal_newlines=True)

    def measure(self, steps):
        self.process.stdin.write("%d\n" % steps)
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


# -- ours ------------------------------------------------------------------------------------

def tune(model, text, folder, *flags):
    """Runs build/llm: rows of metrics.csv, processor seconds, peak bytes, what it printed."""
    out = os.path.join(folder, "out%d" % time.monotonic_ns())
    command = [LLM, "--model", model, "--finetune", text, "--out", out, "--lora", str(RANK),
               "--max-new", "0", "--eval-every", "1000000", *flags]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           universal_newlines=True)
    told = run.stdout.read()
    _, status, usage = os.wait4(run.pid, 0)
    run.returncode = status
    if status:
        sys.exit("%s\n%s" % (" ".join(command), told))
    with open(out + ".run/metrics.csv", encoding="ascii") as file:
        rows = list(csv.DictReader(file))
    return rows, usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss, told


def ours(args, folder, dtype):
    flags = ["--dtype", dtype, "--batch", str(args.batch), "--context", str(args.context),
             "--accumulate", "1", "--held-out", os.path.join(folder, "held.txt"),
             *args.flags.split()]
    one = tune(args.model, args.text, folder, *flags, "--steps", "1")
    rows, cpu, most, _ = tune(args.model, args.text, folder, *flags, "--steps", str(1 + args.steps))
    return (max(float(row["tokens_per_s"]) for row in rows), (cpu - one[1]) / args.steps, most,
            float(rows[-1]["train_loss"]))


def beside(args, folder, way):
    """Prints both sides of one way."""
    dtypes = ["bf16"] if way.startswith("bf16") else ["f32", "bf16"]
    theirs, other = [], Peer(args, way)
    mine = {dtype: [] for dtype in dtypes}
    for _ in range(args.turns):
        theirs.append(other.measure(args.steps))
        for dtype in dtypes:
            mine[dtype].append(ours(args, folder, dtype))
    other.close()
    speed, cpu, most = (max(t[0] for t in theirs), min(t[1] for t in theirs), theirs[-1][2])
    print("%-18s %6.0f tokens/s, %6.2f processor s/step, %5.2f GB" % (way, speed, cpu, most / 1e9))
    for dtype in dtypes:
        a = (max(t[0] for t in mine[dtype]), min(t[1] for t in mine[dtype]), mine[dtype][-1][2])
        print("  ours, %-10s %6.0f tokens/s, %6.2f processor s/step, %5.2f GB: speed %.2f, "
              "processor %.2f, memory %.2f" % (dtype, *a[:2], a[2] / 1e9, a[0] / speed, cpu / a[1],
                                               a[2] / most), flush=True)


# -- memory of a larger model -------------------------------------------------------------------

def memory(args):
    """A Llama of 1.1 B parameters, of zeros, in Q8_0: one step on 512 tokens."""
    sys.path.insert(0, os.path.join(TOP, "tests", "llm"))
    sys.path.insert(0, os.path.join(TOP, "tests", "support"))
    import models
    import test_memory as small
    small.WIDTH, small.HIDDEN, small.LAYERS, small.VOCABULARY = 2048, 5632, 22, 32000
    small.HEADS, small.KV, small.SIZE = 32, 4, 64
    tokens = [models.SPECIAL[0], *models.LETTERS, models.SPECIAL[1]]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print("%d parameters" % small.write(folder))
        with open(os.path.join(folder, "tokenizer.json"), "w", encoding="ascii") as file:
            json.dump(models.letters(tokens), file)
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="ascii") as file:
            json.dump({"bos_token": tokens[0], "eos_token": tokens[-1]}, file)
        text = os.path.join(folder, "text.txt")
        held = os.path.join(folder, "held.txt")
        for path, count in (text, 200), (held, 1):
            with open(path, "w", encoding="ascii") as file:
                file.write("the cat sat on the mat. " * count)
        flags = ["--dtype", "bf16", "--weights", "q8_0", "--batch", "1", "--context",
                 str(args.context), "--accumulate", "1", "--tp", "2", *args.flags.split()]
        plan = subprocess.run([LLM, "--model", folder, "--plan", "--finetune", text, "--lora",
                               str(RANK), *flags], stdout=subprocess.PIPE, check=True,
                              universal_newlines=True).stdout
        print(plan, end="")
        planned = float(re.search(r"at most at a time\s+\S+\s+(\S+)", plan).group(1))
        rows, _, most, _ = tune(folder, text, folder, *flags, "--steps", "2", "--held-out", held)
        print("taken: %.2f MB, planned %.2f: %.3f; losses %s" %
              (most / 1e6, planned, most / 1e6 / planned, [row["train_loss"] for row in rows]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("text", nargs="?")
    parser.add_argument("--peer")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--flags", default="", help="more flags of build/llm")
    parser.add_argument("--folder", help="for temporary files")
    for name, value in ("turns", 3), ("steps", 4), ("batch", 4), ("context", 512), ("threads", 2):
        parser.add_argument("--" + name, type=int, default=value)
    args = parser.parse_args()
    if args.peer:
        return peer(args)
    if args.memory:
        return memory(args)
    if not args.text:
        parser.error("give a model's folder and a text, or --memory")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        with open(args.text, encoding="utf-8") as file:
            held = file.read(4000)
        with open(os.path.join(folder, "held.txt"), "w", encoding="utf-8") as file:
            file.write(held)
        for way in args.ways.split(","):
            beside(args, folder, way)


if __name__ == "__main__":
    main()
