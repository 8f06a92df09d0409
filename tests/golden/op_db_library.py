"""The library of op_db.c, for op_db.py: its tensors, and calls of its functions."""

import ctypes
import os
import subprocess

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
F32, BF16, F16, I32, I64 = 1, 3, 4, 5, 6  # as tsh_dtype
DTYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int32: I32,
          torch.int64: I64}
TORCH_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}
LIB = None
FLOATING = torch.float32  # the dtype of floating tensors


class NotClaimed(Exception):
    """tshard has no such operator, option or dtype; the argument says which."""


class Refused(Exception):
    """tshard returned an error: its code and sentence."""


def need(condition, why="an option that tshard does not have"):
    if not condition:
        raise NotClaimed(why)


def load(path):
    global LIB
    LIB = ctypes.CDLL(path)
    return LIB


def build(folder):
    path = os.path.join(folder, "op_db.so")
    subprocess.check_call(
        [os.environ.get("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O1",
         "-fno-math-errno", "-shared", "-fPIC", "-o", path, os.path.join(HERE, "op_db.c"), "-lm",
         "-lpthread"])
    return path


def pointer(name):
    """A function that returns an address; arguments are converted by `call`."""
    fn = getattr(LIB, name)
    fn.restype = ctypes.c_void_p
    return fn


def convert(x):
    if isinstance(x, V):
        return ctypes.c_void_p(x.handle)
    if x is None or isinstance(x, (ctypes._SimpleCData, ctypes.Array)):
        return x
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int(x)


class V:
    """A tensor of tshard, with the torch tensor whose shape and dtype it has."""

    def __init__(self, ctx, handle, like):
        if not handle:
            raise refusal(ctx)
        self.ctx, self.handle = ctx, handle
        self.like = like
        self.leaf = None  # the handle that has the gradient; None: of no leaf, or of a constant
        n = LIB.tsh_ndim(ctypes.c_void_p(handle))
        LIB.tsh_size.restype = ctypes.c_int64
        self.shape = tuple(LIB.tsh_size(ctypes.c_void_p(handle), d) for d in range(n))
        self.dtype = LIB.tsh_dtype_of(ctypes.c_void_p(handle))

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def floating(self):
        return self.dtype in (F32, BF16, F16)

    def read(self):
        out = torch.empty(self.shape, dtype=TORCH_DTYPES[self.dtype])
        result = LIB.tsh_read(ctypes.c_void_p(self.ctx), ctypes.c_void_p(self.handle), 1,
                              ctypes.c_void_p(out.data_ptr()),
                              ctypes.c_size_t(out.numel() * out.element_size()))
        if result:
            raise refusal(self.ctx)
        return out


def refusal(ctx):
    LIB.od_message.restype = LIB.tsh_result_name.restype = ctypes.c_char_p
    error = LIB.tsh_last_error
    error.restype = ctypes.POINTER(ctypes.c_int)
    code = LIB.tsh_result_name(error(ctypes.c_void_p(ctx))[0]).decode()
    return Refused(code, LIB.od_message(ctypes.c_void_p(ctx)).decode())


def context(x):
    """The ctx of the first tensor among an operator's arguments, which may be lists."""
    if isinstance(x, (list, tuple)):
        return next(filter(None, map(context, x)), None)
    return x.ctx if isinstance(x, V) else None


def call(name, *args):
    """tshard's function of this name: V for tensors, int and float for int and double."""
    return V(context(args), pointer(name)(*[convert(a) for a in args]), None)


def call_result(name, *args):
    """Calls a function that returns a tsh_result, and returns that."""
    return getattr(LIB, name)(*[convert(a) for a in args])


def function(name):
    """The address of a function, as an argument."""
    return ctypes.cast(getattr(LIB, name), ctypes.c_void_p)


def int64(*values):
    """An array of int64_t."""
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def sizes(shape):
    return len(shape), int64(*shape)


def constant(x):
    """x, which gets no gradient from this operator."""
    if isinstance(x, V):
        x.leaf = None
    return x


def reshaped(x, shape):
    return call("od_reshape", x, *sizes(shape))


def filled(ctx, value, dtype=F32):
    return leaf(ctx, torch.tensor(value, dtype=TORCH_DTYPES[dtype]), -1, False)


def leaf(ctx, t, cut, transposed):
    """An owned tensor of t's values; transposed: stored with its dimensions in reverse order."""
    if t.dtype == torch.bool:
        t = t.to(torch.int32)
    if t.is_floating_point():
        t = t.to(FLOATING)
    need(t.dtype in DTYPES, f"a tensor of {str(t.dtype)[6:]}")
    need(t.ndim <= 6, "more than 6 dimensions")
    order = list(range(t.ndim))[::-1] if transposed else list(range(t.ndim))
    stored = t.detach().permute(order).contiguous()
    n, dims = sizes(stored.shape)
    handle = pointer("od_leaf")(ctypes.c_void_p(ctx), DTYPES[t.dtype], n, dims,
                                order.index(cut) if cut >= 0 else -1,
                                ctypes.c_void_p(stored.data_ptr()),
                                ctypes.c_size_t(stored.numel() * stored.element_size()))
    x = V(ctx, handle, t)
    if x.floating:
        pointer("tsh_requires_grad")(ctypes.c_void_p(handle), 1)
    if transposed and t.ndim > 1:
        x = V(ctx, pointer("tsh_permute")(ctypes.c_void_p(handle),
                                          (ctypes.c_int * t.ndim)(*order)), t)
    x.leaf, x.order = handle, order
    return x
