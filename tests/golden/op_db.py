#!/usr/bin/env python3
"""Runs PyTorch's own samples of its operators through tshard.

    python3 tests/golden/op_db.py [--only NAME] [--verbose]      (PyTorch 2.13; not in CI)

The samples are sample_inputs and reference_inputs of
torch.testing._internal.common_methods_invocations.op_db, in float32, of at most 20,000 elements,
for every operator that tshard has. Each is run forward and backward, with contiguous and with
transposed inputs, on one rank; and on two ranks, with all inputs replicated and with those that
have it sharded along each dimension. Values and gradients are compared with PyTorch's in float64.

A sample is claimed if tshard has what its arguments ask for. Of these it counts: equal; differ;
refused, with an error; crashed. On two ranks, layouts that an op does not take (TSH_ERR_LAYOUT) are
counted apart. Exits with 1 if a sample differs or an operator crashes.
"""

import argparse
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import tempfile

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

HERE = os.path.dirname(os.path.abspath(__file__))
LARGEST = 20000  # elements of all inputs of a sample
F32, I32, I64 = 1, 5, 6  # as tsh_dtype
DTYPES = {torch.float32: F32, torch.int32: I32, torch.int64: I64}
ERR_LAYOUT = "TSH_ERR_LAYOUT"
LIB = None


class NotClaimed(Exception):
    """tshard has no such operator, option or dtype."""


class Refused(Exception):
    """tshard returned an error: its code and sentence."""


def need(condition):
    if not condition:
        raise NotClaimed


# ---------------------------------------------------------------- the library


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
    if x is None:
        return None
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int(x)


class V:
    """A tensor of tshard, with the torch tensor whose shape and dtype it has."""

    def __init__(self, ctx, handle, like):
        if not handle:
            raise refusal(ctx)
        self.ctx, self.handle = ctx, handle
        self.like = like
        self.leaf = None  # the handle that has the gradient
        self.leaf_shape = None
        n = LIB.tsh_ndim(ctypes.c_void_p(handle))
        LIB.tsh_size.restype = ctypes.c_int64
        self.shape = tuple(LIB.tsh_size(ctypes.c_void_p(handle), d) for d in range(n))
        self.dtype = LIB.tsh_dtype_of(ctypes.c_void_p(handle))

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def floating(self):
        return self.dtype == F32

    def read(self):
        kind = {F32: torch.float32, I32: torch.int32, I64: torch.int64}[self.dtype]
        out = torch.empty(self.shape, dtype=kind)
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


def call(name, ctx, *args):
    return V(ctx, pointer(name)(*[convert(a) for a in args]), None)


def sizes(shape):
    return len(shape), (ctypes.c_int64 * max(1, len(shape)))(*shape)


def reshaped(x, shape):
    n, dims = sizes(shape)
    return V(x.ctx, pointer("od_reshape")(ctypes.c_void_p(x.handle), n, dims), None)


def filled(ctx, value, dtype=F32):
    return leaf(ctx, torch.tensor(value, dtype={F32: torch.float32, I32: torch.int32,
                                                I64: torch.int64}[dtype]), -1, False)


def leaf(ctx, t, cut, transposed):
    """An owned tensor of t's values; transposed: stored with its dimensions in reverse order."""
    if t.dtype == torch.bool:
        t = t.to(torch.int32)
    need(t.dtype in DTYPES and t.ndim <= 6)
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


# ---------------------------------------------------------- tshard's operators
# Each function takes what the torch function of the sample takes, with V for tensors, and raises
# NotClaimed for options that tshard does not have.


def number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def unary(name):
    def run(x):
        need(isinstance(x, V) and x.floating)
        return call(name, x.ctx, x)
    return run


def both(a, b):
    need(isinstance(a, V) and (isinstance(b, V) or number(b)))


def add(sign):
    def run(a, b, *, alpha=1):
        both(a, b)
        need(a.floating and number(alpha))
        if number(b):
            return call("tsh_add_scalar", a.ctx, a, float(sign * alpha * b))
        need(b.floating)
        if alpha != 1:
            b = call("tsh_scale", a.ctx, b, float(alpha))
        return call("tsh_add" if sign > 0 else "tsh_sub", a.ctx, a, b)
    return run


def mul(a, b):
    both(a, b)
    need(a.floating)
    if number(b):
        return call("tsh_scale", a.ctx, a, float(b))
    need(b.floating)
    return call("tsh_mul", a.ctx, a, b)


def div(a, b, *, rounding_mode=None):
    both(a, b)
    need(a.floating and rounding_mode is None)
    b = filled(a.ctx, float(b)) if number(b) else b
    need(b.floating)
    return call("tsh_div", a.ctx, a, b)


def power(a, b):
    both(a, b)
    need(a.floating)
    if number(b):
        return call("tsh_pow_scalar", a.ctx, a, float(b))
    need(b.floating)
    return call("tsh_pow", a.ctx, a, b)


def compare(name):
    def run(a, b):
        both(a, b)
        b = filled(a.ctx, b, a.dtype) if number(b) else b
        need(a.dtype == b.dtype)
        return call(name, a.ctx, a, b)
    return run


def where(yes, cond, no):
    need(all(isinstance(t, V) for t in (yes, cond, no)) and yes.floating and no.floating)
    return call("tsh_where", yes.ctx, cond, yes, no)


def one_dim(x, dim):
    """dim as tshard takes it; lists of one dimension are that one."""
    if isinstance(dim, (list, tuple)):
        need(len(dim) == 1 or (len(dim) == 0 and x.ndim == 0) or len(dim) == x.ndim)
        dim = dim[0] if len(dim) == 1 else None
    return -1000 if dim is None else int(dim)


def reduction(name):
    def run(x, dim=None, keepdim=False, *, dtype=None):
        need(isinstance(x, V) and x.floating and dtype in (None, torch.float32))
        return call(name, x.ctx, x, one_dim(x, dim), int(keepdim))
    return run


def largest(x, dim=None, keepdim=False):
    need(isinstance(x, V) and x.floating and not isinstance(dim, (list, tuple, V)))
    return call("tsh_max", x.ctx, x, one_dim(x, dim), int(keepdim))


def softmax(name):
    def run(x, dim=None, dtype=None, **_):
        need(isinstance(x, V) and x.floating and number(dim) and dtype in (None, torch.float32))
        return call(name, x.ctx, x, dim)
    return run


def transpose(x, a, b):
    return call("tsh_transpose", x.ctx, x, a, b)


def permute(x, *dims):
    dims = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else list(dims)
    return V(x.ctx, pointer("tsh_permute")(ctypes.c_void_p(x.handle),
                                           (ctypes.c_int * max(1, len(dims)))(*dims)), None)


def reshape(x, *shape):
    shape = shape[0] if len(shape) == 1 and not number(shape[0]) else shape
    need(not isinstance(shape, V) and len(shape) <= 6)
    return reshaped(x, list(shape))


def reshape_as(x, other):
    return reshaped(x, list(other.shape))


def unsqueeze(x, dim):
    need(x.ndim < 6)
    at = dim if dim >= 0 else dim + x.ndim + 1
    return reshaped(x, [*x.shape[:at], 1, *x.shape[at:]])


def flatten(x, start_dim=0, end_dim=-1):
    need(x.ndim)
    a, b = start_dim % x.ndim, end_dim % x.ndim
    return reshaped(x, [*x.shape[:a], math.prod(x.shape[a:b + 1]), *x.shape[b + 1:]])


def matrix_transpose(x):
    return transpose(x, -1, -2) if x.ndim > 1 else call("tsh_clone", x.ctx, x)


def narrow(x, dim, start, length):
    need(number(start) and number(length) and x.ndim)
    if start < 0:
        start += x.shape[dim]
    return V(x.ctx, pointer("tsh_slice")(ctypes.c_void_p(x.handle), dim, ctypes.c_int64(start),
                                         ctypes.c_int64(length)), None)


def concat(parts, dim=0):
    need(isinstance(parts, (list, tuple)) and parts and all(p.ndim == parts[0].ndim for p in parts))
    array = (ctypes.c_void_p * len(parts))(*[p.handle for p in parts])
    return V(parts[0].ctx, pointer("tsh_concat")(array, len(parts), dim), None)


def matmul(a, b):
    need(a.floating and b.floating and a.ndim > 1 and b.ndim > 1)
    return call("tsh_matmul", a.ctx, a, b)


def linear(x, w, b=None):
    need(w.ndim == 2 and x.ndim > 0)
    return call("tsh_linear", x.ctx, x, w, b)


def embedding(w, ids, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False,
              sparse=False):
    need(not sparse)
    return V(ids.ctx, pointer("od_embedding")(
        ctypes.c_void_p(ids.handle), ctypes.c_void_p(w.handle), int(padding_idx is not None),
        ctypes.c_int64(padding_idx or 0), ctypes.c_double(max_norm or 0),
        ctypes.c_double(norm_type), int(scale_grad_by_freq)), None)


def norm(name, usual):
    def run(x, shape, weight=None, *rest, bias=None, eps=None):
        rest = list(rest)
        bias = rest.pop(0) if name == "tsh_layer_norm" and rest else bias
        eps = rest.pop(0) if rest else eps
        need(len(shape) <= x.ndim and x.floating and (eps is None or eps >= 0))
        eps = -1e-300 if eps == 0 else eps  # TSH_ZERO
        # several dimensions are normalised as one
        last, outer = math.prod(shape), list(x.shape[:x.ndim - len(shape)])
        flat = x if len(shape) == 1 else reshaped(x, outer + [last])
        flats = [None if t is None else t if t.ndim == 1 else reshaped(t, [last])
                 for t in (weight, bias)]
        args = flats if name == "tsh_layer_norm" else flats[:1]
        y = call(name, x.ctx, flat, *args, float(usual if eps is None else eps))
        return y if len(shape) == 1 else reshaped(y, list(x.shape))
    return run


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
              enable_gqa=False):
    need(dropout_p == 0 and q.ndim in (3, 4) and q.ndim == k.ndim and v.shape == k.shape)
    need(not (is_causal and q.shape[-2] != k.shape[-2]))  # torch aligns at the top left
    if q.ndim == 3:
        need(attn_mask is None or attn_mask.ndim == 2)
        q, k, v = (reshaped(t, [t.shape[0], 1, *t.shape[1:]]) for t in (q, k, v))
        three = True
    else:
        need(q.shape[0] == k.shape[0] and (q.shape[1] == k.shape[1] or enable_gqa))
        three = False
    y = V(q.ctx, pointer("od_attention")(
        ctypes.c_void_p(q.handle), ctypes.c_void_p(k.handle), ctypes.c_void_p(v.handle),
        convert(attn_mask), int(is_causal), ctypes.c_double(scale or 0)), None)
    return reshaped(y, [y.shape[0], *y.shape[2:]]) if three else y


def cross_entropy(x, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
                  reduction="mean", label_smoothing=0.0):
    need(size_average is None and reduce is None and x.ndim > 0)
    return V(x.ctx, pointer("od_cross_entropy")(
        ctypes.c_void_p(x.handle), ctypes.c_void_p(target.handle), convert(weight),
        {"mean": 0, "sum": 1, "none": 2}[reduction], int(not target.floating),
        ctypes.c_int64(0 if target.floating else ignore_index),
        ctypes.c_double(label_smoothing)), None)


def cast(dtype):
    def run(x, **rest):
        need(x.floating and rest.get("memory_format") in (None, torch.preserve_format,
                                                          torch.contiguous_format))
        return call("tsh_cast", x.ctx, x, dtype)
    return run


def gelu(x, *, approximate="none"):
    return call("tsh_gelu" if approximate == "none" else "tsh_gelu_tanh", x.ctx, x)


def in_place(name):
    def run(x, inplace=False):
        return call(name, x.ctx, x)
    return run


def clone(x, *, memory_format=None):
    return call("tsh_clone", x.ctx, x)


OPS = {
    "add": add(1), "sub": add(-1), "mul": mul, "div": div, "true_divide": div, "pow": power,
    "neg": unary("tsh_neg"), "exp": unary("tsh_exp"),
    "log": unary("tsh_log"), "sqrt": unary("tsh_sqrt"), "sigmoid": unary("tsh_sigmoid"),
    "tanh": unary("tsh_tanh"), "erf": unary("tsh_erf"), "nn.functional.relu": in_place("tsh_relu"),
    "nn.functional.silu": in_place("tsh_silu"), "nn.functional.gelu": gelu, "clone": clone,
    "eq": compare("tsh_eq"), "ne": compare("tsh_ne"), "lt": compare("tsh_lt"),
    "le": compare("tsh_le"), "gt": compare("tsh_gt"), "ge": compare("tsh_ge"), "where": where,
    "sum": reduction("tsh_sum"), "mean": reduction("tsh_mean"), "max": largest,
    "argmax": reduction("tsh_argmax"), "softmax": softmax("tsh_softmax"),
    "log_softmax": softmax("tsh_log_softmax"), "transpose": transpose, "permute": permute,
    "reshape": reshape, "view": reshape, "view_as": reshape_as,
    "reshape_as": reshape_as, "unsqueeze": unsqueeze, "flatten": flatten, "swapaxes": transpose,
    "t": matrix_transpose, "mT": matrix_transpose, "narrow": narrow, "cat": concat,
    "matmul": matmul, "mm": matmul, "bmm": matmul, "nn.functional.linear": linear,
    "nn.functional.embedding": embedding,
    "nn.functional.layer_norm": norm("tsh_layer_norm", 1e-5),
    "nn.functional.rms_norm": norm("tsh_rms_norm", torch.finfo(torch.float32).eps),
    "nn.functional.scaled_dot_product_attention": attention,
    "nn.functional.cross_entropy": cross_entropy, "int": cast(I32), "long": cast(I64),
}

# --------------------------------------------------------------- one comparison


def clamped(x, dtype):
    """What tsh_cast documents where torch's result is C's undefined behaviour."""
    ends, values = torch.iinfo(dtype), torch.nan_to_num(x.double(), 0)
    low, high = values <= float(ends.min), values >= float(ends.max)
    whole = torch.where(low | high, 0, values).to(torch.int64)
    return whole.masked_fill(low, ends.min).masked_fill(high, ends.max).to(dtype)


def wanted(op, args, kwargs, dtype, only_first=False):
    """Torch's output in dtype, the weights of the loss, and the gradients of all tensors;
    only_first: of the first one, as torch has none for the others."""
    flat, spec = tree_flatten((args, kwargs))
    leaves = []
    for i, t in enumerate(flat):
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            flat[i] = t.detach().to(dtype).clone().requires_grad_(not only_first or not leaves)
        elif t is torch.float32:
            flat[i] = dtype
        if isinstance(t, torch.Tensor):
            leaves.append(flat[i])
    a, k = tree_unflatten(flat, spec)
    try:
        y = op.op(*a, **k)
    except RuntimeError as error:
        if only_first or "not differentiable" not in str(error):
            raise
        return wanted(op, args, kwargs, dtype, True)
    y = y[0] if isinstance(y, tuple) else y
    if op.name in ("int", "long"):
        y = clamped(flat[0], y.dtype)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    grads = [None] * len(leaves)
    if y.is_floating_point() and y.requires_grad:
        (y * weights.to(y.dtype)).sum().backward()
        grads = [t.grad if t.is_floating_point() else None for t in leaves]
    return y.detach(), weights, grads


def same(got, want, coarse):
    """Whether got equals want, in float64, but for rounding: 2e-5 relative to the larger of 1 and
    the value, and 8 times the error of torch's own float32."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not got.is_floating_point():
        got, want = got.to(torch.int64), want.to(torch.int64)
        at = (got != want).flatten().nonzero()
        return f"{got.flatten()[at[0]]}, not {want.flatten()[at[0]]}" if len(at) else ""
    g, w, c = got.double(), want.double(), coarse.double()
    bound = 2e-5 * w.abs().clamp(min=1) + 8 * torch.nan_to_num((c - w).abs(), 0, 0, 0)
    ok = (g == w) | ((g - w).abs() <= bound) | (g.isnan() & w.isnan())
    ok |= g == c  # an overflow of float32, as torch has it
    ok |= g.isnan() & c.isnan()
    if bool(ok.all()):
        return ""
    at = int((~ok).flatten().nonzero()[0])
    return f"{g.flatten()[at]:.9g}, not {w.flatten()[at]:.9g}, at {at} of {g.numel()}"


def attempt(ctx, fn, args, kwargs, cut, alone, transposed, want, coarse):
    """Runs a sample on this rank; "" if all is equal, else what differs. cut: the dimension, of the
    tensor that has most, along which tensors are sharded (shapes are aligned at the right); alone:
    only the first is."""
    flat, spec = tree_flatten((args, kwargs))
    leaves = []
    most = max(t.ndim for t in flat if isinstance(t, torch.Tensor))
    for i, t in enumerate(flat):
        if isinstance(t, torch.Tensor):
            d = cut - (most - t.ndim) if cut >= 0 and not (alone and leaves) else -1
            flat[i] = leaf(ctx, t, d if d >= 0 and t.shape[d] != 1 else -1, transposed)
            leaves.append(flat[i])
    a, k = tree_unflatten(flat, spec)
    y = fn(*a, **k)
    (output, weights, grads), (rough, _, rough_grads) = want, coarse
    result = same(V(ctx, pointer("od_full")(ctypes.c_void_p(y.handle)), None).read(),
                  output.to(torch.int32) if output.dtype == torch.bool else output, rough)
    if result:
        return "output: " + result
    if not any(g is not None for g in grads) or not y.floating:
        return ""
    if LIB.od_backward(ctypes.c_void_p(ctx), ctypes.c_void_p(y.handle),
                       ctypes.c_void_p(weights.data_ptr()), ctypes.c_size_t(4 * weights.numel())):
        raise refusal(ctx)
    for i, x in enumerate(leaves):
        handle = pointer("tsh_grad")(ctypes.c_void_p(x.leaf)) if grads[i] is not None else None
        if grads[i] is None or (not handle and not LIB.od_has_error(ctypes.c_void_p(ctx))
                                and not bool(grads[i].any())):
            continue
        if not handle and fn is cross_entropy and i:
            continue  # probabilities and weights of classes get no gradient
        if not handle:
            return f"gradient {i}: none ({LIB.od_message(ctypes.c_void_p(ctx))})"
        back = V(ctx, handle, None).read().permute(x.order)
        result = same(back, grads[i], rough_grads[i])
        if result:
            return f"gradient {i}: {result}"
    return ""


FN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def run(ranks, *sample):
    """Runs a sample on so many ranks: "equal", "differ", "refused", "layout" or "skip", and why."""
    outcome = [None] * ranks

    def rank(ctx, _):
        place = LIB.od_rank(ctypes.c_void_p(ctx))
        LIB.od_barrier(ctypes.c_void_p(ctx))  # all ranks are open before one fails
        try:
            why = attempt(ctx, *sample)
            outcome[place] = ("differ", why) if why else ("equal", "")
        except NotClaimed:
            outcome[place] = ("skip", "")
        except Refused as error:
            code, text = error.args
            outcome[place] = ("layout" if code == ERR_LAYOUT and ranks > 1 else "refused", text)
        except Exception as error:  # of this script
            outcome[place] = ("script", repr(error))
        return 0

    LIB.od_run(ranks, FN(rank))
    order = ["script", "differ", "refused", "layout", "skip", "equal"]
    return min((o or ("refused", "no ctx") for o in outcome), key=lambda o: order.index(o[0]))


def describe(args, kwargs):
    flat, spec = tree_flatten((args, kwargs))
    return str(tree_unflatten([f"{str(t.dtype)[6:]}{tuple(t.shape)}" if isinstance(
        t, torch.Tensor) else t for t in flat], spec))


def samples(op):
    """The samples of op, each once, of at most LARGEST elements: (args, kwargs, tensors)."""
    seen = set()
    for source in (op.sample_inputs, op.reference_inputs):
        torch.manual_seed(0)
        for sample in source("cpu", torch.float32, requires_grad=False):
            args, kwargs = (sample.input, *sample.args), sample.kwargs
            tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
            if not tensors or sum(t.numel() for t in tensors) > LARGEST:
                continue
            key = (describe(args, kwargs), *(t.contiguous().numpy().tobytes() for t in tensors))
            if key not in seen:
                seen.add(key)
                yield args, kwargs, tensors


def run_op(op, fn, verbose):
    """Runs all samples of an operator; returns how often what came out, by ranks and layouts."""
    counts = {}

    def count(where, outcome):
        kind, why = outcome
        counts.setdefault(where, {}).setdefault(kind, 0)
        counts[where][kind] += 1
        if kind in ("differ", "script") or (kind == "refused" and verbose):
            print(f"{op.name} {where}: {kind}: {describe(args, kwargs)}: {why}", flush=True)

    for args, kwargs, tensors in samples(op):
        try:
            want = wanted(op, args, kwargs, torch.float64)
            coarse = wanted(op, args, kwargs, torch.float32)
        except Exception as error:  # such as float64 against an argument of float32
            if verbose:
                print(f"{op.name}: torch itself: {describe(args, kwargs)}: {error}", flush=True)
            continue
        outcome = run(1, fn, args, kwargs, -1, False, False, want, coarse)
        if outcome[0] == "skip":
            continue
        count("1 rank, contiguous", outcome)
        count("1 rank, transposed", run(1, fn, args, kwargs, -1, False, True, want, coarse))
        count("2 ranks, R", run(2, fn, args, kwargs, -1, False, False, want, coarse))
        for cut in range(max(t.ndim for t in tensors)):
            for alone in range(1 + (len(tensors) > 1)):
                outcome = run(2, fn, args, kwargs, cut, alone, False, want, coarse)
                count(f"2 ranks, S({cut})" + (", the first alone" if alone else ""), outcome)
    return counts


def in_child(op, fn, verbose):
    """run_op in a process of its own; a signal is a crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            json.dump(run_op(op, fn, verbose), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) or not text:
        print(f"{op.name}: crashed: {signal.Signals(os.WTERMSIG(status)).name}", flush=True)
        return {"all": {"crashed": 1}}
    return json.loads(text)


def main():
    global LIB
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="operators whose name holds this")
    parser.add_argument("--library", help="the shared library of op_db.c, if it is built already")
    parser.add_argument("--verbose", action="count", default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    total = {}
    with tempfile.TemporaryDirectory() as folder:
        LIB = ctypes.CDLL(args.library or build(folder))
        for op in op_db:
            fn = OPS.get(op.name)
            if not fn or (args.only and args.only not in op.name):
                continue
            for where, kinds in in_child(op, fn, args.verbose).items():
                for kind, n in kinds.items():
                    total.setdefault(where, {}).setdefault(kind, 0)
                    total[where][kind] += n
    for where in sorted(total):
        print(f"{where}: {sum(total[where].values())} claimed: " +
              ", ".join(f"{n} {kind}" for kind, n in sorted(total[where].items())))
    bad = sum(kinds.get(k, 0) for kinds in total.values() for k in ("differ", "crashed", "script"))
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
