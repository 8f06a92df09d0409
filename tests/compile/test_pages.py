#!/usr/bin/env python3
"""The Markdown pages: README.md is short, no line of text is too wide for a terminal, and every
link leads to a file or heading that exists. Reports in cmocka's words."""

import glob
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import check, run_tests
README_LINES, COLUMNS, TABLE_COLUMNS = 200, 110, 120  # the last: of README.md's tables
# Figures that stand in several places: what they are, and a pattern for each.
TWICE = [("seconds of compiling the implementation at -O2",
          [("README.md", r"compiles\s+once, in (\d+) s \(gcc 12, -O2\)"),
           ("examples/README.md", r"compiles once, in .*?\b(\d+) s \(-O2\)")]),
         ("kilobytes of a program with one linear layer",
          [("README.md", r"one linear layer has (\d+) KB"),
           ("examples/README.md", r"(\d+) KB with one linear layer"),
           ("tshard.h", r"one linear layer has (\d+) KB")])]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages():
    found = []
    for form in "*.md", "*/*.md", "*/*/*.md":
        found += glob.glob(os.path.join(TOP, form))
    return sorted(page for page in found if not page.startswith(os.path.join(TOP, "build", "")))


def text_of(page):
    with open(page, encoding="utf-8") as file:
        return file.read()


def without_code(text):
    """The text with fenced and inline code left out."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`", "", text)


def anchor(heading):
    """The name that a heading can be linked by: lower case, hyphens for blanks."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"`|\[|\]\([^)]*\)", "", heading).strip().lower())
    return kept.replace(" ", "-")


def anchors(page):
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}


def readme_is_short(_):
    lines = text_of(os.path.join(TOP, "README.md")).count("\n")
    check(lines <= README_LINES, "README.md has", lines, "lines, at most", README_LINES)


def lines_fit_a_terminal(_):
    """Tables of other pages may be wider: a row cannot be wrapped."""
    for page in pages():
        name = os.path.relpath(page, TOP)
        code = False
        for number, line in enumerate(text_of(page).split("\n"), 1):
            code ^= line.startswith("```")
            table, other = line.startswith("|"), line.startswith("    ") or code
            if other or (table and name != "README.md"):
                continue
            most = TABLE_COLUMNS if table else COLUMNS
            one_word = re.match(r"\s*\S+$", line)
            check(len(line) <= most or one_word, "%s:%d" % (name, number), "has", len(line),
                  "columns, at most", most)


def links_lead_somewhere(_):
    links = 0
    for page in pages():
        for link in LINK.findall(without_code(text_of(page))):
            links += 1
            if re.match(r"https?://", link):
                continue
            path, _, name = link.partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
            where = "%s: %s" % (os.path.relpath(page, TOP), link)
            check(os.path.exists(target), where, "is no file")
            check(not name or name in anchors(target), where, "is no heading")
    check(links > 20, "only", links, "links were found")


def figures_agree(_):
    for what, places in TWICE:
        found = {}
        for name, pattern in places:
            figure = re.search(pattern, text_of(os.path.join(TOP, name)))
            check(figure, name, "does not say", what)
            found[name] = figure[1]
        check(len(set(found.values())) == 1, what, found)


def readme_says_how_many_lines_the_header_has(_):
    said = re.search(r"One header of ([\d,]+) lines", text_of(os.path.join(TOP, "README.md")))
    lines = text_of(os.path.join(TOP, "tshard.h")).count("\n")
    check(said and abs(int(said[1].replace(",", "")) - lines) <= 500, "README.md:",
          said and said[0], "tshard.h has", lines)


if __name__ == "__main__":
    sys.exit(run_tests("pages", [readme_is_short, lines_fit_a_terminal, links_lead_somewhere,
                                 figures_agree, readme_says_how_many_lines_the_header_has]))
