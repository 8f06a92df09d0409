#!/usr/bin/env python3
"""Compares build/llm/tokenize with the Python package `tokenizers`, id by id, on mixed text.

    compare.py PROGRAM TOKENIZER.json ... [--mb N] [--seed N] [--text FILE]

The text: C and Python sources, the system's translations, words of many scripts, emoji, combining
and control characters, code points at random, special tokens, and invalid UTF-8, once as a whole
and once line by line; then what the ids decode to. --text keeps it in a file.
"""

import argparse
import glob
import os
import random
import subprocess
import sys
import sysconfig

from tokenizers import Tokenizer

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
RANGES = [(0x20, 0x7F)] * 6 + [
    (0xA0, 0x250),
    (0x370, 0x400),
    (0x400, 0x500),
    (0x590, 0x700),
    (0x900, 0xE00),
    (0xE00, 0x1000),
    (0x1100, 0x1200),
    (0x1E00, 0x2000),
    (0x2000, 0x2800),
    (0x3000, 0x3100),
    (0xFB00, 0x10000),
    (0x10000, 0x20000),
    (0x1F000, 0x20000),
    (0, 0x110000),
]
COMBINING = [
    0x300,
    0x301,
    0x323,
    0x327,
    0x345,
    0x5B0,
    0x64B,
    0x93C,
    0x3099,
    0x20DD,
    0x1D165,
    0x94D,
]
EMOJI = [
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea",
    "\u2764\ufe0f",
    "\U0001f44d\U0001f3fd",
    "\u00a9",
    "\u2603",
]
HARD = [
    "'s",
    "'S",
    "'ll",
    "'LL",
    "'\u017f",
    "\u212a",
    "don't",
    "we'RE",
    "  ",
    "\t",
    " \n",
    "\r\n",
    "\u00a0",
    "\u180e",
    "\u200b",
    "\u2028",
    "\u0085",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x00",
    "\ufeff",
    "\u0130",
    "\u1e9e",
    "\ufb01",
    "\u2126",
    "\uac00",
    "\u1100\u1161\u11a8",
    "1234567",
    "\u0661",
    "\u00b2",
    "\u2167",
    "<|endoftext|>",
    "<|im_start|>",
    "<s>",
    "</s>",
    "<unk>",
    "[CLS]",
    "[MASK]",
    "[INST]",
    "\u2581",
    "\u2581\u2581",
    "<0x41>",
    "##ing",
    "\ufffd",
    "\u0958",
    "\u0344",
    "\u1fee",
    "\u0e33",
    "\uff76\uff9e",
    "\u3131\u314f",
    "\u33c2",
    "\u00ad",
    "\u200d",
    "\u0600",
    "\u0915\u094d\u0937\u0301",
]
INVALID = [
    b"\xff",
    b"\xc3",
    b"\xe2\x82",
    b"\xf0\x9f\x98",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"\xf5",
    b"\x80\x80",
    b"\xe2\x28\xa1",
    b"\xf4\x90\x80\x80",
]


def word(rng):
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(HARD).encode()
    if kind < 0.3:
        return rng.choice(EMOJI).encode()
    if kind < 0.33:
        return rng.choice(INVALID)
    if kind < 0.4:
        return rng.choice(["=", "-", " ", "a", "\n", "\u4e00", "."]).encode() * rng.randint(2, 90)
    low, high = rng.choice(RANGES)
    letters = []
    for _ in range(rng.randint(1, 9)):
        c = rng.randrange(low, high)
        letters.append(chr(c if not 0xD800 <= c < 0xE000 else 0x4E00 + c % 0x5000))
        if rng.random() < 0.08:
            letters += [chr(rng.choice(COMBINING)) for _ in range(rng.randint(1, 4))]
    return "".join(letters).encode()


def chinese(rng):
    return "".join(
        chr(0x4E00 + int(rng.random() ** 3 * 0x51A5)) for _ in range(rng.randint(1, 30))
    )


def make_text(size, seed):
    rng = random.Random(seed)
    paths = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))
    paths += [os.path.join(TOP, "tshard.h"), os.path.join(TOP, "README.md")]
    paths += sorted(glob.glob("/usr/share/locale/*/LC_MESSAGES/*.mo"))[:: 7 if size > 1e6 else 99]
    sources = [open(path, "rb").read() for path in paths]
    parts, total = [], 0
    while total < size:
        kind = rng.random()
        if kind < 0.4:
            source = rng.choice(sources)
            begin = rng.randrange(max(1, len(source) - 4000))
            part = source[begin : begin + rng.randint(100, 4000)]
        elif kind < 0.6:
            part = "\uff0c".join(chinese(rng) for _ in range(rng.randint(1, 30))).encode()
        elif kind < 0.75:
            part = " ".join(
                "".join(chr(rng.randrange(0x621, 0x64B)) for _ in range(rng.randint(1, 8)))
                for _ in range(rng.randint(5, 60))
            ).encode()
        else:
            part = rng.choice([b"", b" ", b" "]).join(word(rng) for _ in range(rng.randint(1, 80)))
        parts.append(part + rng.choice([b"\n", b"", b" ", b"\n\n"]))
        total += len(parts[-1])
    return b"".join(parts)


def run(program, arguments, data):
    done = subprocess.run(
        [program] + arguments, input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    if done.returncode:
        sys.exit("%s %s: %s" % (program, arguments, done.stderr.decode()[:200]))
    return done.stdout


def differs(name, got, want, tokenizer, text):
    for i, (a, b) in enumerate(zip(got, want)):
        if a != b:
            break
    else:
        i = min(len(got), len(want))
    print(
        "%s: id %d: %s, not %s (%d ids, not %d)"
        % (name, i, got[i - 2 : i + 8], want[i - 2 : i + 8], len(got), len(want))
    )
    print(
        "   before:", ascii(tokenizer.decode(want[max(i - 8, 0) : i], skip_special_tokens=False))
    )
    print("   got: ", [tokenizer.id_to_token(g) for g in got[i : i + 8]])
    print("   want:", [tokenizer.id_to_token(w) for w in want[i : i + 8]])
    return 1


def compare(program, path, data):
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    name, bad = os.path.basename(path), 0
    text = data.decode("utf-8", "replace")
    want = tokenizer.encode(text).ids
    got = [int(x) for x in run(program, [path], data).split()]
    if got != want:
        bad += differs(name + " whole", got, want, tokenizer, text)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    out = run(program, [path, "--lines", "--no-special"], data).split(b"\n")
    wrong = 0
    for line, ids in zip(lines, out):
        text = line.decode("utf-8", "replace")
        want_line = tokenizer.encode(text, add_special_tokens=False).ids
        got_line = [int(x) for x in ids.split()]
        if got_line != want_line:
            wrong += 1
            if wrong < 4:
                differs(name + " line " + ascii(text[:200]), got_line, want_line, tokenizer, text)
    bad += wrong
    some = want[:200000]
    ids = " ".join(map(str, some)).encode()
    decoded = tokenizer.decode(some, skip_special_tokens=False).encode()
    for flags in ([], ["--stream"]):
        shown = run(program, [path, "--decode"] + flags, ids)
        if shown != decoded and not (
            flags and shown.replace(b"\xef\xbf\xbd", b"") == decoded.replace(b"\xef\xbf\xbd", b"")
        ):
            at = next(
                (i for i, (a, b) in enumerate(zip(shown, decoded)) if a != b),
                min(len(shown), len(decoded)),
            )
            print(
                "%s: decode %s: at byte %d %r, not %r"
                % (name, flags, at, shown[at - 20 : at + 20], decoded[at - 20 : at + 20])
            )
            bad += 1
    print("%-16s %d ids, %d lines, %d wrong" % (name, len(want), len(lines), bad))
    return bad


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("tokenizers", nargs="+")
    parser.add_argument("--mb", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text")
    o = parser.parse_args()
    data = make_text(int(o.mb * 1e6), o.seed)
    if o.text:
        with open(o.text, "wb") as file:
            file.write(data)
    return 1 if sum(compare(o.program, path, data) for path in o.tokenizers) else 0


if __name__ == "__main__":
    sys.exit(main())
