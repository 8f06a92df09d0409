"""api.py - reads the public part of the headers: functions, types and macros, each with its
comment, by topic. index.py and docs.py print it.

The last lines of a function's comment may be "torch: F.mse_loss, nn.MSELoss": what PyTorch calls
it. Of a comment on several functions, a name belongs to the one that ends like it (torch.add to
tsh_add), else to the first.

A topic begins with a comment "/* -- name ---...", else with a section's banner; text after the
dashes is about the whole topic. A comment belongs to the declarations below it up to an empty line
or another comment; one at the end of a declaration's line belongs to that declaration alone.
"""

import os
import re
import sys

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEADERS = ["tshard.h"] + ["backends/tshard_%s.h" % x
                          for x in ("threads", "uv", "mpi", "blis", "backend")]
BANNER = re.compile(r"/\* =+ \*/\n/\* >>([\w-]+) +MARK: .*?\*/\n(.*?)/\* =+(?: \*/|\n)", re.S)
TOPIC = re.compile(r"/\* -- (.*?) -{2,}")
END = "/* end of header: stop here if you only want the API"
TOKEN = re.compile(r"""(?P<comment>/\*.*?\*/) | (?P<wrap>extern\ "C"\ \{|^\}$)
    | (?P<macro>^\#(?:\\\n|[^\n])*) | (?P<empty>\n[ \t]*\n) | (?P<space>\s+) | (?P<code>\S)""",
                   re.S | re.M | re.X)


class Item:
    """kind: function, type or macro; text: as the header has it; doc: what its comment says, or,
    with own 0, the heading of its topic; section: the header's; heading: what that says; torch:
    PyTorch's names."""

    def __init__(self, kind, name, text, doc, own, header, section, topic, heading):
        self.kind, self.name, self.text, self.own = kind, name, text, own
        self.header, self.section, self.topic, self.heading = header, section, topic, heading
        self.doc, self.torch = without_torch(doc)


def without_torch(doc):
    """(doc without its line "torch: ...", the names of that line)."""
    parts = re.split(r"(?:^|\n)torch: ", doc)
    if len(parts) == 1:
        return doc, []
    return parts[0].strip(), [name.strip() for name in " ".join(parts[1:]).split(",")]


def share_torch(items):
    """Gives each name of a comment on several functions to one of them."""
    functions = [item for item in items if item.kind == "function"]
    if len(items) < 2 or not functions:
        return
    names = functions[0].torch
    for item in items:
        item.torch = []
    for name in names:
        last = re.sub(r"_$", "", name.split(".")[-1]).lower()
        best = [item for item in functions if item.name == "tsh_" + last] or [
            item for item in functions if item.name.endswith("_" + last)] or functions
        best[0].torch.append(name)


def plain(comment):
    """What a comment says: its lines without the stars and indentation."""
    text = re.sub(r"^/\*+ ?|\s*\*/$", "", comment)
    lines = [re.sub(r"^\s*\* ?|^\s+(?! )", "", line).rstrip() for line in text.split("\n")]
    return "\n".join(lines).strip()


def topic_says(comment):
    """What the comment with a topic's heading says of all of it."""
    return plain(re.sub(r"^/\* -- .*? -{2,}\s*", "/* ", comment))


def declaration_end(text, at):
    """Where the declaration at `at` ends: after the first semicolon outside of braces."""
    depth = 0
    for match in re.finditer(r"/\*.*?\*/|[{};]", text[at:], re.S):
        depth += (match[0] == "{") - (match[0] == "}")
        if match[0] == ";" and depth == 0:
            return at + match.end()
    return len(text)


def named(code):
    """(kind, name) of a declaration; None for what users do not call by name."""
    bare = re.sub(r"/\*.*?\*/", "", code, flags=re.S)
    bare = re.sub(r"^#.*\n", "", bare, flags=re.M)
    function = re.match(r"TSH_API\b[^;{}]*?\b(tshb?_\w+)\s*\(", bare)
    if function:
        return "function", function[1]
    if bare.startswith("typedef"):
        pointer = re.match(r"typedef [^;{]*?\(\*(tshb?_\w+)\)", bare)
        return "type", pointer[1] if pointer else re.search(r"(tshb?_\w+)\s*;$", bare)[1]
    struct = re.match(r"struct (tshb?_\w+) \{", bare)
    return ("type", struct[1]) if struct else None


def sections(text):
    """(name, what its banner says, text) of every section before the implementation."""
    text = text.split(END)[0]
    found = list(BANNER.finditer(text))
    for this, following in zip(found, found[1:] + [None]):
        says = " ".join(plain(line) for line in this[2].strip().split("\n")).split(" Needs:")[0]
        yield this[1], says, text[this.end():following.start() if following else len(text)]


def read_section(header, name, says, text):
    """The items of a section, in order."""
    topic, heading, doc, own, at, last = re.sub("-api$", "", name), "", "", 0, 0, None
    group, found = [], []  # group: the items that the last comment is about
    while at < len(text):
        match = TOKEN.match(text, at)
        if match["code"]:
            end = declaration_end(text, at)
            code, kind = text[at:end], named(text[at:end])
        elif match["macro"]:
            end, code = match.end(), match[0]
            macro = re.match(r"#define (TSH\w+)", code)
            kind = ("macro", macro[1]) if macro else None
        else:
            kind, end = None, match.end()
            after = match["comment"] and last and "\n" not in text[last[0]:at]
            if (match["comment"] and not after) or match["empty"]:
                share_torch(group)
                group = []
            if match["comment"] and TOPIC.match(match[0]):
                topic = TOPIC.match(match[0])[1]
                heading = doc = topic_says(match[0])
                own = 0
            elif after:  # about the declaration before it alone
                last[1].doc, last[1].torch = without_torch(plain(match[0]))
                last[1].own = 1
                group = [item for item in group if item is not last[1]]
            elif match["comment"]:
                doc, own = plain(match[0]), 1
            elif match["empty"]:
                doc = ""
        if kind:
            item = Item(*kind, code, doc, own, header, name, topic, heading)
            last = (end, item)
            found.append(item)
            group += [item] if own else []
        at = end
    share_torch(group)
    return found


def read(top=TOP):
    """Every item of every header; [(header, section, what it says)] beside."""
    items, heads = [], []
    for header in HEADERS:
        with open(os.path.join(top, header), encoding="utf-8") as file:
            for name, says, text in sections(file.read()):
                heads.append((header, name, says))
                if name not in ("front", "contents", "manual"):
                    items += read_section(header, name, says, text)
    seen = {}
    for item in items:  # TSH_API has several definitions; a struct is named before it is defined
        if item.name not in seen or len(item.text) > len(seen[item.name].text):
            seen[item.name] = item
    return [item for item in items if seen[item.name] is item], heads


def title(item):
    """The name of its topic; a backend's is its header."""
    name = item.topic if item.header == HEADERS[0] else item.header
    return name if "/" in name else name[0].upper() + name[1:]


def sentences(doc):
    """The sentences of a comment."""
    text = " ".join(doc.split())
    return re.split(r"(?<=[\w)\]`'\"]\.)(?<!\bal\.) (?=\S)", text) if text else []


def summary(item):
    """Its comment's sentence about it: of a comment on several, the one that begins with the end of
    the name ("new: zeros"), else the first."""
    said = sentences(item.doc) if item.own else []
    for sentence in said:
        begin = re.match(r"(\w+): ", sentence)
        if begin and item.name.endswith("_" + begin[1]):
            return sentence
    return said[0] if said else ""


def call_form(item):
    """tsh_add(a, b): a function with the names of its parameters."""
    bare = " ".join(re.sub(r"/\*.*?\*/", "", item.text, flags=re.S).split())
    bare = re.sub(r"\) TSH_PRINTF\(.*", ");", bare)
    inside = bare[bare.index(item.name) + len(item.name) + 1:bare.rindex(")")]
    inside = re.sub(r"\(\*(\w+)\)\([^()]*\)", r"\1", inside)
    names = [re.sub(r"\[.*?\]", "", part).split()[-1].lstrip("*") for part in inside.split(",")]
    return "%s(%s)" % (item.name, ", ".join(name for name in names if name != "void"))


# ---- pages that are made of it -----------------------------------------------


def is_current(page, text, top=TOP):
    """Whether the file of a page has this text."""
    path = os.path.join(top, page)
    if not os.path.exists(path):
        return False
    with open(path, encoding="utf-8") as file:
        return file.read() == text


def main(page, text, script):
    """With --write writes the page, else says whether it is up to date."""
    if "--write" in sys.argv[1:]:
        with open(os.path.join(TOP, page), "w", encoding="utf-8") as out:
            out.write(text)
    elif not is_current(page, text):
        sys.exit("%s is out of date: python3 tests/lint/%s --write"
                 % (page, os.path.basename(script)))
