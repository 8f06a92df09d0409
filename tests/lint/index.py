#!/usr/bin/env python3
"""The public functions by topic, as examples/API.md.

    index.py            says whether that file is what the headers give; the exit code is 1 if not
    index.py --write    writes it
"""

import os
import sys
import textwrap

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import api

PAGE = "examples/API.md"
HEAD = """# Public functions

Made from the headers by `python3 tests/lint/index.py --write`; `make lint` checks that it is up to
date. Each line is the first sentence of what the header says there, and PyTorch's names (F is
torch.nn.functional, nn torch.nn, dist torch.distributed). `make docs` writes all of it, with types
and macros, into build/docs/index.html, which finds functions by PyTorch's names, too.
"""


def text(top=api.TOP):
    """The page's text."""
    items, heads = api.read(top)
    said = {(header, name): says for header, name, says in heads}
    functions = [item for item in items if item.kind == "function"]
    lines, before, topic = [HEAD], "", None
    for item in functions:
        if (item.header, item.topic) != topic:
            topic = (item.header, item.topic)
            lines += ["", "## " + api.title(item), ""]
            if item.section == item.topic + "-api":
                lines += [textwrap.fill(said[item.header, item.section], 100), ""]
            lines += [textwrap.fill(item.heading, 100), ""] if item.heading else []
            before = ""
        says = api.summary(item)
        line = "- `%s`%s" % (api.call_form(item), ": " + says if says not in ("", before) else "")
        line += " torch: %s" % ", ".join("`%s`" % name for name in item.torch) if item.torch else ""
        lines.append(textwrap.fill(line, 100, subsequent_indent="  ", break_long_words=False,
                                   break_on_hyphens=False))
        before = says
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    api.main(PAGE, text(), __file__)
