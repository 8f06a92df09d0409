#!/usr/bin/env python3
"""Writes examples/llm/classes.h: the scripts of \\p{...} and what POSIX classes have beside general
categories, as the package `tokenizers` (its Oniguruma) has them, code point by code point."""

import os
import sys

from tokenizers import Regex, pre_tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))
PATH = os.path.join(HERE, "..", "..", "examples", "llm", "classes.h")
POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
STEP = 20000
SCRIPTS = ("Arabic Armenian Bengali Bopomofo Cyrillic Devanagari Georgian Greek Han Hangul Hebrew "
           "Hiragana Katakana Khmer Lao Latin Myanmar Tamil Telugu Thai Tibetan").split()
# POSIX class: the categories that it has as a whole
POSIX = {"alpha": "L Nl", "lower": "Ll", "upper": "Lu"}


def members(pattern):
    """The code points that a pattern of one character matches."""
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    found = set()
    for i in range(0, len(POINTS), STEP):
        some = POINTS[i:i + STEP]
        left = set()
        for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, some))):
            left.update(some[begin:end])
        found.update(set(some) - left)
    return found


def ranges(points):
    rows = []
    for c in sorted(points):
        if rows and c == rows[-1][1] + 1:
            rows[-1][1] = c
        else:
            rows.append([c, c])
    return rows


def table(name, points):
    rows, lines, line = ranges(points), [], "   "
    for begin, end in rows:
        word = " 0x%X,0x%X," % (begin, end)
        if len(line) + len(word) > 98:
            lines.append(line)
            line = "   "
        line += word
    lines.append(line.rstrip(","))
    return "static const uint32_t llm_class_%s[] = {\n%s};\n" % (name.lower(), "\n".join(lines))


def main():
    parts, rows = [], []
    for name in SCRIPTS:
        parts.append(table(name, members(r"\p{%s}" % name)))
        rows.append(name)
    for name, categories in POSIX.items():
        whole = set().union(*(members(r"\p{%s}" % c) for c in categories.split()))
        own = members("[[:%s:]]" % name)
        if not whole <= own:
            sys.exit("[[:%s:]] lacks some of %s" % (name, categories))
        parts.append(table(name, own - whole))
        rows.append(name)
    pieces = ["    {\"%s\", llm_class_%s, sizeof llm_class_%s / 8}" % (n, n.lower(), n.lower())
              for n in rows]
    with open(PATH, "w", encoding="ascii") as file:
        file.write("""\
/* classes.h - ranges of code points, first and last of each, of scripts and of POSIX classes, as
 * Oniguruma defines them. Of a POSIX class, only what its general categories (alpha: L and Nl,
 * lower: Ll, upper: Lu) do not have. tests/llm/make_classes.py writes this file. */
#ifndef LLM_CLASSES_H
#define LLM_CLASSES_H

#include <stddef.h>
#include <stdint.h>

%s
typedef struct llm_class_row {
    const char *name;
    const uint32_t *ranges;
    size_t count;
} llm_class_row;

static const llm_class_row llm_classes[] = {
%s};

#endif
""" % ("\n".join(parts), ",\n".join(pieces)))


if __name__ == "__main__":
    main()
