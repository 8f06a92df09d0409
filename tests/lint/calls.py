#!/usr/bin/env python3
"""Calls of every public function, as tests/unit/api_calls.h, for tests/unit/test_api.c.

    calls.py            says whether that file is what the header gives; the exit code is 1 if not
    calls.py --write    writes it

For each function a row: how to call it with arguments that lie in memory, and of each argument its
name, and its kind, which says what values the test gives it. For each structure that a function
takes by its address, a table of its fields with theirs; a member that is a structure is replaced by
its fields, an array of structures by those of its first two.
"""

import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import api

PAGE = "tests/unit/api_calls.h"
HEAD = """/* Made from tshard.h by `python3 tests/lint/calls.py --write`; `make lint` checks that
 * it is up to date. See test_api.c, which includes it. */
"""
LEFT_OUT = "tsh_text_format"  # a va_list has no other values; tsh_text_add calls it
# replaced by their fields
MEMBERS = ("tsh_init", "tsh_attention_desc", "tsh_lookup_desc", "tsh_output",
           "tsh_custom_optim")
CONTRACTS = ("tsh_comm", "tsh_allocator", "tsh_gemm", "tsh_logger")  # left zero, in structures

# C type: kind. A kind of a pointer says what it points to.
KINDS = {"int": "INT", "unsigned": "INT", "int64_t": "LONG", "uint64_t": "LONG", "tsh_req": "LONG",
         "size_t": "SIZE", "uint32_t": "WORD", "double": "DOUBLE", "tsh_dtype": "DTYPE",
         "tsh_shape": "SHAPE", "tsh_layout": "LAYOUT", "tsh_ctx *": "CTX", "tsh_ctx **": "OUT_CTX",
         "tsh_tensor *": "TENSOR", "tsh_tensor **": "TENSORS", "tsh_tensor *const *": "TENSORS",
         "tsh_module *": "MODULE", "tsh_optim *": "OPTIM", "tsh_cache *": "CACHE",
         "tsh_ema *": "EMA", "tsh_outer *": "OUTER",
         "tsh_pipeline *": "PIPELINE", "tsh_comm *": "COMM", "char *": "TEXT", "void *": "BUFFER",
         "int64_t *": "LONGS", "int *": "INTS", "double *": "DOUBLES", "FILE *": "STREAM",
         "char *const *": "NAMES", "tsh_layout *": "LAYOUT_AT", "tsh_layout *const *": "LAYOUTS",
         "tsh_segment *": "SEGMENTS", "tsh_range": "RANGES", "tsh_error *": "ERROR_AT",
         "tsh_req *": "REQ_AT", "tsh_logger *": "LOGGER", "tsh_writer *": "WRITER"}
# What the type alone does not say: how long an array is, and which buffer is written.
NAMED = {"n": "COUNT", "count": "COUNT", "micro_batches": "COUNT", "input_count": "COUNT",
         "user": "USER", "recv": "OUTPUT", "out": "OUTPUT", "done": "OUTPUT",
         "format": "FORMAT"}


def without_comments(text):
    return " ".join(re.sub(r"/\*.*?\*/", " ", text, flags=re.S).split())


def split(text, at):
    """The parts of text between separators that stand outside of brackets."""
    parts, depth, part = [], 0, ""
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == at and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return parts + ([part.strip()] if part.strip() else [])


def declared(text):
    """(type, name) of a parameter or a field; of a pointer to a function, the type is None."""
    function = re.match(r".*?\(\*(\w+)\)", text)
    if function:
        return None, function[1]
    match = re.match(r"(.*?)(\w+)(\[.*\])?$", text)
    return match[1].strip(), match[2]


class Calls:
    def __init__(self, top):
        items, _ = api.read(top)
        mine = [item for item in items if item.header == api.HEADERS[0]]
        self.types = {item.name: without_comments(item.text) for item in mine
                      if item.kind == "type"}
        self.functions = [item for item in mine
                          if item.kind == "function" and item.name != LEFT_OUT]
        self.structs, self.stubs = [], []

    def stub(self, name):
        if name not in self.stubs:
            self.stubs.append(name)
        return str(self.stubs.index(name))

    def struct(self, name):
        if name not in self.structs:
            self.structs.append(name)
        return "STRUCT_" + name

    def kind(self, owner, kind, name):
        """(kind, which structure or stub) of a parameter of a function, or a field."""
        bare = re.sub(r"^const ", "", kind or "").replace("struct ", "")
        if bare.endswith("_fn") or kind is None:
            return "FUNCTION", self.stub("stub_%s_%s" % (owner, name))
        if name in NAMED and bare in ("int", "int *", "void *", "char *"):
            return NAMED[name], "0"
        if name == "out" and bare == "tsh_comm *":
            return "OUT_COMM", "0"
        if bare in KINDS:
            return KINDS[bare], "0"
        if bare.endswith(" *") and "{" in self.types.get(bare[:-2], ""):
            return "STRUCT", self.struct(bare[:-2])
        if "enum" in self.types.get(bare, ""):
            return "ENUM", "0"
        raise SystemExit("calls.py: no kind for %s %s of %s" % (kind, name, owner))

    def fields(self, name, path=""):
        """(path, kind, which) of each field."""
        inside = re.match(r"(?:typedef )?struct \w+ \{(.*)\}", self.types[name])[1]
        for declaration in filter(None, split(inside, ";")):
            first, *others = split(declaration, ",")
            kind, _ = declared(first)
            base = (kind or "").rstrip("* ")
            for text in [first] + [base + " " + other for other in others]:
                kind, field = declared(text)
                if kind in MEMBERS:
                    for index in ("[0]", "[1]") if text.endswith("]") else ("",):
                        yield from self.fields(kind, path + field + index + ".")
                elif kind not in CONTRACTS and field != "next":  # a list of one
                    yield (path + field, *self.kind(name, kind, field))

    def call(self, item):
        """(the function that calls it, its row)."""
        text = re.sub(r"\) TSH_PRINTF\(.*", ");", without_comments(item.text))
        result = re.match(r"TSH_API (.*?)\b%s\(" % item.name, text)[1].strip()
        inside = text[text.index(item.name) + len(item.name) + 1:text.rindex(")")]
        given, kinds = [], []
        for part in split(inside, ","):
            if part == "...":
                given.append("1")  # for "%d"
            elif part != "void":
                kind, name = declared(part)
                code, which = self.kind(item.name, kind, name)
                if kind is None:
                    kind = re.sub(r"\(\*\w+\)", "(*)", part)
                    given.append("*(%s)a[%d]" % (kind.replace("(*)", "(**)", 1), len(kinds)))
                elif code == "RANGES":
                    given.append("*(tsh_range **)a[%d]" % len(kinds))
                else:
                    given.append("*(%s*)a[%d]" % (kind if kind.endswith("*") else kind + " ",
                                                  len(kinds)))
                kinds.append('{%s, %s, "%s"}' % (code, which, name))
        call = "%s(%s)" % (item.name, ", ".join(given))
        used = "(void)a; " if not kinds else ""
        if result.endswith("char *"):
            call = "use_text(%s)" % call
        elif result == "FILE *":
            call = "use_file(%s)" % call
        elif result != "void":
            call = "(void)" + call
        function = "static void call_%s(void *const *a) { %s%s; }" % (item.name, used, call)
        return function, '{"%s", call_%s, %d, {%s}}' % (item.name, item.name, len(kinds),
                                                        ", ".join(kinds) or "{INT, 0, NULL}")


def wrap(text, indent):
    """Breaks a line after a comma or an opening brace, so that it has at most 100 columns."""
    lines = []
    while len(text) > 100:
        at = max(text.rfind(mark, indent + 8, 99) for mark in (", ", "{ ", "(*"))
        at += 0 if text[at] == "(" else 1
        lines.append(text[:at].rstrip())
        text = " " * (indent + 4) + text[at:].strip()
    return "\n".join(lines + [text])


def text(top=api.TOP):
    """The file's text."""
    calls = Calls(top)
    functions, rows = zip(*[calls.call(item) for item in calls.functions])
    tables, at = [], 0
    while at < len(calls.structs):  # fields may bring further structures
        name = calls.structs[at]
        fields = ["    {offsetof(%s, %s), {%s, %s, \"%s\"}}," % (name, path, kind, which, path)
                  for path, kind, which in calls.fields(name)]
        tables.append("static const api_field fields_of_%s[] = {\n%s\n};"
                      % (name, "\n".join(wrap(field, 4) for field in fields)))
        at += 1
    structs = ["    {\"%s\", sizeof(%s), fields_of_%s, sizeof fields_of_%s / sizeof(api_field)},"
               % ((name,) * 4) for name in calls.structs]
    stubs = ["    (api_function)%s," % stub for stub in calls.stubs]
    return "\n".join(
        [HEAD, "enum {"] + ["    STRUCT_%s," % name for name in calls.structs]
        + ["    API_STRUCTS", "};", "", "\n\n".join(tables), "",
           "static const api_struct structs[API_STRUCTS] = {"]
        + [wrap(line, 4) for line in structs] + ["};", "",
           "static const api_function stubs[] = {"] + stubs + ["};", ""]
        + [wrap(line, 0) for line in functions] + ["", "static const api_call calls[] = {"]
        + [wrap("    %s," % row, 4) for row in rows] + ["};", ""])


if __name__ == "__main__":
    api.main(PAGE, text(), __file__)
