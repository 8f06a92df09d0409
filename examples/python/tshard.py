"""tshard from Python: every function of libtshard.so, tensors with operators, modules, ranks.

    import tshard

    def learn(ctx):                                         # runs on every rank
        net = tshard.root()
        up = tshard.Linear(net, "up", 2, 32, style=tshard.COLWISE)
        adam = tshard.Adam(net, lr=0.005)
        x = tshard.tensor(numpy_array)
        loss = (up(x) ** 2).mean()
        loss.backward()
        adam.step()
        tshard.zero_grads(net)
        tshard.step_end()

    tshard.run(2, learn)                                    # two ranks, as threads

README.md beside this file is the manual. The C function tsh_relu is tshard.relu(x) and x.relu();
TSH_COLWISE is tshard.COLWISE. A ctx as first argument may be left out. A descriptor's fields are
keyword arguments. An error of the library is an exception, tshard.Error.
"""

import bisect
import collections
import ctypes
import enum
import functools
import os
import re
import threading
import warnings
import weakref

import cffi
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ffi = cffi.FFI()

# ---- the library and its declarations ----------------------------------------

MORE = """
void *memcpy(void *to, const void *from, size_t bytes);
int posix_memalign(void **block, size_t align, size_t bytes);
int madvise(void *block, size_t bytes, int advice);
void free(void *block);
typedef struct { int32_t type, id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensor {
    DLTensor t;
    void *manager;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;
"""


def _find_library(version):
    """The path of the library: $TSHARD_LIBRARY, beside this file, in build/, or installed."""
    beside = [os.path.join(folder, "libtshard.so")
              for folder in (HERE, os.path.join(HERE, "..", "..", "build"))]
    return os.environ.get("TSHARD_LIBRARY") or next(
        (path for path in beside if os.path.exists(path)), "libtshard.so." + version)


def _real(path, version):
    """The C type of tsh_real in the library, found by opening a ctx for each."""
    probe = cffi.FFI()
    probe.cdef("int tsh_open_built(int, size_t, size_t, const void *, void **);"
               "void tsh_close(void *); const char *tsh_version(void);")
    library = probe.dlopen(path)
    for real in "float", "double":
        ctx = probe.new("void **")
        code = library.tsh_open_built(version, probe.sizeof(real), 0, probe.NULL, ctx)
        library.tsh_close(ctx[0])
        if code == 0:
            return real
    raise ImportError("%s is tshard %s, but tshard_cdef.h was made from %d.%d: run make_cdef.py" % (
        path, probe.string(library.tsh_version()).decode(), version // 1000, version % 1000))


def _parameters(text):
    """{function: names of its parameters}, from the declarations."""
    found = {}
    for name, inside in re.findall(r"^extern [^;(]*?\b(tsh_\w+)\(([^;]*)\)\s*;", text, re.M):
        inside = re.sub(r"\(\*(\w+)\)\([^)]*\)", r"\1", inside)  # a pointer to a function
        found[name] = [re.search(r"(\w+)(?:\[\w*\])?$", part.strip())[1]
                       for part in inside.split(",") if part.strip() not in ("void", "...")]
    return found


def _open():
    with open(os.path.join(HERE, "tshard_cdef.h"), encoding="utf-8") as file:
        text = file.read()
    numbers = dict(re.findall(r"^#define (TSH\w+) (\S+)$", text, re.M))
    major, minor = numbers["TSHARD_VERSION_MAJOR"], numbers["TSHARD_VERSION_MINOR"]
    path = _find_library("%s.%s" % (major, minor))
    version = int(major) * 1000 + int(minor)
    try:
        real = _real(path, version)
    except OSError as error:
        raise ImportError("%s; `make shared` makes it, TSHARD_LIBRARY=PATH says where it is"
                          % error) from None
    text = re.sub("^#define .*\n", "", text, flags=re.M).replace("typedef float tsh_real",
                                                                 "typedef %s tsh_real" % real)
    ffi.cdef(text + MORE)
    constants = {name[4:]: float(number) for name, number in numbers.items()
                 if name.startswith("TSH_")}
    return ffi.dlopen(path), _parameters(text), constants, version


lib, PARAMETERS, CONSTANTS, VERSION = _open()
libc = ffi.dlopen(None)
BUILT = (VERSION, ffi.sizeof("tsh_real"), ffi.sizeof("tsh_desc"))  # TSH_BUILT of tshard.h


class _Named(enum.IntEnum):
    def __str__(self):
        return self.name


def _enums():
    """{name of a C enum: its IntEnum}; the members lose their TSH_."""
    found = {}
    for name in ffi.list_types()[0]:
        kind = ffi.typeof(name)
        if kind.kind == "enum":
            members = {member[4:]: value for value, member in kind.elements.items()}
            found[kind.cname] = _Named(name[4:], members)
    return found


ENUMS = _enums()
CONSTANTS.update((str(member.name), member) for kind in ENUMS.values() for member in kind)
Result, Dtype = ENUMS["tsh_result"], ENUMS["tsh_dtype"]
REAL = Dtype.F32 if BUILT[1] == 4 else Dtype.F64
NUMPY = {Dtype.F32: np.float32, Dtype.F64: np.float64, Dtype.F16: np.float16, Dtype.I32: np.int32,
         Dtype.I64: np.int64, Dtype.BF16: np.uint16}  # bf16, which NumPy lacks, by its bits
DTYPES = {np.dtype(kind): name for name, kind in NUMPY.items() if name != Dtype.BF16}

# ---- errors and memory ---------------------------------------------------------


class Error(RuntimeError):
    """An error of the library: .code, .rank (the world rank at fault, or -1), .sentence."""

    def __init__(self, code, rank, sentence):
        super().__init__("%s (TSH_%s)" % (sentence, Result(code).name))
        self.code, self.rank, self.sentence = Result(code), rank, sentence


class _Memory:
    """The allocator of every ctx. A block that a NumPy array or a DLPack capsule shares is freed
    only when these are gone, whatever became of its tensor and its ctx."""

    def __init__(self):
        self.lock = threading.Lock()
        self.starts, self.sizes = [], {}  # addresses of all blocks, sorted; {address: bytes}
        self.shared = collections.Counter()  # {address of a block: how many share it}
        self.unused = set()  # blocks that the library freed while they were shared
        self.ended = collections.deque()  # blocks that one array fewer shares

    def settle(self):
        while self.ended:
            start = self.ended.popleft()
            self.shared[start] -= 1
            if not self.shared[start]:
                del self.shared[start]
                if start in self.unused:
                    self.unused.remove(start)
                    self.forget(start)

    def forget(self, start):
        del self.starts[bisect.bisect_left(self.starts, start)], self.sizes[start]
        libc.free(ffi.cast("void *", start))

    def allocate(self, old, old_bytes, new_bytes, align):
        """As a tsh_allocator_fn does."""
        with self.lock:
            self.settle()
            block, start = ffi.new("void **"), int(ffi.cast("uintptr_t", old))
            if new_bytes:
                if libc.posix_memalign(block, align, new_bytes):
                    return ffi.NULL
                if new_bytes >= 1 << 22:  # huge pages, as the library's own allocator asks for
                    page = -int(ffi.cast("uintptr_t", block[0])) % 65536
                    libc.madvise(ffi.cast("char *", block[0]) + page,
                                 (new_bytes - page) & -65536, 14)
                bisect.insort(self.starts, int(ffi.cast("uintptr_t", block[0])))
                self.sizes[int(ffi.cast("uintptr_t", block[0]))] = new_bytes
                if start:
                    libc.memcpy(block[0], old, min(old_bytes, new_bytes))
            if start in self.shared:
                self.unused.add(start)
            elif start:
                self.forget(start)
            return block[0]

    def share(self, data):
        """A pointer to data, which lies in a block, that keeps this block."""
        with self.lock:
            self.settle()
            address = int(ffi.cast("uintptr_t", data))
            start = self.starts[bisect.bisect_right(self.starts, address) - 1]
            self.shared[start] += 1
        return ffi.gc(ffi.cast("char *", data), lambda _: self.ended.append(start))


MEMORY = _Memory()


@ffi.callback("tsh_allocator_fn")
def _allocate(old, old_bytes, new_bytes, align, _):
    return MEMORY.allocate(old, old_bytes, new_bytes, align)


@ffi.callback("void(const char *, void *)")
def _warn(message, _):
    text = ffi.string(message).decode(errors="replace")
    if text.startswith("warning: "):  # errors are raised
        warnings.warn("tshard: " + text[9:], stacklevel=2)


# ---- a ctx and what belongs to it -----------------------------------------------


class _Scope:
    """What tensors live as long as: a step, a scope, or the ctx."""

    def __init__(self):
        self.open, self.kept = True, []  # kept: Python objects that C code may use until then


_LATE = []  # ctxs that are to be closed
_FREED = _Scope()
_FREED.open = False
_here = threading.local()  # .ctx: a weak reference to this thread's ctx


def current():
    """This thread's ctx: that of its rank, or the last Context made in it."""
    ctx = getattr(_here, "ctx", lambda: None)()
    if ctx is None or not ctx.life.open:
        raise Error(Result.ERR_STATE, -1, "this thread has no ctx; call tshard.run(ranks, fn), or "
                    "keep a tshard.Context() while you use it")
    return ctx


class Context:
    """A ctx of one rank, in this thread; keywords are the fields of tsh_desc. It is closed when it
    and its tensors are gone, by close(), or at the end of a `with` block."""
    kind, prefix = "tsh_ctx *", ""

    def __init__(self, **desc):
        while _LATE:
            _LATE.pop().close()
        self.life, self.kept = _Scope(), []
        out = ffi.new("tsh_ctx **")
        code = lib.tsh_open_built(*BUILT, _desc(desc, self.kept), out)
        if code != Result.OK:
            last = lib.tsh_last_error(out[0])
            sentence = ffi.string(last.message).decode() if out[0] else "no memory for a ctx"
            lib.tsh_close(out[0])
            self.life.open = False
            raise Error(code, -1, sentence)
        self._begin(out[0], True)

    @classmethod
    def _of_rank(cls, c):
        ctx = cls.__new__(cls)
        ctx.life, ctx.kept = _Scope(), []
        ctx._begin(c, False)
        return ctx

    def _begin(self, c, owner):
        self.c, self.owner = c, owner  # owner: 1 if close() closes it, else its runner
        self.error = lib.tsh_last_error(c)  # stays at this address
        self.pending = None  # what a callback raised
        self.stop = ()  # what the next call raises
        self.owned = _Scope()  # tensors that are freed with their Python objects
        self.scopes = [_Scope()]  # the step, then tsh_scope_begin's
        self.thread, self.free = threading.get_ident(), collections.deque()
        _here.ctx = weakref.ref(self)

    def close(self):
        if self.life.open:
            self.life.open = self.owned.open = False
            self._end_scopes()
            if self.owner:
                lib.tsh_close(self.c)
            self.kept.clear()

    def __del__(self):
        if MEMORY.lock.locked():  # the garbage collector ran within an allocation
            _LATE.append(self)
        else:
            self.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __getattr__(self, name):
        return _method(self, name)

    @property
    def rank(self):
        return lib.tsh_world(self._pointer()).rank

    @property
    def size(self):
        return lib.tsh_world(self._pointer()).size

    def _pointer(self):
        if not self.life.open:
            raise Error(Result.ERR_STATE, -1, "the ctx is closed")
        if threading.get_ident() != self.thread:
            raise Error(Result.ERR_STATE, -1, "the ctx belongs to another thread: each rank uses "
                        "its own")
        if self.stop:
            raise type(self.stop[0])(*self.stop[0].args)
        return self.c

    def _collect(self):
        while self.free:
            lib.tsh_tensor_free(self.free.popleft())

    def _end_scopes(self, first=0):
        for scope in self.scopes[first:]:
            scope.open = False
            scope.kept.clear()
        self.scopes[first:] = []

    def _raise(self):
        """Raises the ctx's error. The ctx goes on without it, unless other ranks know it."""
        error = Error(self.error.code, self.error.rank,
                      ffi.string(self.error.message).decode(errors="replace"))
        pending, self.pending = self.pending, None
        lib.tsh_clear_error(self.c)
        raise pending if pending is not None else error

    def _fail(self, error, path=""):
        """Makes an exception the ctx's error, so that the other ranks learn it. path: that of the
        module that runs, which the library puts before the sentence."""
        if isinstance(error, Error):
            code, sentence = error.code, error.sentence
            if path and sentence.startswith(path + ": "):
                sentence = sentence[len(path) + 2:]
        else:
            code, sentence = Result.ERR_ABORTED, "%s: %s" % (type(error).__name__, error)
        lib.tsh_fail(self.c, int(code), b"%s", ffi.new("char[]", sentence.encode()))


class _Handle:
    """A pointer of the library that belongs to a ctx."""
    prefix = ""  # of its functions, which are its methods

    @classmethod
    def _of(cls, ctx, c, scope=None):
        self = cls.__new__(cls)
        self._ctx, self._c, self._scope = ctx, c, scope or ctx.life
        return self

    def __getattr__(self, name):
        return _method(self, name)

    def __eq__(self, other):
        return isinstance(other, _Handle) and self._c == other._c and self._scope is other._scope

    def __hash__(self):
        return hash(self._c)

    def _pointer(self, function="tshard", name="t"):
        if not self._scope.open:
            raise Error(Result.ERR_STALE, -1, "%s: %s" % (
                function, "the ctx of %s is closed" % name if not self._ctx.life.open else
                "the values of %s were given back by tsh_backward, tsh_step_end or tsh_scope_end; "
                "tsh_retain_grad or tsh_keep would have kept them" % name))
        return self._c


# ---- C functions -------------------------------------------------------------------


def _desc(fields, keep):
    """A tsh_desc with the memory and the logger that are usual here."""
    fields = dict(fields)
    log = fields.pop("log", None)
    logger = {"log": _warn if log is None else log}
    return _new("tsh_desc", {"allocator": {"allocate": _allocate}, "logger": logger, **fields},
                None, keep)


def _new(kind, value, ctx, keep):
    struct = ffi.new(ffi.getctype(kind, "*"))
    keep.append(struct)
    _fill(struct, value, ctx, keep)
    return struct


def _fill(struct, value, ctx, keep):
    """Fills a struct from a dict, from its fields in order, or from one of its type."""
    kind = ffi.typeof(struct).item
    if isinstance(value, Layout):
        value = value.c
    if isinstance(value, ffi.CData):
        struct[0] = value[0] if ffi.typeof(value).kind == "pointer" else value
        return
    if kind.cname == "tsh_shape":
        value = [value] if isinstance(value, int) else [int(size) for size in value]
        struct.ndim = len(value)
        struct.dim[0:min(len(value), lib.TSH_MAX_DIMS)] = value[:lib.TSH_MAX_DIMS]
        return
    fields = dict(kind.fields)
    for name, item in value.items() if isinstance(value, dict) else zip(fields, value):
        name = name.rstrip("_")
        if name not in fields:
            raise TypeError("%s has no field %s; it has %s" % (kind.cname, name, ", ".join(fields)))
        inner = fields[name].type
        if inner.kind == "struct":
            _fill(ffi.addressof(struct[0], name), item, ctx, keep)
        elif inner.kind == "array" and inner.item.kind == "struct":
            for i, part in enumerate(item):
                _fill(ffi.addressof(struct[0], name, i), part, ctx, keep)
        else:
            setattr(struct, name, _to_c(inner, item, ctx, keep))


def _to_c(kind, value, ctx, keep, function="tshard", name="a tensor"):
    """A Python value as the C type `kind`. keep gets what must outlive the call."""
    if isinstance(value, ffi.CData):
        return value
    if kind.kind == "enum":
        if isinstance(value, bool) and kind.cname == "tsh_choice":
            value = CONSTANTS["YES" if value else "NO"]
        elif kind.cname == "tsh_dtype" and not isinstance(value, int):
            value = _dtype(value)
        return int(value)
    if kind.kind == "struct":
        return _new(kind, value, ctx, keep)[0]
    if kind.kind == "function":
        return ffi.NULL if value is None else _callback(kind, value, ctx, keep)
    if kind.kind != "pointer":
        return value
    if value is None:
        return ffi.NULL
    keep.append(value)
    if isinstance(value, Context):
        return value._pointer()
    if isinstance(value, _Handle):
        return value._pointer(function, name)
    return _pointer_to(kind.item, value, ctx, keep, function, name)


def _pointer_to(item, value, ctx, keep, function, name):
    if item.cname == "FILE":
        value.flush()
        return value
    if item.cname == "char":
        made = ffi.new("char[]", value if isinstance(value, bytes) else os.fspath(value).encode())
    elif item.kind == "struct" and item.fields is not None:
        if not isinstance(value, list):
            return _new(item, value, ctx, keep)
        made = ffi.new(ffi.getctype(item, "[]"), len(value) + 1)  # the last one is zero
        for i, part in enumerate(value):
            _fill(made + i, part, ctx, keep)
    elif isinstance(value, (list, tuple)):
        parts = [_to_c(item, part, ctx, keep, function, "%s[%d]" % (name, i))
                 for i, part in enumerate(value)]
        made = ffi.new(ffi.getctype(item, "[]"), parts + ([ffi.NULL] if item.kind == "pointer"
                                                          else []))
    else:
        made = ffi.from_buffer(value)
        if item.kind == "primitive":
            made = ffi.cast(ffi.getctype(item, "*"), made)
    keep.append(made)
    return made


def _callback(kind, call, ctx, keep):
    """A C function that calls a Python one, without `user`, and with an array and its length as so
    many arguments. What it raises, the Python call that led to it raises."""
    counted = [i for i, part in enumerate(kind.args[:-1])
               if part.kind == "pointer" and part.item.kind == "pointer"
               and kind.args[i + 1].cname == "int"]

    def enter(*values):
        arguments = []
        try:
            for i, (part, value) in enumerate(zip(kind.args, values)):
                if i in counted:
                    arguments += [_from_c(part.item, value[k], ctx) for k in range(values[i + 1])]
                elif i - 1 not in counted and not (i == len(values) - 1 and part.cname == "void *"):
                    arguments.append(_from_c(part, value, ctx))
            result = call(*arguments)
            if result is None:
                return None if kind.result.kind == "void" else ffi.cast(kind.result, 0)
            if ctx is not None:
                ctx.scopes[-1].kept.append(result)
            return _to_c(kind.result, result, ctx, [], "forward", "the result")
        except BaseException as error:  # no exception may pass through C
            if ctx is None:
                raise
            if ctx.pending is None:
                ctx.pending = error
            first = arguments[0] if arguments else None
            ctx._fail(error, first.path() if isinstance(first, Module) else "")
            return None if kind.result.kind == "void" else ffi.cast(kind.result, 0)

    made = ffi.callback(kind, enter)
    keep.append(made)
    return made


def _from_c(kind, value, ctx, scope=None):
    """A result of C, or an argument of a callback, as Python has it."""
    if kind.kind == "enum":
        return ENUMS[kind.cname](value)
    if kind.cname == "tsh_shape":
        return tuple(value.dim[0:value.ndim])
    if kind.cname == "tsh_layout":
        return Layout(value)
    if kind.kind != "pointer":
        return value
    if not value:
        return None
    if kind.item.cname == "char":
        return ffi.string(value).decode()
    if kind.item.cname == "tsh_ctx":
        return ctx
    if kind.item.cname == "tsh_tensor":
        return Tensor._of(ctx, value, scope or ctx.scopes[-1])
    handle = HANDLES.get(kind.item.cname)
    return handle._of(ctx, value) if handle else value


# Functions whose result lives longer than the step: until its Python object is gone, or as long
# as the ctx.
OWNED = {"tensor_new", "tensor_from", "keep"}
PARAMS = {"param", "add_param"}
# Tensors that must be given; other pointers are NULL if they are not.
NO_DEFAULT = {("tsh_tensor *", name) for name in ("x", "a", "b", "t", "loss")}


class Function:
    """A C function: converts arguments and result, and raises the ctx's error."""

    def __init__(self, name):
        self.name, self.c = "tsh_" + name, getattr(lib, "tsh_" + name)
        self.type, self.names = ffi.typeof(self.c), PARAMETERS["tsh_" + name]
        self.kinds = self.type.args
        self.desc = next((i for i, word in enumerate(self.names) if word in ("desc", "schedule")),
                         None)
        self.has_ctx = bool(self.kinds) and self.kinds[0].cname == "tsh_ctx *"
        self.owned, self.param = name in OWNED, name in PARAMS
        # 1: the library may use what it was given after the call
        self.keeps = self.desc is not None or name == "parallelize"
        self.returns_tensor = self.type.result.cname == "tsh_tensor *"
        self.frees = name.endswith("_free")
        self.scoped = name.startswith("pipeline_")  # releases the step tensors made within it
        self.counted = {i for i in range(len(self.kinds)) if self.counts(i)}
        self.__name__, self.__doc__ = name, "%s(%s)" % (self.name, ", ".join(self.names))

    def __repr__(self):
        return "<%s>" % self.__doc__

    def counts(self, i):
        """1 if parameter i is the length of the array, or of the bytes, before it."""
        before = self.kinds[i - 1] if i else None
        return (before is not None and before.kind == "pointer"
                and self.names[i] in ("n", "count", "size", "bytes")
                and self.kinds[i].kind == "primitive" and before.item.cname != "char")

    def bind(self, given, named):
        """The values of all parameters, from arguments by position and by name."""
        given, fields, values = list(given), {}, {}
        if self.has_ctx and not (given and isinstance(given[0], Context)) and "ctx" not in named:
            tied = next((part for part in given if isinstance(part, _Handle)), None)
            given.insert(0, tied._ctx if tied is not None else current())
        for word, value in named.items():
            word = word.rstrip("_")
            (values if word in self.names and word != "desc" else fields)[word] = value
        for i, name in enumerate(self.names):
            if name == "user" or i in self.counted or name in values or not given:
                continue
            if i == self.desc and not isinstance(given[0], (dict, ffi.CData, type(None))):
                fields.update(zip(dict(self.kinds[i].item.fields), given))
                given = []
            else:
                values[name] = given.pop(0)
        if given:
            raise TypeError("%s: %d arguments too many" % (self.__doc__, len(given)))
        if fields and self.desc is None:
            raise TypeError("%s has no parameter %s" % (self.__doc__, ", ".join(fields)))
        if fields:
            name = self.names[self.desc]
            values[name] = {**(values.get(name) or {}), **fields}
        return values

    def default(self, i, values):
        name, kind = self.names[i], self.kinds[i]
        if i in self.counted:
            before = values.get(self.names[i - 1])
            if before is None or isinstance(before, (list, tuple)):
                return len(before or ())
            c = isinstance(before, ffi.CData)
            return ffi.sizeof(before) if c else memoryview(before).nbytes
        if name == "dim" and "keepdim" in self.names:
            return lib.TSH_ALL
        if name in ("keepdim", "eps", "samples", "user"):
            return 0 if kind.kind == "primitive" else None
        if kind.kind in ("pointer", "function") and (kind.cname, name) not in NO_DEFAULT:
            return None
        raise TypeError("%s: %s is missing" % (self.__doc__, name))

    def __call__(self, *given, **named):
        values, keep, out = self.bind(given, named), [], None
        ctx = next((part if isinstance(part, Context) else part._ctx for part in values.values()
                    if isinstance(part, (Context, _Handle))), None)
        if ctx is None:
            ctx = next((part._ctx for value in values.values() if isinstance(value, list)
                        for part in value if isinstance(part, _Handle)), None)
        arguments = []
        for i, (name, kind) in enumerate(zip(self.names, self.kinds)):
            value = values[name] if name in values else self.default(i, values)
            if value is None and kind.cname == "double *":
                value = out = ffi.new("double *")
            arguments.append(_to_c(kind, value, ctx, keep, self.name, name))
        if ctx is None:
            result = self.c(*arguments)
        else:
            ctx._pointer()
            ctx._collect()
            result = self.call(ctx, arguments)
            if ctx.error.code:
                ctx._raise()
            if self.keeps:
                (ctx.scopes[-1].kept if self.returns_tensor else ctx.kept).append(keep)
        if self.frees:
            for part in values.values():
                if isinstance(part, _Handle):
                    part._scope = _FREED
        if self.type.result.cname == "tsh_result":
            if result:
                raise Error(result, -1, "%s: %s" % (
                    self.name, ffi.string(lib.tsh_result_text(result)).decode()))
            return out[0] if out is not None else None
        return self.result(ctx, result, values)

    def call(self, ctx, arguments):
        depth = len(ctx.scopes)
        if self.scoped or self.name == "tsh_scope_begin":
            ctx.scopes.append(_Scope())
        result = self.c(*arguments)
        if self.scoped:
            ctx._end_scopes(depth)
        elif self.name == "tsh_scope_end" and depth > 1:
            ctx._end_scopes(depth - 1)
        elif self.name == "tsh_step_end":
            ctx._end_scopes()
            ctx.scopes.append(_Scope())
        return result

    def result(self, ctx, result, values):
        if self.returns_tensor:  # an op may return one of its inputs
            for part in values.values():
                if isinstance(part, Tensor) and part._c == result:
                    return part
            scope = ctx and (ctx.owned if self.owned else ctx.life if self.param else None)
            return _from_c(self.type.result, result, ctx, scope)
        return _from_c(self.type.result, result, ctx)


@functools.lru_cache(None)
def _function(name):
    """The Function of tsh_<name>, or None. Left out: tsh_open and others that only programs of
    version 0.1 reach, tsh_close, and functions like printf."""
    full = "tsh_" + name
    if (full not in PARAMETERS or full + "_built" in PARAMETERS or full.endswith("_built")
            or name == "close" or ffi.typeof(getattr(lib, full)).ellipsis):
        return None
    return Function(name)


def _method(self, name):
    """The functions that take a handle first are its methods: x.relu(); adam.step(), of
    tsh_optim_step."""
    for full in (self.prefix + name, name):
        function = None if name.startswith("_") else _function(full)
        if function and self.kind in [kind.cname for kind in function.kinds[:2]
                                      if self.kind == "tsh_ctx *" or kind.cname != "tsh_ctx *"][:1]:
            return functools.partial(function, self)
    raise AttributeError("%s has no %s: there is no tsh_%s that takes a %s first" % (
        type(self).__name__, name, self.prefix + name, self.kind))


def __getattr__(name):
    """tshard.<name>: a function, a constant, a layer, an optimiser."""
    if name.startswith("_"):
        raise AttributeError(name)
    if _function(name):
        return _function(name)
    kinds = ENUMS["tsh_optim_kind"].__members__
    if name.upper() in kinds:  # Adam: tsh_optim_new, of kind TSH_ADAM
        return functools.partial(_function("optim_new"), kind=kinds[name.upper()])
    if name in CONSTANTS:
        return CONSTANTS[name]
    if hasattr(lib, "TSH_" + name):  # an enumerator of an enum without a name
        return getattr(lib, "TSH_" + name)
    layer = re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    if name[0].isupper() and _function("add_" + layer):  # LayerNorm: tsh_add_layer_norm
        return _function("add_" + layer)
    raise AttributeError("tshard has no %s: there is no tsh_%s or TSH_%s" % (name, name, name))


def __dir__():
    functions = (name[4:] for name in PARAMETERS if _function(name[4:]))
    return sorted([*globals(), *CONSTANTS, *functions])


# ---- tensors -----------------------------------------------------------------------


class Layout:
    """R (tshard.replicated()), S(d) (tshard.sharded(d)) or P (tshard.partial())."""

    def __init__(self, c):
        self.c = c

    kind = property(lambda self: ENUMS["tsh_layout_kind"](self.c.kind))
    dim = property(lambda self: self.c.dim)

    def __repr__(self):
        text = ffi.new("char[64]")
        return ffi.string(lib.tsh_layout_text(self.c, text, 64)).decode()

    def __eq__(self, other):
        return repr(self) == repr(other)

    def __hash__(self):
        return hash(repr(self))


def _dtype(name):
    """A Dtype from one, from its name ("bf16") or from a NumPy dtype."""
    if isinstance(name, str) and name.upper() in Dtype.__members__:
        return Dtype[name.upper()]
    if not isinstance(name, int) and np.dtype(name) in DTYPES:
        return DTYPES[np.dtype(name)]
    return Dtype(name)


def _operator(number, tensors):
    """An operator of a tensor and a number, or of two tensors by the function of this name."""
    def operator(self, other):
        if isinstance(other, Tensor):
            return _function(tensors)(self, other)
        if isinstance(other, (int, float, np.number)):
            return number(self, float(other))
        return NotImplemented
    return operator


def _number(x, value):
    """A tensor of one element, replicated, of x's dtype."""
    return full((), value, ctx=x._ctx) if x.dtype == REAL else cast(
        full((), value, ctx=x._ctx), x.dtype)


def _compare(name):
    return _operator(lambda x, value: _function(name)(x, _number(x, value)), name)


class Tensor(_Handle):
    """A tsh_tensor. All functions that take a tensor first are methods: x.relu(), x.sum(dim=-1)."""
    kind = "tsh_tensor *"
    __array_ufunc__ = None  # a NumPy array times a tensor is an error, not an array of tensors

    def __del__(self):
        if self._scope is self._ctx.owned and self._scope.open:
            self._ctx.free.append(self._c)  # in the ctx's own thread, at its next call

    def _pointer(self, function="tsh_data", name="t"):
        return super()._pointer(function, name)

    shape = property(lambda self: _function("shape_of")(self))
    dtype = property(lambda self: _function("dtype_of")(self))
    layout = property(lambda self: _function("layout_of")(self))
    ndim = property(lambda self: lib.tsh_ndim(self._pointer("tsh_ndim")))
    grad = property(lambda self: _function("grad")(self))
    ctx = property(lambda self: self._ctx)
    T = property(lambda self: _function("transpose")(self, -2, -1))

    @property
    def local_shape(self):
        """The shape of this rank's shard."""
        return tuple(lib.tsh_local_size(self._pointer(), i) for i in range(self.ndim))

    def backward(self, **desc):
        _function("backward_with")(self._ctx, self, **desc)

    def item(self):
        return _function("item")(self._ctx, self)

    def reshape(self, *shape):
        return _function("reshape")(self, shape[0] if isinstance(shape[0], tuple) else shape)

    def permute(self, *dims):
        return _function("permute")(self, list(dims))

    def split(self, n, dim=0):
        return split(self, dim, n)

    def write(self, values, extent=lib.TSH_GLOBAL):
        """Copies an array into an owned tensor: the whole of it, or with LOCAL this rank's."""
        values = np.ascontiguousarray(values, NUMPY[self.dtype])
        _function("write")(self._ctx, self, extent, values)

    def numpy(self, local=False):
        """The values as an array. Of a replicated tensor, of one rank's, and of this rank's shard
        (local) it shares the memory; else it is a copy that all ranks of tp make together. bf16 is
        converted to float32."""
        if local or self.layout.kind == lib.TSH_REPLICATED or lib.tsh_tp(self._ctx.c).size == 1:
            values = _array(self)
        else:
            values = np.empty(self.shape, NUMPY[self.dtype])
            _function("read")(self._ctx, self, lib.TSH_GLOBAL, values)
        if self.dtype == Dtype.BF16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values

    def tolist(self):
        return self.numpy().tolist()

    def __array__(self, dtype=None, copy=None):
        values = self.numpy()
        return np.array(values, dtype) if copy or dtype not in (None, values.dtype) else values

    def __dlpack_device__(self):
        return 1, 0  # kDLCPU

    def __dlpack__(self, *_, copy=None, **__):
        return _to_capsule(_function("keep")(self) if copy else self)

    def __repr__(self):
        if not self._scope.open:
            return "<tshard tensor, released>"
        text = ffi.new("char[]", 400)
        return ffi.string(lib.tsh_to_string(self._pointer(), text, 400)).decode()

    def __len__(self):
        return self.shape[0]

    def __float__(self):
        return self.item()

    def __bool__(self):
        return bool(self.item())

    def __getitem__(self, index):
        return _index(self, index)

    __add__ = __radd__ = _operator(lambda x, c: add_scalar(x, c), "add")
    __sub__ = _operator(lambda x, c: add_scalar(x, -c), "sub")
    __rsub__ = _operator(lambda x, c: add_scalar(neg(x), c), "sub")
    __mul__ = __rmul__ = _operator(lambda x, c: scale(x, c), "mul")
    __truediv__ = _operator(lambda x, c: div(x, _number(x, c)), "div")
    __rtruediv__ = _operator(lambda x, c: div(_number(x, c), x), "div")
    __pow__ = _operator(lambda x, c: pow_scalar(x, c), "pow")
    __lt__, __le__, __gt__, __ge__ = map(_compare, ("lt", "le", "gt", "ge"))

    def __neg__(self):
        return _function("neg")(self)

    def __matmul__(self, other):
        return _function("matmul")(self, other) if isinstance(other, Tensor) else NotImplemented


add_scalar, neg, scale, div, pow_scalar, full, cast = map(
    _function, ("add_scalar", "neg", "scale", "div", "pow_scalar", "full", "cast"))


def _index(x, index):
    """x[index] by tsh_slice and tsh_reshape, views both."""
    index = list(index) if isinstance(index, tuple) else [index]
    given = sum(part is not None and part is not Ellipsis for part in index)
    if given > x.ndim:
        raise IndexError("%d indices for a tensor of %d dimensions" % (given, x.ndim))
    if Ellipsis not in index:
        index.append(Ellipsis)
    at = index.index(Ellipsis)
    index[at:at + 1] = [slice(None)] * (x.ndim - given)
    shape, dim = [], 0
    for part in index:
        if part is None:
            shape.append(1)
            continue
        size = x.shape[dim]
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step != 1:
                raise IndexError("a slice's step is 1 here, not %d" % step)
            length = max(stop - start, 0)
            shape.append(length)
        elif isinstance(part, (int, np.integer)):
            if not -size <= part < size:
                raise IndexError("index %d is outside a dimension of %d" % (part, size))
            start, length = int(part) % size, 1
        else:
            raise TypeError("an index is an integer, a slice, None or ..., not %r" % (part,))
        if length != size:
            x = _function("slice")(x, dim, start, length)
        dim += 1
    return x if tuple(shape) == x.shape else x.reshape(tuple(shape))


def _array(x):
    """This rank's shard as an array that shares its memory; bf16 by its bits."""
    data, kind = _function("data")(x._ctx, x), np.dtype(NUMPY[x.dtype])
    shape = x.local_shape
    if not data:
        return np.empty(shape, kind)
    strides = [lib.tsh_stride(x._c, i) * kind.itemsize for i in range(len(shape))]
    extent = sum((size - 1) * step for size, step in zip(shape, strides)) + kind.itemsize
    return np.ndarray(shape, kind, ffi.buffer(MEMORY.share(data), extent), strides=strides)


def from_numpy(array, layout=None, ctx=None):
    """A tensor with a copy of the array, which is the whole tensor on every rank, and its dtype.
    It lives until the Python object is gone. layout: replicated, or sharded."""
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if array.dtype not in DTYPES:
        raise TypeError("from_numpy: %s has no dtype of tshard; convert it: tensor(array, dtype)"
                        % array.dtype)
    ctx, dtype = ctx or current(), DTYPES[array.dtype]
    return _from_bytes(ctx, dtype, array, layout)


def _from_bytes(ctx, dtype, array, layout):
    if layout is None:
        return _function("tensor_from")(ctx, dtype, array.shape, lib.tsh_replicated(),
                                        array if array.size else None)
    made = _function("tensor_new")(ctx, dtype, array.shape, layout)
    made.write(array)
    return made


def tensor(data, dtype=None, layout=None, ctx=None):
    """A tensor of numbers, lists or an array. dtype None: floating numbers become tshard.REAL,
    integers I64 (I32 if they are of at most 32 bits)."""
    array = np.asarray(data)
    dtype = None if dtype is None else _dtype(dtype)
    if dtype == Dtype.BF16:
        made = from_numpy(array.astype(NUMPY[REAL]), layout, ctx)
        return _function("keep")(cast(made, dtype))
    if dtype is None:
        dtype = (REAL if array.dtype.kind == "f" else
                 Dtype.I32 if array.dtype.itemsize <= 4 else Dtype.I64)
    return from_numpy(array.astype(NUMPY[dtype]), layout, ctx)


def split(x, dim, n):
    parts = ffi.new("tsh_tensor *[]", n)
    _function("split")(x, dim, n, parts)
    return [Tensor._of(x._ctx, part, x._ctx.scopes[-1]) for part in parts]


def shard_range(layout, length, size, rank):
    """What a rank owns of a dimension: [(start, length)] of each segment."""
    ranges = ffi.new("tsh_range[]", lib.TSH_MAX_SEGMENTS)
    if lib.tsh_shard_range(layout.c, length, size, rank, ranges) < 0:
        raise Error(Result.ERR_LAYOUT, -1, "tsh_shard_range: %s does not fit a dimension of %d, or "
                    "there is no rank %d of %d" % (layout, length, rank, size))
    return [(part.start, part.length) for part in ranges[0:max(layout.c.segments, 1)]]


def custom_op(inputs, forward, backward=None, out=None, partial=0, name="custom"):
    """An op of one's own on NumPy arrays, this rank's shards. forward(*arrays) returns an array, or
    a tuple of them; backward(grads, arrays, results), with a gradient (or None) for each result, the
    gradients (or None) of the inputs. out: {"shape", "layout", "dtype"} of each result; by default
    one as the first input. partial: bit i says that the gradient of input i is a partial sum."""
    ctx, first = inputs[0]._ctx, inputs[0]
    out = out or [{"shape": first.shape, "layout": first.layout, "dtype": first.dtype}]
    real, tp = np.dtype(NUMPY[REAL]), lib.tsh_tp(ctx._pointer())
    kinds, shapes = [], []
    for part in out:
        dtype = _dtype(part.get("dtype") or REAL)
        kinds.append(np.dtype(NUMPY[dtype]) if dtype in (Dtype.I32, Dtype.I64) else real)
        shapes.append(list(part["shape"]))
        layout = part.get("layout")
        if layout is not None and layout.kind == lib.TSH_SHARDED:
            own = shard_range(layout, shapes[-1][layout.dim], tp.size, tp.rank)
            shapes[-1][layout.dim] = sum(length for _, length in own)

    def view(data, kind, shape):
        size = int(np.prod(shape))
        if not data:
            return None
        return np.frombuffer(ffi.buffer(data, size * kind.itemsize), kind, size).reshape(shape)

    def arrays(tensors, n):
        return [_array(Tensor._of(ctx, tensors[i], ctx.scopes[-1])) for i in range(n)]

    def guarded(kind, call):
        def enter(*values):
            try:
                call(*values[:-1])
            except BaseException as error:  # no exception may pass through C
                ctx.pending = ctx.pending or error
                ctx._fail(error)
        return ffi.callback(kind, enter)

    def run_forward(tensors, n, results):
        made = forward(*arrays(tensors, n))
        for k, values in enumerate(made if isinstance(made, tuple) else (made,)):
            if 0 not in shapes[k]:
                view(results[k], kinds[k], shapes[k])[...] = values

    def run_backward(tensors, n, results, grads, into):
        given = arrays(tensors, n)
        back = backward([view(grads[k], real, shape) for k, shape in enumerate(shapes)], given,
                        [view(results[k], kinds[k], shape) for k, shape in enumerate(shapes)])
        for i, values in enumerate(back if isinstance(back, tuple) else (back,)):
            if into[i] and values is not None:
                view(into[i], real, given[i].shape)[...] += values

    fields = dict(ffi.typeof("tsh_custom_op_desc").fields)
    results = ffi.new("tsh_tensor *[]", len(out))
    _function("custom_op")(ctx, list(inputs), results, {
        "name": name, "outputs": len(out), "out": out, "partial": partial,
        "forward": guarded(fields["forward"].type, run_forward),
        "backward": guarded(fields["backward"].type, run_backward) if backward else None})
    made = [Tensor._of(ctx, part, ctx.scopes[-1]) for part in results]
    return made if len(made) > 1 else made[0]


def rng_state(ctx=None):
    """The state of the random numbers as bytes, for tshard.set_rng_state."""
    ctx = ctx or current()
    state = ffi.new("char[]", lib.tsh_rng_state(ctx._pointer(), ffi.NULL, 0))
    lib.tsh_rng_state(ctx.c, state, len(state))
    return bytes(ffi.buffer(state))


def fail(code, sentence):
    """Raises an error, which the other ranks learn if fn does not catch it."""
    raise Error(code, current().rank, sentence)


class no_grad:
    """with tshard.no_grad(): ops in it are not recorded for backward."""
    begin, end = "no_grad_begin", "no_grad_end"

    def __init__(self, ctx=None):
        self.ctx = ctx

    def __enter__(self):
        self.ctx = self.ctx or current()
        _function(self.begin)(self.ctx)

    def __exit__(self, kind, *_):
        try:
            _function(self.end)(self.ctx)
        except Error:
            if kind is None:  # else what was raised before is the reason
                raise


class scope(no_grad):
    """with tshard.scope(): the step tensors made in it are released at its end."""
    begin, end = "scope_begin", "scope_end"


# ---- DLPack --------------------------------------------------------------------------

DLPACK = {Dtype.F32: (2, 32), Dtype.F64: (2, 64), Dtype.F16: (2, 16), Dtype.BF16: (4, 16),
          Dtype.I32: (0, 32), Dtype.I64: (0, 64)}  # {dtype: (code, bits) of a DLDataType}
_capsules = {}  # {address of a DLManagedTensor: what it needs}, until its deleter is called


def _python(name, result, *arguments):
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_capsule_new = _python("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p,
                       ctypes.c_void_p)
_capsule_valid = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_capsule_get = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_capsule_rename = _python("PyCapsule_SetName", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_UNUSED, _USED = ctypes.c_char_p(b"dltensor"), ctypes.c_char_p(b"used_dltensor")


@ffi.callback("void(DLManagedTensor *)")
def _delete_managed(managed):
    _capsules.pop(int(ffi.cast("uintptr_t", managed)), None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _delete_capsule(capsule):
    if _capsule_valid(capsule, _UNUSED):  # nobody took what it holds
        _capsules.pop(_capsule_get(capsule, _UNUSED), None)


def _to_capsule(x):
    """A DLPack capsule that shares the memory of a tensor that this rank holds whole."""
    if x.layout.kind != lib.TSH_REPLICATED and lib.tsh_tp(x._ctx.c).size > 1:
        raise BufferError("the tensor is %s, and this rank has a part of it: x.full_tensor(), or "
                          "x.numpy(local=True)" % x.layout)
    if x.dtype not in DLPACK:
        raise BufferError("DLPack has no dtype %s" % x.dtype.name)
    array, managed = _array(x), ffi.new("DLManagedTensor *")
    code, bits = DLPACK[x.dtype]
    sizes = ffi.new("int64_t[]", list(array.shape) + [lib.tsh_stride(x._c, i)
                                                      for i in range(array.ndim)])
    managed.t.data = ffi.cast("void *", array.ctypes.data)
    managed.t.device, managed.t.ndim = (1, 0), array.ndim
    managed.t.dtype = (code, bits, 1)
    managed.t.shape, managed.t.strides = sizes, sizes + array.ndim
    managed.deleter = _delete_managed
    address = int(ffi.cast("uintptr_t", managed))
    _capsules[address] = array, managed, sizes
    return _capsule_new(address, _UNUSED, ctypes.cast(_delete_capsule, ctypes.c_void_p))


def from_dlpack(source, layout=None, ctx=None):
    """A tensor with a copy of the values of any object that has __dlpack__, on the CPU."""
    if source.__dlpack_device__()[0] != 1:
        raise BufferError("from_dlpack: the values are not in memory of the CPU")
    capsule = source.__dlpack__()
    managed = ffi.cast("DLManagedTensor *", _capsule_get(id(capsule), _UNUSED))
    t = managed.t
    dtype = next((name for name, kind in DLPACK.items()
                  if kind == (t.dtype.code, t.dtype.bits) and t.dtype.lanes == 1), None)
    if dtype is None:
        raise TypeError("from_dlpack: tshard has no dtype of code %d with %d bits"
                        % (t.dtype.code, t.dtype.bits))
    kind, shape = np.dtype(NUMPY[dtype]), list(t.shape[0:t.ndim])
    if 0 in shape:
        array = np.empty(shape, kind)
    else:
        dense = [int(np.prod(shape[i + 1:])) for i in range(len(shape))]
        strides = list(t.strides[0:t.ndim]) if t.strides else dense
        first = ffi.cast("char *", t.data) + t.byte_offset
        low = sum((size - 1) * step for size, step in zip(shape, strides) if step < 0)
        high = sum((size - 1) * step for size, step in zip(shape, strides) if step > 0)
        array = np.ndarray(shape, kind, ffi.buffer(first + low * kind.itemsize,
                                                   (high - low + 1) * kind.itemsize),
                           -low * kind.itemsize, [step * kind.itemsize for step in strides])
    made = _from_bytes(ctx or current(), dtype, np.ascontiguousarray(array).reshape(shape), layout)
    _capsule_rename(id(capsule), _USED)
    if managed.deleter:
        managed.deleter(managed)
    return made


# ---- modules and optimisers ----------------------------------------------------------


class Module(_Handle):
    """A tsh_module: a layer, or a container with a forward of its own. Of a class derived from it,
    forward(self, x, ...) computes the output."""
    kind = "tsh_module *"

    def __init__(self, parent, name):
        keep, forward = [], type(self).forward
        desc = {} if forward is Module.forward else {
            "forward": lambda _, *inputs: forward(self, *inputs)}
        made = _function("add_module")(parent, name, **desc)
        self._ctx, self._c, self._scope = made._ctx, made._c, made._scope
        self._ctx.kept.append((self, keep))

    def forward(self, *inputs):
        return _function("forward_n")(self, list(inputs))

    __call__ = lambda self, *inputs: _function("forward_n")(self, list(inputs))

    def __getitem__(self, path):
        """The module at a path below this one."""
        return _function("find")(self, path)

    def path(self):
        return _function("module_path")(self)

    def parameters(self):
        """{path: parameter} of all parameters below, as tsh_each_param visits them."""
        found = {}

        def add(path, param):
            found[path] = Tensor._of(self._ctx, param._c, self._ctx.life)
        _function("each_param")(self, add)
        return found

    def forward_residual(self, x, y):
        """(x + y, what the module gives of it)."""
        both = ffi.new("tsh_tensor **", x._pointer())
        out = _function("forward_residual")(self, both, y)
        return Tensor._of(self._ctx, both[0], self._ctx.scopes[-1]), out

    def __repr__(self):
        return "<tshard module \"%s\">" % (self.path() if self._scope.open else "released")


class Optim(_Handle):
    """A tsh_optim: adam.step() is tsh_optim_step(adam)."""
    kind, prefix = "tsh_optim *", "optim_"


class Cache(_Handle):
    kind, prefix = "tsh_cache *", "cache_"


class Pipeline(_Handle):
    kind, prefix = "tsh_pipeline *", "pipeline_"


HANDLES = {kind.kind[:-2]: kind for kind in (Tensor, Module, Optim, Cache, Pipeline)}

# ---- ranks -----------------------------------------------------------------------------


def run(ranks, fn, *args, **desc):
    """Calls fn(ctx, *args) on so many ranks, each in a thread of its own (one rank: in this one).
    Returns what they returned, a list. Keywords are the fields of tsh_desc; log: a function that
    gets warnings and errors as text (by default, warnings are Python's).

    If fn raises on a rank, the others get an Error that names it at their next collective, and run
    raises the first exception, with .ranks, {rank: its exception}."""
    results, raised, stop, keep, said = [None] * ranks, {}, [], [], []

    @ffi.callback("int(tsh_ctx *, void *)")
    def main(c, _):
        before = getattr(_here, "ctx", None)
        ctx = Context._of_rank(c)
        rank, ctx.stop = ctx.rank, stop
        try:
            results[rank] = fn(ctx, *args)
            _function("ok")(ctx)
        except BaseException as error:  # no exception may pass through C
            raised[rank] = error
            ctx._fail(error)
        finally:
            ctx.close()  # the runner closes it in C
            _here.ctx = before or weakref.ref(ctx)
        return rank in raised

    log = desc.pop("log", _warn)

    @ffi.callback("void(const char *, void *)")
    def hear(message, user):
        said.append(ffi.string(message).decode(errors="replace"))
        if log is _warn:
            _warn(message, user)
        else:
            log(said[-1])

    c_desc = _desc({**desc, "log": hear}, keep)
    ended, begun, code = threading.Event(), [], []

    def start():
        try:
            if not begun:
                begun.append(True)
                code.append(lib.tsh_run_built(*BUILT, c_desc, main, ffi.NULL) if ranks == 1 else
                            lib.tsh_threads_run_built(*BUILT, ranks, c_desc, main, ffi.NULL))
        finally:
            ended.set()

    if ranks == 1:
        start()
    helper = threading.Thread(target=start)
    while not ended.is_set():  # waits in Python, so that Ctrl-C arrives here
        try:
            if helper.ident is None:
                helper.start()
            ended.wait(0.1)  # a signal just before it would not end it
        except BaseException as error:
            stop.append(error)  # the ranks raise it at their next call
    if raised:
        error = next(iter(raised.values()))  # the first one
        error.ranks = raised
        raise error
    if stop:
        raise stop[0]
    if code != [0]:  # a rank could not start
        raise Error(Result.ERR_STATE, -1, said[-1] if said else "the ranks did not start")
    return results
