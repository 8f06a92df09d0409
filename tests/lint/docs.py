#!/usr/bin/env python3
"""The manuals and every public function, type and macro on one page, searchable without a server.

    docs.py [FILE]      build/docs/index.html by default

All of it comes from the headers (api.py), and what helps those who know PyTorch from two pages of
examples/: RECIPES.md, each recipe an entry, and the table of FROM_PYTORCH.md, whose names find our
functions. The page is one file: nothing is loaded from elsewhere. It can be read without
JavaScript, which only the search needs; #q=WORDS in its address searches.
"""

import html
import os
import re
import sys
import textwrap

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import api

HEADING = re.compile(r"^(?: \*|/\*) ([A-Z][A-Z'-]+(?: [A-Z][A-Z'-]*)*)(?:[:,] (.*))?$", re.M)
KINDS = {"function": "function", "type": "type", "macro": "macro"}

STYLE = """
:root { color-scheme: light dark; --fore: #1d2129; --back: #ffffff; --soft: #f3f4f6;
  --line: #d5d9e0; --link: #0b57b0; --mute: #5b6472; }
@media (prefers-color-scheme: dark) { :root { --fore: #e4e6ea; --back: #15181d; --soft: #1f242b;
  --line: #363d48; --link: #86b7ff; --mute: #9aa3b0; } }
* { box-sizing: border-box; }
html { scroll-padding-top: 4rem; }
body { margin: 0; color: var(--fore); background: var(--back);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
header { position: sticky; top: 0; z-index: 1; display: flex; gap: 1rem; align-items: center;
  padding: .6rem 1rem; background: var(--back); border-bottom: 1px solid var(--line); }
header b { white-space: nowrap; }
#search { flex: 1; min-width: 0; max-width: 40rem; padding: .4rem .6rem; font: inherit;
  color: inherit; background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; }
#found { color: var(--mute); white-space: nowrap; }
#page { display: flex; align-items: flex-start; max-width: 78rem; margin: 0 auto; }
nav { position: sticky; top: 3.6rem; flex: 0 0 16rem; max-height: calc(100vh - 4rem);
  overflow-y: auto; padding: 1rem; font-size: .9rem; }
nav a { display: block; padding: .1rem 0; } nav summary { margin-top: .6rem; font-weight: 600; }
main { flex: 1; min-width: 0; padding: 1rem 1.5rem 6rem; }
h2 { margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--line); font-size: 1.35rem; }
h3 { margin: 0 0 .4rem; font-size: 1.05rem; } h3 small { color: var(--mute); font-weight: 400; }
pre, code { font: .875em/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { margin: .5rem 0; padding: .6rem .8rem; overflow-x: auto; background: var(--soft);
  border-radius: .4rem; overflow-wrap: normal; }
p { margin: .5rem 0; } .item { padding-left: 1.6rem; text-indent: -1.1rem; }
section.entry { margin: 1.3rem 0; } section.entry:target h3 { background: var(--soft); }
.heading { color: var(--mute); }
[hidden] { display: none !important; }
@media (max-width: 50rem) { #page { display: block; }
  nav { position: static; max-height: 40vh; margin: 0 0 1rem; padding: 0 1rem .5rem;
    border-bottom: 1px solid var(--line); } main { padding: 0 1rem 4rem; }
  header b, .searching nav { display: none; } }
"""

# Entries with all words of the query stay; first in the list are those whose name has them, then
# those that PyTorch calls so.
SCRIPT = """
(function () {
  var box = document.getElementById("search"), found = document.getElementById("found");
  var hits = document.getElementById("hits");
  var entries = [].slice.call(document.querySelectorAll("section.entry"));
  var groups = [].slice.call(document.querySelectorAll("section.group"));
  var texts = entries.map(function (entry) { return entry.textContent.toLowerCase(); });
  function has(text, words) {
    return words.every(function (word) { return text.indexOf(word) >= 0; });
  }
  function search() {
    var words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
    var names = [], torch = [], others = [];
    entries.forEach(function (entry, i) {
      entry.hidden = !has(texts[i], words);
      if (!entry.hidden && words.length)
        (has(entry.dataset.name.toLowerCase(), words) ? names :
         has(entry.dataset.torch.toLowerCase(), words) ? torch : others).push(entry);
    });
    groups.forEach(function (group) {
      group.hidden = words.length > 0 && !group.querySelector("section.entry:not([hidden])");
    });
    names.sort(function (a, b) { return a.dataset.name.length - b.dataset.name.length; });
    hits.hidden = !words.length;
    document.body.classList.toggle("searching", words.length > 0);
    hits.textContent = "";
    names.concat(torch, others).slice(0, 40).forEach(function (entry) {
      var link = document.createElement("a"), line = document.createElement("div");
      link.href = "#" + entry.id;
      link.textContent = entry.dataset.name;
      line.appendChild(link);
      hits.appendChild(line);
    });
    found.textContent = words.length ? names.length + torch.length + others.length + " found" : "";
  }
  function read() {
    var query = /^#q=(.*)$/.exec(location.hash);
    if (query) { box.value = decodeURIComponent(query[1].replace(/\\+/g, " ")); search(); }
  }
  box.addEventListener("input", function () {
    history.replaceState(null, "", box.value ? "#q=" + encodeURIComponent(box.value) : "#");
    search();
  });
  hits.addEventListener("click", function () { setTimeout(function () {
    box.value = ""; search(); document.getElementById(location.hash.slice(1)).scrollIntoView();
  }, 0); });
  document.addEventListener("keydown", function (event) {
    if (event.key === "/" && document.activeElement !== box) {
      event.preventDefault();
      box.focus();
    }
    if (event.key === "Escape" && box.value) { box.value = ""; search(); }
  });
  window.addEventListener("hashchange", read);
  read();
})();
"""


class Page:
    def __init__(self, top):
        self.top = top
        self.items, self.heads = api.read(top)
        self.place = {}  # what a name links to: an entry, or for an enum's constant the enum
        for item in self.items:
            if item.kind == "type":
                for name in re.findall(r"\bTSH_[A-Z0-9_]+\b", item.text):
                    self.place.setdefault(name, item.name)
        self.place.update((item.name, item.name) for item in self.items)
        self.add_torch()

    def page(self, name):
        """The text of a page of examples/."""
        with open(os.path.join(self.top, "examples", name), encoding="utf-8") as file:
            return file.read()

    def add_torch(self):
        """Gives the first function of a row of FROM_PYTORCH.md's table its name in PyTorch."""
        named = {item.name: item for item in self.items}
        for torch, ours in re.findall(r"^\| `([\w.]+)` \|(?: [\d,]+ \|)? (.*) \|$",
                                      self.page("FROM_PYTORCH.md"), re.M):
            first = re.match(r"`(tsh_\w+)", ours)
            item = named.get(first[1]) if first else None
            if first and not item:  # the first of several functions, as tsh_sampler_new
                item = next((i for i in self.items if i.kind == "function" and
                             i.name.startswith(first[1] + "_")), None)
            if item and torch not in item.torch:
                item.torch.append(torch)

    def recipes(self):
        """(title, id, HTML) of each recipe of RECIPES.md."""
        parts = re.split(r"^## (.*)\n", self.page("RECIPES.md"), flags=re.M)
        for title, text in zip(parts[1::2], parts[2::2]):
            place = "recipe-" + re.sub(r"\W+", "-", title.lower()).strip("-")
            body = ""
            for kind, block in self.blocks(text):
                if block.strip():
                    body += "<pre>%s</pre>\n" % self.linked(block) if kind else self.prose(block)
            plain = re.sub(r"`", "", title)
            yield plain, place, ('<section class="entry" id="%s" data-name="%s" data-torch="">\n'
                                 '<h3><a href="#%s">%s</a> <small>recipe</small></h3>\n%s'
                                 '</section>\n' % (place, html.escape(plain), place,
                                                  html.escape(plain), body))

    @staticmethod
    def blocks(text):
        """(language, code) of fenced blocks, ("", text) of what stands between them."""
        parts = re.split(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
        yield "", parts[0]
        for i in range(1, len(parts), 3):
            yield parts[i], parts[i + 1]
            yield "", parts[i + 2]

    def linked(self, text, here=""):
        """Text as HTML, where every public name but `here` leads to what is said of it."""
        def link(match):
            place = self.place.get(match[0])
            if not place or place == here:
                return match[0]
            return '<a href="#%s">%s</a>' % (place, match[0])
        return re.sub(r"\b(?:tsh|TSH|TSHARD)_\w+", link, html.escape(text, quote=False))

    def prose(self, text, here=""):
        """A comment's text: paragraphs, points ("- ", "1. "), and what is indented as it stands."""
        parts = []
        for block in re.split(r"\n[ ]*\n", textwrap.dedent(text).strip("\n")):
            lines = block.split("\n")
            if all(line.startswith("    ") for line in lines):
                parts.append("<pre>%s</pre>" % self.linked(textwrap.dedent(block), here))
                continue
            for line in lines:
                point = re.match(r"\s*(-|\d+\.) ", line)
                if point or line is lines[0]:
                    parts.append(['<p class="item">' if point else "<p>"])
                parts[-1].append(self.linked(line.strip(), here))
            parts = [part if isinstance(part, str) else part[0] + "\n".join(part[1:]) + "</p>"
                     for part in parts]
        text = "\n".join(parts)
        return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", text)

    def chapters(self, header):
        """(title, text) of a header's manual: what stands under capitals in its comments."""
        with open(os.path.join(self.top, header), encoding="utf-8") as file:
            text = file.read().split(api.END)[0]
        for comment in re.findall(r"(?<![^\n])/\*.*?\*/", text, re.S):
            marks = list(HEADING.finditer(comment))
            for mark, following in zip(marks, marks[1:] + [None]):
                body = comment[mark.end():following.start() if following else -2]
                body = "\n".join(line[3:] for line in body.split("\n"))
                title = mark[1] if mark[1] in ("MPI", "CBLAS") else mark[1].capitalize()
                yield title, (mark[2] + "\n" if mark[2] else "") + body

    def entry(self, item):
        """The section of a function, type or macro."""
        says = self.prose(item.doc, item.name) if item.doc else ""
        if item.torch:
            says += "\n<p>torch: %s</p>" % ", ".join("<code>%s</code>" % html.escape(name)
                                                     for name in item.torch)
        return ('<section class="entry" id="%s" data-name="%s" data-torch="%s">\n'
                '<h3><a href="#%s">%s</a> <small>%s</small></h3>\n<pre>%s</pre>\n%s</section>\n'
                % (item.name, item.name, html.escape(" ".join(item.torch)), item.name, item.name,
                   KINDS[item.kind], self.linked(item.text, item.name), says))

    def groups(self):
        """(title, id, [HTML of entries]) of manuals and topics, in the order of the headers."""
        for header in api.HEADERS:
            name, entries = os.path.basename(header), []
            for number, (title, text) in enumerate(self.chapters(header)):
                place = "%s-%d" % (name.replace(".h", ""), number)
                entries.append((place, title,
                                '<section class="entry" id="%s" data-name="%s" data-torch="">\n'
                                '<h3>%s</h3>\n%s</section>\n'
                                % (place, html.escape(title), html.escape(title),
                                   self.prose(text))))
            yield "Manual of " + name, "manual-" + name, "", entries
            topics = {}
            for item in self.items:
                if item.header == header:
                    topics.setdefault((item.section, item.topic), []).append(item)
            for (section, topic), items in topics.items():
                heading = next((item.heading for item in items if item.heading), "")
                title = topic[0].upper() + topic[1:] if header == api.HEADERS[0] else name
                yield (title, "topic-%s-%s" % (section, topic.replace(" ", "-")),
                       self.prose(heading) if heading else "",
                       [(item.name, item.name, self.entry(item)) for item in items])

        recipes = list(self.recipes())
        yield ("Recipes for what PyTorch has", "recipes", "",
               [(place, title, text) for title, place, text in recipes])

    def write(self):
        nav, main = [], []
        for title, place, heading, entries in self.groups():
            nav.append("<details%s><summary>%s</summary>\n%s</details>" % (
                " open" if place == "manual-tshard.h" else "", html.escape(title), "".join(
                    '<a href="#%s">%s</a>\n' % (at, html.escape(name)) for at, name, _ in entries)))
            main.append('<section class="group" id="%s">\n<h2>%s</h2>\n'
                        '<div class="heading">%s</div>\n%s</section>' % (
                            place, html.escape(title), heading,
                            "".join(text for _, _, text in entries)))
        return PAGE % (STYLE, "\n".join(nav), "\n".join(main), SCRIPT)


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tshard</title>
<style>%s</style>
</head>
<body>
<header><b>tshard</b><input id="search" type="search" autocomplete="off" spellcheck="false"
placeholder="Search (press /)" aria-label="Search"><span id="found"></span></header>
<div id="page">
<nav>
%s
</nav>
<main>
<div id="hits" hidden></div>
%s
</main>
</div>
<script>%s</script>
</body>
</html>
"""


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(api.TOP, "build/docs/index.html")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    page = Page(api.TOP)
    with open(path, "w", encoding="utf-8") as out:
        out.write(page.write())
    print("%s: %d functions, types and macros" % (os.path.relpath(path), len(page.items)))


if __name__ == "__main__":
    main()
