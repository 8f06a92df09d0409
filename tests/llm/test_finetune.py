#!/usr/bin/env python3
"""build/llm --finetune, --evaluate and --adapter on a small model: losses fall, and are the same at
every degree; a killed run goes on with the same bits; adapters; preferences; what is refused."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
sys.path.insert(0, HERE)
import killed_runs
import models
import test_llm
from scripts import check, run_tests

SCRIPT_LIMIT = 200  # seconds, for tests/run.sh
EACH = 60           # of one run
CONTEXT = 32


class Learner:
    """A small llama with a token for each letter, and files to learn from."""

    def __init__(self, folder, layers=2, wide=False):
        """wide: rows are multiples of 32, as blocks of 8 bits want."""
        self.folder = folder
        self.model = os.path.join(folder, "model")
        model = models.load("llama")
        model["config"]["num_hidden_layers"] = layers
        if wide:
            model["config"].update(hidden_size=64, intermediate_size=96, num_attention_heads=2,
                                   num_key_value_heads=2, head_dim=32)
            sizes = {48: 64, 24: 64, 44: 96}
            model["tensors"] = {name: [sizes.get(size, size) for size in shape]
                                for name, shape in model["tensors"].items()}
        for name, shape in list(model["tensors"].items()):
            for i in range(2, layers if ".layers.1." in name else 0):
                model["tensors"][name.replace(".1.", ".%d." % i)] = shape
        models.write(self.model, model)
        tokens = [models.SPECIAL[0], *models.LETTERS, models.SPECIAL[1]]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.save("model/tokenizer.json", json.dumps(models.letters(tokens)))
        self.save("model/tokenizer_config.json", json.dumps(
            {"bos_token": models.SPECIAL[0], "eos_token": models.SPECIAL[1]}))
        draw = random.Random(1)
        words = "the cat sat on a mat and saw dogs run home".split()
        self.text = self.save("text.txt", " ".join(draw.choice(words) for _ in range(250)))
        sums = [(draw.randrange(5), draw.randrange(5)) for _ in range(24)]
        self.chats = self.lines("chats.jsonl", [
            {"messages": [{"role": "user", "content": "%d and %d?" % (a, b)},
                          {"role": "assistant", "content": "it is %d." % (a + b)}]}
            for a, b in sums])
        self.pairs = self.lines("pairs.jsonl", [
            {"prompt": "%d and %d?" % (a, b), "chosen": " it is %d." % (a + b),
             "rejected": " no, %d" % a} for a, b in sums])

    def path(self, name):
        return os.path.join(self.folder, name)

    def save(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return file.name

    def lines(self, name, objects):
        return self.save(name, "".join(json.dumps(each) + "\n" for each in objects))

    def flags(self, data, out, *more, steps=4):
        """The flags of a short run."""
        return ["--finetune", data, "--out", self.path(out), "--context", str(CONTEXT), "--dtype",
                "f32", "--max-new", "0", "--steps", str(steps), "--lr", "1e-2", *more]

    def llm(self, *flags):
        return test_llm.llm(self.model, *flags)

    def train(self, data, out, *more, steps=4):
        """Losses and norms of a run, and the final held-out loss."""
        for name in (out, out + ".run"):
            shutil.rmtree(self.path(name), ignore_errors=True)
        done = self.llm(*self.flags(data, out, *more, steps=steps))
        check(done.returncode == 0, more, done.stderr, done.stdout)
        rows = self.rows(out)
        check(len(rows) == steps, more, rows)
        return ([float(row[1]) for row in rows], [float(row[4]) for row in rows],
                float(rows[-1][2]))

    def rows(self, out):
        """metrics.csv without its head."""
        with open(self.path(out + ".run/metrics.csv"), encoding="ascii") as file:
            return [line.strip().split(",") for line in file][1:]

    def bits(self, out):
        """What equal runs write alike: metrics.csv without the speed, and the tensors."""
        files = [name for name in os.listdir(self.path(out)) if name.endswith(".safetensors")]
        check(len(files) == 1, files)
        with open(self.path(os.path.join(out, files[0])), "rb") as file:
            return [row[:5] + row[6:] for row in self.rows(out)], file.read()

    def evaluate(self, data, *more):
        """loss, accuracy in percent, number of targets"""
        done = self.llm("--evaluate", data, "--context", str(CONTEXT), "--dtype", "f32", *more)
        check(done.returncode == 0, more, done.stderr)
        words = done.stdout.replace(",", "").split()
        check(words[0] == "loss" and words[2] == "perplexity", done.stdout)
        check(abs(math.exp(float(words[1])) / float(words[3]) - 1) < 1e-4, done.stdout)
        return float(words[1]), float(words[6]), int(words[9])


def near(a, b, tolerance, *what):
    """Are the numbers of two runs the same, but for rounding?"""
    for x, y in zip(a, b):
        check(abs(x - y) <= tolerance * max(abs(x), abs(y)), *what, a, b)


def same_at_every_degree(learner, data, *more):
    """Trains at several degrees. Returns the losses."""
    losses, norms, held = learner.train(data, "one", "--tp", "1", *more)
    for flags in ("--tp 2", "--tp 3", "--tp 1 --dp 2", "--tp 1 --dp 2 --zero",
                  "--tp 1 --accumulate 4", "--tp 2 --dp 2 --zero --accumulate 2",
                  "--tp 1 --recompute", "--tp 1 --pp 2 --accumulate 4",
                  "--tp 2 --pp 2 --dp 2 --zero --accumulate 2 --recompute"):
        others = learner.train(data, "other", *more, *flags.split())
        # float32 sums in another order; metrics.csv has 6 digits of the norms
        near(losses + [held], others[0] + [others[2]], 2e-6, flags, more)
        near(norms, others[1], 5e-6, flags, more)
    return losses, held


def all_weights_learn_the_same_at_every_degree(folder):
    learner = Learner(folder)
    before = learner.evaluate(learner.text, "--tp", "1")[0]
    losses, held = same_at_every_degree(learner, learner.text, "--no-packing")
    check(losses[-1] < losses[0] - 1 and held < before - 1, losses, held, before)


def adapters_learn_the_same_at_every_degree(folder):
    learner = Learner(folder)
    losses, _ = same_at_every_degree(learner, learner.text, "--lora", "4", "--alpha", "32")
    check(losses[-1] < losses[0] - 0.2, losses)


def same_bits_of_stages(learner, data, *more):
    more = (*more, "--accumulate", "4", "--max-new", "8", "--tp", "1")
    told = []
    for stages in "1234":
        done = learner.llm(*learner.flags(data, stages, *more, "--pp", stages))
        check(done.returncode == 0, more, stages, done.stderr)
        told.append([line for line in done.stdout.split("\n") if "/s" not in line and
                     not line.startswith(("wrote", "ranks"))])
        check(learner.bits(stages) == learner.bits("1"), more, stages, "other bits")
        check(told[0] == told[-1], more, stages, told)
    for stages in "1234":
        shutil.rmtree(learner.path(stages))


def stages_learn_the_same_bits(folder):
    """No weight is shared by two stages: a pipeline gives the bits of one rank that runs the same
    micro-batches, and writes the same sample, model and adapter."""
    learner = Learner(folder, layers=4)
    dropout = ("--lora", "4", "--lora-dropout", "0.1")
    same_bits_of_stages(learner, learner.text)
    same_bits_of_stages(learner, learner.text, *dropout, "--dtype", "bf16")
    same_bits_of_stages(learner, learner.chats, "--template", "chatml", "--context", "96")
    same_bits_of_stages(learner, learner.pairs, "--lora", "4")
    same_bits_of_stages(learner, learner.pairs)


def stages_of_8_bits_learn_the_same_bits(folder):
    learner = Learner(folder, layers=4, wide=True)
    same_bits_of_stages(learner, learner.text, "--lora", "4", "--weights", "q8_0")
    same_bits_of_stages(learner, learner.pairs, "--lora", "4", "--weights", "q8_0", "--recompute")


def a_state_goes_on_at_another_degree(folder):
    learner = Learner(folder)
    flags = ("--save-every", "3", "--accumulate", "2")
    losses, norms, held = learner.train(learner.text, "whole", *flags, "--tp", "1", steps=20)
    with subprocess.Popen([test_llm.LLM, "--model", learner.model,
                           *learner.flags(learner.text, "part", *flags, "--tp", "1", "--pp", "2",
                                          steps=20)], stdout=subprocess.DEVNULL) as run:
        while run.poll() is None and not os.path.exists(
                learner.path("part.run/state.safetensors")):
            time.sleep(0.01)
        run.kill()
    for more in ("--tp 1", "--tp 2 --pp 2", "--tp 1 --dp 2 --zero"):
        for name in ("part", "part.run"):
            if os.path.exists(learner.path(name)):
                shutil.copytree(learner.path(name), learner.path(name.replace("part", "more")))
        done = learner.llm(*learner.flags(learner.text, "more", *flags, *more.split(), "--resume",
                                          steps=20))
        if not os.path.exists(learner.path("part")):
            check(done.returncode == 0 and "resumed" in done.stdout, more, done.stderr)
        rows = learner.rows("more")
        near(losses + [held], [float(row[1]) for row in rows] + [float(rows[-1][2])], 1e-5, more)
        near(norms, [float(row[4]) for row in rows], 1e-4, more)
        for name in ("more", "more.run"):
            shutil.rmtree(learner.path(name))


def bf16_adapters_begin_as_the_model(folder):
    """B is 0 at first: held-out losses before training are those without adapters, to the last
    digit; then they fall as in f32."""
    learner = Learner(folder)
    told = []
    for out, more in (("all", ()), ("adapter", ("--lora", "4", "--alpha", "32"))):
        done = learner.llm(*learner.flags(learner.chats, out, "--template", "chatml", "--context",
                                          "96", "--dtype", "bf16", "--tp", "2", *more, steps=10))
        check(done.returncode == 0, more, done.stderr)
        told.append(done.stdout.split("before    held-out loss ")[1].split(",")[0])
        losses = [float(row[1]) for row in learner.rows(out)]
        check(losses[-1] < losses[0] - 0.2, more, losses)
    check(told[0] == told[1], told)


def preferences_are_learnt(folder):
    learner = Learner(folder)
    for more in ((), ("--lora", "4")):
        losses, held = same_at_every_degree(learner, learner.pairs, *more)
        check(abs(losses[0] - math.log(2)) < 1e-6, "at first no answer is preferred", losses)
        check(losses[-1] < losses[0] - 0.02 and held < losses[0] - 0.02, losses, held)


def packed_rows_learn_what_single_ones_do(folder):
    """All chats are one batch, so that the step's loss is the same however they lie in rows."""
    learner = Learner(folder)
    more = ("--template", "chatml", "--held-out", learner.chats, "--tp", "1", "--context", "96")
    one = learner.train(learner.chats, "one", "--no-packing", "--batch", "24", *more, steps=1)
    rows = learner.llm(*learner.flags(learner.chats, "packed", *more, steps=1)).stdout
    rows = int(rows.split(" in ")[1].split()[0])
    check(1 < rows < 24, rows)
    packed = learner.train(learner.chats, "packed", "--batch", str(rows), *more, steps=1)
    near(one[0] + one[1], packed[0] + packed[1], 5e-6, "packed")


def chats_end(folder):
    """The token that ends an answer is learnt, and the sample ends with it."""
    learner = Learner(folder)
    done = learner.llm(*learner.flags(learner.chats, "out", "--template", "chatml", "--context",
                                      "96", "--tp", "2", steps=40), "--max-new", "40")
    check(done.returncode == 0, done.stderr)
    after = done.stdout.split("after training, after the first held-out prompt:\n")[1]
    answer = after.split("\n\n")[0]
    check(answer.startswith("it is ") and answer.endswith(".") and len(answer) < 12, answer)


def a_killed_run_goes_on(folder):
    learner = Learner(folder)
    draw = random.Random(os.environ.get("TSHARD_SEED", "finetune"))
    for data, more in killed_runs.RUNS:
        data = getattr(learner, data)
        killed_runs.killed_runs(learner, 3, data, more, draw)
    flags = ("--save-every", "3", *more)
    done = learner.llm(*learner.flags(data, "new", *flags, "--resume", steps=20))
    check(done.returncode == 0, "--resume without a state begins", done.stderr)
    shutil.rmtree(learner.path("new"))
    done = learner.llm(*learner.flags(data, "new", *flags, steps=20))
    check(done.returncode == 1 and "go on from it with --resume" in done.stderr, done.stderr)
    done = learner.llm(*learner.flags(data, "new", *flags, "--resume", steps=21))
    check(done.returncode == 1 and "'steps 20', this one has 'steps 21'" in done.stderr,
          done.stderr)


def adapters_are_written_and_read(folder):
    learner = Learner(folder)
    learner.train(learner.text, "adapter", "--lora", "4", "--targets", "q_proj,down_proj",
                  "--alpha", "32", "--held-out", learner.text)
    with open(learner.path("adapter/adapter_config.json"), encoding="ascii") as file:
        config = json.load(file)
    check(config["target_modules"] == ["q_proj", "down_proj"] and config["r"] == 4 and
          config["lora_alpha"] == 32 and config["task_type"] == "CAUSAL_LM", config)
    names = models.read_safetensors(learner.path("adapter/adapter_model.safetensors"))
    check("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names and
          len(names) == 8, sorted(names))
    adapter = ("--adapter", learner.path("adapter"))
    base = learner.evaluate(learner.text, "--tp", "1")
    found = [learner.evaluate(learner.text, *adapter, *more)
             for more in (("--tp", "1"), ("--tp", "2"), ("--tp", "2", "--merge"),
                          ("--tp", "1", "--pp", "2"), ("--tp", "1", "--pp", "2", "--merge"))]
    check(found[0][0] < base[0] - 0.1, found, base)
    near(found[0], found[1], 1e-5, "two ranks")
    near(found[0], found[2], 1e-5, "merged")
    near(found[0], found[3], 1e-5, "two stages")
    near(found[0], found[4], 1e-5, "two stages, merged")
    prompt = ("--prompt", "the cat", "--max-new", "12", "--dtype", "f32", "--tp", "2")
    merged = learner.path("merged")
    done = learner.llm(*adapter, "--merge", "--out", merged, "--dtype", "f32", "--tp", "2")
    check(done.returncode == 0, done.stderr)
    texts = [learner.llm(*prompt, *adapter), learner.llm(*prompt, *adapter, "--merge"),
             test_llm.llm(merged, *prompt)]
    check(all(text.returncode == 0 for text in texts), texts)
    check(len({text.stdout for text in texts}) == 1, texts)
    check(texts[0].stdout != learner.llm(*prompt).stdout, "the adapter does something")
    done = learner.llm(*learner.flags(learner.text, "both", "--lora", "4", "--merge"))
    check(done.returncode == 0 and os.path.exists(learner.path("both/config.json")), done.stderr)


def replicas_share_the_rows_by_default(folder):
    """As many as there are cores and divide --batch, if flags leave it open."""
    learner = Learner(folder)
    cores = len(os.sched_getaffinity(0))
    for batch, more, tunes in ((6, "--lora 2", True), (6, "--lora 2 --tp 1", False),
                               (6, "--lora 2 --threads %d" % cores, False), (6, "", False)):
        copies = max(n for n in range(1, cores + 1) if batch % n == 0) if tunes else 1
        for name in ("out", "out.run"):
            shutil.rmtree(learner.path(name), ignore_errors=True)
        done = learner.llm(*learner.flags(learner.text, "out"), "--batch", str(batch),
                           *more.split())
        check(done.returncode == 0 and " x dp %d" % copies in done.stdout, more, copies,
              done.stdout, done.stderr)
        check((", dp %d" % copies in done.stderr) == (copies > 1), done.stderr)
    near(learner.evaluate(learner.text), learner.evaluate(learner.text, "--tp", "1"), 1e-5)


def evaluation_is_that_of_the_logits(folder):
    """Compares with the logits of windows of 32 tokens that begin 20 apart: each window counts the
    tokens that the one before it has not."""
    learner = Learner(folder)
    with open(learner.text, encoding="ascii") as file:
        ids = [learner.ids[letter] for letter in file.read()[:90]]
    text = learner.save("short.txt", "".join(list(models.LETTERS)[i - 1] for i in ids))
    loss, right, count, seen, dump = 0.0, 0, 0, 0, learner.path("logits")
    for begin in range(0, len(ids), 20):
        window = ids[begin:begin + CONTEXT]
        done = learner.llm("--ids", " ".join(map(str, window)), "--print-ids", "--max-new", "0",
                           "--dump-logits", dump, "--dtype", "f32")
        check(done.returncode == 0, done.stderr)
        (_, wide), flat = models.read_safetensors(dump)["logits"]
        for i, target in enumerate(window[1:]):
            if begin and begin + i + 1 < seen:
                continue
            logits = flat[i * wide:(i + 1) * wide]
            loss += math.log(sum(map(math.exp, logits))) - logits[target]
            right += max(logits) == logits[target]
            count += 1
        seen = begin + len(window)
        if seen == len(ids):
            break
    for more in ("--tp 1", "--tp 2 --batch 2", "--tp 1 --dp 2 --batch 2",
                 "--tp 1 --pp 2 --dp 3 --batch 6"):
        found = learner.evaluate(text, "--stride", "20", *more.split())
        near(found, (loss / count, 100 * right / count, count), 1e-3, more)
        near(found[:1], [loss / count], 2e-6, more)


def refused(learner, code, sentence, *flags):
    before = sorted(os.listdir(learner.folder))
    done = learner.llm(*flags, "--tp", "1")
    check(done.returncode == code and sentence in done.stderr and done.stderr.count("\n") == 1,
          flags, done.returncode, done.stderr)
    check(sorted(os.listdir(learner.folder)) == before, flags, "something is written")


def mistakes_are_refused(folder):
    learner = Learner(folder)
    text = ("--finetune", learner.text)
    out = ("--out", learner.path("out"))
    run = (*text, *out, "--context", "32", "--max-new", "0")
    refused(learner, 2, "--finetune needs --out DIR", *text)
    refused(learner, 2, "--out is for --finetune", "--prompt", "a", *out)
    refused(learner, 2, "are for --finetune", "--evaluate", learner.text, "--lora", "4")
    refused(learner, 2, "give one of", "--prompt", "a", *run)
    refused(learner, 2, "are for --lora", *run, "--alpha", "4")
    refused(learner, 2, "exclude each other", *run, "--steps", "1", "--epochs", "1")
    refused(learner, 2, "--pp is for", "--prompt", "a", "--pp", "2")
    refused(learner, 1, "--pp 3: the model has 2 layers", *run, "--pp", "3")
    refused(learner, 2, "has --save-every", *run, "--resume")
    scaled = Learner(os.path.join(folder, "scaled"))
    models.write(scaled.model, models.load("phi3_longrope"))
    refused(scaled, 1, "a --context of at most 64 here, not 65", *text, *out, "--pp", "2",
            "--context", "65")
    refused(learner, 2, "a probability", *run, "--lora", "4", "--lora-dropout", "1")
    refused(learner, 2, "--merge is for", *run, "--merge")
    refused(learner, 1, "give --lora", *run, "--weights", "q8_0")
    refused(learner, 1, "too small to train in", *run, "--dtype", "f16")
    refused(learner, 1, "does not divide by --dp 3", *run, "--dp", "3", "--batch", "8")
    refused(learner, 1, "does not divide by --accumulate 3", *run, "--accumulate", "3")
    refused(learner, 1, "No such file", "--finetune", learner.path("absent.txt"), *out)
    refused(learner, 1, "text.txt has none", *run, "--dpo", "0.2")
    refused(learner, 1, "matches no linear layer", *run, "--lora", "4", "--targets",
            "absent_proj")
    refused(learner, 1, "--targets is a list", *run, "--lora", "4", "--targets", ",")
    refused(learner, 1, "folder with files", *text, "--out", learner.model)
    refused(learner, 1, "adapter_config.json", "--prompt", "a", "--adapter", learner.model)
    refused(learner, 1, "tokens would be left out", "--evaluate", learner.text, "--context", "8",
            "--stride", "9")
    short = learner.save("short.txt", "a")
    refused(learner, 1, "fewer than two tokens", "--evaluate", short)
    latin = learner.path("latin.txt")
    with open(latin, "wb") as file:
        file.write(b"one\ntwo \xe9\n")
    refused(learner, 1, "latin.txt:2: this line is not UTF-8", "--evaluate", latin)
    refused(learner, 2, "--lora takes a whole number above 0", *run, "--lora", "0")
    refused(learner, 2, "--out is for --finetune", "--adapter", learner.model, *out)
    bad = learner.lines("bad.jsonl", [{"text": "abc"}, {"prompt": "a", "completion": ""}])
    refused(learner, 1, "bad.jsonl:2: ", "--finetune", bad, *out)
    long = learner.lines("long.jsonl", [{"text": "abc " * 40}] * 20)
    refused(learner, 1, "long.jsonl:1: 161 tokens are more than the context of 32",
            "--finetune", long, *out, "--context", "32")
    refused(learner, 1, "give --adapter DIR", "--evaluate", learner.pairs)
    refused(learner, 1, "chats.jsonl:1: ", "--finetune",
            learner.chats, *out)


def an_adapter_of_another_model_is_refused(folder):
    learner = Learner(folder)
    learner.train(learner.text, "adapter", "--lora", "4", steps=1)
    other = os.path.join(folder, "other")
    models.write(other, models.load("gpt2"))
    shutil.copy(learner.path("model/tokenizer.json"), other)
    done = test_llm.llm(other, "--prompt", "a", "--tp", "1", "--adapter",
                        learner.path("adapter"))
    check(done.returncode == 1 and done.stderr.count("\n") == 1 and "lora_" in done.stderr,
          done.stderr)


TESTS = [all_weights_learn_the_same_at_every_degree, adapters_learn_the_same_at_every_degree,
         stages_learn_the_same_bits, stages_of_8_bits_learn_the_same_bits,
         a_state_goes_on_at_another_degree,
         bf16_adapters_begin_as_the_model, preferences_are_learnt,
         packed_rows_learn_what_single_ones_do, chats_end,
         a_killed_run_goes_on, adapters_are_written_and_read,
         replicas_share_the_rows_by_default, evaluation_is_that_of_the_logits,
         mistakes_are_refused, an_adapter_of_another_model_is_refused]

if __name__ == "__main__":
    sys.exit(run_tests("finetune", TESTS, jobs=2) != 0)
