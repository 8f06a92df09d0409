"""tshard-gdb.py - what gdb shows of a tsh_tensor * and of a tsh_ctx *

    (gdb) source tshard-gdb.py
    (gdb) print x
    $1 = (tsh_tensor *) 0x55... f32 (2, 3) S(1): 1 2 3 4 5 6
    (gdb) print ctx
    $2 = (tsh_ctx *) 0x55... rank 1 of 2: TSH_ERR_SHAPE: tsh_add: shapes ...

make install puts it where gdb loads it by itself together with libtshard.so. It reads memory alone,
also in a core file; for that, the library must have been compiled with -g. Where it was not, a
command does the same:

    (gdb) tshard x
    f32 (2, 3) S(1): 1 2 3 / 4 5 6

It calls tsh_to_string and tsh_last_error in the program, while the other threads stand still.
"""

import itertools
import struct

import gdb

VALUES = 16  # how many elements are shown
FORMATS = {"TSH_F32": "f", "TSH_F64": "d", "TSH_BF16": "H", "TSH_F16": "e", "TSH_I32": "i",
           "TSH_I64": "q"}


def shape_text(dims):
    return "(%s)" % ", ".join(str(dim) for dim in dims)


def layout_text(layout):
    """R, P, S(1) or S(1, 3 segments, unit 64), as tsh_layout_text writes it."""
    kind = str(layout["kind"])
    if kind != "TSH_SHARDED":
        return kind.replace("TSH_", "")[0]
    text, unit = "S(%d" % int(layout["dim"]), int(layout["segment"][0]["unit"])
    if int(layout["segments"]) > 1:
        text += ", %d segments" % int(layout["segments"])
    return text + (", unit %d" % unit if unit > 1 else "") + ")"


def decoded(dtype, data):
    """The number that these bytes are."""
    (number,) = struct.unpack(FORMATS[dtype], data)
    if dtype == "TSH_BF16":  # the upper half of a float
        (number,) = struct.unpack("f", struct.pack("I", number << 16))
    return number


def values(t):
    """The first elements of this rank's shard, as text; of a quantised tensor none."""
    dtype = str(t["dtype"])
    local = [int(t["local"][d]) for d in range(int(t["ndim"]))]
    if int(t["block"]) == 0:
        return "no values: stale, or not allocated yet"
    if dtype not in FORMATS:
        return "quantised"
    size = struct.calcsize(FORMATS[dtype])
    begin = int(t["block"] + 1) + int(t["offset"]) * size  # the data follows the block's header
    memory, found = gdb.selected_inferior(), []
    for index in itertools.islice(itertools.product(*(range(n) for n in local)), VALUES + 1):
        at = sum(i * int(t["stride"][d]) for d, i in enumerate(index))
        found.append(decoded(dtype, memory.read_memory(begin + at * size, size).tobytes()))
    text = " ".join("%.6g" % number for number in found[:VALUES])
    return text + (" ..." if len(found) > VALUES else "")


def called(function, kind, *arguments):
    """What a function of the program returns, while other threads stand still."""
    before = gdb.parameter("scheduler-locking")
    gdb.execute("set scheduler-locking on", to_string=True)
    try:
        text = ", ".join("(void *) %d" % argument if isinstance(argument, int) else argument
                         for argument in arguments)
        return gdb.parse_and_eval("((%s) %s)(%s)" % (kind, function, text))
    finally:
        gdb.execute("set scheduler-locking " + before, to_string=True)


def is_known(pointer):
    """Whether gdb knows the structure's fields."""
    try:
        return bool(pointer.dereference().type.strip_typedefs().fields())
    except (gdb.error, TypeError):
        return False


class Tensor:
    """dtype, shape, layout and first values."""

    def __init__(self, pointer):
        self.pointer = pointer

    def says(self):
        t, size = self.pointer, 512
        if not is_known(t):
            ctx = int(called("tsh_ctx_of", "void *(*)(void *)", int(t)))
            error = called("tsh_last_error", "int *(*)(void *)", ctx)  # begins with the code
            failed = int(error.dereference()) != 0
            buffer = int(called("malloc", "void *(*)(unsigned long)", str(size)))
            called("tsh_to_string", "char *(*)(void *, char *, unsigned long)", int(t),
                   "(char *) %d" % buffer, str(size))
            text = gdb.Value(buffer).cast(gdb.lookup_type("char").pointer()).string()
            called("free", "void (*)(void *)", buffer)
            if not failed:  # to print a stale tensor is no error of the program
                called("tsh_clear_error", "void (*)(void *)", ctx)
            return text
        dtype = str(t["dtype"]).replace("TSH_", "").lower()
        dims = [int(t["dim"][d]) for d in range(int(t["ndim"]))]
        text = "%s %s %s" % (dtype, shape_text(dims), layout_text(t["layout"]))
        if int(t["path"]):
            text = '"%s" ' % t["path"].string() + text
        return text + ": " + values(t)

    def to_string(self):
        begin = "(tsh_tensor *) 0x%x" % int(self.pointer)
        if int(self.pointer) == 0:
            return begin
        try:
            return begin + " " + self.says()
        except gdb.error as error:  # memory that is no tensor, or no running program to call
            return "%s (%s)" % (begin, error)


class Ctx:
    """The rank and its error."""

    def __init__(self, pointer):
        self.pointer = pointer

    def says(self):
        ctx = self.pointer
        text = ""
        if is_known(ctx):
            error, world = ctx["error"], ctx["world"]
            text = "rank %d of %d: " % (int(world["rank"]), int(world["size"]))
        else:
            error = called("tsh_last_error", "const tsh_error *(*)(void *)", int(ctx))
        if int(error["code"]) == 0:
            return text + "no error"
        return text + "%s: %s" % (error["code"], error["message"].string())

    def to_string(self):
        begin = "(tsh_ctx *) 0x%x" % int(self.pointer)
        if int(self.pointer) == 0:
            return begin
        try:
            return begin + " " + self.says()
        except gdb.error as error:
            return "%s (%s)" % (begin, error)


def shown(value):
    """The Tensor or Ctx of a value; None for other types."""
    kind = value.type.strip_typedefs()
    if kind.code != gdb.TYPE_CODE_PTR:
        return None
    name = kind.target().unqualified().strip_typedefs().tag
    return {"tsh_tensor": Tensor, "tsh_ctx": Ctx}.get(name, lambda _: None)(value)


def printer(value):
    """For gdb, which also asks for each argument in a backtrace: so it never calls the program."""
    found = shown(value)
    return found if found and (int(value) == 0 or is_known(value)) else None


class Command(gdb.Command):
    """tshard EXPRESSION: what a tsh_tensor * or tsh_ctx * holds; calls the library, if need be."""

    def __init__(self):
        super().__init__("tshard", gdb.COMMAND_DATA, gdb.COMPLETE_EXPRESSION)

    def invoke(self, argument, from_tty):
        found = shown(gdb.parse_and_eval(argument))
        if not found or int(found.pointer) == 0:
            raise gdb.GdbError("tshard: takes a tsh_tensor * or a tsh_ctx * that is not NULL")
        print(found.says())


printer.__name__ = "tshard"
if not any(getattr(p, "__name__", "") == "tshard" for p in gdb.pretty_printers):
    gdb.pretty_printers.append(printer)
    Command()
