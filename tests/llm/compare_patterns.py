#!/usr/bin/env python3
"""Compares how tokenizer.h splits texts by Oniguruma's constructs with the package `tokenizers`,
for each pattern below: so many random texts of code points of every kind. Not part of make test,
which compares with a few of them, recorded in tests/golden/patterns.json.

    compare_patterns.py [TEXTS]     100000 texts of each construct
    compare_patterns.py golden      writes tests/golden/patterns.json
"""

import json
import os
import random
import subprocess
import sys
import tempfile

from tokenizers import Regex, Tokenizer, pre_tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))
BETWEEN = "\n%%between%%\n"
POSIX = ("alnum alpha ascii blank cntrl digit graph lower print punct space upper word "
         "xdigit").split()
SCRIPTS = ("Arabic Armenian Bengali Bopomofo Cyrillic Devanagari Georgian Greek Han Hangul Hebrew "
           "Hiragana Katakana Khmer Lao Latin Myanmar Tamil Telugu Thai Tibetan").split()
CONSTRUCTS = {
    "BLOOM": [r" ?[^(\s|[.,!?…。，、।۔،])]+"],
    "nested": [r"[a[b-d]e]+", r"[^a[^b-y]z]+", r"[\w[^\s]]+", r"[-[a]-]+", r"[[b]^a]+",
               r"[^[a-f][g-m]]+", r"[a-c[\P{L}]]+", r"[^\W\d]+", r"[x[^x[y[^z]]]]+"],
    "&&": [r"[a-z&&[^aeiou]]+", r"[\p{L}&&[^\p{Lu}]]+", r"[^a-z&&[b-x]]+", r"[\w&&[[:ascii:]]]+",
           r"[a-z&&b-y&&[^m]]+", r"[[a-m]&&[g-z]x]+"],
    **{"[:%s:]" % name: ["[[:%s:]]+" % name, "[^a[:^%s:]b]+" % name] for name in POSIX},
    r"\p{script}": [r"\p{%s}+" % name for name in SCRIPTS] + [r"[^\p{Han}\p{L}]+", r"\P{Latin}+"],
    r"\h": [r"\h+", r"\H+", r"[\hx]+", r"[^\H]+"],
    r"\b": [r"\b\w", r"\b", r"\B.", r"a\b", r"[\b ]+"],
    r"\R": [r"\R", r"\R+a?", r"\s*\R"],
    "possessive": [r"a++b?", r"\w*+x", r"x?+x", r"\p{L}++|\s*+", r"(?:ab)++a"],
}
SOME = ["a", "b", "c", "x", "y", "z", "A", "Z", "0", "9", "_", "-", " ", "  ", "\r\n", "\n", "\r",
        "\t", "\u0085", "\u2028", "\x0b", "\x08", ".", ",", "!", "(", ")", "|", "\u2026", "\u3002",
        "\u00b2", "\u00bc", "\u24b6", "\u2160", "\u0300", "\u0345", "\u4e2d", "\u3042", "\u30a2",
        "\u30fc", "\uac00", "\u0e01", "\u05d0", "\u0627", "\u03b1", "\u0416", "\u00e9", "\u00aa",
        "\u1c8a", "\U0001f130", "\U00020000", "\U00031350", "\u200d", "\ufe0f", "\U0001f600",
        "\x01", "\x7f", "\u00ad", "\ue000", "\u0378", "\U0010ffff"]


def text(draw):
    out = []
    for _ in range(draw.randrange(1, 16)):
        kind = draw.random()
        if kind < 0.7:
            out.append(draw.choice(SOME))
        elif kind < 0.9:
            out.append(chr(draw.randrange(1, 0x3000)))
        else:
            c = draw.randrange(1, 0x110000 - 0x800)
            out.append(chr(c if c < 0xD800 else c + 0x800))
    return "".join(out)


def byte_chars():
    """GPT-2's character for each byte."""
    usual = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    more = iter(range(256, 512))
    return [chr(b) if b in usual else chr(next(more)) for b in range(256)]


def tokenizer(pattern):
    """WordPiece on bytes: the first of a word has another id than the others."""
    chars = byte_chars()
    vocab = {c: i for i, c in enumerate(chars)}
    vocab.update({"##" + c: 256 + i for i, c in enumerate(chars)})
    vocab["[UNK]"] = 512
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": None, "post_processor": None, "decoder": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                 "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                 "use_regex": False}]},
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 1000, "vocab": vocab}}


def goldens(path):
    """For each pattern: texts, and how many bytes each part has that they are split into."""
    draw, rows = random.Random(9), []
    for pattern in (p for patterns in CONSTRUCTS.values() for p in patterns):
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
        texts = ["".join(text(draw) for _ in range(4)) for _ in range(5)]
        rows.append({"pattern": pattern, "cases": [
            [t, [len(part.encode("utf-8")) for part, _ in splitter.pre_tokenize_str(t)]]
            for t in texts]})
    with open(path, "w", encoding="ascii") as file:
        file.write("[" + ",\n".join(json.dumps(row) for row in rows) + "]\n")


def compare(program, folder, pattern, texts):
    """How many texts differ."""
    path = os.path.join(folder, "tokenizer.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(tokenizer(pattern), file)
    wants = [e.ids for e in Tokenizer.from_file(path).encode_batch(texts)]
    done = subprocess.run([program, path, "--between", BETWEEN],
                          input=BETWEEN.join(texts).encode("utf-8"), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE)
    if done.returncode != 0:
        print("%s: %s" % (pattern, done.stderr.decode("utf-8", "replace").strip()))
        return len(texts)
    gots = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    wrong = [t for t, got, want in zip(texts, gots, wants) if got != want]
    for t in wrong[:2]:
        print("%s: %r is split otherwise" % (pattern, t))
    return len(wrong) + abs(len(gots) - len(wants))


def main(count):
    draw, failed = random.Random(5), 0
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "tokenize")
        subprocess.check_call([os.environ.get("CC", "cc"), "-O2", "-o", program,
                               os.path.join(HERE, "tokenize.c"), "-lcjson", "-lpcre2-8", "-lm"])
        for name, patterns in CONSTRUCTS.items():
            each = -(-count // len(patterns))
            wrong = sum(compare(program, folder, p, [text(draw) for _ in range(each)])
                        for p in patterns)
            print("%-12s %d patterns, %d texts, %d differ" % (name, len(patterns),
                                                              each * len(patterns), wrong),
                  flush=True)
            failed += wrong
    return failed


if __name__ == "__main__":
    if sys.argv[1:] == ["golden"]:
        goldens(os.path.join(HERE, "..", "golden", "patterns.json"))
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100000) > 0)
