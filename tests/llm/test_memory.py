#!/usr/bin/env python3
"""How much memory examples/llm takes: the rule and the table in its README.md, checked against the
peak of build/llm on a model of 60 million parameters at several dtypes and degrees. And what it
does when an allocation fails: an error about memory, never another model or text.

    FULL=1 test_memory.py     every allocation fails once, not every 20th; tells what came of them
"""

import collections
import json
import os
import struct
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
sys.path.insert(0, HERE)
from scripts import Skipped, check, run_tests
from test_llm import CHATML, LLM, Letters, need_llm

SCRIPT_LIMIT = 300  # seconds, for tests/run.sh
README = os.path.join(TOP, "examples", "llm", "README.md")
BYTES = {"f32": 4, "bf16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a weight
# Of the table: parameters, layers, key heads, head size, as their config.json files say.
MODELS = {
    "SmolLM2 135M": (134515008, 30, 3, 64),
    "Llama 3.2 1B": (1235814400, 16, 8, 64),
    "Qwen 2.5 7B": (7615616512, 28, 4, 128),
    "Llama 3.1 8B": (8030261248, 32, 8, 128),
    "Llama 3.3 70B": (70553706496, 80, 8, 128),
}
TOKENS = 4096


def rule(parameters, layers, kv_heads, head_size, weights, tokens, ranks, cache=2):
    """Bytes of one rank, as README.md says."""
    values = 2 * layers * kv_heads * head_size * tokens
    return (parameters * BYTES[weights] + values * cache) / ranks


def table():
    rows = ["| model | 1 rank: bf16 | q8_0 | q4_0 | 2 ranks: bf16 | q8_0 | q4_0 | 4 ranks: bf16 | "
            "q8_0 | q4_0 |", "|---|" + "--:|" * 9]
    for name, model in MODELS.items():
        sizes = [rule(*model, weights, TOKENS, ranks) / 1e9
                 for ranks in (1, 2, 4) for weights in ("bf16", "q8_0", "q4_0")]
        rows.append("| %s | %s |" % (name, " | ".join("%.2g" % x if x < 9.95 else "%.0f" % x
                                                      for x in sizes)))
    return "\n".join(rows)


def the_table_is_that_of_the_rule(folder):
    with open(README, encoding="utf-8") as file:
        text = file.read()
    check(table() in text, "README.md lacks:\n" + table())


# A llama: width, hidden, layers, heads, key heads, head size, vocabulary.
WIDTH, HIDDEN, LAYERS, HEADS, KV, SIZE, VOCABULARY = 768, 2048, 6, 12, 6, 64, 16384


def shapes():
    yield "model.embed_tokens.weight", [VOCABULARY, WIDTH]
    for i in range(LAYERS):
        at = "model.layers.%d." % i
        for name, rows, columns in (
                ("self_attn.q_proj", HEADS * SIZE, WIDTH), ("self_attn.k_proj", KV * SIZE, WIDTH),
                ("self_attn.v_proj", KV * SIZE, WIDTH), ("self_attn.o_proj", WIDTH, HEADS * SIZE),
                ("mlp.gate_proj", HIDDEN, WIDTH), ("mlp.up_proj", HIDDEN, WIDTH),
                ("mlp.down_proj", WIDTH, HIDDEN)):
            yield at + name + ".weight", [rows, columns]
        yield at + "input_layernorm.weight", [WIDTH]
        yield at + "post_attention_layernorm.weight", [WIDTH]
    yield "model.norm.weight", [WIDTH]
    yield "lm_head.weight", [VOCABULARY, WIDTH]


def write(folder):
    """The model in bf16, all of its weights 0, as a file with holes. Returns its parameters."""
    header, at = {}, 0
    for name, shape in shapes():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
        json.dump({"model_type": "llama", "dtype": "bfloat16", "hidden_size": WIDTH,
                   "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS,
                   "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": SIZE,
                   "vocab_size": VOCABULARY, "tie_word_embeddings": False}, file)
    return at // 2


def peak(folder, tokens, *flags):
    """Bytes that build/llm had at most, by the system's count of its resident pages."""
    prompt = " ".join(str(i % VOCABULARY) for i in range(tokens - 2))
    run = subprocess.Popen([LLM, "--model", folder, "--ids", prompt, "--print-ids", "--max-new",
                            "2", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                           encoding="utf-8", errors="replace")
    errors = run.stderr.read()
    _, status, usage = os.wait4(run.pid, 0)
    run.returncode = status
    check(status == 0, flags, errors)
    return 1024 * usage.ru_maxrss


def the_rule_is_true(folder):
    need_llm()
    parameters = write(folder)
    more = 64e6  # README.md says 100 MB, for larger models
    for tokens in (8, 1500):
        for weights, ranks, flags in (
                ("bf16", 1, ()), ("bf16", 2, ()), ("bf16", 3, ()), ("f32", 2, ("--dtype", "f32")),
                ("q8_0", 1, ("--weights", "q8_0")), ("q4_0", 2, ("--weights", "q4_0"))):
            want = ranks * rule(parameters, LAYERS, KV, SIZE, weights, tokens, ranks,
                                4 if weights == "f32" else 2)
            got = peak(folder, tokens, "--tp", str(ranks), *flags)
            print("%4d tokens, %s, %d ranks: %.1f MB, %.1f more than the rule says" %
                  (tokens, weights, ranks, got / 1e6, (got - want) / 1e6))
            check(want < got < want + ranks * more, tokens, weights, ranks, "ranks take", got,
                  "bytes, the rule says", want, "and at most", more, "more per rank")


# -- allocations that fail ---------------------------------------------------------

FULL = os.environ.get("FULL") == "1"
EVERY = 1 if FULL else 20
GGUF = os.path.join(HERE, "golden", "gguf")
TINY = os.path.join(TOP, "examples", "llm", "tiny")


def failmalloc(folder):
    """Compiles the object that lets an allocation fail."""
    path = os.path.join(folder, "failmalloc.so")
    made = subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", path,
                           os.path.join(TOP, "tests", "support", "failmalloc.c")],
                          stderr=subprocess.PIPE)
    if made.returncode != 0:
        raise Skipped("needs a compiler and glibc")
    return path


def program(preload, flags, text, at=0, count=""):
    """Runs build/llm, of whose allocations number `at` fails."""
    env = {**os.environ, "LD_PRELOAD": preload, "OMP_NUM_THREADS": "1", "FAIL_AT": str(at)}
    if count:
        env["FAIL_COUNT"] = count
    return subprocess.run([LLM, *flags], input=text, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=env, timeout=60, encoding="utf-8",
                          errors="replace")


def every_allocation_fails(folder, flags, text="", least=50):
    """An allocation that fails leads to an error about memory, or to the same output."""
    need_llm()
    preload, count = failmalloc(folder), os.path.join(folder, "count")
    whole = program(preload, flags, text, count=count)
    check(whole.returncode == 0, flags, whole.stderr)
    with open(count, encoding="ascii") as file:
        total = int(file.read())
    check(least < total < 5000, flags, total, "allocations")
    found = collections.Counter()
    for at in range(1, total + 1, EVERY):
        done = program(preload, flags, text, at)
        if done.returncode == 0:
            check(done.stdout == whole.stdout, flags, "allocation", at, "of", total, "fails:",
                  "other output", done.stdout)
            found["the same output"] += 1
        else:
            check(done.returncode in (1, 2) and "memory" in done.stderr.lower(), flags,
                  "allocation", at, "of", total, "fails:", done.returncode, done.stderr)
            found["an error about memory"] += 1
    if FULL:
        print(flags, total, "allocations:", dict(found))


def gguf_models_lack_memory(folder):
    for name in sorted(os.listdir(GGUF)):
        if name.endswith(".gguf") and not name.startswith("tokens_"):
            every_allocation_fails(folder, ("--model", os.path.join(GGUF, name), "--ids", "1 2 3",
                                            "--print-ids", "--max-new", "3", "--tp", "1"))


def folders_lack_memory(folder):
    tokens = ("--ids", "1 2 3", "--print-ids", "--max-new", "3")
    every_allocation_fails(folder, ("--model", os.path.join(TINY, "llama"), *tokens, "--tp", "2"))
    lines = os.path.join(folder, "lines")
    with open(lines, "w", encoding="ascii") as file:
        file.write("hello\nthe other\n")
    every_allocation_fails(folder, ("--model", os.path.join(TINY, "bert"), "--embed", lines,
                                    "--tp", "1"))


def tokenizers_lack_memory(folder):
    """Of GGUF files, and of each kind of tokenizer.json."""
    for name in "tokens_gemma", "tokens_llama3", "tokens_smollm":
        every_allocation_fails(folder, ("--tokenize", "--tokenizer",
                                        os.path.join(GGUF, name + ".gguf")), "the other 12")
    with open(os.path.join(TOP, "tests", "golden", "tokenizers.json"), encoding="utf-8") as file:
        goldens = {item["name"]: item["tokenizer"] for item in json.load(file)}
    for name in "gpt2", "t5", "bert":
        path = os.path.join(folder, name + ".json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(goldens[name], file)
        every_allocation_fails(folder, ("--tokenize", "--tokenizer", path), "the other 12")


def conversations_lack_memory(folder):
    model = Letters(os.path.join(folder, "model"), template=CHATML)
    flags = ("--chat", "--max-new", "4", "--tp", "1")
    every_allocation_fails(folder, ("--model", model.folder, *flags), "hello\nagain\n")


if __name__ == "__main__":
    sys.exit(run_tests("memory", [the_table_is_that_of_the_rule, the_rule_is_true,
                                  gguf_models_lack_memory, folders_lack_memory,
                                  tokenizers_lack_memory, conversations_lack_memory]) > 0)
