"""tshard's operators for op_db.py, by the names that PyTorch's op_db gives them.

Each function takes what the torch function of the sample takes, with V for tensors, and raises
NotClaimed for options that tshard does not have. It returns the output, or a list of it and of
further outputs whose values are compared, too.
"""

import ctypes
import math

import torch

from op_db_library import (F32, I32, I64, NotClaimed, V, call, call_result, constant, convert,
                           filled, function,
                           int64, need, pointer, refusal, reshaped, sizes)

DTYPE, DIMS, UNBATCHED = "a dtype", "several dimensions, but not all", "no batch dimension"


def number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def zero(x):
    """A real option that is x: 0 is TSH_ZERO."""
    return float(x) if x else -1e-300


def unary(name):
    def run(x, inplace=False):
        need(isinstance(x, V) and x.floating)
        return call(name, x)
    return run


def tensors(a, b):
    need(isinstance(a, V) and isinstance(b, V) and a.floating and b.floating)


def binary(name):
    def run(a, b):
        tensors(a, b)
        return call(name, a, b)
    return run


def both(a, b):
    need(isinstance(a, V) and (isinstance(b, V) or number(b)))


def add(sign):
    def run(a, b, *, alpha=1):
        both(a, b)
        need(a.floating and number(alpha))
        if number(b):
            return call("tsh_add_scalar", a, float(sign * alpha * b))
        need(b.floating)
        if alpha != 1:
            b = call("tsh_scale", b, float(alpha))
        return call("tsh_add" if sign > 0 else "tsh_sub", a, b)
    return run


def mul(a, b):
    both(a, b)
    need(a.floating)
    if number(b):
        return call("tsh_scale", a, float(b))
    need(b.floating)
    return call("tsh_mul", a, b)


def div(a, b, *, rounding_mode=None):
    both(a, b)
    need(a.floating and rounding_mode is None)
    b = filled(a.ctx, float(b), a.dtype) if number(b) else b
    need(b.floating)
    return call("tsh_div", a, b)


def power(a, b):
    both(a, b)
    need(a.floating)
    if number(b):
        return call("tsh_pow_scalar", a, float(b))
    need(b.floating)
    return call("tsh_pow", a, b)


def compare(name):
    def run(a, b):
        both(a, b)
        b = filled(a.ctx, b, a.dtype) if number(b) else b
        need(a.dtype == b.dtype)
        return call(name, a, b)
    return run


def where(yes, cond, no):
    need(all(isinstance(t, V) for t in (yes, cond, no)) and yes.floating and no.floating)
    return call("tsh_where", cond, yes, no)


def one_dim(x, dim):
    """dim as tshard takes it; lists of one dimension are that one."""
    if isinstance(dim, (list, tuple)):
        need(len(dim) == 1 or (len(dim) == 0 and x.ndim == 0) or len(dim) == x.ndim, DIMS)
        dim = dim[0] if len(dim) == 1 else None
    return -1000 if dim is None else int(dim)


def reduction(name):
    def run(x, dim=None, keepdim=False, *, dtype=None):
        need(isinstance(x, V) and x.floating and dtype in (None, torch.float32), DTYPE)
        return call(name, x, one_dim(x, dim), int(keepdim))
    return run


def largest(reduced, compared):
    def run(x, dim=None, keepdim=False, *, other=None):
        other = dim if isinstance(dim, V) else other
        if other is not None:
            return binary(compared)(x, other)
        need(isinstance(x, V) and x.floating and not isinstance(dim, (list, tuple)))
        return call(reduced, x, one_dim(x, dim), int(keepdim))
    return run


def clamp(x, min=None, max=None):
    need(x.floating, DTYPE)
    need(not isinstance(min, V) and not isinstance(max, V), "limits that are tensors")
    return call("tsh_clamp", x, *(math.nan if a is None else float(a) for a in (min, max)))


def clamp_one(at):
    def run(x, limit):
        return clamp(x, **{at: limit})
    return run


def variance(name):
    def run(x, dim=None, unbiased=None, keepdim=False, *, correction=None):
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        correction = 1 if correction is None else correction
        correction = correction if unbiased is None else int(unbiased)
        return call(name, x, one_dim(x, dim), zero(correction), int(keepdim))
    return run


def p_norm(x, p, dim, keepdim):
    return call("tsh_norm", x, zero(p), one_dim(x, dim), int(keepdim))


def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    need(dtype in (None, torch.float32), DTYPE)
    return p_norm(x, ord, dim, keepdim)


def any_norm(x, ord=None, dim=None, keepdim=False, *, dtype=None):
    need(dtype in (None, torch.float32), DTYPE)
    matrix = len(dim) == 2 if isinstance(dim, (list, tuple)) else dim is None and x.ndim == 2
    need(number(ord) and not matrix or ord is None, "a norm of matrices")
    return p_norm(x, 2 if ord is None else ord, dim, keepdim)


def old_norm(x, p="fro", dim=None, keepdim=False, *, dtype=None):
    need(p != "nuc" and (number(p) or p == "fro"), "a norm of matrices")
    return p_norm(x, 2 if p == "fro" else p, dim, keepdim)


def cumsum(x, dim, *, dtype=None):
    need(dtype in (None, torch.float32) or not x.floating and dtype == torch.int64, DTYPE)
    return call("tsh_cumsum", x, dim)


def softmax(name):
    def run(x, dim=None, dtype=None, **_):
        need(isinstance(x, V) and x.floating and number(dim) and dtype in (None, torch.float32))
        return call(name, x, dim)
    return run


def transpose(x, a, b):
    return call("tsh_transpose", x, a, b)


def permute(x, *dims):
    dims = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else list(dims)
    return call("tsh_permute", x, (ctypes.c_int * max(1, len(dims)))(*dims))


def reshape(x, *shape):
    shape = shape[0] if len(shape) == 1 and not number(shape[0]) else shape
    need(not isinstance(shape, V) and len(shape) <= 6)
    return reshaped(x, list(shape))


def reshape_as(x, other):
    return reshaped(x, list(other.shape))


def unsqueeze(x, dim):
    return call("tsh_unsqueeze", x, dim)


def squeeze(x, dim=None):
    if not isinstance(dim, (list, tuple)):
        return call("tsh_squeeze", x, -1000 if dim is None else dim)
    for d in sorted((d % max(x.ndim, 1) for d in dim), reverse=True):
        x = call("tsh_squeeze", x, d)
    return x


def expand(x, *shape):
    shape = shape[0] if len(shape) == 1 and not number(shape[0]) else shape
    return call("od_expand", x, *sizes(shape.shape if isinstance(shape, V) else shape))


def repeat(x, *repeats):
    repeats = repeats[0] if len(repeats) == 1 and not number(repeats[0]) else repeats
    return call("tsh_tile", x, int64(*repeats), len(repeats))


def repeat_interleave(x, repeats, dim=None, *, output_size=None):
    need(number(repeats) and output_size is None, "a number of repeats for each element")
    if dim is None:
        x, dim = reshaped(x, [-1]), 0
    return call("tsh_repeat_interleave", x, ctypes.c_int64(repeats), dim)


def pad(x, pad, mode="constant", value=None):
    modes = ["constant", "reflect", "replicate", "circular"]
    return call("tsh_pad", x, int64(*pad), len(pad) // 2, modes.index(mode), float(value or 0))


def constant_pad(x, by, value=0):
    return pad(x, by, "constant", value)


def flip(x, dims):
    """One call for each dimension."""
    x = x if len(dims) else call("tsh_clone", x)
    for d in dims:
        x = call("tsh_flip", x, d)
    return x


def flip_at(dim):
    def run(x):
        return flip(x, [dim])
    return run


def roll(x, shifts, dims=None):
    if dims in (None, ()):
        return reshaped(call("tsh_roll", reshaped(x, [-1]), ctypes.c_int64(shifts), 0), x.shape)
    for s, d in zip(*([a] if number(a) else a for a in (shifts, dims))):
        x = call("tsh_roll", x, ctypes.c_int64(s), d)
    return x


def slice_step(x, dim=0, start=None, end=None, step=1):
    end = 2**63 - 1 if end is None else min(end, 2**63 - 1)
    return call("tsh_slice_step", x, dim, ctypes.c_int64(start or 0), ctypes.c_int64(end),
                ctypes.c_int64(1 if step is None else step))


def item(x, at):
    """x[at] for numbers and slices."""
    at = list(at) if isinstance(at, tuple) else [at]
    need(all(number(a) or isinstance(a, slice) or a is Ellipsis or a is None for a in at),
         "lists of indices")
    if Ellipsis in at:
        i = at.index(Ellipsis)
        at[i:i + 1] = [slice(None)] * (x.ndim + 1 + at.count(None) - len(at))
    d = 0
    for a in at:
        if a is None:
            x = unsqueeze(x, d)
        elif number(a):
            x = select(x, d, a)
            continue
        else:
            x = slice_step(x, d, a.start, a.stop, a.step)
        d += 1
    return x


def select(x, dim, index):
    return call("tsh_squeeze", narrow(x, dim, index, 1), dim)


def triangle(name):
    def run(x, diagonal=0):
        return call(name, x, ctypes.c_int64(diagonal))
    return run


def one_hot(ids, num_classes=-1):
    need(num_classes > 0, "a number of classes taken from the values")
    return call("tsh_one_hot", ids, ctypes.c_int64(num_classes))


def masked_fill(x, mask, value):
    need(number(value) or isinstance(value, bool), "a value that is a tensor")
    return call("tsh_masked_fill", x, mask, float(value))


def gather(x, dim, index, *, sparse_grad=False):
    need(not sparse_grad)
    return call("tsh_gather", x, dim, index)


def take_along_dim(x, index, dim=None):
    if dim is None:
        return call("tsh_gather", reshaped(x, [-1]), 0, reshaped(index, [-1]))
    need(all(a == b for d, (a, b) in enumerate(zip(x.shape, index.shape)) if d != dim % x.ndim),
         "an index that is broadcast")
    return call("tsh_gather", x, dim, index)


def scatter_add(x, dim, index, src):
    return call("tsh_scatter_add", x, dim, index, src)


def index_select(x, dim, index):
    return call("tsh_index_select", x, dim, index)


def with_indices(name, x, *args):
    """A value and its indices, which are the last argument's."""
    indices = ctypes.c_void_p()
    pointer_to = ctypes.cast(ctypes.byref(indices), ctypes.c_void_p)
    value = call(name, x, *args, pointer_to)
    return [value, V(x.ctx, indices.value, None)]


def sort(x, dim=-1, descending=False, *, stable=None):
    return with_indices("tsh_sort", x, dim, int(descending))


def msort(x):
    return sort(x, 0)[0]


def argsort(x, dim=-1, descending=False, *, stable=None):
    return call("tsh_argsort", x, dim, int(descending))


def topk(x, k, dim=-1, largest=True, sorted=True):
    need(sorted, "an order that is not specified")
    value, index = with_indices("tsh_topk", x, ctypes.c_int64(k), dim, int(largest))
    return [value, call("tsh_gather", x, dim, index)]


def torch_topk(*args, **kwargs):
    """What topk is compared with: which of equal elements torch chooses is not specified, so the
    elements that the indices name are compared."""
    value, _ = torch.topk(*args, **kwargs)
    return value, value.detach()


def einsum(operands, equation):
    operands = operands if isinstance(operands, (list, tuple)) else [operands]
    need(len(operands) <= 2, "three inputs")
    return call("tsh_einsum", ctypes.c_char_p(equation.encode()), *operands,
                *[None] * (2 - len(operands)))


def outer(a, b):
    return einsum([a, b], "i,j->ij")


def trace(x):
    return einsum([x], "ii->")


def diagonal(x, offset=0, dim1=0, dim2=1):
    need(offset == 0 and x.shape[dim1] == x.shape[dim2], "a diagonal beside the main one")
    letters = [chr(97 + d) for d in range(x.ndim)]
    letters[dim1] = letters[dim2] = "z"
    rest = "".join(c for c in letters if c != "z")
    return einsum([x], "".join(letters) + "->" + rest + "z")


def tensordot(a, b, dims=2):
    if number(dims):
        dims = [list(range(a.ndim - dims, a.ndim)), list(range(dims))]
    left = [chr(97 + d) for d in range(a.ndim)]
    right = [chr(65 + d) for d in range(b.ndim)]
    for i, j in zip(*dims):
        right[j] = left[i]
    once = [c for c in left + right if (left + right).count(c) == 1]
    return einsum([a, b], "%s,%s->%s" % tuple("".join(s) for s in (left, right, once)))


def flatten(x, start_dim=0, end_dim=-1):
    need(x.ndim)
    a, b = start_dim % x.ndim, end_dim % x.ndim
    return reshaped(x, [*x.shape[:a], math.prod(x.shape[a:b + 1]), *x.shape[b + 1:]])


def matrix_transpose(x):
    return transpose(x, -1, -2) if x.ndim > 1 else call("tsh_clone", x)


def narrow(x, dim, start, length):
    need(number(start) and number(length) and x.ndim)
    if start < 0:
        start += x.shape[dim]
    return call("tsh_slice", x, dim, ctypes.c_int64(start), ctypes.c_int64(length))


def split(x, size, dim=0):
    need(number(size) and size and x.shape[dim] % size == 0, "parts of different sizes")
    parts = (ctypes.c_void_p * (x.shape[dim] // size))()
    if call_result("tsh_split", x, dim, len(parts), parts):
        raise refusal(x.ctx)
    return [V(x.ctx, part, None) for part in parts]


def chunk(x, chunks, dim=0):
    need(x.shape[dim] % chunks == 0, "parts of different sizes")
    return split(x, x.shape[dim] // chunks, dim)


def listed(name):
    """An operator on a list of tensors, along a dimension."""
    def run(parts, dim=0):
        need(isinstance(parts, (list, tuple)) and parts)
        need(name == "tsh_stack" or all(p.ndim == parts[0].ndim for p in parts))
        array = (ctypes.c_void_p * len(parts))(*[p.handle for p in parts])
        return V(parts[0].ctx, pointer(name)(array, len(parts), dim), None)
    return run


def matmul(a, b):
    need(a.floating and b.floating and a.ndim > 1 and b.ndim > 1)
    return call("tsh_matmul", a, b)


def linear(x, w, b=None):
    need(w.ndim == 2 and x.ndim > 0)
    return call("tsh_linear", x, w, b)


def embedding(w, ids, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False,
              sparse=False):
    need(not sparse)
    return call("od_embedding", ids, w, int(padding_idx is not None),
                ctypes.c_int64(padding_idx or 0), float(max_norm or 0), float(norm_type),
                int(scale_grad_by_freq))


def norm(name, usual):
    def run(x, shape, weight=None, *rest, bias=None, eps=None):
        rest = list(rest)
        bias = rest.pop(0) if name == "tsh_layer_norm" and rest else bias
        eps = rest.pop(0) if rest else eps
        need(len(shape) <= x.ndim and x.floating)
        # several dimensions are normalised as one
        last, outer = math.prod(shape), list(x.shape[:x.ndim - len(shape)])
        flat = x if len(shape) == 1 else reshaped(x, outer + [last])
        flats = [None if t is None else t if t.ndim == 1 else reshaped(t, [last])
                 for t in (weight, bias)]
        args = flats if name == "tsh_layer_norm" else flats[:1]
        y = call(name, flat, *args, zero(usual if eps is None else eps))
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
    y = call("od_attention", q, k, v, attn_mask, int(is_causal), float(scale or 0))
    return reshaped(y, [y.shape[0], *y.shape[2:]]) if three else y


def cross_entropy(x, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
                  reduction="mean", label_smoothing=0.0):
    need(size_average is None and reduce is None and x.ndim > 0)
    return call("od_cross_entropy", x, constant(target), constant(weight),
                REDUCTIONS[reduction], int(not target.floating),
                ctypes.c_int64(0 if target.floating else ignore_index), float(label_smoothing))


REDUCTIONS = {"mean": 0, "sum": 1, "none": 2, "batchmean": 3}


def loss(name):
    def run(x, target, weight=None, size_average=None, reduce=None, reduction="mean", *,
            pos_weight=None, delta=None, beta=None, log_target=False, ignore_index=-100):
        need(size_average is None and reduce is None)
        need(name == "tsh_nll_loss" or x.shape == target.shape, "shapes that differ")
        turn = beta if delta is None else delta
        return call("od_loss", function(name), x, target, REDUCTIONS[reduction], constant(weight),
                    constant(pos_weight), 0.0 if turn is None else zero(turn), int(log_target),
                    ctypes.c_int64(ignore_index))
    return run


def cosine_similarity(a, b, dim=1, eps=1e-8):
    return call("tsh_cosine_similarity", a, b, dim, zero(eps))


def pairs(n, *options):
    """The options, each one number or n of them, as two numbers each."""
    out = []
    for x in options:
        x = [x] * n if number(x) else list(x)
        x = x * n if len(x) == 1 else x
        out += (x + [0, 0])[:2]
    return out


def conv(name, n, transposed=False):
    def run(x, w, b=None, stride=1, padding=0, *rest, output_padding=0, groups=1, dilation=1):
        rest = list(rest)
        if transposed:
            output_padding = rest.pop(0) if rest else output_padding
            groups = rest.pop(0) if rest else groups
        dilation = rest.pop(0) if rest else dilation
        groups = rest.pop(0) if rest else groups
        need(x.ndim == n + 2, UNBATCHED)
        if padding == "same":
            both = [d * (k - 1) for d, k in zip(pairs(n, dilation), w.shape[2:])]
            need(all(p % 2 == 0 for p in both), "padding of one side")
            padding = [p // 2 for p in both]
        padding = 0 if padding == "valid" else padding
        return call("od_conv", function(name), x, w, b,
                    int64(*pairs(n, stride, padding, output_padding, dilation), groups))
    return run


def max_pool(name, n):
    def run(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False,
            return_indices=False):
        need(x.ndim == n + 2, UNBATCHED)
        need(not return_indices, "indices of the maxima")
        stride = kernel_size if stride in (None, (), []) else stride
        return call("od_pool", function(name), x,
                    int64(*pairs(n, kernel_size, stride, padding, dilation), int(ceil_mode), 1, 0))
    return run


def avg_pool(name, n):
    def run(x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
            divisor_override=None):
        need(x.ndim == n + 2, UNBATCHED)
        stride = kernel_size if stride in (None, (), []) else stride
        return call("od_pool", function(name), x,
                    int64(*pairs(n, kernel_size, stride, padding, 1), int(ceil_mode),
                          int(count_include_pad), divisor_override or 0))
    return run


def adaptive_avg_pool(name, n):
    def run(x, size):
        need(x.ndim == n + 2, UNBATCHED)
        size = [size] * n if number(size) or size is None else list(size)
        size = [x.shape[2 + d] if s is None else s for d, s in enumerate(size)]
        return call(name, x, *[ctypes.c_int64(s) for s in size])
    return run


def interpolate(x, size=None, scale_factor=None, mode="nearest", align_corners=None,
                recompute_scale_factor=None, antialias=False):
    n = x.ndim - 2
    need(n in (1, 2), "three dimensions")
    need(mode in ("nearest", "linear", "bilinear") and not antialias, "a mode")
    scale = pairs(n, scale_factor or 0)
    if recompute_scale_factor:
        size, scale = [math.floor(x.shape[2 + d] * scale[d]) for d in range(n)], [0, 0]
    return call("od_interpolate", x, int64(*pairs(n, size or 0)), (ctypes.c_double * 2)(*scale),
                int(mode != "nearest"), int(bool(align_corners)))


def upsample(mode, corners):
    def run(x, size=None, scale_factor=None):
        return interpolate(x, size, scale_factor, mode, corners)
    return run


def pixel_shuffle(x, upscale_factor):
    need(x.ndim == 4, "no or several batch dimensions")
    return call("tsh_pixel_shuffle", x, ctypes.c_int64(upscale_factor))


def batch_norm(x, mean, variance, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    for t in (mean, variance):
        if t is not None:
            pointer("tsh_requires_grad")(convert(t), 0)
            constant(t)
    y = call("od_batch_norm", x, weight, bias, mean, variance, int(training), zero(momentum),
             zero(eps))
    return [y] + [t for t in (mean, variance) if t is not None]


def torch_batch_norm(x, mean, variance, *args, **kwargs):
    """What batch_norm is compared with: the running statistics are outputs, too."""
    mean, variance = (t if t is None else t.detach().clone() for t in (mean, variance))
    y = torch.nn.functional.batch_norm(x, mean, variance, *args, **kwargs)
    return (y, *(t for t in (mean, variance) if t is not None))


def group_norm(x, groups, weight=None, bias=None, eps=1e-5):
    return call("tsh_group_norm", x, ctypes.c_int64(groups), weight, bias, zero(eps))


def instance_norm(x, running_mean=None, running_var=None, weight=None, bias=None,
                  use_input_stats=True, momentum=0.1, eps=1e-5):
    need(running_mean is None and running_var is None, "running statistics")
    need(use_input_stats)
    return call("tsh_instance_norm", x, weight, bias, zero(eps))


def softplus(x, beta=1, threshold=20):
    need(threshold == 20, "another threshold")
    return call("tsh_softplus", x, float(beta))


def elu(x, alpha=1.0, inplace=False):
    return call("tsh_elu", x, zero(alpha))


def leaky_relu(x, negative_slope=0.01, inplace=False):
    return call("tsh_leaky_relu", x, zero(negative_slope))


def rounded(x, *, decimals=0):
    need(decimals == 0, "decimals")
    return call("tsh_round", x)


def cast(dtype):
    def run(x, **rest):
        need(x.floating and rest.get("memory_format") in (None, torch.preserve_format,
                                                          torch.contiguous_format))
        return call("tsh_cast", x, dtype)
    return run


def gelu(x, *, approximate="none"):
    return call("tsh_gelu" if approximate == "none" else "tsh_gelu_tanh", x)


def clone(x, *, memory_format=None):
    return call("tsh_clone", x)


OPS = {
    "add": add(1), "sub": add(-1), "mul": mul, "div": div, "true_divide": div, "pow": power,
    "neg": unary("tsh_neg"), "exp": unary("tsh_exp"),
    "log": unary("tsh_log"), "sqrt": unary("tsh_sqrt"), "sigmoid": unary("tsh_sigmoid"),
    "tanh": unary("tsh_tanh"), "erf": unary("tsh_erf"), "nn.functional.relu": unary("tsh_relu"),
    "nn.functional.silu": unary("tsh_silu"), "nn.functional.gelu": gelu, "clone": clone,
    "eq": compare("tsh_eq"), "ne": compare("tsh_ne"), "lt": compare("tsh_lt"),
    "le": compare("tsh_le"), "gt": compare("tsh_gt"), "ge": compare("tsh_ge"), "where": where,
    "sum": reduction("tsh_sum"), "mean": reduction("tsh_mean"),
    "max": largest("tsh_max", "tsh_maximum"),
    "min": largest("tsh_min", "tsh_minimum"),
    "argmax": reduction("tsh_argmax"), "softmax": softmax("tsh_softmax"),
    "log_softmax": softmax("tsh_log_softmax"), "transpose": transpose, "permute": permute,
    "reshape": reshape, "view": reshape, "view_as": reshape_as,
    "reshape_as": reshape_as, "unsqueeze": unsqueeze, "flatten": flatten, "swapaxes": transpose,
    "t": matrix_transpose, "mT": matrix_transpose, "narrow": narrow, "cat": listed("tsh_concat"),
    "matmul": matmul, "mm": matmul, "bmm": matmul, "nn.functional.linear": linear,
    "nn.functional.embedding": embedding,
    "nn.functional.layer_norm": norm("tsh_layer_norm", 1e-5),
    "nn.functional.rms_norm": norm("tsh_rms_norm", torch.finfo(torch.float32).eps),
    "nn.functional.scaled_dot_product_attention": attention,
    "nn.functional.cross_entropy": cross_entropy, "int": cast(I32), "long": cast(I64),
    **{name: unary("tsh_" + name) for name in (
        "abs", "sign", "sin", "cos", "floor", "ceil", "rsqrt", "reciprocal", "expm1", "log1p")},
    **{"nn.functional." + name: unary("tsh_" + name) for name in (
        "selu", "mish", "relu6", "hardsigmoid", "hardswish")},
    "nn.functional.logsigmoid": unary("tsh_log_sigmoid"), "nn.functional.softplus": softplus,
    "nn.functional.elu": elu, "nn.functional.leaky_relu": leaky_relu, "round": rounded,
    "clamp": clamp, "clamp_min": clamp_one("min"), "clamp_max": clamp_one("max"),
    "minimum": binary("tsh_minimum"), "maximum": binary("tsh_maximum"),
    "argmin": reduction("tsh_argmin"), "logsumexp": reduction("tsh_logsumexp"),
    "var": variance("tsh_var"), "std": variance("tsh_std"), "norm": old_norm,
    "linalg.vector_norm": vector_norm, "linalg.norm": any_norm, "prod": reduction("tsh_prod"),
    "cumsum": cumsum, "masked_fill": masked_fill, "stack": listed("tsh_stack"),
    "squeeze": squeeze, "expand": expand, "expand_as": expand, "broadcast_to": expand,
    "nn.functional.pad": pad, "constant_pad_nd": constant_pad, "flip": flip, "fliplr": flip_at(1),
    "flipud": flip_at(0), "roll": roll, "slice": slice_step, "__getitem__": item,
    "select": select, "split": split, "chunk": chunk, "gather": gather,
    "take_along_dim": take_along_dim, "scatter_add": scatter_add, "index_select": index_select,
    "topk": topk, "sort": sort, "msort": msort, "argsort": argsort,
    "nn.functional.one_hot": one_hot, "tril": triangle("tsh_tril"), "triu": triangle("tsh_triu"),
    "tile": repeat, "repeat": repeat, "repeat_interleave": repeat_interleave, "einsum": einsum,
    "outer": outer, "trace": trace, "diagonal": diagonal, "tensordot": tensordot,
    **{"nn.functional." + name: loss("tsh_" + name) for name in (
        "mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "nll_loss", "kl_div")},
    "nn.functional.cosine_similarity": cosine_similarity,
    **{f"nn.functional.conv{n}d": conv(f"tsh_conv{n}d", n) for n in (1, 2)},
    **{f"nn.functional.conv_transpose{n}d": conv(f"tsh_conv_transpose{n}d", n, True)
       for n in (1, 2)},
    **{f"nn.functional.max_pool{n}d": max_pool(f"tsh_max_pool{n}d", n) for n in (1, 2)},
    **{f"nn.functional.avg_pool{n}d": avg_pool(f"tsh_avg_pool{n}d", n) for n in (1, 2)},
    **{f"nn.functional.adaptive_avg_pool{n}d": adaptive_avg_pool(f"tsh_adaptive_avg_pool{n}d", n)
       for n in (1, 2)},
    "nn.functional.interpolate": interpolate,
    "nn.functional.upsample_bilinear": upsample("bilinear", True),
    "nn.functional.upsample_nearest": upsample("nearest", None),
    "nn.functional.pixel_shuffle": pixel_shuffle, "nn.functional.batch_norm": batch_norm,
    "nn.functional.group_norm": group_norm, "nn.functional.instance_norm": instance_norm,
}

# What an operator is compared with, if that is not op_db's own function.
TORCH = {"nn.functional.batch_norm": torch_batch_norm, "topk": torch_topk}

# Operators that tshard has for integers, too.
INTEGERS = {
    "cumsum", "stack", "squeeze", "unsqueeze", "expand", "nn.functional.pad", "flip", "roll",
    "slice", "gather", "scatter_add", "index_select", "topk", "sort", "argsort", "tril", "triu",
    "tile", "repeat_interleave", "masked_fill", "transpose", "permute", "reshape", "cat", "narrow",
}

# Operators that sum, mostly products. With --dtype they round several times: the gradient of the
# result, and what ranks send.
PRODUCTS = {
    "sum", "mean", "matmul", "mm", "bmm", "einsum", "outer", "tensordot", "nn.functional.linear",
    "nn.functional.scaled_dot_product_attention", "nn.functional.layer_norm",
    "nn.functional.rms_norm", "nn.functional.batch_norm", "nn.functional.group_norm",
    "nn.functional.instance_norm",
    *(f"nn.functional.{name}{n}d" for name in ("conv", "conv_transpose") for n in (1, 2)),
}

# Further layouts: of each tensor of a sample the sharded dimension, -1 for none; the last entry is
# that of all further tensors.
LAYOUTS = {
    **{f"nn.functional.conv{n}d": [(-1, 0, 0), (1, 1, -1), (-1, 1, -1), (0, -1, -1), (1, 0, 0)]
       for n in (1, 2)},
    **{f"nn.functional.conv_transpose{n}d": [(-1, 1, 0), (1, 0, -1), (-1, 0, -1), (0, -1, -1)]
       for n in (1, 2)},
    "nn.functional.batch_norm": [(1, 0)], "nn.functional.group_norm": [(1, 0)],
    "nn.functional.instance_norm": [(1, 0)], "nn.functional.nll_loss": [(1, -1, 0), (2, 1, -1)],
    "nn.functional.linear": [(-1, 0, 0), (1, 1, -1)],
    "nn.functional.embedding": [(0, -1), (1, -1)],
}
