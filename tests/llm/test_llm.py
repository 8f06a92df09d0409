#!/usr/bin/env python3
"""examples/llm on small models of every family: logits and greedy tokens of transformers, at 1 to 4
ranks, in both forms of config.json; and what is refused. make_models.py writes the goldens."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
sys.path.insert(0, HERE)
import models
from scripts import LAUNCHER, NO_LAUNCHER, Skipped, check, has_launcher, run_tests

SCRIPT_LIMIT = 400  # seconds, for tests/run.sh
EACH = 60           # of one run
LLM = os.environ.get("TSHARD_LLM") or os.path.join(TOP, "build", "llm")
# Logits are up to 20; sums of float32 in another order move them by 1e-5.
TOLERANCE = 1e-4
RANKS = (1, 2, 3, 4)


def need_llm():
    """Builds the program, if need be."""
    if not os.path.exists(LLM):
        made = subprocess.run(["make", "--no-print-directory", "build/llm"], cwd=TOP, timeout=300,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
        if made.returncode != 0:
            if "needs libcjson-dev" in made.stdout:
                raise Skipped("needs libcjson-dev and libpcre2-dev")
            raise ValueError(made.stdout[-600:])


def llm(folder, *flags, before=(), text=""):
    """Runs it; text is its stdin."""
    need_llm()
    return subprocess.run([*before, LLM, "--model", folder, *flags], input=text,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=EACH,
                          encoding="utf-8", errors="replace")


def numbers(ids):
    return " ".join(map(str, ids))


def run(folder, model, *flags):
    """Logits and new tokens."""
    dump = os.path.join(folder, "logits")
    done = llm(folder, "--ids", numbers(model["prompt"]), "--print-ids", "--greedy", "--max-new",
               str(len(model["new"])), "--dump-logits", dump, "--dtype", "f32", *flags)
    check(done.returncode == 0 and not done.stderr, *flags, done.stderr)
    return models.read_safetensors(dump)["logits"], list(map(int, done.stdout.split()))


def compare(folder, name, *flags):
    model = models.load(name)
    (shape, logits), new = run(folder, model, *flags)
    want = [x for row in model["logits"] for x in row]
    check(shape == [len(model["prompt"]), len(model["logits"][0])], name, shape)
    off = max(abs(a - b) for a, b in zip(logits, want))
    check(off <= TOLERANCE, name, *flags, "logits are off by", off)
    check(new == model["new"], name, *flags, "writes", new, "not", model["new"])


def texts(folder, prompts, *flags, before=()):
    """The tokens that follow each prompt."""
    ids = [word for prompt in prompts for word in ("--ids", numbers(prompt))]
    done = llm(folder, *ids, "--print-ids", "--dtype", "f32", *flags, before=before)
    check(done.returncode == 0 and not done.stderr, flags, done.stderr)
    return [list(map(int, line.replace("[0] ", "").split())) for line in done.stdout.splitlines()]


def compare_batch(folder, batch, *flags):
    new = texts(folder, batch["prompts"], "--max-new", str(len(batch["new"][0])), *flags)
    check(new == batch["new"], flags, "a batch gives", new, "not", batch["new"])


def family(name):
    def test(folder):
        model = models.load(name)
        models.write(folder, model)
        for ranks in RANKS:
            compare(folder, name, "--tp", str(ranks))
            if "batch" in model:
                compare_batch(folder, model["batch"], "--tp", str(ranks))
        compare(folder, name, "--tp", "3", "--balance", "1,3,2")
        models.write(folder, dict(model, config=models.older(model["config"])))
        compare(folder, name, "--tp", "2")
    test.__name__ = name
    return test


def processes_write_what_threads_do(folder):
    if not has_launcher():
        raise Skipped(NO_LAUNCHER)
    model = models.load("smollm3")
    models.write(folder, model)
    for more in ((), ("--balance", "1,3,2"), ("--balance", "auto")):
        done = llm(folder, "--ids", numbers(model["prompt"]), "--print-ids", "--max-new", "32",
                   "--backend", "tcp", *more, before=(LAUNCHER, "-n", "3"))
        check(done.returncode == 0, more, done.stderr)
        check(done.stdout.split() == ["[0]", *map(str, model["new"])], more, done.stdout)
        check(("shares" in done.stderr) == ("auto" in more), more, done.stderr)


def only_on_rank_0(folder, ranks=3):
    """Ranks that each start in a folder of their own: a function that runs the program on them, and
    rank 0's folder."""
    if not has_launcher():
        raise Skipped(NO_LAUNCHER)
    with open(os.path.join(folder, "start"), "w", encoding="ascii") as file:
        file.write("#!/bin/sh\nmkdir -p %s/$TSHARD_RANK && cd %s/$TSHARD_RANK && exec \"$@\"\n"
                   % (folder, folder))
    os.chmod(file.name, 0o755)
    here = os.path.join(folder, "0")
    os.makedirs(here)

    def alone(model, *flags):
        return llm(model, *flags, "--backend", "tcp",
                   before=(LAUNCHER, "-n", str(ranks), file.name))

    return alone, here


def only_rank_0_needs_the_folder(folder):
    """The model's folder under a name that only rank 0 finds."""
    start, here = only_on_rank_0(folder)
    here = os.path.join(here, "model")
    os.makedirs(here)

    def alone(*flags):
        return start("model", *flags)

    for name in ("smollm3", "gpt2"):
        model = models.load(name)
        models.write(here, model)
        done = alone("--ids", numbers(model["prompt"]), "--print-ids", "--max-new", "32",
                     "--dtype", "f32")
        check(done.returncode == 0, done.stderr)
        check(done.stdout.split() == ["[0]", *map(str, model["new"])], done.stdout, done.stderr)
    end = model["new"][9]
    with open(os.path.join(here, "generation_config.json"), "w", encoding="ascii") as text:
        json.dump({"eos_token_id": [end]}, text)
    done = alone("--ids", numbers(model["prompt"]), "--print-ids", "--max-new", "32")
    check(done.stdout.split() == ["[0]", *map(str, model["new"][:model["new"].index(end)])],
          done.stdout, done.stderr)
    done = alone("--ids", "1 61", "--print-ids")
    check(done.returncode == 1 and "61 is not one of" in done.stderr, done.returncode, done.stderr)
    os.remove(os.path.join(here, "model.safetensors"))
    done = alone("--ids", "1 2", "--print-ids")
    check(done.returncode == 1 and "folder without model.safetensors" in done.stderr, done.stderr)
    os.remove(os.path.join(here, "config.json"))
    done = alone("--ids", "1 2", "--print-ids")
    check(done.returncode == 1 and "model/config.json cannot be read" in done.stderr, done.stderr)


def shards_are_kept_for_the_next_start(folder):
    start, here = only_on_rank_0(folder)
    here = os.path.join(here, "model")
    os.makedirs(here)
    model = models.load("smollm3")
    models.write(here, model)

    def told(*flags):
        done = start("model", "--ids", numbers(model["prompt"]), "--print-ids", "--max-new", "32",
                     "--dtype", "f32", "--cache", "kept", *flags)
        check(done.returncode == 0, done.stderr)
        check(done.stdout.split() == ["[0]", *map(str, model["new"])], done.stdout, done.stderr)
        return done.stderr

    def kept(rank):
        inside = os.path.join(folder, str(rank), "kept")
        files = [os.path.join(inside, name) for name in sorted(os.listdir(inside))]
        return {path: os.stat(path).st_mtime_ns for path in files}

    told()
    first = kept(1), kept(2)
    check(all(first) and not any("part-" in path for path in [*first[0], *first[1]]), first)
    told()
    check(first == (kept(1), kept(2)), "written again", first)
    damaged = max(first[0], key=os.path.getsize)
    with open(damaged, "r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    check(told() == "", "a damaged file is sent again in silence")
    again = kept(1)
    check(again.keys() == first[0].keys() and
          {path for path in again if again[path] != first[0][path]} == {damaged}, again, damaged)
    shutil.rmtree(os.path.join(folder, "2", "kept"))
    with open(os.path.join(folder, "2", "kept"), "w", encoding="ascii"):
        pass  # no folder
    check("rank 2 cannot keep" in told(), "a folder that takes nothing")


def written(folder, name, **changes):
    """The folder with keys of config.json changed, or (value ...) taken away."""
    model = models.load(name)
    config = dict(model["config"], **changes)
    config = {key: value for key, value in config.items() if value is not ...}
    models.write(folder, dict(model, config=config))
    return folder


def refused(folder, *words, flags=("--ids", "1 2 3", "--print-ids"), code=1):
    done = llm(folder, "--tp", "2", *flags)
    check(done.returncode == code, words, "exit code", done.returncode, done.stdout, done.stderr)
    check(done.stderr.count("\n") == 1 and all(word in done.stderr for word in words), "wants",
          words, "not", done.stderr)


def configs_that_would_change_results_are_refused(folder):
    for name, changes, words in (
            ("llama", {"model_type": "mixtral"}, ("model_type", "mixtral", "llama, ", "qwen3")),
            ("llama", {"model_type": ...}, ("model_type",)),
            ("llama", {"hidden_size": ...}, ("llama needs the key hidden_size",)),
            ("llama", {"hidden_size": "48"}, ("hidden_size is \"48\"", "number")),
            ("llama", {"num_attention_heads": 5}, ("5 heads", "3 groups")),
            ("llama", {"rope_interleaved": True}, ("rope_interleaved is true", "false")),
            ("llama", {"quantization_config": {"bits": 4}}, ("quantization_config", "bits")),
            ("llama", {"hidden_act": "xielu"}, ("hidden_act", "xielu", "gelu_new")),
            ("llama", {"rope_parameters": {"rope_type": "mystery"}}, ("mystery", "longrope")),
            ("llama", {"rope_parameters": {"rope_type": "default", "mscale": 2}}, ("mscale is 2",)),
            ("llama", {"rope_parameters": {"rope_type": "linear"}}, ("linear", "factor")),
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True},
             ("scale_attn_by_inverse_layer_idx is true",)),
            ("opt", {"do_layer_norm_before": False}, ("do_layer_norm_before is false",)),
            ("falcon", {"alibi": True}, ("alibi is true",)),
            ("bert", {"position_embedding_type": "relative_key"}, ("relative_key", "absolute")),
            ("gemma3", {"model_type": "gemma3"}, ("model_type", "gemma3_text")),
            ("mistral_window", {"layer_types": ["full_attention"]}, ("layer_types", "1 values")),
            ("phi3_longrope_far", {"rope_parameters": {
                "rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1]}},
             ("long_factor", "4 positive numbers")),
            ("bert", {"is_decoder": True}, ("is_decoder is true",)),
            ("phi", {"qk_layernorm": True}, ("qk_layernorm is true",))):
        refused(written(folder, name, **changes), "config.json", *words)
    with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
        file.write("{\"model_type\": ")
    refused(folder, "config.json: line 1, column 16")
    refused(os.path.join(folder, "nowhere"), "nowhere/config.json", "No such file")


def texts_that_are_too_long_are_refused(folder):
    flags = ("--ids", "1 2 3", "--print-ids", "--max-new", "30")
    for name, changes, words in (
            ("gpt2", {"n_positions": 32}, ("more than 32", "positions")),
            ("opt", {"max_position_embeddings": 32}, ("more than 32", "positions"))):
        refused(written(folder, name, **changes), "3 tokens", "30 new", *words, flags=flags)


def settings_within_reach_change_nothing(folder):
    """A window that the text does not reach, or that no layer has."""
    for name, changes in (
            ("mistral", {"sliding_window": 64}),
            ("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
            ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2,
                       "layer_types": ...}),
            ("gemma2", {"layer_types": ..., "cache_implementation": "hybrid"}),
            ("gemma3", {"layer_types": ..., "sliding_window_pattern": 3}),
            ("llama", {"rope_interleaved": False, "mystery": None, "pretraining_tp": 1})):
        compare(written(folder, name, **changes), name, "--tp", "2")


def folders_that_lie_are_refused(folder):
    model = models.load("llama")
    for layers in (1, 3):
        refused(written(folder, "llama", num_hidden_layers=layers),
                "model.layers.%d." % (layers // 2 + 1))
    refused(written(folder, "llama", intermediate_size=45), "(44, 48)", "(45, 48)")
    tensors = dict(model["tensors"])
    del tensors["model.norm.weight"]
    models.write(folder, dict(model, tensors=tensors))
    refused(folder, "model.norm.weight")
    os.remove(os.path.join(folder, "model.safetensors"))
    refused(folder, "model.safetensors")


def edit_header(path, edit, cut=0):
    """Changes the header of a file, and takes bytes off its end."""
    with open(path, "rb") as file:
        data = file.read()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size].decode("ascii"))
    edit(header)
    text = json.dumps(header).encode("ascii")
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data[8 + size:len(data) - cut])


def files_that_lie_are_refused(folder):
    """Each refusal names the file, and the tensor where there is one."""
    path = os.path.join(folder, "model.safetensors")
    norm = "model.norm.weight"

    def changed(edit, *words, cut=0):
        written(folder, "llama")
        edit_header(path, edit, cut)
        refused(folder, "model.safetensors", *words)

    def another_dtype(header):
        header[norm].update(dtype="I32")

    def overlapping(header):
        end = header[norm]["data_offsets"]
        header[norm]["data_offsets"] = [end[0] - 4, end[1] - 4]

    def longer(header):
        header[norm]["shape"] = [49]

    changed(another_dtype, norm, "I32", "F32")
    changed(overlapping, norm, "overlaps")
    changed(longer, norm)
    changed(lambda header: None, "cut off", cut=4)
    written(folder, "llama")  # all in one file, and one of them in a second one, too
    tensors = models.read_safetensors(path)
    os.remove(path)
    models.write_safetensors(os.path.join(folder, "a.safetensors"), tensors)
    models.write_safetensors(os.path.join(folder, "b.safetensors"), {norm: tensors[norm]})
    refused(folder, "twice", norm)
    index = {name: "a.safetensors" for name in tensors}
    index[norm] = "c.safetensors"
    with open(path + ".index.json", "w", encoding="ascii") as file:
        json.dump({"weight_map": index}, file)
    refused(folder, "c.safetensors", "named by the index")


def values_that_are_not_finite_are_told(folder):
    written(folder, "llama")
    path = os.path.join(folder, "model.safetensors")
    tensors = models.read_safetensors(path)
    shape, floats = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = (shape, [float("nan"), *floats[1:]])
    models.write_safetensors(path, tensors)
    done = llm(folder, "--tp", "2", "--ids", "1 2", "--print-ids", "--max-new", "1")
    check("norm.weight" in done.stderr and "1 NaN" in done.stderr, done.returncode, done.stderr)


ESCAPES = "\x1b[2J\x1b]0;owned\x07\nllm: all is well\x7f\u009b31m\u202e"


def one_safe_line(done, *what):
    check(done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("llm: ")
          and not any(ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e"
                      for c in done.stderr[:-1] + done.stdout), *what, repr(done.stderr),
          repr(done.stdout))


def text_of_files_reaches_no_terminal(folder):
    """A string with escape sequences and a forged line wherever a file may have one: every error is
    one line of this program's own."""
    letters = Letters(folder)
    path = os.path.join(folder, "model.safetensors")
    ids = ("--ids", "1 2", "--print-ids")
    for changes in ({ESCAPES: 1}, {"model_type": ESCAPES}, {"hidden_size": ESCAPES},
                    {"hidden_act": ESCAPES}, {"rope_parameters": {"rope_type": ESCAPES}},
                    {"rope_parameters": {"rope_type": "default", ESCAPES: 2}}, {"x": {ESCAPES: 1}}):
        one_safe_line(llm(written(folder, "llama", **changes), *ids), changes)
    written(folder, "llama")
    tensors = models.read_safetensors(path)
    models.write_safetensors(path, dict(tensors, **{"model." + ESCAPES: ([1], [1.0])}))
    one_safe_line(llm(folder, *ids), "a tensor's name")
    written(folder, "llama")
    edit_header(path, lambda header: header["model.norm.weight"].update(dtype=ESCAPES))
    one_safe_line(llm(folder, *ids), "a dtype")
    written(folder, "llama")
    os.rename(path, os.path.join(folder, "a.safetensors"))
    letters.save("model.safetensors.index.json", {"weight_map": {ESCAPES: "a.safetensors"}})
    one_safe_line(llm(folder, *ids), "an index")
    letters.save("model.safetensors.index.json", {"weight_map": {"model.norm.weight": ESCAPES}})
    one_safe_line(llm(folder, *ids), "an index of such a file")
    os.remove(os.path.join(folder, "model.safetensors.index.json"))
    os.rename(os.path.join(folder, "a.safetensors"), path)
    tokenizer = models.letters(letters.tokens)
    for key, value in (("normalizer", {"type": ESCAPES}), (ESCAPES, 1), ("decoder", ESCAPES),
                       ("model", dict(tokenizer["model"], merges=[[ESCAPES, "b"]])),
                       ("model", dict(tokenizer["model"], unk_token=ESCAPES)),
                       ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(" + ESCAPES},
                                          "behavior": "Isolated", "invert": False})):
        letters.save("tokenizer.json", dict(tokenizer, **{key: value}))
        one_safe_line(llm(folder, "--prompt", "a"), key)
    letters.save("tokenizer.json", tokenizer)
    lines = os.path.join(folder, "lines")
    with open(lines, "w", encoding="ascii") as file:
        file.write("a\n")
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    for changes in ({"type": ESCAPES}, {"path": ESCAPES + ".."}):
        letters.save("modules.json", [dict(module, **changes), module])
        one_safe_line(llm(folder, "--embed", lines), changes)


def generated_text_has_no_control_characters(folder):
    """But newlines and tabs; --raw keeps them, and so does --detokenize into a pipe."""
    letters = Letters(folder)
    odd = {"a": "\x1b", "b": "\x07", "c": "\u009b", "d": "\r", "e": "\t", "f": "\x7f", "g": "\xe9"}
    tokenizer = models.letters(letters.tokens)
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [
        tokenizer["decoder"], *({"type": "Replace", "pattern": {"String": a}, "content": b}
                                for a, b in odd.items())]}
    letters.save("tokenizer.json", tokenizer)
    ids = ["--ids", numbers(models.load("llama")["prompt"]), "--max-new", "60", "--temperature",
           "3", "--seed", "1"]

    def text(*flags):
        done = subprocess.run([LLM, "--model", folder, *flags], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=EACH)
        check(done.returncode == 0, flags, done.stderr)
        return done.stdout.decode("utf-8")

    for flags in (ids, ids + ids[:2]):
        raw, safe = text(*flags, "--raw"), text(*flags)
        check(sum(raw.count(c) for c in "\x1b\x07\u009b\r\x7f") > 3 and "\t" in raw, repr(raw))
        check(safe == "".join(c for c in raw if c not in "\x1b\x07\u009b\r\x7f"), repr(safe),
              "not", repr(raw))
    done = subprocess.run([LLM, "--model", folder, "--detokenize"], stdout=subprocess.PIPE,
                          input=b"1 2 3 4 5 6 7", timeout=EACH)
    check(done.stdout.decode("utf-8") == "".join(odd.values()), done.stdout)


def logits_that_are_not_finite_are_refused(folder):
    """Greedily, too: finite weights whose logits are beyond f16, or beyond f32."""
    for scale, dtype in ((3e4, "f16"), (1e38, "f32")):
        written(folder, "llama")
        path = os.path.join(folder, "model.safetensors")
        tensors = models.read_safetensors(path)
        shape, floats = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = (shape, [scale * x for x in floats])
        models.write_safetensors(path, tensors)
        for ranks in (1, 3):
            for flags in ((), ("--temperature", "0"), ("--temperature", "1"),
                          ("--repetition-penalty", "1.5"), ("--ids", "4 5")):
                done = llm(folder, "--ids", "1 2 3", "--print-ids", "--max-new", "4", "--dtype",
                           dtype, "--tp", str(ranks), *flags)
                check(done.returncode == 1 and "tsh_sample: row 0 of the logits" in done.stderr and
                      (scale == 1e38 or not done.stdout.strip()), scale, dtype, ranks, flags,
                      done.returncode, done.stdout, done.stderr)
        if dtype == "f16":
            done = llm(folder, "--ids", "1 2 3", "--print-ids", "--max-new", "4", "--dtype", "f32")
            check(done.returncode == 0 and len(done.stdout.split()) == 4, done.stderr)


def other_names_load(folder):
    """Without the prefix, and with tensors that are no parameters, as in older files of the hub."""
    for name, prefix, more in (
            ("gpt2", "transformer.", {"h.0.attn.bias": [1, 1, 4, 4]}),
            ("gpt_neox", "", {"gpt_neox.layers.0.attention.bias": [1, 1, 4, 4],
                              "gpt_neox.layers.1.attention.rotary_emb.inv_freq": [1]}),
            ("llama", "model.", {"layers.0.self_attn.rotary_emb.inv_freq": [4]}),
            ("bert", "bert.", {"embeddings.position_ids": [1, 9], "pooler.dense.weight": [48, 48],
                               "pooler.dense.bias": [48]}),
            ("opt", "model.", {})):
        model = models.load(name)
        models.write(folder, model)
        path = os.path.join(folder, "model.safetensors")
        tensors = {key[len(prefix):] if key.startswith(prefix) else key: value
                   for key, value in models.read_safetensors(path).items()}
        tensors = {key.replace("LayerNorm.weight", "LayerNorm.gamma")
                   .replace("LayerNorm.bias", "LayerNorm.beta"): value
                   for key, value in tensors.items()}
        for key, shape in more.items():
            tensors[key] = (shape, models.values(key, shape, 0, 0))
        models.write_safetensors(path, tensors)
        compare(folder, name, "--tp", "2")


def mistakes_are_told(folder):
    written(folder, "llama")
    for flags, code, words in ((("--ids", "1 61", "--print-ids"), 1, ("61", "61 tokens")),
                               (("--ids", "1 x", "--print-ids"), 1, ("\"x\"", "number")),
                               (("--ids", " ", "--print-ids"), 1, ("--ids",)),
                               ((), 2, ("one of --prompt, --ids, --chat",)),
                               (("--ids", "1", "--prompt", "a"), 2, ("one of --prompt, --ids",)),
                               (("--ids", "1", "--chat"), 2, ("one of --prompt, --ids, --chat",)),
                               (("--ids", "1", "--system", "a"), 2, ("--system", "--chat")),
                               (("--ids", "1", "--cache", folder), 2, ("--cache", "tcp")),
                               (("--ids", "1", "--wire", "f32"), 2, ("--wire", "'f32'")),
                               (("--ids", "1", "--balance", "auto"), 2, ("auto", "tcp")),
                               (("--ids", "1", "--print-ids", "--balance", "2"), 1,
                                ("2 ranks", "'2'")),
                               (("--ids", "1", "--stop", ""), 2, ("--stop", "not empty")),
                               (("--ids", "1", "--stop"), 2, ("--stop needs a value",)),
                               (("--ids", "1", "--stop", "a", "--print-ids"), 1, ("tokenizer",)),
                               (("--ids", "1", "--ids", "2", "--dump-logits", "x"), 2,
                                ("--dump-logits takes one prompt",)),
                               (("--ids", "1", "--seed", "x"), 2, ("--seed", "'x'")),
                               (("--ids", "1", "--top-p", "0"), 2, ("--top-p", "'0'")),
                               (("--ids", "1", "--temperature", "x"), 2, ("from 0, not 'x'",)),
                               (("--ids", "1", "--temperature", "-1"), 2, ("from 0, not '-1'",)),
                               (("--ids", "1", "--temperature", ""), 2, ("from 0, not ''",)),
                               (("--ids", "1", "--temperature", "nan"), 2, ("from 0, not 'nan'",)),
                               (("--ids", "1"), 1, ("tokenizer",)),
                               (("--embed", "/"), 1, ("tokenizer",)),
                               (("--ids", "1", "--max-new", "-3"), 2, ("--max-new", "whole")),
                               (("--ids", "1", "--dtype", "q8_0"), 2, ("--dtype", "q8_0")),
                               (("--ids", "1", "--weights", "q5_0"), 2, ("--weights", "q5_0")),
                               (("--ids", "1", "--nothing"), 2, ("--nothing",)),
                               (("--ids", "1", "--print-ids", "--dump-logits", folder), 1,
                                (folder,))):
        refused(folder, *words, flags=flags, code=code)


def the_end_of_a_text_ends_it(folder):
    model = models.load("llama")
    end = model["new"][9]
    want = model["new"][:model["new"].index(end)]
    flags = ("--ids", numbers(model["prompt"]), "--print-ids", "--tp", "2")
    for ids in (end, [60, end]):
        done = llm(written(folder, "llama", eos_token_id=ids), *flags)
        check(done.stdout.split() == list(map(str, want)), done.stdout, done.stderr)
    with open(os.path.join(folder, "generation_config.json"), "w", encoding="ascii") as file:
        json.dump({"eos_token_id": [end]}, file)
    done = llm(written(folder, "llama", eos_token_id=None), *flags)
    check(done.stdout.split() == list(map(str, want)), done.stdout, done.stderr)
    done = llm(folder, *flags, "--ignore-eos", "--max-new", "32")
    check(done.stdout.split() == list(map(str, model["new"])), done.stdout, done.stderr)


def samples_are_those_of_the_seed(folder):
    """At every degree; another seed gives others. Filters that leave one token are greedy."""
    model = models.load("llama")
    written(folder, "llama")

    def tokens(*flags):
        done = llm(folder, "--ids", numbers(model["prompt"]), "--print-ids", "--max-new",
                   str(len(model["new"])), "--dtype", "f32", "--ignore-eos", *flags)
        check(done.returncode == 0 and not done.stderr, flags, done.stderr)
        return list(map(int, done.stdout.split()))

    flags = ("--temperature", "2", "--top-p", "0.95", "--min-p", "0.001", "--top-k", "50")
    want = tokens(*flags, "--seed", "5", "--tp", "1")
    for ranks in RANKS:
        got = tokens(*flags, "--seed", "5", "--tp", str(ranks))
        check(got == want, "on", ranks, "ranks", got, "not", want)
    check(tokens(*flags, "--seed", "6", "--tp", "1") != want, "the seed changes nothing")
    for one in (("--top-k", "1"), ("--top-p", "1e-6"), ("--min-p", "1"), ("--temperature", "1e-6"),
                ("--temperature", "2", "--greedy"), ("--temperature", "0"),
                ("--temperature", "0.0", "--top-p", "0.9")):
        got = tokens(*one, "--seed", "5", "--tp", "2")
        check(got == model["new"], one, got, "not", model["new"])
    got = tokens("--repetition-penalty", "1000000", "--tp", "2")
    check(len(set(got + model["prompt"])) == len(got) + len(set(model["prompt"])),
          "a token comes twice:", got)


def batches_are_texts_of_their_own(folder):
    """What follows a prompt does not depend on the others: sampled, stopped, ended, in chunks, as
    text, on processes."""
    model = models.load("llama")
    letters = Letters(folder)
    prompts = model["batch"]["prompts"] + [[(7 * i) % 61 for i in range(150)]]
    for flags in ((), ("--temperature", "1.5", "--top-p", "0.9", "--seed", "3"),
                  ("--repetition-penalty", "1.7"), ("--seed", "9", "--repetition-penalty", "2")):
        flags += ("--max-new", "20", "--ignore-eos")
        want = [texts(folder, [prompt], "--tp", "1", *flags)[0] for prompt in prompts]
        for ranks in RANKS:
            got = texts(folder, prompts, "--tp", str(ranks), *flags)
            check(got == want, flags, "at", ranks, "gives", got, "not", want)
        if has_launcher():
            got = texts(folder, prompts, "--backend", "tcp", *flags, before=(LAUNCHER, "-n", "2"))
            check(got == want, flags, "on processes gives", got, "not", want)
    want = texts(folder, [[5, 7]], "--max-new", "2", "--ignore-eos")
    check(texts(folder, [[5, 7]] * 300, "--max-new", "2", "--ignore-eos") == 300 * want, want)
    new = [letters.decode(ids) for ids in model["batch"]["new"]]
    stop = new[2][3:5]
    flags = [word for prompt in model["batch"]["prompts"] for word in ("--ids", numbers(prompt))]
    done = llm(folder, *flags, "--max-new", "16", "--dtype", "f32", "--stop", stop)
    check(done.stdout == "".join("==> %d <==\n%s\n" % (i + 1, text.split(stop)[0])
                                 for i, text in enumerate(new)), done.stdout, new, stop)
    check("38 tokens" in done.stderr, done.stderr)
    done = llm(folder, "--prompt", "hello", "--prompt", "a", "--max-new", "6", "--dtype", "f32")
    want = [letters.decode(letters.next(letters.encode(text), 6)) for text in ("hello", "a")]
    check(done.stdout == "==> 1 <==\n%s\n==> 2 <==\n%s\n" % tuple(want), done.stdout, want)
    end = model["batch"]["new"][0][4]
    written(folder, "llama", eos_token_id=end)
    got = texts(folder, model["batch"]["prompts"], "--max-new", "16")
    want = [ids[:ids.index(end)] if end in ids else ids for ids in model["batch"]["new"]]
    check(got == want, got, "not", want)


def fewer_bits_are_near(folder):
    """With 16 bits, and with 8 in blocks of 32, the logits are near, of weights or of what ranks
    send; all at several degrees."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
             "intermediate_size": 96}
    model = models.load("llama")
    model["config"].update(sizes)
    for name, shape in model["tensors"].items():
        rows = {"gate": 96, "up_p": 96, "q_pr": 128, "k_pr": 64, "v_pr": 64, "o_pr": 64, "down": 64}
        columns = {"o_pr": 128, "down": 96}
        part = name.split(".")[-2][:4]
        if len(shape) == 1:
            shape[:] = [64]
        elif part in rows:
            shape[:] = [rows[part], columns.get(part, 64)]
        else:
            shape[:] = [61, 64]
    models.write(folder, model)
    (_, exact), _ = run(folder, model, "--tp", "1")
    size = max(map(abs, exact))
    for flags, most in ((("--dtype", "bf16"), 0.05), (("--weights", "q8_0"), 0.04),
                        (("--weights", "q4_0"), 0.5), (("--weights", "q4_1"), 0.4)):
        for ranks in (("1",), ("2",), ("3",), ("3", "--balance", "1,2,1")):
            (_, logits), _ = run(folder, model, "--tp", *ranks, *flags)
            off = max(abs(a - b) for a, b in zip(logits, exact)) / size
            check(1e-5 < off < most, flags, ranks, "logits are off by", off)
    model["prompt"] = (model["prompt"] * 256)[:256]  # short activations are sent as they are
    (_, exact), _ = run(folder, model, "--tp", "2")
    for wire, most in (("bf16", 0.02), ("q8_0", 0.05), ("q4_0", 0.5)):
        (_, logits), _ = run(folder, model, "--tp", "2", "--wire", wire)
        off = max(abs(a - b) for a, b in zip(logits, exact)) / size
        check(1e-5 < off < most, "--wire", wire, "logits are off by", off)


CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
          "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
class Letters:
    """A folder whose tokenizer has a token for each letter; `end` is that of <|im_end|>."""

    def __init__(self, folder, end=60, template=CHATML, **changes):
        self.folder, self.end = written(folder, "llama", **changes), end
        self.tokens = [models.SPECIAL[0], *models.LETTERS]
        self.tokens.insert(end, models.SPECIAL[1])
        self.save("tokenizer.json", models.letters(self.tokens))
        self.save("tokenizer_config.json", {"chat_template": template, "bos_token": "<s>"})

    def save(self, name, value):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            json.dump(value, file)

    def encode(self, text):
        ids = []
        while text:
            token = next((t for t in models.SPECIAL if text.startswith(t)), text[0])
            ids.append(self.tokens.index(token))
            text = text[len(token):]
        return ids

    def decode(self, ids):
        return "".join(self.tokens[i] for i in ids if self.tokens[i] not in models.SPECIAL)

    def next(self, ids, most):
        """The tokens that follow, greedily, without those that end a text."""
        done = llm(self.folder, "--ids", numbers(ids), "--print-ids", "--ignore-eos", "--max-new",
                   str(most), "--dtype", "f32", "--tp", "1")
        check(done.returncode == 0, done.stderr)
        return list(map(int, done.stdout.split()))


def stop_strings_end_a_text(folder):
    """Before the first of them; what might have been the beginning of one is shown in the end."""
    model = models.load("llama")
    letters = Letters(folder)
    text = letters.decode(model["new"])
    flags = ("--ids", numbers(model["prompt"]), "--dtype", "f32", "--max-new", "32")
    check(len(text) > 24, "the text is too short for this test", text)
    for stops, want in (((text[9:12],), text[:text.index(text[9:12])]),
                        ((text[5:25], text[14:16]), text[:text.index(text[14:16])]),
                        ((text[12:15] + "~", text[-2:] + "~", "~"), text),
                        ((text[0],), "")):
        more = [word for stop in stops for word in ("--stop", stop)]
        for ranks in RANKS:
            done = llm(folder, *flags, *more, "--tp", str(ranks))
            check(done.returncode == 0 and done.stdout == want + "\n", stops, repr(done.stdout),
                  "not", repr(want), done.stderr)
    done = llm(folder, *flags, "--stop", text[9:12], "--print-ids", "--tp", "2")
    count = len(done.stdout.split())
    check(list(map(int, done.stdout.split())) == model["new"][:count], done.stdout, done.stderr)
    check(text[9:12] in letters.decode(model["new"][:count]) and
          text[9:12] not in letters.decode(model["new"][:count - 1]), done.stdout)


def tokens_beyond_the_model_are_refused_in_texts(folder):
    """A tokenizer with more tokens than the model is one as long as no text has them."""
    letters = Letters(folder)
    with open(os.path.join(folder, "tokenizer.json"), encoding="utf-8") as file:
        tokenizer = json.load(file)
    beyond = len(letters.tokens)
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=beyond, content="<far>"))
    tokenizer["model"]["dropout"] = 0.0
    letters.save("tokenizer.json", tokenizer)
    for flags in ("--prompt", "ab c"), ("--prompt", "a", "--stop", "<far>"), ("--chat",):
        done = llm(folder, *flags, "--max-new", "4", text="ab\n")
        check(done.returncode == 0, flags, done.stderr)
    words = "token %d" % beyond, "%d tokens" % beyond
    refused(folder, *words, flags=("--prompt", "ab <far>c", "--max-new", "4"))
    done = llm(folder, "--chat", "--max-new", "4", text="ab\n<far>\n")
    check(done.returncode == 1 and all(word in done.stderr for word in words), done.stderr)


def talk(letters, questions, most, context=4096, system=None):
    """What a conversation is to give: its answers as tokens, how many tokens its prompts have, how
    many of them the cache has not, and how often something was forgotten."""
    said, cache, answers, total, computed, forgotten = [], [], [], 0, 0, 0
    begin = [] if system is None else ["<|im_start|>system\n%s<|im_end|>\n" % system]
    for question in questions:
        said.append("<|im_start|>user\n%s<|im_end|>\n" % question)
        while True:
            ids = letters.encode("".join(begin + said) + "<|im_start|>assistant\n")
            if len(ids) < context:
                break
            forgotten += 1
            said = said[2:]
            if not said:
                break
        if not said:
            continue
        kept = 0
        while kept < min(len(cache), len(ids) - 1) and cache[kept] == ids[kept]:
            kept += 1
        new = letters.next(ids, min(most, context - len(ids)))
        end = new.index(letters.end) if letters.end in new else len(new)
        cache = ids + new[:end if letters.end in new else -1]
        answers.append(new[:end])
        said.append("<|im_start|>assistant\n%s<|im_end|>\n" % letters.decode(new[:end]))
        total, computed = total + len(ids), computed + len(ids) - kept
    return answers, total, computed, forgotten


def converse(letters, questions, most, *flags, before=()):
    done = llm(letters.folder, "--chat", "--greedy", "--max-new", str(most), "--dtype", "f32",
               *flags, text="\n".join(questions), before=before)
    check(done.returncode == 0, flags, done.stderr)
    return done


def conversations_keep_the_cache(folder):
    """Answers are those of the whole conversation, and end where the template says; only what is
    new is computed."""
    questions = ["hello, who are you?", "and what is 2 1 3?", "bye!"]
    for end in range(61):
        letters = Letters(folder, end)
        answers, total, computed, _ = talk(letters, questions, 20, system="be nice.")
        if any(len(a) < 20 for a in answers[:2]) and all(answers):
            break
    else:
        check(False, "no answer ends before its time")
    want = "".join(letters.decode(a) + "\n" for a in answers)
    for ranks in RANKS:
        done = converse(letters, [*questions[:2], "", questions[2]], 20, "--system", "be nice.",
                        "--tp", str(ranks))
        check(done.stdout == want, ranks, repr(done.stdout), "not", repr(want))
        check("3 answers; prompts: %d tokens, %d of them computed" % (total, computed) in
              done.stderr and computed < 0.8 * total, done.stderr, total, computed)
    done = converse(letters, questions, 20, "--system", "be nice.", "--print-ids")
    check(done.stdout == "".join(numbers(a) + "\n" for a in answers) and
          "tokens/s" not in done.stderr, done.stdout, done.stderr)
    stop = letters.decode(answers[0])[2:4]
    done = converse(letters, questions[:1], 20, "--system", "be nice.", "--stop", stop)
    check(done.stdout == letters.decode(answers[0]).split(stop)[0] + "\n", done.stdout, stop)
    check(converse(letters, [], 5).stdout == "", "nothing is asked, and answered")


def conversations_on_processes(folder):
    if not has_launcher():
        raise Skipped(NO_LAUNCHER)
    letters, questions = Letters(folder), ["hello", "and now?"]
    want = ["[0] " + letters.decode(a) for a in talk(letters, questions, 12)[0]]
    flags = ("--backend", "tcp", "--stop", "zz~")
    done = converse(letters, questions, 12, *flags, before=(LAUNCHER, "-n", "3"))
    check([line for line in done.stdout.split("\n") if line] ==
          [line for answer in want for line in answer.replace("\n", "\n[0] ").split("\n")],
          done.stdout, want)


def answers_come_at_once_and_questions_may_take_long(folder):
    """Longer than TSHARD_TIMEOUT."""
    letters, questions = Letters(folder), ["hello", "and now?"]
    answers = [letters.decode(a) for a in talk(letters, questions, 12)[0]]
    flags = ("--model", folder, "--chat", "--greedy", "--max-new", "12", "--dtype", "f32")
    ways = [("", [LLM, *flags, "--tp", "3"])]
    if has_launcher():
        ways.append(("[0] ", [LAUNCHER, "-n", "2", LLM, *flags, "--backend", "tcp"]))
    for label, command in ways:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, encoding="utf-8",
                              env=dict(os.environ, TSHARD_TIMEOUT="1")) as running:
            for question, answer in zip(questions, answers):
                time.sleep(2)
                running.stdin.write(question + "\n")
                running.stdin.flush()
                for want in answer.split("\n"):
                    line = running.stdout.readline()
                    check(line == label + want + "\n", command, repr(line), repr(want))
            running.stdin.close()
            check(running.wait(EACH) == 0 and not running.stdout.read(), "exit code")


def long_conversations_forget(folder):
    letters = Letters(folder)
    questions = ["one", "two", "three? " + "x" * 60, "four", "five, " + 3 * "so long "]
    answers, _, _, forgotten = talk(letters, questions, 9, 110)
    check(forgotten >= 2 and len(answers) == len(questions), forgotten, answers)
    done = converse(letters, questions, 9, "--context", "110", "--tp", "2")
    check(done.stdout == "".join(letters.decode(a) + "\n" for a in answers), done.stdout, answers)
    check(done.stderr.count("do not fit into 110 (--context): the oldest question and its answer "
                            "are forgotten") == forgotten, forgotten, done.stderr)
    done = converse(letters, ["one", "x" * 110, "two"], 9, "--context", "110", "--tp", "2")
    check(done.stderr.count("this line is left out") == 1 and "2 answers" in done.stderr,
          done.stderr)
    # An answer that the context cuts.
    room = len(letters.encode("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n")) + 5
    done = llm(folder, "--chat", "--greedy", "--dtype", "f32", "--context", str(room),
               text="one\n")
    check(done.stdout == letters.decode(talk(letters, ["one"], 99, room)[0][0]) + "\n" and
          "the answer is cut: no more fits into %d tokens" % room in done.stderr, done.stdout,
          done.stderr)


def answers_are_drawn_as_the_model_says(folder):
    """generation_config.json, else temperature 0.7 and top-p 0.9; flags come first."""
    letters = Letters(folder)

    def answer(*flags, code=0):
        done = llm(folder, "--chat", "--dtype", "f32", "--max-new", "30", "--tp", "2", *flags,
                   text="hello\n")
        check(done.returncode == code, flags, done.stderr)
        return done.stderr if code else done.stdout

    greedy, usual = answer("--greedy"), answer()
    endless = answer("--greedy", "--ignore-eos")
    check(usual != greedy and usual == answer("--temperature", "0.7", "--top-p", "0.9", "--seed",
                                              "0"), usual, greedy)
    check(answer("--temperature", "0") == greedy == answer("--top-k", "1"), "greedy")
    check(answer("--seed", "4") != usual, "the seed changes nothing")
    for config, flags in (({"eos_token_id": 7}, ()),
                          ({"do_sample": False, "temperature": 3}, ()),
                          ({"do_sample": True, "top_k": None},
                           ("--temperature", "1", "--top-p", "1", "--top-k", "50")),
                          ({"temperature": 2, "top_k": 9, "min_p": 0.01, "top_p": 0.8},
                           ("--temperature", "2", "--top-p", "0.8", "--top-k", "9", "--min-p",
                            "0.01")),
                          ({"repetition_penalty": 1.5}, ("--repetition-penalty", "1.5")),
                          ({"temperature": 0, "top_p": 0.5}, ("--greedy",))):
        letters.save("generation_config.json", {})
        want = answer(*flags, "--ignore-eos")
        letters.save("generation_config.json", config)
        check(answer("--ignore-eos") == want, config, flags, answer("--ignore-eos"), want)
        if "temperature" in config:
            check(answer("--greedy", "--ignore-eos") == endless, "flags come first")
    for key, value in (("temperature", -1), ("temperature", "hot"), ("top_p", 2), ("top_k", True)):
        letters.save("generation_config.json", {"do_sample": True, key: value})
        check("generation_config.json: " + key in answer(code=1), key)
        check(answer("--greedy"), "greedy does not read it")


def answers_end_in_time(folder):
    """At --max-new, 512 by default, with a line that says so."""
    Letters(folder, max_position_embeddings=4000)
    for flags, most in (((), 512), (("--max-new", "30"), 30)):
        done = llm(folder, "--chat", "--ignore-eos", "--dtype", "f32", "--print-ids", *flags,
                   text="hello\n")
        check(len(done.stdout.split()) == most and "llm: the answer is cut after %d tokens "
              "(--max-new)\n" % most == done.stderr, len(done.stdout.split()), done.stderr)


def ctrl_c_ends_an_answer_then_the_conversation(folder):
    """On a terminal, whose first line says how to end."""
    letters = Letters(folder, max_position_embeddings=100000)
    for ranks, last in (("1", "\x04"), ("3", None)):
        ours, theirs = pty.openpty()
        with subprocess.Popen([LLM, "--model", letters.folder, "--chat", "--greedy", "--ignore-eos",
                               "--context", "90000", "--max-new", "80000", "--dtype", "f32", "--tp",
                               ranks], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
                              encoding="utf-8") as running:
            shown = ""

            def wait(text, count):
                nonlocal shown
                until = time.time() + EACH
                while shown.count(text) < count and time.time() < until:
                    if select.select([ours], [], [], 1)[0]:
                        shown += os.read(ours, 4096).decode("utf-8", "replace")
                check(shown.count(text) >= count, ranks, "waited for", text, shown[-200:])

            try:
                for turn in (1, 2):
                    wait("> ", turn)
                    begun = len(shown)
                    os.write(ours, b"hello\n")
                    while len(shown) < begun + 100:  # the answer is on its way
                        wait("", 1)
                        shown += os.read(ours, 4096).decode("utf-8", "replace")
                    running.send_signal(signal.SIGINT)
                wait("> ", 3)
                check(running.poll() is None, "it ended with the answer")
                if last:
                    os.write(ours, last.encode())
                else:
                    running.send_signal(signal.SIGINT)
                said = running.communicate(timeout=EACH)[1]
            finally:
                running.kill()
                os.close(ours)
                os.close(theirs)
            check(running.returncode == 0, running.returncode, said)
            check(said.startswith("llm: write a line to ask; Ctrl-C ends an answer, Ctrl-D"), said)
            check(said.count("you ended this answer") == 2 and "2 answers" in said, said)


def help_and_readme_agree(folder):
    """The same flags, and the same defaults."""
    told = {}
    for line in llm(folder, "--help").stdout.splitlines()[1:]:
        name, text = line.split(None, 1)
        told[name] = re.findall(r"\d+(?:\.\d+)?", " ".join(re.findall(r"\(([^)]*)\)", text)))
    with open(os.path.join(TOP, "examples", "llm", "README.md"), encoding="utf-8") as file:
        rows = file.read().split("| flag | what it does |")[1].split("\n\n")[0].splitlines()[2:]
    shown = {}
    for row in rows:
        names, text = row.strip("| ").split(" | ", 1)
        for name in re.findall(r"--[a-z-]+", names):
            shown[name] = text
            found = re.findall(r"`(--[a-z-]+)", text)
            shown.update({more: text for more in found if more not in shown})
    check(set(told) <= set(shown), "not in README.md:", set(told) - set(shown))
    check(set(shown) <= set(told), "not in --help:", set(shown) - set(told))
    for name, numbers_told in told.items():
        for number in numbers_told:
            check(re.search(r"(?<![\d.])%s(?![\d.]*\d)" % re.escape(number), shown[name]), name,
                  number, "is not in README.md:", shown[name])


def chat_templates_are_chosen(folder):
    letters = Letters(folder, template=CHATML + "x")
    refused(folder, "chat template is not known here", "--template none", "chatml", "llama3.2",
            flags=("--chat",))
    refused(folder, "--template mystery is none of", "qwen3", flags=("--chat", "--template",
                                                                      "mystery"))
    refused(folder, "gemma takes no system message", flags=("--chat", "--template", "gemma",
                                                            "--system", "a"))
    refused(folder, "--context 300 is more than 256", flags=("--chat", "--template", "none",
                                                             "--context", "300"))
    done = converse(letters, ["abc", "de"], 6, "--template", "none")
    first = letters.next(letters.encode("abc"), 6)
    second = letters.next(letters.encode("abc" + letters.decode(first) + "de"), 6)
    check(done.stdout == letters.decode(first) + "\n" + letters.decode(second) + "\n", done.stdout)
    with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="ascii") as file:
        file.write(CHATML + "\n")
    want = letters.decode(talk(letters, ["abc"], 6)[0][0]) + "\n"
    check(converse(letters, ["abc"], 6).stdout == want, "chat_template.jinja is not read")
    os.remove(os.path.join(folder, "chat_template.jinja"))
    check(converse(letters, ["abc"], 6, "--template", "chatml").stdout == want, "--template")


def the_models_of_the_course_know_their_texts(folder):
    """examples/llm/tiny: one has the licence by heart, one tells topics apart."""
    tiny = os.path.join(TOP, "examples", "llm", "tiny")
    with open(os.path.join(TOP, "LICENSE"), "rb") as file:
        text = file.read()
    text = text[text.index(b"Permission"):][:140]
    for ranks in RANKS:
        done = llm(os.path.join(tiny, "llama"), "--ids", numbers(text[:13]), "--print-ids",
                   "--max-new", str(len(text) - 13), "--tp", str(ranks))
        check(done.stdout.split() == list(map(str, text[13:])), ranks, done.stdout, done.stderr)
    lines = os.path.join(folder, "lines")
    with open(lines, "w", encoding="ascii") as file:
        file.write("A wet and cold day.\nRain and thunder!\nWe bake bread with butter.\n")
    for ranks in RANKS:
        done = llm(os.path.join(tiny, "bert"), "--embed", lines, "--tp", str(ranks))
        rows = [list(map(float, line.split())) for line in done.stdout.splitlines()]
        check(len(rows) == 3, done.stderr)
        size = [sum(x * x for x in row) ** 0.5 for row in rows]
        near, far = (sum(a * b for a, b in zip(rows[0], rows[i])) / size[0] / size[i]
                     for i in (1, 2))
        check(near > 0.7 and far < 0.3, near, far)


def plans_are_printed(_):
    """--plan reads config.json alone: no file to learn from, no tokenizer."""
    tiny = os.path.join(TOP, "examples", "llm", "tiny")
    done = llm(os.path.join(tiny, "llama"), "--plan", "--tp", "2", "--context", "100")
    check(done.returncode == 0 and "1 x 100 tokens" in done.stdout, done.stdout, done.stderr)
    check("keys and values" in done.stdout and "--weights q8_0" not in done.stdout, done.stdout)
    done = llm(os.path.join(tiny, "llama"), "--plan", "--finetune", "/no/file", "--lora", "4",
               "--tp", "2", "--batch", "6", "--context", "32")
    check(done.returncode == 0 and "6 x 32 tokens" in done.stdout, done.stdout, done.stderr)
    check("moments" in done.stdout and "--recompute" in done.stdout, done.stdout)
    for flags, words in ((("--context", "1000"), ()), (("--lora", "2", "--batch", "3", "--dp", "2"),
                                                      ("--batch 3", "--dp 2"))):
        done = llm(os.path.join(tiny, "llama"), "--plan", "--tp", "1", *flags)
        check(done.returncode == bool(words) and all(word in done.stderr for word in words), flags,
              done.stdout, done.stderr)


def embedded(folder, lines, *flags, before=()):
    """The vectors that --embed prints of these lines."""
    path = os.path.join(os.path.dirname(folder), os.path.basename(folder) + ".lines")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    done = llm(folder, "--embed", path, *flags, before=before)
    check(done.returncode == 0 and not done.stderr, folder, flags, done.stderr)
    return [list(map(float, line.replace("[0] ", "").split()))
            for line in done.stdout.splitlines()]


def vectors_are_those_of_sentence_transformers(folder):
    """make_embeddings.py tells of what folders."""
    with open(os.path.join(HERE, "golden", "embed", "vectors.json"), encoding="ascii") as file:
        golden = json.load(file)
    for name, case in golden["cases"].items():
        at = os.path.join(folder, name)
        models.write_embedder(at, case)
        for ranks in RANKS if name in ("some", "shortcut", "llama") else (2,):
            rows = embedded(at, golden["texts"], "--tp", str(ranks), "--dtype", "f32")
            check(list(map(len, rows)) == list(map(len, case["vectors"])), name, "shape")
            size = max(abs(x) for row in case["vectors"] for x in row)
            off = max(abs(a - b) for row, want in zip(rows, case["vectors"])
                      for a, b in zip(row, want)) / size
            check(off < 2e-5, name, ranks, "vectors are off by", off)
    if not has_launcher():
        raise Skipped(NO_LAUNCHER)
    here = os.path.join(folder, "elsewhere")
    rows = embedded(here, golden["texts"], "--dtype", "f32", "--backend", "tcp",
                    before=(LAUNCHER, "-n", "2"))
    check(max(abs(a - b) for row, want in zip(rows, golden["cases"]["elsewhere"]["vectors"])
              for a, b in zip(row, want)) < 1e-4, "over TCP", rows)


def folders_of_sentence_transformers_that_would_give_others_are_refused(folder):
    with open(os.path.join(HERE, "golden", "embed", "vectors.json"), encoding="ascii") as file:
        cases = json.load(file)["cases"]
    lines = os.path.join(folder, "lines")
    with open(lines, "w", encoding="ascii") as file:
        file.write("abc\n" + 300 * "d" + "\n")

    def changed(name, file, value, *words):
        case = json.loads(json.dumps(cases[name]))
        config = case["files"].setdefault(file, {})
        if isinstance(value, dict):
            config.update(value)
        else:
            case["files"][file] = value
        here = os.path.join(folder, "model")
        shutil.rmtree(here, ignore_errors=True)
        models.write_embedder(here, case)
        refused(here, *words, flags=("--embed", lines))

    modules = cases["tanh"]["files"]["modules.json"]
    clip = [modules[0], modules[1], dict(modules[2], type="sentence_transformers.models.CNN")]
    changed("tanh", "modules.json", clip, "module 2", "sentence_transformers.models.CNN")
    changed("tanh", "modules.json", [dict(modules[0], type="custom.Transformer"), modules[1]],
            "module 0", "custom.Transformer")
    changed("tanh", "modules.json", modules[:1], "at least a Transformer and a Pooling")
    changed("tanh", "modules.json", [modules[0], modules[2]], "module 1", "Dense")
    changed("tanh", "modules.json", [modules[0], dict(modules[1], path="../x")], "../x")
    changed("tanh", "modules.json", [modules[0], dict(modules[1], path="nowhere")],
            "nowhere/config.json", "cannot be read")
    changed("tanh", "modules.json", "x", "modules.json is no list")
    changed("max", "1_Pooling/config.json", {"pooling_mode": "median"}, "\"median\"", "lasttoken")
    changed("max", "1_Pooling/config.json", {"pooling_mode": ["max", 3]}, "pooling_mode is 3")
    changed("max", "1_Pooling/config.json", {"pooling_mode_new": True}, "pooling_mode_new is true")
    changed("max", "1_Pooling/config.json", {"embedding_dimension": 47}, "of 47", "gives 48")
    changed("tanh", "a dense/config.json", {"in_features": 47}, "47", "(7, 48)")
    changed("tanh", "a dense/config.json", {"activation_function": "torch.nn.CELU"},
            "torch.nn.CELU")
    changed("tanh", "a dense/config.json", {"module_input_name": "token_embeddings"},
            "module_input_name")
    changed("tanh", "a dense/config.json", {"out_features": 6}, "linear.")
    changed("tanh", "a dense/config.json", {"scale": 2}, "scale is 2")
    changed("cut", "sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length is \"x\"")
    changed("cut", "sentence_bert_config.json", {"max_seq_length": 299}, "line 2 has 299 tokens",
            "256 positions")
    changed("cut", "sentence_bert_config.json", {"transformer_task": "fill-mask"}, "fill-mask")
    changed("cut", "sentence_bert_config.json", {"query_expansion": {"length": 3}},
            "query_expansion")
    where = "config_sentence_transformers.json"
    changed("prompt", where, {"default_prompt_name": "answer"}, where, "\"answer\"")
    changed("prompt", where, {"model_type": "SparseEncoder"}, where, "SparseEncoder")


def the_readme_shows_a_family(folder):
    """What README.md says a family takes is models/starcoder2.h, which has a golden."""
    here = os.path.join(TOP, "examples", "llm")
    with open(os.path.join(here, "README.md"), encoding="utf-8") as file:
        shown = file.read().split("```c\n")[1].split("```")[0]
    with open(os.path.join(here, "models", "starcoder2.h"), encoding="utf-8") as file:
        source = file.read()
    check("starcoder2_family" in shown and shown in source, "README.md shows other code than "
          "models/starcoder2.h has")
    check(len(source.splitlines()) <= 90 and "starcoder2" in models.names(), "90 lines, a golden")


if __name__ == "__main__":
    sys.exit(run_tests("llm", [family(name) for name in models.names()] + [
        processes_write_what_threads_do, only_rank_0_needs_the_folder,
        shards_are_kept_for_the_next_start,
        configs_that_would_change_results_are_refused,
        texts_that_are_too_long_are_refused, settings_within_reach_change_nothing,
        other_names_load, folders_that_lie_are_refused, files_that_lie_are_refused,
        text_of_files_reaches_no_terminal, generated_text_has_no_control_characters,
        values_that_are_not_finite_are_told, logits_that_are_not_finite_are_refused,
        mistakes_are_told,
        vectors_are_those_of_sentence_transformers,
        folders_of_sentence_transformers_that_would_give_others_are_refused,
        the_models_of_the_course_know_their_texts, plans_are_printed, the_readme_shows_a_family,
        the_end_of_a_text_ends_it, samples_are_those_of_the_seed, fewer_bits_are_near,
        batches_are_texts_of_their_own, stop_strings_end_a_text, conversations_keep_the_cache,
        conversations_on_processes, answers_come_at_once_and_questions_may_take_long,
        long_conversations_forget, answers_are_drawn_as_the_model_says, answers_end_in_time,
        ctrl_c_ends_an_answer_then_the_conversation, help_and_readme_agree,
        chat_templates_are_chosen, tokens_beyond_the_model_are_refused_in_texts]) > 0)
