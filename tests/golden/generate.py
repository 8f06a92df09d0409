#!/usr/bin/env python3
"""Writes the golden files of test_golden.c beside itself: what PyTorch computes.

    /usr/bin/python3 tests/golden/generate.py [NAME ...]

NAME is a file without its ending; without any, all are written. loss_dim, half and
attention_options (which compares its formula with transformers' own) were written by PyTorch 2.13,
the others by Debian's python3-torch, 1.13.1.

A file holds cases; a case is a group of tensors "case.what":
    in0, in1, ...       the inputs, float32 or int64
    out                 the function's value
    w                   a cotangent: the loss is sum(out * w)
    grad0, grad1, ...   the loss's gradients of the float inputs
PyTorch computes in double on the float32 inputs; results are rounded to float32 once, so that they
are the exact ones to half a unit in the last place. Inputs come from Python's own generator, keyed
by the case's name: the bytes do not depend on the order of cases, nor on PyTorch's generator.
"""

import json
import os
import random
import struct
import sys

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
DTYPES = {torch.float32: ("F32", "f"), torch.int64: ("I64", "q")}


def write(name, tensors):
    """The safetensors format: length of the header, header in JSON, values in order."""
    header, parts, at = {}, [], 0
    for key, t in tensors.items():
        dtype, code = DTYPES[t.dtype]
        values = t.detach().contiguous().reshape(-1).tolist()
        parts.append(struct.pack("<%d%s" % (len(values), code), *values))
        header[key] = {"dtype": dtype, "shape": list(t.shape),
                       "data_offsets": [at, at + len(parts[-1])]}
        at += len(parts[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = os.path.join(HERE, name + ".safetensors")
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return os.path.getsize(path)


class Cases:
    """The cases of one file."""

    def __init__(self):
        self.tensors = {}

    def real(self, name, key, shape, low=-2.0, high=2.0):
        count = 1
        for n in shape:
            count *= n
        rng = random.Random("%s.%s" % (name, key))
        values = [rng.uniform(low, high) for _ in range(count)]
        return torch.tensor(values, dtype=torch.float32).reshape(shape)

    def put(self, name, what, t):
        self.tensors["%s.%s" % (name, what)] = t.float() if t.dtype.is_floating_point else t.long()

    def half(self, name, fn, *inputs, low=-2.0, high=2.0):
        """Inputs are bf16 values. Beside the exact results: what PyTorch gives in bf16."""
        given = [self.real(name, i, x, low, high).bfloat16().float() if isinstance(x, tuple) else x
                 for i, x in enumerate(inputs)]
        self.add(name, fn, *given, rounds=True)
        with torch.no_grad():
            self.put(name, "torch", fn(*[x.bfloat16() if x.is_floating_point() else x
                                         for x in given]))

    def add(self, name, fn, *inputs, low=-2.0, high=2.0, rounds=False):
        """An input is a shape (float values in [low, high)) or a tensor. rounds: the gradient of
        the output is of bf16 values, which products of bf16 do not round once more."""
        given = [self.real(name, i, x, low, high) if isinstance(x, tuple) else x
                 for i, x in enumerate(inputs)]
        leaves = [x.double().requires_grad_() if x.dtype == torch.float32 else x for x in given]
        out = fn(*leaves)
        for i, x in enumerate(given):
            self.put(name, "in%d" % i, x)
        self.put(name, "out", out)
        if not out.requires_grad:
            return
        w = self.real(name, "w", tuple(out.shape))
        w = w.bfloat16().float() if rounds else w
        self.put(name, "w", w)
        (out * w.double()).sum().backward()
        for i, x in enumerate(leaves):
            if x.requires_grad:
                self.put(name, "grad%d" % i, x.grad if x.grad is not None else torch.zeros_like(x))


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


# ---- elementwise -------------------------------------------------------------

PAIRS = {"same": ((2, 19), (2, 19)), "row": ((3, 5), (5,)), "column": ((5, 1), (3, 5, 4)),
         "outer": ((2, 1, 3), (4, 1)), "single": ((), (2, 3))}
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow}
UNARY = {
    "neg": (torch.neg, -4, 4), "scale": (lambda x: x * -1.75, -4, 4),
    "add_scalar": (lambda x: x + 0.3, -4, 4), "cube": (lambda x: x ** 3.0, -4, 4),
    "square": (lambda x: x ** 2.0, -4, 4), "power": (lambda x: x ** -1.5, 0.3, 4),
    "exp": (torch.exp, -8, 8), "log": (torch.log, 0.01, 20), "sqrt": (torch.sqrt, 0.01, 20),
    "sigmoid": (torch.sigmoid, -8, 8), "tanh": (torch.tanh, -4, 4), "relu": (torch.relu, -4, 4),
    "erf": (torch.erf, -4, 4),
    "gelu": (F.gelu, -4, 4), "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), -4, 4),
    "silu": (F.silu, -8, 8)}


def maps():
    c = Cases()
    for op, fn in BINARY.items():
        for kind, (a, b) in PAIRS.items():
            # 0.5 to 2.5: bases of pow and divisors well away from 0
            low, high = (0.5, 2.5) if op in ("pow", "div") else (-2, 2)
            c.add("%s_%s" % (op, kind), fn, a, b, low=low, high=high)
    for op, (fn, low, high) in UNARY.items():
        c.add(op, fn, (37,), low=low, high=high)
    choice = ints(1, 0, 1, 0, 0, 1).reshape(2, 1, 3)
    c.add("where", lambda m, a, b: torch.where(m != 0, a, b), choice, (4, 1), ())
    c.add("cast", lambda x: x.long(), (29,), low=-40, high=40)
    c.add("twice", lambda x: x * x + x - x / (x * x + 1), (3, 7))
    return c


# ---- along a dimension -------------------------------------------------------

def over(fn, dim, keep):
    return lambda x: fn(x) if dim is None else fn(x, dim=dim, keepdim=keep)


def reductions():
    c = Cases()
    sums = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "argmax": torch.argmax}
    for op, fn in sums.items():
        for dim in (0, 1, -1):
            for keep in (0, 1):
                c.add("%s_%d_%d" % (op, dim, keep), over(fn, dim, bool(keep)), (3, 4, 5))
        c.add("%s_all" % op, over(fn, None, 0), (3, 4, 5))
    for op, fn in {"softmax": torch.softmax, "log_softmax": torch.log_softmax}.items():
        for dim in (0, 1, -1):
            c.add("%s_%d" % (op, dim), lambda x, fn=fn, dim=dim: fn(x, dim), (3, 4, 5), low=-6,
                  high=6)
        c.add("%s_long" % op, lambda x, fn=fn: fn(x, -1), (2, 131), low=-6, high=6)
    c.add("sum_long", torch.sum, (4500,), low=-1, high=1)
    c.add("mean_long", lambda x: x.mean(0), (301, 3), low=-1, high=1)
    return c


# ---- views, matrices ---------------------------------------------------------

def views():
    c = Cases()
    c.add("permute", lambda x: x.permute(2, 0, 3, 1) * 2, (2, 3, 4, 5))
    c.add("turned", lambda x: x.transpose(0, 2).reshape(4, 6).transpose(0, 1), (2, 3, 4))
    c.add("regroup", lambda x: x.reshape(3, -1, 2, 1).transpose(1, 2).reshape(-1, 4), (6, 8))
    c.add("slice", lambda x: x[:, 1:4].transpose(1, 2)[:, 2:5] * x[:, 2:5].transpose(1, 2)[:, 0:3],
          (2, 5, 6))
    c.add("split", lambda x: (lambda q, k, v: q * k + v.exp())(*x.chunk(3, 1)), (4, 9))
    c.add("concat", lambda a, b: torch.cat([a, b.transpose(0, 1), a], 1), (3, 2), (4, 3))
    c.add("chain", lambda a, b: torch.cat([a.reshape(2, 6), b], 0).transpose(0, 1)[1:5]
          .reshape(2, 10).tanh(), (3, 4), (3, 6))
    c.add("heads", lambda x: (lambda q, k, v: q @ k.transpose(-1, -2) @ v)(
        *(p.reshape(2, 5, 3, 2).transpose(1, 2) for p in x.chunk(3, 2))), (2, 5, 18), low=-1,
        high=1)
    return c


def matrices():
    c = Cases()
    c.add("matmul_2d", torch.matmul, (5, 7), (7, 3))
    c.add("matmul_odd", torch.matmul, (33, 67), (67, 18), low=-1, high=1)
    c.add("matmul_batch", torch.matmul, (2, 3, 4, 5), (2, 3, 5, 6))
    c.add("matmul_broadcast", torch.matmul, (2, 1, 4, 5), (3, 5, 6))
    c.add("matmul_shared", torch.matmul, (2, 3, 4, 5), (5, 2))
    c.add("matmul_wide", torch.matmul, (4, 5), (3, 5, 2))
    c.add("matmul_turned", lambda a, b: a.transpose(0, 1) @ b.transpose(0, 1), (7, 5), (4, 7))
    c.add("matmul_self", lambda a: a @ a, (6, 6), low=-1, high=1)
    for rows, shape in {"1d": (), "2d": (5,), "3d": (2, 3)}.items():
        c.add("linear_%s" % rows, F.linear, shape + (7,), (4, 7), (4,))
        c.add("linear_%s_plain" % rows, F.linear, shape + (7,), (4, 7))
    c.add("linear_turned", lambda x, w, b: F.linear(x.transpose(0, 1), w, b), (7, 2, 3), (5, 3),
          (5,))
    ids = ints(3, 0, 3, 6, 1, 1, 0, 3, 5, 2, 6, 6).reshape(3, 4)
    c.add("embedding", F.embedding, ids, (7, 5))
    c.add("embedding_1d", F.embedding, ids[0], (7, 3))
    return c


# ---- lookups with options ----------------------------------------------------

LOOKUPS = {
    "plain": {}, "padding": dict(padding_idx=3), "padding_back": dict(padding_idx=-1),
    "norm_1": dict(max_norm=1.0, norm_type=1.0), "norm_2": dict(max_norm=1.0),
    "norm_inf": dict(max_norm=1.0, norm_type=float("inf")),
    "norm_odd": dict(max_norm=2.5, norm_type=3.5), "freq": dict(scale_grad_by_freq=True),
    "sparse": dict(sparse=True), "sparse_padding": dict(sparse=True, padding_idx=0),
    "all": dict(padding_idx=-4, max_norm=1.0, scale_grad_by_freq=True)}


def lookups():
    """Embeddings with every option; "after" is the table as max_norm left it."""
    c = Cases()
    ids = ints(3, 0, 3, 6, 1, 1, 0, 3, 5, 0, 6, 6).reshape(3, 4)
    for name, options in LOOKUPS.items():
        table, w = c.real(name, 1, (7, 5)), c.real(name, "w", (3, 4, 5))
        leaf = table.double().requires_grad_()
        out = F.embedding(ids, leaf, **options)
        (out * w.double()).sum().backward()
        grad = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
        for what, t in {"in0": ids, "in1": table, "out": out, "w": w, "grad1": grad,
                        "after": leaf}.items():
            c.put(name, what, t)
    return c


# ---- norm, attention, loss ---------------------------------------------------

def rms_norm(x, w, eps=1e-6):
    return x * w / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def norms():
    c = Cases()
    for name, shape in {"small": (4, 10), "odd": (2, 3, 33), "row": (6,)}.items():
        d = shape[-1:]
        c.add("norm_%s" % name, lambda x, w, b, d=d: F.layer_norm(x, d, w, b), shape, d, d)
        c.add("norm_%s_plain" % name, lambda x, w, d=d: F.layer_norm(x, d, w), shape, d)
    for name, shape in {"small": (4, 10), "odd": (2, 3, 33), "row": (6,)}.items():
        c.add("rms_%s" % name, rms_norm, shape, shape[-1:])
    c.add("rms_eps", lambda x, w: rms_norm(x, w, 0.25), (4, 10), (10,))
    c.add("rms_one", lambda x, w: rms_norm(x, 1 + w, 0.25), (2, 3, 33), (33,))
    c.add("norm_eps", lambda x, w, b: F.layer_norm(x, (10,), w, b, 0.25), (4, 10), (10,), (10,))
    return c


def rope(x, base=10000.0, dims=0, pairs=False, start=0):
    """Rotary positions: pairs (i, i + dims / 2), or (2 i, 2 i + 1)."""
    dims = dims or x.shape[-1]
    speed = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.arange(start, start + x.shape[-2], dtype=torch.float64)[:, None] * speed
    turned, rest = x[..., :dims], x[..., dims:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if pairs else turned.chunk(2, -1)
    a, b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    turned = torch.stack((a, b), -1).flatten(-2) if pairs else torch.cat((a, b), -1)
    return torch.cat((turned, rest), -1)


def ropes():
    c = Cases()
    for form in ("halves", "pairs"):
        pairs = form == "pairs"
        c.add("rope_%s" % form, lambda x, pairs=pairs: rope(x, pairs=pairs), (2, 3, 5, 8))
        c.add("rope_%s_flat" % form, lambda x, pairs=pairs: rope(x, pairs=pairs), (7, 2))
        c.add("rope_%s_part" % form, lambda x, pairs=pairs: rope(x, dims=4, pairs=pairs),
              (2, 6, 7))
        c.add("rope_%s_late" % form,
              lambda x, pairs=pairs: rope(x, 500.0, 6, pairs, 4000), (2, 3, 6))
        c.add("rope_%s_rows" % form,
              lambda x, pairs=pairs: torch.stack([rope(row, pairs=pairs, start=start)
                                                  for row, start in zip(x, (17, 0, 3))]),
              (3, 2, 4, 6))
    return c


def attend(q, k, v, causal=False, scale=None, mask=0.0):
    """The plain formula; query i sees keys up to i + Tk - Tq where causal; the mask is added."""
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5) + mask
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]) != 0
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ v


def attentions():
    c = Cases()
    for kind in ("full", "causal"):
        causal = kind == "causal"
        for name, (b, h, tq, tk, d) in {"small": (2, 3, 5, 5, 4), "tiles": (1, 2, 130, 130, 4),
                                        "late": (1, 1, 3, 70, 5), "one": (1, 2, 1, 9, 3),
                                        "wide": (1, 1, 66, 67, 3)}.items():
            c.add("attention_%s_%s" % (name, kind),
                  lambda q, k, v, causal=causal: attend(q, k, v, causal),
                  (b, h, tq, d), (b, h, tk, d), (b, h, tk, d))
    for name, (h, kv, tq, tk) in {"two": (4, 2, 5, 5), "one": (3, 1, 3, 6),
                                  "tiles": (4, 2, 70, 70)}.items():
        c.add("attention_grouped_%s" % name, lambda q, k, v, n=h // kv: attend(
            q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), True),
            (2, h, tq, 3), (2, kv, tk, 3), (2, kv, tk, 3))
    c.add("attention_scale", lambda q, k, v: attend(q, k, v, True, 1.5), (1, 2, 4, 3), (1, 2, 4, 3),
          (1, 2, 4, 3))
    # masks: added eighths of integers; and which keys are kept, on 70 keys none of the first 66
    eighths = ints(*((i * 7) % 23 - 11 for i in range(3 * 4 * 5))).reshape(3, 4, 5)
    c.add("attention_mask_added", lambda m, q, k, v: attend(q, k, v, mask=m / 8), eighths,
          (2, 3, 4, 3), (2, 3, 5, 3), (2, 3, 5, 3))
    kept = ints(*([0] * 66 + [1, 0, 1, 1] + [i % 3 for i in range(70)])).reshape(2, 1, 1, 70)
    c.add("attention_mask_kept", lambda m, q, k, v: attend(q, k, v, mask=torch.where(
        m != 0, 0.0, float("-inf"))), kept, (2, 2, 3, 2), (2, 2, 70, 2), (2, 2, 70, 2))
    # every later tile holds larger scores: the online maximum moves each time
    rise = torch.arange(150, dtype=torch.float32).reshape(1, 1, 150, 1) / 4
    c.add("attention_rising", attend, torch.full((1, 1, 2, 1), 0.5), rise, (1, 1, 150, 1))
    return c


def seen(tq, tk, causal, window):
    """Which keys a query sees, as transformers' masks: distances below the window."""
    at = torch.arange(tk - tq, tk)[:, None] - torch.arange(tk)
    kept = (at >= 0) if causal else torch.ones(tq, tk) != 0
    return kept & (at.abs() < window) if window else kept


def eager(q, k, v, bias=None, sinks=None, causal=True, window=0, cap=0.0):
    """transformers' eager attention: Gemma 2's with a soft cap, gpt-oss's with sinks, T5's bias."""
    n = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(n, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~seen(q.shape[2], k.shape[2], causal, window), float("-inf"))
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return torch.softmax(scores, -1)[..., :k.shape[2]] @ v.repeat_interleave(n, 1)


def agrees_with_transformers():
    """eager() against the functions that it is to equal, in float."""
    from types import SimpleNamespace

    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss
    q, k, v = (torch.randn(2, h, 9, 8) for h in (4, 2, 2))
    sinks = torch.randn(4)
    mask = torch.zeros(9, 9).masked_fill(~seen(9, 9, True, 4), float("-inf"))[None, None]
    module = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=8, sinks=sinks)
    capped = gemma(module, q, k, v, mask, scaling=8 ** -0.5, softcap=1.5)[0]
    sunk = gpt_oss(module, q, k, v, mask, scaling=8 ** -0.5)[0]
    for theirs, ours in ((capped, eager(q, k, v, window=4, cap=1.5)),
                         (sunk, eager(q, k, v, None, sinks, window=4))):
        assert (theirs.transpose(1, 2) - ours).abs().max() < 1e-5


def attention_options():
    c = Cases()
    agrees_with_transformers()
    for name, (tq, tk, causal, window) in {
            "causal": (70, 70, True, 20), "both": (70, 70, False, 33), "one": (5, 66, True, 1),
            "late": (3, 70, True, 40), "all": (9, 9, True, 9)}.items():
        c.add("window_%s" % name, lambda q, k, v, causal=causal, window=window: eager(
            q, k, v, causal=causal, window=window), (1, 2, tq, 3), (1, 1, tk, 3), (1, 1, tk, 3))
    c.add("cap", lambda q, k, v: eager(q, k, v, cap=1.5), (2, 2, 6, 4), (2, 1, 6, 4), (2, 1, 6, 4))
    c.add("sinks", lambda q, k, v, sinks: eager(q, k, v, None, sinks), (2, 4, 6, 4), (2, 2, 6, 4),
          (2, 2, 6, 4), (4,))
    c.add("sinks_late", lambda q, k, v, sinks: eager(q, k, v, None, sinks), (2, 4, 1, 4),
          (2, 2, 9, 4), (2, 2, 9, 4), (4,))
    for name, shape in {"heads": (1, 4, 5, 7), "rows": (2, 1, 5, 7), "plain": (5, 7),
                        "keys": (2, 4, 1, 7), "slopes": (4, 1, 1), "full": (2, 4, 5, 7)}.items():
        c.add("bias_%s" % name, lambda q, k, v, bias: eager(q, k, v, bias, causal=False),
              (2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 3), shape)
    c.add("together", lambda q, k, v, bias, sinks: eager(q, k, v, bias, sinks, True, 4, 2.0),
          (2, 4, 9, 4), (2, 2, 9, 4), (2, 2, 9, 4), (1, 4, 9, 9), (4,))
    return c


def losses():
    c = Cases()
    targets = ints(3, 0, 6, 2, 2)
    masked = ints(3, -100, 6, 2, -100)
    for reduction in ("none", "sum", "mean"):
        def loss(x, y, ignore=-100, reduction=reduction):
            return F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1), ignore_index=ignore,
                                   reduction=reduction).reshape(y.shape if reduction == "none"
                                                                else ())
        c.add("loss_%s" % reduction, loss, (5, 7), targets, low=-5, high=5)
        c.add("loss_%s_outside" % reduction, loss, (5, 7), masked, low=-5, high=5)
        c.add("loss_%s_inside" % reduction, lambda x, y, loss=loss: loss(x, y, 2), (5, 7), targets,
              low=-5, high=5)
        c.add("loss_%s_3d" % reduction, loss, (2, 3, 37), ints(1, 36, 0, -100, 20, 7).reshape(2, 3),
              low=-9, high=9)
        c.add("loss_%s_steep" % reduction, loss, (3, 4), ints(0, 3, 1), low=-1000, high=1000)
    return c


# Options of cross-entropy that combine: all of them on the same logits, targets and cotangent.
# "options.<what>" are the inputs, "<letters>_<kind>_<reduction>" has the value and the gradient of
# the logits; the letters are w for weights, e for smoothing 0.1, z for a z-loss of 0.01.
SMOOTHING, Z_LOSS = 0.1, 0.01
KINDS = {"plain": (3, 0, 6, 2, 2, 5), "outside": (3, -100, 6, 2, -100, 5),
         "steep": (3, 0, 6, 2, 1, 5), "inside": (3, 0, 6, 2, 2, 5), "nothing": (-100,) * 6,
         "probs": None}


def loss_options():
    c = Cases()
    x = c.real("options", "logits", (6, 7), -5, 5)
    w = c.real("options", "weight", (7,), 0.25, 2)
    t = torch.softmax(c.real("options", "probs", (6, 7), -3, 3), 1)
    up = c.real("options", "up", (6,))
    for what, value in (("logits", x), ("steep", x * 200), ("weight", w), ("probs", t), ("up", up)):
        c.put("options", what, value)
    for kind, targets in KINDS.items():
        if targets:
            c.put("options", kind + "_target", ints(*targets))
        for letters in ("", "w", "e", "we", "z", "wez"):
            for reduction in ("none", "sum", "mean"):
                leaf = (x * 200 if kind == "steep" else x).double().requires_grad_()
                out = option_loss(leaf, t, w, kind, letters, reduction)
                (out * up.double()[:out.numel()].reshape(out.shape)).sum().backward()
                name = "%s_%s_%s" % (letters, kind, reduction)
                c.put(name, "out", out)
                c.put(name, "grad", leaf.grad)
    return c


def option_loss(x, t, w, kind, letters, reduction):
    ignore = 2 if kind == "inside" else -100
    target = t.double() if kind == "probs" else ints(*KINDS[kind])
    weight = w.double() if "w" in letters else None
    options = {"weight": weight, "label_smoothing": SMOOTHING if "e" in letters else 0.0}
    loss = F.cross_entropy(x, target, ignore_index=ignore, reduction=reduction, **options)
    if "z" not in letters or (kind == "nothing" and reduction == "mean"):
        return loss  # 0 / 0 already
    counts, divisor = torch.ones(6, dtype=torch.float64), 6.0
    if kind != "probs":
        counts = (target != ignore).double()
        each = weight if weight is not None else torch.ones(7, dtype=torch.float64)
        divisor = (each[target.clamp(min=0)] * counts).sum()
    extra = Z_LOSS * torch.logsumexp(x, 1) ** 2 * counts
    return loss + (extra if reduction == "none" else extra.sum() if reduction == "sum" else
                   extra.sum() / divisor)


def loss_dims():
    """Classes in dimension 1: "<form>.<kind>" is the target, "<form>_<letters>_<kind>_<reduction>"
    as in loss_options."""
    c = Cases()
    for form, shape in {"flat": (2, 6, 3), "deep": (1, 5, 3, 2)}.items():
        rows = shape[:1] + shape[2:]
        x, w = c.real(form, "logits", shape, -5, 5), c.real(form, "weight", shape[1:2], 0.25, 2)
        up = c.real(form, "up", rows)
        ids = ints(3, -100, 0, 2, 2, 4).reshape(rows)
        targets = {"outside": ids, "inside": ids.clamp(min=1),
                   "probs": torch.softmax(c.real(form, "probs", shape, -3, 3), 1)}
        for what, value in dict(targets, logits=x, weight=w, up=up).items():
            c.put(form, what, value)
        for kind, target in targets.items():
            for letters in ("", "we"):
                for reduction in ("none", "sum", "mean"):
                    leaf = x.double().requires_grad_()
                    out = F.cross_entropy(
                        leaf, target.double() if kind == "probs" else target,
                        weight=w.double() if letters else None, reduction=reduction,
                        ignore_index=2 if kind == "inside" else -100,
                        label_smoothing=SMOOTHING if letters else 0.0)
                    scale = up.double() if reduction == "none" else up.flatten()[0]
                    (out * scale).sum().backward()
                    name = "%s_%s_%s_%s" % (form, letters, kind, reduction)
                    c.put(name, "out", out)
                    c.put(name, "grad", leaf.grad)
    return c


# ---- a whole model, optimisers ------------------------------------------------

VOCABULARY, WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 11, 8, 2, 2, 2, 6


def model():
    """A GPT-2 of two blocks with tied output weights: the loss, and every parameter's gradient."""
    c, p = Cases(), {}
    shapes = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (LENGTH, WIDTH),
              "ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    for i in range(BLOCKS):
        for layer, (out, into) in {"c_attn": (3 * WIDTH, WIDTH), "c_proj": (WIDTH, WIDTH),
                                   "c_fc": (4 * WIDTH, WIDTH),
                                   "mlp_proj": (WIDTH, 4 * WIDTH)}.items():
            shapes["h%d.%s.weight" % (i, layer)] = (out, into)
            shapes["h%d.%s.bias" % (i, layer)] = (out,)
        for layer in ("ln_1", "ln_2"):
            shapes["h%d.%s.weight" % (i, layer)] = shapes["h%d.%s.bias" % (i, layer)] = (WIDTH,)
    for key, shape in shapes.items():
        c.put("model", key, c.real("model", key, shape, -0.6, 0.6))
        p[key] = c.tensors["model." + key].double().requires_grad_()
    rng = random.Random("ids")
    ids, target = (ints(*(rng.randrange(VOCABULARY) for _ in range(BATCH * LENGTH)))
                   .reshape(BATCH, LENGTH) for _ in range(2))

    def linear(x, name):
        return F.linear(x, p[name + ".weight"], p[name + ".bias"])

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), p[name + ".weight"], p[name + ".bias"])

    x = F.embedding(ids, p["wte.weight"]) + p["wpe.weight"]
    for i in range(BLOCKS):
        q, k, v = (t.reshape(BATCH, LENGTH, HEADS, -1).transpose(1, 2)
                   for t in linear(norm(x, "h%d.ln_1" % i), "h%d.c_attn" % i).chunk(3, 2))
        y = attend(q, k, v, causal=True).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        x = x + linear(y, "h%d.c_proj" % i)
        y = F.gelu(linear(norm(x, "h%d.ln_2" % i), "h%d.c_fc" % i), approximate="tanh")
        x = x + linear(y, "h%d.mlp_proj" % i)
    logits = norm(x, "ln_f") @ p["wte.weight"].t()
    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), target.reshape(-1))
    loss.backward()
    for what, t in {"ids": ids, "target": target, "logits": logits, "loss": loss}.items():
        c.put("model", what, t)
    for key, t in p.items():
        c.put("model", "grad." + key, t.grad)
    return c


STEPS = 5
OPTIMISERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    "sgd_decay": (torch.optim.SGD, dict(lr=0.1, momentum=0.5, weight_decay=0.2)),
    "adam": (torch.optim.Adam, dict(lr=0.05)),
    "adam_decay": (torch.optim.Adam, dict(lr=0.05, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.2)),
    "adamw": (torch.optim.AdamW, dict(lr=0.05, weight_decay=0.3)),
    "adamw_clip": (torch.optim.AdamW, dict(lr=0.05, betas=(0.8, 0.95), weight_decay=0.1)),
    "sgd_clip": (torch.optim.SGD, dict(lr=0.1))}
CLIP = 1.5


def optimisers():
    """Two parameters under given gradients, one set per step; the values after each step."""
    c = Cases()
    start = [c.real("start", i, s, -1, 1) for i, s in enumerate(((4, 3), (4,)))]
    grads = [[c.real("grad", "%d.%d" % (s, i), tuple(x.shape), -1, 1) for i, x in enumerate(start)]
             for s in range(STEPS)]
    for i in range(2):
        c.put("all", "start%d" % i, start[i])
        c.put("all", "grad%d" % i, torch.stack([g[i] for g in grads]))
    for name, (make, options) in OPTIMISERS.items():
        params = [x.double().requires_grad_() for x in start]
        optimiser = make(params, **options)
        norms, after = [], [[], []]
        for s in range(STEPS):
            for i, x in enumerate(params):
                x.grad = grads[s][i].double()
            if name.endswith("_clip"):
                norms.append(torch.nn.utils.clip_grad_norm_(params, CLIP))
            optimiser.step()
            for i, x in enumerate(params):
                after[i].append(x.detach().clone())
        for i in range(2):
            c.put(name, "after%d" % i, torch.stack(after[i]))
        if norms:
            c.put(name, "norms", torch.stack(norms))
    params = [x.double().requires_grad_() for x in start]
    for i, x in enumerate(params):
        x.grad = grads[0][i].double()
    c.put("clip", "norm", torch.nn.utils.clip_grad_norm_(params, CLIP))
    for i, x in enumerate(params):
        c.put("clip", "grad%d" % i, x.grad)
    return c


def sparse_optimisers():
    """A table under row-sparse gradients, the values after each step."""
    c = Cases()
    start, w = c.real("all", "start", (6, 3)), c.real("all", "w", (STEPS, 4, 3))
    ids = ints(0, 1, 1, 4, 2, 2, 2, 2, 5, 0, 5, 1, 4, 0, 3, 4, 1, 1, 0, 0).reshape(STEPS, 4)
    for what, t in {"start": start, "w": w, "ids": ids}.items():
        c.put("all", what, t)
    makers = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1),
              "adam": lambda p: torch.optim.SparseAdam(p, lr=0.05),
              "adam_eps": lambda p: torch.optim.SparseAdam(p, lr=0.05, betas=(0.8, 0.9), eps=0.1)}
    for name, make in makers.items():
        table, after = start.double().requires_grad_(), []
        optimiser = make([table])
        for s in range(STEPS):
            optimiser.zero_grad()
            (F.embedding(ids[s], table, sparse=True) * w[s].double()).sum().backward()
            optimiser.step()
            after.append(table.detach().clone())
        c.put(name, "after", torch.stack(after))
    return c


# ---- bf16 --------------------------------------------------------------------

def halves():
    """Ops on bf16 values; and AdamW on bf16 parameters with float master weights, whose steps are
    mostly less than half a unit in the last place of a bf16."""
    c = Cases()
    for op in ("add", "mul", "div"):
        c.half(op, BINARY[op], (3, 37), (37,), low=0.5, high=2.5)
    for op in ("exp", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu"):
        c.half(op, UNARY[op][0], (67,), low=-4, high=4)
    c.half("sum", lambda x: x.sum(1), (5, 67))
    c.half("mean", lambda x: x.mean(0), (67, 3))
    c.half("softmax", lambda x: torch.softmax(x, -1), (3, 67), low=-6, high=6)
    c.half("log_softmax", lambda x: torch.log_softmax(x, -1), (3, 67), low=-6, high=6)
    c.half("norm", lambda x, w, b: F.layer_norm(x, (33,), w, b), (5, 33), (33,), (33,))
    c.half("rms", rms_norm, (5, 33), (33,))
    c.half("matmul", torch.matmul, (5, 67), (67, 9))
    c.half("linear", F.linear, (5, 67), (9, 67), (9,))
    c.half("embedding", F.embedding, ints(2, 0, 2, 5), (6, 7))
    c.half("attention", lambda q, k, v: attend(q, k, v, True), (1, 2, 9, 8), (1, 2, 9, 8),
           (1, 2, 9, 8))
    c.half("loss", lambda x, y: F.cross_entropy(x, y), (5, 67), ints(3, 66, 0, 3, 17))
    start = c.real("master", "start", (64,), 0.5, 2).bfloat16().float()
    grads = torch.stack([c.real("master", "grad%d" % s, (64,), 0.1, 1) for s in range(STEPS * 8)])
    master, after = start.clone().requires_grad_(), []
    optimiser = torch.optim.AdamW([master], lr=2e-4, weight_decay=0.1)
    for grad in grads:
        master.grad = grad.clone()
        optimiser.step()
        after.append(master.detach().clone())
    for what, t in {"start": start, "grads": grads, "after": torch.stack(after)}.items():
        c.put("master", what, t)
    return c


def main():
    torch.set_num_threads(1)
    files = {"map": maps, "reduce": reductions, "view": views, "matmul": matrices, "norm": norms,
             "attention": attentions, "attention_options": attention_options, "loss": losses,
             "loss_options": loss_options,
             "loss_dim": loss_dims, "model": model, "optim": optimisers, "rope": ropes,
             "lookup": lookups, "sparse": sparse_optimisers, "half": halves}
    sizes = {name: write(name, files[name]().tensors) for name in sys.argv[1:] or files}
    print("%d bytes in all: %s" % (sum(sizes.values()), sizes))


if __name__ == "__main__":
    main()
