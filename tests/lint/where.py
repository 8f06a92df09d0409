#!/usr/bin/env python3
"""The functions of tshard.h that say in an error where they were called, as
backends/tshard_where.h.

    where.py            says whether that file is what tshard.h gives; the exit code is 1 if not
    where.py --write    writes it

Every function of which a parameter leads to a ctx (a ctx, a tensor, an array of tensors, a module)
gets a second function, which sets the place in that ctx, and a macro of its own name, which calls
it with __FILE__ and __LINE__. A function that cannot record an error is left out: it takes const.
"""

import os
import re
import sys
import textwrap

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import api
import calls

PAGE = "backends/tshard_where.h"
# What they are for: the error itself, the end of the ctx, where its memory comes from.
LEFT_OUT = ("tsh_fail", "tsh_ok", "tsh_clear_error", "tsh_close", "tsh_set_place", "tsh_world",
            "tsh_tp", "tsh_pp", "tsh_dp", "tsh_root")
HEAD = """/* tshard_where.h - errors say where the program called the library */
/*
 * DO THIS
 *
 *     #include "tshard.h"
 *     #include "backends/tshard_where.h"      // after tshard.h and backends, in each source file
 *
 * and compile with -DTSHARD_WHERE while you look for an error. Then its sentence ends with the file
 * and line of the call that failed:
 *
 *     tsh_add: shapes (2, 3) R and (4) R do not broadcast (...): tsh_reshape (model.c:42)
 *
 * Without TSHARD_WHERE this header holds nothing, and costs nothing.
 *
 * DOES
 *
 * - name the innermost call: in tsh_add(tsh_mul(a, b), c) over two lines that of tsh_mul, if that
 *   fails; in a module's forward the call there, not tsh_forward;
 * - work in C99 and C++11. Each function of tshard.h that has a ctx, a tensor or a module gets a
 *   macro of its name, which evaluates each argument once. A function's address, as in
 *   `op = tsh_gelu;`, is that of the function itself: calls through it name no place of their own.
 *
 * DOES NOT
 *
 * - name a place for tsh_optim_..., tsh_pipeline_... and tsh_cache_...: in these, errors name the
 *   place of the call around them, or none;
 * - go before the implementation: define TSHARD_IMPLEMENTATION for an #include further up.
 *
 * Made from tshard.h by `python3 tests/lint/where.py --write`; `make lint` checks that it is up to
 * date.
 */
#if defined(TSHARD_WHERE) && !defined(TSHARD_WHERE_H)
#define TSHARD_WHERE_H

#if !defined(TSHARD_H)
#error "include tshard.h before tshard_where.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Defines name_placed, which calls name with the place set in `owner`, a ctx, and returns what name
 * returns. TSHI_WHERE_VOID: of functions that return nothing. TSHI_HERE: the first parameters. */
#define TSHI_HERE const char *file_, int line_
#define TSHI_WHERE(type, name, owner, parameters, arguments)                                      \\
    static inline type name##_placed parameters {                                                 \\
        tsh_ctx *const ctx_ = owner;                                                              \\
        const tsh_place outer_ = tsh_set_place(ctx_, file_, line_);                               \\
        type result_ = name arguments;                                                            \\
        (void)tsh_set_place(ctx_, outer_.file, outer_.line);                                      \\
        return result_;                                                                           \\
    }
#define TSHI_WHERE_VOID(name, owner, parameters, arguments)                                       \\
    static inline void name##_placed parameters {                                                 \\
        tsh_ctx *const ctx_ = owner;                                                              \\
        const tsh_place outer_ = tsh_set_place(ctx_, file_, line_);                               \\
        name arguments;                                                                           \\
        (void)tsh_set_place(ctx_, outer_.file, outer_.line);                                      \\
    }

"""
TAIL = """
#undef TSHI_HERE
#undef TSHI_WHERE
#undef TSHI_WHERE_VOID

#ifdef __cplusplus
}
#endif
#endif
"""


def owner(parameters):
    """The expression for the ctx that the parameters, (type, name), lead to; None: none does."""
    for kind, name in parameters:
        if kind == "tsh_ctx *":
            return name
        if kind == "tsh_module *":
            return "tsh_module_ctx(%s)" % name
    tensors = [name for kind, name in parameters if kind == "tsh_tensor *"]
    if tensors:
        chain = " : ".join("%s ? %s" % (name, name) for name in tensors[:-1])
        return "tsh_ctx_of(%s)" % (chain + " : " + tensors[-1] if chain else tensors[0])
    for kind, name in parameters:
        if kind in ("tsh_tensor *const *", "tsh_tensor **"):
            return "tsh_ctx_of(%s ? %s[0] : NULL)" % (name, name)
    return None


def entry(item):
    """The lines of one function; None if it gets none."""
    bare = calls.without_comments(item.text)
    head, inside = bare[:bare.index(item.name)], bare[bare.index(item.name) + len(item.name) + 1:]
    inside = inside[:inside.rindex(")")]
    if item.name in LEFT_OUT or "..." in inside or "va_list" in inside:
        return None
    texts = calls.split(inside, ",")
    parameters = [calls.declared(text) for text in texts]
    # the object that the call is about comes first
    if re.match(r"const tsh_(tensor|module|optim) ", inside) and item.name != "tsh_keep":
        return None
    at = owner([(kind, name) for kind, name in parameters if kind])
    if item.name == "tsh_keep":
        at = "tsh_ctx_of(%s)" % parameters[0][1]
    if not at:
        return None
    kind = head.replace("TSH_API", "").strip()
    arguments = "(%s)" % ", ".join(name for _, name in parameters)
    full = "(TSHI_HERE, %s)" % ", ".join(texts)
    begin = "TSHI_WHERE_VOID(" if kind == "void" else "TSHI_WHERE(%s, " % kind
    text = "%s%s, %s, %s, %s)" % (begin, item.name, at, full, arguments)
    lines = textwrap.wrap(text, 100, subsequent_indent=" " * begin.index("("),
                          break_long_words=False, break_on_hyphens=False)
    macro = "#define %s(...) %s_placed(__FILE__, __LINE__, __VA_ARGS__)" % (item.name, item.name)
    if len(macro) > 100:
        macro = macro.replace("(...) ", "(...) \\\n    ")
    return lines + [macro]


def text(top=api.TOP):
    """The header's text."""
    items, _ = api.read(top)
    lines = []
    for item in items:
        if item.kind == "function" and item.header == api.HEADERS[0]:
            lines += entry(item) or []
    return HEAD + "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    api.main(PAGE, text(), __file__)
