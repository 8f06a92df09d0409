#!/usr/bin/env python3
"""Writes examples/llm/unicode.h: what the Python package `tokenizers` does with every code point,
found by asking it, so that both agree whatever versions of Unicode its parts were built for.

    make_unicode.py [FILE]      needs `tokenizers`; takes a minute
"""

import itertools
import os
import sys
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from charsmap import charsmap

OUT = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "llm", "unicode.h"
)
POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
# How a code point joins others to a grapheme cluster (UAX #29). Regional indicators are left out:
# only clusters of less than 6 bytes count, and a pair of them has 8.
BREAKS = (
    "ALONE CONTROL EXTEND NONJOINER LINKER JOINER SPACING PREPEND CONSONANT PICTURE L V T LV LVT"
).split()
FLAGS = ("WORD", "SPACE", "PUNCTUATION", "NUMERIC", "NONSPACING", "MARK", "OTHER")
# PCRE2 10.42, Debian 12's, knows Unicode 14, as does the Python of that release.
assert unicodedata.unidata_version.startswith("14.")
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co"


def pieces(step, text):
    return [piece for piece, _ in step.pre_tokenize_str(text)]


def flags():
    """FLAGS of every code point, as bits."""
    whitespace, bert = pre_tokenizers.Whitespace(), pre_tokenizers.BertPreTokenizer()
    digits, split = pre_tokenizers.Digits(True), pre_tokenizers.WhitespaceSplit()
    options = dict(
        clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False
    )
    clean = normalizers.BertNormalizer(**dict(options, clean_text=True))
    accents = normalizers.BertNormalizer(**dict(options, strip_accents=True))
    marks, nfd = normalizers.StripAccents(), normalizers.NFD()
    word = Tokenizer(models.WordLevel({"[U]": 0}, unk_token="[U]"))
    word.add_tokens([AddedToken("<m>", single_word=True, normalized=False)])
    got = [0] * 0x110000
    for c in POINTS:
        s = chr(c)
        kind = len(pieces(whitespace, "+" + s + "+"))
        in_word = kind == 3
        assert (word.encode(s + "<m>").ids[-1] == 0) == in_word, hex(c)
        space = len(pieces(split, "a" + s + "a")) == 2
        assert space == (kind == 2), hex(c)
        punctuation = len(pieces(bert, "a" + s + "a")) == 3
        numeric = len(pieces(digits, "a" + s + "a")) == 3
        alone = nfd.normalize_str(s) == s
        nonspacing = alone and accents.normalize_str("a" + s) == "a"
        mark = marks.normalize_str("a" + s) == "a"
        cleaned = clean.normalize_str("a" + s + "b")
        assert cleaned in ("ab", "a" + s + "b", "a b"), hex(c)
        assert (cleaned == "a b") == (space and cleaned != "ab"), hex(c)
        for bit, on in enumerate(
            (in_word, space, punctuation, numeric, nonspacing, mark, cleaned == "ab")
        ):
            got[c] |= on << bit
    return got


def classes():
    """The canonical combining class of every code point, found by what NFD swaps."""
    nfd = normalizers.NFD()
    known = {}  # one of each class; U+0334 is of class 1
    for c in POINTS:
        moves = nfd.normalize_str(chr(c) + "\u0334") != chr(c) + "\u0334"  # known there, too
        if moves or c == 0x334:
            known.setdefault(unicodedata.combining(chr(c)), chr(c))
    got = [0] * 0x110000
    for c in POINTS:
        s = chr(c)
        if nfd.normalize_str(s) != s:
            continue
        if all(nfd.normalize_str(pair) == pair for pair in (s + known[1], known[9] + s)):
            continue
        fits = [
            k
            for k in sorted(known)
            if k
            and nfd.normalize_str(s + known[k]) == s + known[k]
            and nfd.normalize_str(known[k] + s) == known[k] + s
        ]
        assert len(fits) == 1, hex(c)
        got[c] = fits[0]
    return got


def decompositions():
    """(code point, first, second) of canonical decompositions, one level; second 0: one only. And
    whether NFC puts it together again."""
    nfd, nfc = normalizers.NFD(), normalizers.NFC()
    for c in POINTS:
        full = nfd.normalize_str(chr(c))
        if full == chr(c) or 0xAC00 <= c < 0xD7A4:
            continue
        if len(full) == 1:
            yield c, ord(full), 0, False
            continue
        first = nfc.normalize_str(full[:-1])
        if len(first) != 1:  # left in parts: one level more, by the standard's own data
            parts = [int(x, 16) for x in unicodedata.decomposition(chr(c)).split()]
            assert len(parts) == 2 and nfd.normalize_str("".join(map(chr, parts))) == full, hex(c)
            first = chr(parts[0])
            full = first + chr(parts[1])
        yield c, ord(first), ord(full[-1]), nfc.normalize_str(full) == chr(c)


def compatibility():
    """(code point, what NFKD makes of it) where that is not what NFD makes."""
    nfd, nfkd = normalizers.NFD(), normalizers.NFKD()
    for c in POINTS:
        full = nfkd.normalize_str(chr(c))
        if full != nfd.normalize_str(chr(c)):
            yield c, [ord(x) for x in full]


def compat_tables():
    """First and last code point of runs of compatibility(), and the points of all, each twice, plus
    1 for the last of a code point."""
    bounds, points = [], []
    for c, full in compatibility():
        if bounds and bounds[-1] == c - 1:
            bounds[-1] = c
        else:
            bounds += [c, c]
        points += [p << 1 | (i == len(full) - 1) for i, p in enumerate(full)]
    return bounds, points


def breaks():
    """The class of BREAKS of every code point, found by the normalizer Precompiled, which replaces
    a whole cluster of less than 6 bytes if it begins with a key: with the key y, "y" and an accent
    become "Y" where a cluster begins at y, and "Y" and the accent elsewhere."""
    accent, picture, joiner, ka, virama = "\u0301", "\u2603", "\u200d", "\u0915", "\u094d"

    def begins(key):
        normalizer = normalizers.Precompiled(charsmap({key: "Y"}))
        return lambda text: normalizer.normalize_str(text + key + accent)[-1] == "Y"

    whole = normalizers.Precompiled(charsmap({"a": "Y"})).normalize_str
    control = normalizers.Precompiled(charsmap({accent: "Y"})).normalize_str
    after = {key: begins(key) for key in ("a", picture, ka, "\u1100", "\u1161", "\u11a8")}

    def one(c):
        s = chr(c)
        if c == 0 or c != 0x301 and control(s + accent + "\u0302") == s + "Y":
            return "CONTROL"
        if c != 0x61 and whole("a" + s) == "Y":
            if not after[ka](ka + s):
                return "LINKER"
            if not after[picture](picture + s + joiner):
                return "NONJOINER" if after[ka](ka + virama + s) else "EXTEND"
            return "SPACING" if after[ka](ka + virama + s) else "JOINER"
        if not after["a"](s):
            return "PREPEND"
        if not after[ka](s + virama):
            return "CONSONANT"
        if not after[picture](s + joiner):
            return "PICTURE"
        hangul = tuple(not after[key](s) for key in ("\u1100", "\u1161", "\u11a8"))
        syllable = 0xAC00 <= c < 0xD7A4
        return {
            (0, 0, 0): "ALONE",
            (1, 1, 0): "L",
            (0, 1, 1): "LV" if syllable else "V",
            (0, 0, 1): "LVT" if syllable else "T",
        }[hangul]

    got = [0] * 0x110000
    for c in POINTS:
        got[c] = BREAKS.index(one(c))
        if 0xAC00 <= c < 0xD7A4:  # computed, so that the table is short
            assert BREAKS[got[c]] == ("LVT" if (c - 0xAC00) % 28 else "LV"), hex(c)
            got[c] = BREAKS.index("LV")
    return got


def lowercase():
    """(first, last, step, difference) of runs of code points; U+0130 has two characters, apart."""
    lower = normalizers.Lowercase()
    pairs = [(c, lower.normalize_str(chr(c))) for c in POINTS]
    assert [hex(c) for c, s in pairs if len(s) != 1] == ["0x130"]
    rows = []
    for c, s in pairs:
        if len(s) != 1 or ord(s) == c:
            continue
        difference = ord(s) - c
        if (
            rows
            and rows[-1][3] == difference
            and c - rows[-1][1] in (1, 2)
            and (rows[-1][0] == rows[-1][1] or rows[-1][2] == c - rows[-1][1])
        ):
            rows[-1][2] = c - rows[-1][1]
            rows[-1][1] = c
        else:
            rows.append([c, c, 1, difference])
    return rows


def added():
    """(first, last, index of the category) of what has another category in the patterns of
    `tokenizers` than in Unicode 14."""
    names = CATEGORIES.split()
    got = {}
    for index, name in enumerate(names):
        step = pre_tokenizers.Split(Regex(r"\p{%s}" % name), "removed")
        for at in range(0, len(POINTS), 4096):
            part = POINTS[at : at + 4096]
            inside = [True] * len(part)
            for _, (begin, end) in step.pre_tokenize_str("".join(map(chr, part))):
                inside[begin:end] = [False] * (end - begin)
            for c, is_in in zip(part, inside):
                if is_in:
                    got[c] = index
    rows, changed = [], []
    for c in POINTS:
        old = unicodedata.category(chr(c))
        if c in got and names[got[c]] != old:
            if old != "Cn":
                changed.append((hex(c), old, names[got[c]]))
                continue
            if rows and rows[-1][1] == c - 1 and rows[-1][2] == got[c]:
                rows[-1][1] = c
            else:
                rows.append([c, c, got[c]])
        elif c not in got and old != "Cn" and old != "Cs":
            changed.append((hex(c), old, None))
    print("changed categories:", changed)
    return rows


def runs(values):
    """(code point, value) where the value becomes another; before the first it is 0."""
    last = 0
    for c in range(0x110000):
        if values[c] != last:
            yield c << 8 | values[c]
            last = values[c]


def table(kind, name, numbers, per):
    numbers = list(numbers)
    lines, line = [], "   "
    for at in range(0, len(numbers), per):
        words = " " + ", ".join(str(n) for n in numbers[at : at + per]) + ","
        if len(line) + len(words) > 100:
            lines.append(line)
            line = "   "
        line += words
    return "static const %s %s[] = {\n%s\n};\n" % (kind, name, "\n".join(lines + [line]))


def main():
    pairs = list(decompositions())
    composed = sum(1 for p in pairs if p[3])
    flat = list(itertools.chain.from_iterable((c << 1 | keeps, a, b) for c, a, b, keeps in pairs))
    text = (
        "/* unicode.h - tables of the properties and mappings of code points, for tokenizer.h\n"
        " *\n"
        " * Written by tests/llm/make_unicode.py, which asks the Python package tokenizers %s. */\n"
        "#ifndef LLM_UNICODE_H\n#define LLM_UNICODE_H\n\n#include <stdint.h>\n\n"
        % tokenizers.__version__
    )
    text += (
        "/* Properties of a code point, in this order: \\w matches it; \\s "
        "matches it; BERT takes it for\n"
        " * punctuation; it is a number; an accent that BertNormalizer "
        "removes; a mark that StripAccents\n"
        " * removes; a control character that BertNormalizer removes. */\nenum {\n"
    )
    for bit, name in enumerate(FLAGS):
        text += "    LLM_%s = %d,\n" % (name, 1 << bit)
    text += ("    LLM_ACTIVE = 128 /* NFC or NFD may change the code point; tokenizer.h sets this "
             "flag */\n};\n\n")
    text += (
        "/* A row for each code point at which the properties change: code "
        "point << 8 | properties. They are\n"
        " * valid up to the next row. */\n"
    )
    text += table("uint32_t", "llm_unicode_flags", runs(flags()), 1)
    text += (
        "\n"
        "/* A row for each code point at which the canonical combining class "
        "changes: code point << 8 |\n"
        " * class. It is valid up to the next row. */\n"
    )
    text += table("uint32_t", "llm_unicode_classes", runs(classes()), 1)
    text += (
        "\n"
        "/* Canonical decompositions, 3 numbers each: code point << 1 | (1 if "
        "NFC composes it again), the\n"
        " * first code point that it becomes, the second or 0. Hangul is computed. */\n"
    )
    text += table("uint32_t", "llm_unicode_pairs", flat, 3)
    bounds, points = compat_tables()
    text += (
        "\n"
        "/* Compatibility decompositions (NFKD). llm_unicode_compat_runs: "
        "first and last code point of each\n"
        " * run of code points that have one. llm_unicode_compat: the "
        "decompositions of all of them in order,\n"
        " * each code point << 1, | 1 for the last one of a decomposition. */\n"
    )
    text += table("uint32_t", "llm_unicode_compat_runs", bounds, 2)
    text += table("uint32_t", "llm_unicode_compat", points, 1)
    text += (
        "\n"
        "/* Mappings to lower case, 4 numbers each: first code point, last "
        "one, step between them, what is\n"
        " * added to get the lower case. */\n"
    )
    text += table("int32_t", "llm_unicode_lower", itertools.chain.from_iterable(lowercase()), 4)
    text += (
        "\n"
        "/* llm_unicode_added: ranges of code points that Unicode 14 did not "
        "have, 3 numbers each: first,\n"
        " * last, index of their general category in llm_unicode_categories. */\n"
    )
    text += 'static const char llm_unicode_categories[] =\n    "%s";\n' % CATEGORIES
    text += table("uint32_t", "llm_unicode_added", itertools.chain.from_iterable(added()), 3)
    text += (
        "\n"
        "/* Classes of code points that decide where a grapheme cluster ends, "
        "see UAX #29. */\nenum {\n"
    )
    for value, name in enumerate(BREAKS):
        text += "    LLM_BREAK_%s = %d%s\n" % (name, value, "," * (name != BREAKS[-1]))
    text += (
        "};\n"
        "/* A row for each code point at which LLM_BREAK_... changes: code "
        "point << 8 | LLM_BREAK_... Hangul\n"
        " * syllables are all LV here; tokenizer.h makes those with a final consonant LVT. */\n"
    )
    text += table("uint32_t", "llm_unicode_breaks", runs(breaks()), 1)
    text += "\n#endif\n"
    with open(sys.argv[1] if len(sys.argv) > 1 else OUT, "w", encoding="utf-8") as file:
        file.write(text)
    print("%d pairs, %d composed" % (len(pairs), composed))


if __name__ == "__main__":
    main()
