#!/usr/bin/env python3
"""The page of `make docs`: it explains every public function, loads nothing from elsewhere, has no
dead links, and its search works in a browser. Reports in cmocka's words."""

import html
import glob
import html.parser
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import Skipped, check, run_tests

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
LIMIT = 100  # seconds of one command
VOID = {"meta", "input", "br", "link", "img"}


class Reader(html.parser.HTMLParser):
    """What a page holds: of every entry what it says outside of code, and whether it is hidden."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.loads = [], set(), [], []
        self.says, self.hidden, self.names, self.entry = {}, {}, {}, None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        got = dict(attributes)
        self.ids.add(got.get("id"))
        if tag == "a":
            self.links.append(got.get("href", ""))
        self.loads += [got[key] for key in ("src", "srcset", "data") if key in got]
        self.loads += [got.get("href")] if tag == "link" else []
        if tag == "section" and got.get("class") == "entry":
            self.entry = got["id"]
            self.says[self.entry], self.hidden[self.entry] = "", "hidden" in got
            self.names[self.entry] = (got["data-name"] + " " + got["data-torch"]).lower()
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        check(self.open and self.open[-1] == tag, "</%s> ends %s" % (tag, self.open[-3:]))
        self.open.pop()
        if tag == "section":
            self.entry = None

    def handle_data(self, data):
        if self.entry and "pre" not in self.open and "h3" not in self.open:
            self.says[self.entry] += data


def make_page(folder):
    path = os.path.join(folder, "docs", "index.html")
    subprocess.run([sys.executable, os.path.join(HERE, "docs.py"), path], check=True, timeout=LIMIT,
                   stdout=subprocess.DEVNULL)
    return path


def read_page(folder):
    with open(make_page(folder), encoding="utf-8") as file:
        return Reader(file.read())


def public_functions():
    """Found in another way than docs.py does."""
    for path in [os.path.join(TOP, "tshard.h")] + glob.glob(os.path.join(TOP, "backends", "*.h")):
        with open(path, encoding="utf-8") as file:
            yield from re.findall(r"^TSH_API [^(]*?\b(tshb?_\w+)\((?!tsh_\w+\)\()", file.read(),
                                  re.M)


def every_function_is_explained(folder):
    page, names = read_page(folder), set(public_functions())
    check(len(names) > 200, "only", len(names), "functions")
    for name in sorted(names):
        check(name in page.says, name, "is not in the page")
        check(page.says[name].strip(), name, "has no comment")


def nothing_is_loaded_and_links_lead_somewhere(folder):
    page = read_page(folder)
    check(not page.loads, "the page loads", page.loads)
    for link in page.links:
        check(link.startswith("#") and link[1:] in page.ids, "nothing is at", link)
    check(page.open == [], "not closed:", page.open)
    with open(make_page(folder), encoding="utf-8") as file:
        found = re.findall(r"@import|url\(|fetch\(|XMLHttpRequest|https?://\S+", file.read())
    check(not found, "an address:", found)


def the_manual_is_in_it(folder):
    with open(make_page(folder), encoding="utf-8") as file:
        text = " ".join(html.unescape(re.sub("<[^>]*>", " ", file.read())).split())
    for words in "Shapes broadcast", "one rank's world", "The first error of a ctx is kept":
        check(words in text, "the page lacks:", words)


# What somebody who knows PyTorch searches for, and what has to be among the entries whose name, or
# whose name in PyTorch, has it.
SEARCHES = {"mse": ("tsh_mse_loss",), "bce": ("tsh_binary_cross_entropy",
                                              "tsh_binary_cross_entropy_with_logits"),
            "conv": ("tsh_conv1d", "tsh_conv2d"), "topk": ("tsh_topk",), "einsum": ("tsh_einsum",),
            "scheduler": ("tsh_schedule_lr",), "dataloader": ("tsh_sampler_next",),
            "requires_grad": ("tsh_requires_grad",), "freeze": ("tsh_freeze",),
            "lora": ("tsh_lora",), "all_reduce": ("tsh_allreduce",), "shard": ("tsh_sharded",),
            "state_dict": ("tsh_save", "tsh_load"), "nn.linear": ("tsh_add_linear",),
            "batchnorm2d": ("tsh_add_batch_norm",), "tensor.view": ("tsh_reshape",)}


def names_of_pytorch_are_found(folder):
    page = read_page(folder)
    for word, wanted in SEARCHES.items():
        for name in wanted:
            check(word in page.names.get(name, ""), word, "does not find", name)


def in_browser(folder, query):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        raise Skipped("a browser is missing: apt-get install chromium")
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu",
                           "--user-data-dir=" + os.path.join(folder, "profile"), "--dump-dom",
                           "file://" + make_page(folder) + query], timeout=LIMIT,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
    if done.returncode or "</html>" not in done.stdout:
        raise Skipped("%s does not run here (exit code %d)" % (browser, done.returncode))
    return done.stdout


def search_in_a_browser(folder):
    text = in_browser(folder, "#q=tsh_linear")
    page = Reader(text)
    shown = {name for name, hidden in page.hidden.items() if not hidden}
    check("tsh_linear" in shown and "tsh_add_linear" in shown, "not found:", sorted(shown)[:9])
    check("tsh_hash" not in shown and len(shown) < 20, len(shown), "entries are shown")
    first = re.search(r'id="hits".*?<a href="#(\w+)"', text, re.S)
    check(first and first[1] == "tsh_linear", "the first that is found is", first and first[1])
    check("%d found" % len(shown) in text, "it does not say how many it found")
    both = Reader(in_browser(folder, "#q=torch.nn.functional+cross_entropy"))
    check([name for name, hidden in both.hidden.items() if not hidden] == ["tsh_cross_entropy"],
          "two words", [name for name, hidden in both.hidden.items() if not hidden])


def nothing_is_hidden_without_a_query(folder):
    page = Reader(in_browser(folder, "#tsh_add"))
    check(len(page.hidden) > 250 and not any(page.hidden.values()), "entries are hidden")


TESTS = [every_function_is_explained, nothing_is_loaded_and_links_lead_somewhere,
         the_manual_is_in_it, names_of_pytorch_are_found, search_in_a_browser,
         nothing_is_hidden_without_a_query]

if __name__ == "__main__":
    sys.exit(run_tests("docs", TESTS))
