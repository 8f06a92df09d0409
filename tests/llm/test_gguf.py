#!/usr/bin/env python3
"""examples/llm on GGUF files that make_gguf.py wrote: logits and greedy tokens of transformers at 1
to 4 ranks, blocks as they are, ids of their vocabularies, and files that lie."""

import json
import os
import shutil
import struct
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
sys.path.insert(0, HERE)
import models
import test_llm
from scripts import check, run_tests

SCRIPT_LIMIT = 400  # seconds, for tests/run.sh
FOLDER = os.path.join(models.GOLDEN, "gguf")
# Of the largest logit: 8-bit inputs of products with blocks of 4 to 8 bits.
NEAR = 0.05


def golden(name):
    with open(os.path.join(FOLDER, name + ".json"), encoding="ascii") as file:
        return json.load(file)


def run(folder, path, model, *flags):
    """Logits and new tokens."""
    dump = os.path.join(folder, "logits")
    done = test_llm.llm(path, "--ids", test_llm.numbers(model["prompt"]), "--print-ids", "--greedy",
                        "--max-new", str(len(model["new"])), "--dump-logits", dump, *flags)
    check(done.returncode == 0 and not done.stderr, path, *flags, done.stderr)
    (shape, logits) = models.read_safetensors(dump)["logits"]
    check(shape == [len(model["prompt"]), len(model["logits"][0])], path, shape)
    return logits, list(map(int, done.stdout.split()))


def largest(a, b):
    return max(abs(x - y) for x, y in zip(a, b))


def model_of(name):
    def test(folder):
        model = golden("models")[name]
        path = os.path.join(FOLDER, name + ".gguf")
        want = [x for row in model["logits"] for x in row]
        for ranks in test_llm.RANKS:
            logits, new = run(folder, path, model, "--dtype", "f32", "--tp", str(ranks))
            off = largest(logits, want)
            check(off <= test_llm.TOLERANCE, name, ranks, "logits are off by", off)
            check(new == model["new"], name, ranks, "writes", new, "not", model["new"])
    test.__name__ = name
    return test


def blocks_stay_as_they_are(folder):
    """Then inputs of products have 8 bits: logits are near, and the same in another run."""
    for name in ("llama", "gemma", "gpt2", "phi3"):
        model = golden("models")[name]
        path = os.path.join(FOLDER, name + ".gguf")
        want = [x for row in model["logits"] for x in row]
        size = max(map(abs, want))
        for ranks in test_llm.RANKS:
            logits, _ = run(folder, path, model, "--tp", str(ranks))
            off = largest(logits, want) / size
            check(1e-6 < off < NEAR, name, ranks, "logits are off by", off)
            check(run(folder, path, model, "--tp", str(ranks))[0] == logits, name, "twice")
        for flags in ("--weights", "q8_0"), ("--dtype", "bf16"):
            logits, _ = run(folder, path, model, "--tp", "2", *flags)
            off = largest(logits, want) / size
            check(1e-6 < off < NEAR, name, flags, "logits are off by", off)


def only_rank_0_needs_the_file(folder):
    """Under a name that the other rank does not find. Blocks, factors of rotary frequencies among
    the values, biases, a vocabulary."""
    alone, here = test_llm.only_on_rank_0(folder, 2)
    path = os.path.join(here, "model.gguf")
    for name, flags in (("llama", ("--dtype", "f32")), ("llama_llama3", ("--dtype", "f32")),
                        ("phi3_longrope", ("--dtype", "f32")), ("qwen2", ("--dtype", "f32")),
                        ("gpt2", ("--dtype", "f32")), ("llama", ()), ("gemma", ())):
        model = golden("models")[name]
        shutil.copyfile(os.path.join(FOLDER, name + ".gguf"), path)
        ids = ("--ids", test_llm.numbers(model["prompt"]), "--print-ids", "--greedy", "--max-new",
               str(len(model["new"])))
        done = alone("model.gguf", *ids, *flags)
        want = test_llm.llm(path, *ids, *flags, "--tp", "2").stdout.split()
        check(done.returncode == 0 and done.stdout.split() == ["[0]", *want], name, flags, want,
              done.stdout, done.stderr)
        check(not flags or want == list(map(str, model["new"])), name, want)
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) - 1)
    done = alone("model.gguf", "--ids", "1 2", "--print-ids")
    check(done.returncode == 1 and "model.gguf" in done.stderr, done.returncode, done.stderr)


def vocabularies_give_the_same_ids(folder):
    program = [test_llm.LLM, "--tokenize", "--tokenizer"]
    for name, cases in golden("tokens").items():
        path = os.path.join(FOLDER, name + ".gguf")
        for text, ids in cases:
            done = subprocess.run([*program, path], input=text.encode(), stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, timeout=60)
            got = list(map(int, done.stdout.split()))
            check(done.returncode == 0 and got == ids, name, repr(text), got, ids, done.stderr)


# -- files that lie ----------------------------------------------------------------


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def number(value):
    return struct.pack("<II", 4, value)


def real(value):
    return struct.pack("<If", 6, value)


def array(*values):
    return struct.pack("<IIQ", 9, 4, len(values)) + struct.pack("<%dI" % len(values), *values)


def strings(*items):
    return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(map(string, items))


def named(text):
    return struct.pack("<I", 8) + string(text)


KEYS = {"general.architecture": struct.pack("<I", 8) + string("llama"),
        "llama.block_count": number(1), "llama.context_length": number(64),
        "llama.embedding_length": number(4), "llama.feed_forward_length": number(4),
        "llama.attention.head_count": number(2),
        "llama.attention.layer_norm_rms_epsilon": real(1e-5)}
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TENSORS = [("token_embd.weight", (4, 6)), ("output_norm.weight", (4,)),
           ("blk.0.attn_norm.weight", (4,)), ("blk.0.ffn_norm.weight", (4,))] + [
               ("blk.0.%s.weight" % name, (4, 4)) for name in MATRICES]


def made(keys=(), tensors=None, magic=b"GGUF", version=3, counts=None, cut=0, places=()):
    """A GGUF file of a llama of width 4. keys: other values, None: without; places: other offsets
    and types of tensors."""
    keys = {key: value for key, value in {**KEYS, **dict(keys)}.items() if value is not None}
    tensors = TENSORS if tensors is None else tensors
    places, at, infos, data = dict(places), 0, b"", b""
    for name, shape in tensors:
        count = 1
        for length in shape:
            count *= length
        offset, kind = places.get(name, (at, 0))
        infos += string(name) + struct.pack("<I%dQ" % len(shape), len(shape), *shape) + \
            struct.pack("<IQ", kind, offset if offset is not None else at)
        values = struct.pack("<%df" % min(count, 256), *([0.5] * min(count, 256)))
        data += values + bytes(-len(values) % 32)
        at = len(data)
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys))))
    head += b"".join(string(key) + value for key, value in keys.items()) + infos
    whole = head + bytes(-len(head) % 32) + data
    return whole[:len(whole) - cut]


def files_that_lie_are_refused(folder):
    path = os.path.join(folder, "lie.gguf")

    def refused(data, *words):
        with open(path, "wb") as file:
            file.write(data)
        test_llm.refused(path, "lie.gguf", *words)

    with open(path, "wb") as file:
        file.write(made())
    done = test_llm.llm(path, "--ids", "1 2 3", "--print-ids", "--max-new", "2")
    check(done.returncode == 0, done.stderr)
    whole, q, embed = made(), "blk.0.attn_q.weight", "token_embd.weight"
    for size in 4, 20, 600, 800:
        refused(whole[:size], "ends within")
    refused(whole[:300], "do not fit")
    refused(made(cut=33), "blk.0.ffn_down.weight", "bytes of data")
    refused(made(version=2), "version 2", "version 3")
    refused(made(version=3 << 24), "big-endian")
    refused(made(counts=(11, 1 << 60)), "keys", "do not fit")
    refused(made(counts=(1 << 61, 7)), "tensors do not fit")
    refused(made(counts=(12, 7)), "0 dimensions")
    refused(made(counts=(11, 6)), "llama.attention.layer_norm_rms_epsilon", "dimensions")
    refused(made({"general.architecture": None}), "general.architecture", "missing")
    refused(made({"general.architecture": struct.pack("<I", 8) + string("mamba")}), "mamba",
            "qwen3")
    refused(made({"llama.block_count": None}), "llama.block_count", "missing")
    refused(made({"llama.block_count": struct.pack("<I", 8) + string("1")}), "llama.block_count",
            "no number")
    refused(made({"llama.block_count": real(1.5)}), "llama.block_count", "1.5")
    refused(made({"llama.block_count": number(2)}), "layers.1.")
    refused(made({"llama.attention.head_count": number(3)}), "heads")
    refused(made({"llama.attention.head_count_kv": array(2, 1)}), "llama.attention.head_count_kv",
            "no number", "layers that differ")
    refused(made({"llama.attention.head_count": array()}), "llama.attention.head_count",
            "no number")
    refused(made({"llama.attention.layer_norm_rms_epsilon": None, "llama.logit_scale": real(2)}),
            "llama.logit_scale", "not known")
    refused(made({"llama.expert_count": number(8)}), "llama.expert_count")
    refused(made({"llama.context_length": struct.pack("<I", 99)}), "llama.context_length", "99")
    refused(made({"general.alignment": number(24)}), "general.alignment", "24")
    refused(made({"general.tags": struct.pack("<IIQ", 9, 8, 1 << 62)}), "general.tags", "ends")
    refused(made({"general.x": struct.pack("<IIQ", 9, 10, 1 << 61)}), "general.x", "ends")
    refused(made({"general.x": struct.pack("<IIQ", 9, 9, 0)}), "general.x", "arrays")
    refused(made({"split.count": number(3)}), "one of 3 files", "-00001-of-00003.gguf")
    refused(made({"split.count": number(3), "split.no": number(1)}), "file 2 of 3")
    refused(made({"llama.rope.scaling.type": struct.pack("<I", 8) + string("spiral")}), "spiral")
    refused(made(places={q: (1 << 40, 0)}), q, "1099511627776")
    refused(made(places={q: (0, 0)}), q, embed, "overlap")
    refused(made(places={q: (8, 0)}), q, "alignment")
    refused(made(places={q: (None, 11)}), q, "type 11", "Q4_K")
    refused(made(places={q: (None, 12)}), q, "blocks of 256")
    refused(made(tensors=TENSORS + [(q, (4, 4))]), q, "twice")
    refused(made(tensors=TENSORS[:-1]), "down_proj")
    refused(made(tensors=TENSORS[1:]), embed, "missing")
    refused(made(tensors=TENSORS + [("blk.0.attn_sinks.weight", (4,))]), "attn_sinks")
    refused(made(tensors=TENSORS[:-1] + [("blk.0.ffn_down.weight", (4, 8))]), "down_proj", "(8, 4)")
    refused(made(tensors=TENSORS[:-1] + [("blk.0.ffn_down.weight", (1 << 31, 1 << 31))]),
            "blk.0.ffn_down.weight", "dimension")
    refused(made(tensors=[(embed, (4, 6, 1, 1, 1))]), embed, "5 dimensions")
    with open(path, "wb") as file:
        file.write(whole[:4])
    test_llm.refused(path, "ends within", "lie.gguf")


def equal_numbers_of_layers_are_one(folder):
    """An array with the same number for each layer, as some files have them for heads."""
    outputs = []
    for keys in ({}, {"llama.attention.head_count": array(2, 2, 2),
                      "llama.attention.head_count_kv": array(2),
                      "llama.feed_forward_length": array(4, 4)}):
        path = os.path.join(folder, "model.gguf")
        with open(path, "wb") as file:
            file.write(made(keys))
        done = test_llm.llm(path, "--ids", "1 2 3", "--print-ids", "--max-new", "3")
        check(done.returncode == 0, keys, done.stderr)
        outputs.append(done.stdout)
    check(outputs[0] == outputs[1], outputs)


# -- a model in several files --------------------------------------------------------


class Split:
    """Writes the tensors of a GGUF file to several, as llama-gguf-split does."""

    SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = file.read()
        self.at = 8
        tensors, keys = self.take("<QQ")
        first, self.count = self.at, keys
        for _ in range(keys):
            self.skip_string()
            self.skip(self.take("<I")[0])
        self.keys = self.data[first:self.at]
        self.tensors = [self.tensor() for _ in range(tensors)]
        begin = self.at + -self.at % 32
        places = sorted(offset for *_, offset in self.tensors) + [len(self.data) - begin]
        self.values = {offset: self.data[begin + offset:begin + end]
                       for offset, end in zip(places, places[1:])}

    def take(self, layout):
        got = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return got

    def skip_string(self):
        length = self.take("<Q")[0]
        self.at += length

    def skip(self, kind):
        kind, count = self.take("<IQ") if kind == 9 else (kind, 1)
        for _ in range(count if kind == 8 else 0):
            self.skip_string()
        self.at += self.SIZES.get(kind, 0) * count

    def tensor(self):
        begin = self.at
        self.skip_string()
        dims = self.take("<I")[0]
        self.at += 8 * dims + 4
        return self.data[begin:self.at], self.take("<Q")[0]

    def part(self, i, count):
        """File i of count."""
        own = b"".join(string("split." + key) + struct.pack("<IH", 2, value)
                       for key, value in (("no", i), ("count", count)))
        some = self.tensors[i::count]
        infos = values = b""
        for info, offset in some:
            infos += info + struct.pack("<Q", len(values))
            values += self.values[offset] + bytes(-len(self.values[offset]) % 32)
        head = b"GGUF" + struct.pack("<IQQ", 3, len(some), 2 + (0 if i else self.count))
        head += (b"" if i else self.keys) + own + infos
        return head + bytes(-len(head) % 32) + values

    def write(self, folder, count):
        """The path of the first."""
        paths = [os.path.join(folder, "model-%05d-of-%05d.gguf" % (i + 1, count))
                 for i in range(count)]
        for i, path in enumerate(paths):
            with open(path, "wb") as file:
                file.write(self.part(i, count))
        return paths[0]


def split_files_are_read_together(folder):
    for name, count in ("llama", 3), ("phi3_longrope", 2), ("gpt2", 5):
        model, whole = golden("models")[name], os.path.join(FOLDER, name + ".gguf")
        path = Split(whole).write(folder, count)
        for flags in ("--tp", "2"), ("--tp", "1", "--dtype", "f32"):
            want = run(folder, whole, model, *flags)
            check(run(folder, path, model, *flags) == want, name, count, flags)
    test_llm.refused(path.replace("-00001-", "-00002-"), "file 2 of 5", path)
    os.remove(path.replace("-00001-", "-00005-"))
    test_llm.refused(path, "model-00005-of-00005.gguf", "No such file")
    shutil.copyfile(path.replace("-00001-", "-00004-"), path.replace("-00001-", "-00005-"))
    test_llm.refused(path, "model-00005-of-00005.gguf", "file 5 of 5")
    with open(path.replace("-00001-", "-00003-"), "r+b") as file:
        file.truncate(os.path.getsize(file.name) - 33)
    test_llm.refused(path, "model-00003-of-00005.gguf", "bytes of data")


def only_rank_0_needs_split_files(folder):
    alone, here = test_llm.only_on_rank_0(folder, 2)
    model = golden("models")["llama_llama3"]
    path = Split(os.path.join(FOLDER, "llama_llama3.gguf")).write(here, 3)
    done = alone(os.path.basename(path), "--ids", test_llm.numbers(model["prompt"]), "--print-ids",
                 "--greedy", "--max-new", str(len(model["new"])), "--dtype", "f32")
    check(done.returncode == 0 and done.stdout.split() == ["[0]", *map(str, model["new"])],
          done.stdout, done.stderr)


# -- vocabularies ------------------------------------------------------------------


def tokenized(folder, keys, text, *flags):
    """Of a file with keys alone, of an architecture that is not known: ids and stderr."""
    path = os.path.join(folder, "vocabulary.gguf")
    with open(path, "wb") as file:
        file.write(made({**dict.fromkeys(KEYS), "general.architecture": named("no-such"), **keys},
                        tensors=[]))
    done = subprocess.run([test_llm.LLM, "--tokenize", "--tokenizer", path, *flags], timeout=60,
                          input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return list(map(int, done.stdout.split())), done.stderr.decode("utf-8", "replace")


def pre_tokenizers_are_those_of_llama_cpp(folder):
    """The text, cut differently by each; U+0120 is the space of byte-level BPE."""
    tokens = ["a", "1", "2", "3", "4", "\u0120", ",", "\u0120,", "12", "34", "123", "1234", ",,"]
    keys = {"tokenizer.ggml.model": named("gpt2"), "tokenizer.ggml.tokens": strings(*tokens),
            "tokenizer.ggml.merges": strings("\u0120 ,", "1 2", "3 4", "12 3", "12 34", ", ,")}
    text = "a ,1234"
    default, gpt2, single = [0, 5, 6, 10, 4], [0, 7, 11], [0, 7, 1, 2, 3, 4]
    for pre, flags, want, warns in (
            (None, (), default, "missing"), ("default", (), default, "\"default\""),
            ("gpt-2", (), gpt2, ""), ("smollm", (), single, ""), ("dbrx", (), [0, 7, 10, 4], ""),
            ("falcon", (), [0, 5, 6, 10, 4], ""), ("deepseek-coder", (), single, ""),
            ("default", ("--pre", "gpt-2"), gpt2, ""), (None, ("--pre", "smollm"), single, ""),
            ("gpt-2", ("--pre", "default"), default, ""),
            ("mystery", ("--pre", "gpt-2"), gpt2, "")):
        got, errors = tokenized(folder, {**keys, "tokenizer.ggml.pre": pre and named(pre)}, text,
                                *flags)
        check(got == want, pre, flags, got, want, errors)
        check(warns in errors and bool(errors) == bool(warns), pre, flags, errors)
    for flags, words in ((("--pre", "mystery"), ("--pre", "mystery", "README.md")),
                         ((), ("tokenizer.ggml.pre", "no-such-pre", "--pre NAME"))):
        got, errors = tokenized(folder, {**keys, "tokenizer.ggml.pre": named("no-such-pre")}, text,
                                *flags)
        check(got == [] and all(word in errors for word in words), flags, errors)
    with open(os.path.join(TOP, "examples", "llm", "README.md"), encoding="utf-8") as file:
        readme = file.read()
    with open(os.path.join(TOP, "examples", "llm", "gguf_tokenizer.h"), encoding="utf-8") as file:
        table = file.read().split("gguf_pres[] = {")[1].split("};")[0]
    for row in table.replace("\n     ", " ").split("\n    {\"")[1:]:
        for name in row.split("\"")[0].split():
            check("`%s`" % name in readme, "README.md lacks the pre-tokenizer", name)


def tokens_may_be_there_twice_or_empty(folder):
    """Of two with one text the last counts, as in llama.cpp; an empty one is no text's."""
    keys = {"tokenizer.ggml.model": named("gpt2"), "tokenizer.ggml.pre": named("gpt-2"),
            "tokenizer.ggml.tokens": strings("a", "", "b", "<x>", "ab", "a", "<x>", ""),
            "tokenizer.ggml.token_type": struct.pack("<IIQ8i", 9, 5, 8, 1, 5, 1, 3, 1, 1, 3, 3),
            "tokenizer.ggml.merges": strings("a b")}
    got, errors = tokenized(folder, keys, "abb<x>a")
    check(got == [4, 2, 6, 5], got, errors)
    pieces = {"tokenizer.ggml.model": named("llama"),
              "tokenizer.ggml.tokens": strings("<unk>", "a", "b", "", "ab", "a", "\u2581"),
              "tokenizer.ggml.token_type": struct.pack("<IIQ7i", 9, 5, 7, 2, 1, 1, 5, 1, 1, 1),
              "tokenizer.ggml.scores": struct.pack("<IIQ7f", 9, 6, 7, 0, -1, -2, 0, -3, -4, -5),
              "tokenizer.ggml.add_bos_token": struct.pack("<IB", 7, 0)}
    got, errors = tokenized(folder, pieces, "aabb")
    check(got == [6, 5, 4, 2], got, errors)


def word_pieces_and_lines(folder):
    """The tokenizers "bert", with U+2581 where a word begins, and "gemma4", BPE on lines."""
    bert = {"tokenizer.ggml.model": named("bert"),
            "tokenizer.ggml.tokens": strings("[UNK]", "[CLS]", "[SEP]", "\u2581the", "rs",
                                             "\u2581,", "\u2581o"),
            "tokenizer.ggml.token_type": struct.pack("<IIQ7i", 9, 5, 7, 3, 3, 3, 1, 1, 1, 1),
            "tokenizer.ggml.cls_token_id": number(1), "tokenizer.ggml.unknown_token_id": number(0),
            "tokenizer.ggml.seperator_token_id": number(2)}
    got, errors = tokenized(folder, bert, "The ,\u00d3rs thex")
    check(got == [1, 3, 5, 6, 4, 0, 2], got, errors)
    lines = {"tokenizer.ggml.model": named("gemma4"),
             "tokenizer.ggml.tokens": strings("<bos>", "a", "\u2581", "a\u2581", "\n", "\n\n",
                                              "a\u2581a", "<0xC3>", "<0xA4>"),
             "tokenizer.ggml.merges": strings("a \u2581", "\n \n", "a\u2581 a"),
             "tokenizer.ggml.bos_token_id": number(0)}
    got, errors = tokenized(folder, lines, "a a\n\n\u00e4 a")
    check(got == [0, 6, 5, 7, 8, 2, 1], got, errors)


def vocabularies_that_lie_are_refused(folder):
    path = os.path.join(folder, "lie.gguf")
    text = struct.pack("<I", 8)
    tokens = {"tokenizer.ggml.model": text + string("gpt2"),
              "tokenizer.ggml.pre": text + string("gpt-2"),
              "tokenizer.ggml.tokens": strings("a", "b", "ab", "<s>"),
              "tokenizer.ggml.merges": strings("a b")}
    for changes, words in (
            ({"tokenizer.ggml.pre": text + string("mystery")}, ("tokenizer.ggml.pre", "mystery")),
            ({"tokenizer.ggml.model": text + string("rwkv")}, ("tokenizer.ggml.model", "rwkv")),
            ({"tokenizer.ggml.model": None}, ("tokenizer.ggml.model", "missing")),
            ({"tokenizer.ggml.model": text + string("llama")}, ("tokenizer.ggml.scores",)),
            ({"tokenizer.ggml.tokens": None}, ("tokenizer.ggml.tokens", "missing")),
            ({"tokenizer.ggml.tokens": strings("a", "b", "ab", b"\0")}, ("token 3", "U+0000")),
            ({"tokenizer.ggml.tokens": strings("a", "b", "ab", b"\xff")}, ("UTF-8",)),
            ({"tokenizer.ggml.token_type": struct.pack("<IIQi", 9, 5, 1, 1)}, ("token_type", "4")),
            ({"tokenizer.ggml.merges": strings("a x")}, ("\"a\" and \"x\"",)),
            ({"tokenizer.ggml.merges": None}, ("tokenizer.ggml.merges", "missing")),
            ({"tokenizer.ggml.add_bos_token": struct.pack("<IB", 7, 1)}, ("bos_token_id",)),
            ({"tokenizer.ggml.add_bos_token": struct.pack("<IB", 7, 1),
              "tokenizer.ggml.bos_token_id": number(4)}, ("bos_token_id", "4 tokens"))):
        with open(path, "wb") as file:
            file.write(made({**tokens, **changes}))
        test_llm.refused(path, "lie.gguf", *words, flags=("--prompt", "ab"))
    with open(path, "wb") as file:
        file.write(made(tokens))
    done = test_llm.llm(path, "--prompt", "abba", "--print-ids", "--max-new", "1")
    check(done.returncode == 0, done.stderr)


if __name__ == "__main__":
    sys.exit(run_tests("gguf", [model_of(name) for name in golden("models")] + [
        blocks_stay_as_they_are, only_rank_0_needs_the_file, vocabularies_give_the_same_ids,
        files_that_lie_are_refused, equal_numbers_of_layers_are_one, split_files_are_read_together,
        only_rank_0_needs_split_files, pre_tokenizers_are_those_of_llama_cpp,
        tokens_may_be_there_twice_or_empty, word_pieces_and_lines,
        vocabularies_that_lie_are_refused]) > 0)
