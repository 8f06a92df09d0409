#!/usr/bin/env python3
"""Writes losses.safetensors beside itself: what PyTorch's losses give, for test_losses.c.

    python3 tests/golden/losses.py        (PyTorch 2.13)

A case is a group of tensors "case.what": in0 is x, in1 the target, in2 weight, in3 pos_weight; out
and its cotangent w; grad0 and grad1, as in generate.py, whose Cases this uses. The name of a case
is NAME_KIND_REDUCTION; of KIND, "w" is a weight and "p" a pos_weight, "edge" values at which
formulas break.
"""

import math

import torch
import torch.nn.functional as F

from generate import Cases, ints, write

INF, NAN = math.inf, math.nan


def reals(*values):
    return torch.tensor(values, dtype=torch.float32)


def case(c, name, fn, x, target, weights=(), double=True):
    """Adds a case; weights get no gradient. double: PyTorch computes in double."""
    given = [x, target] + list(weights)
    leaves = [t.double() if double and t.is_floating_point() else t.clone() for t in given]
    for t in leaves[:2]:
        if t.is_floating_point():
            t.requires_grad_()
    out = fn(*leaves)
    for i, t in enumerate(given):
        c.put(name, "in%d" % i, t)
    c.put(name, "out", out.detach())
    w = c.real(name, "w", tuple(out.shape))
    c.put(name, "w", w)
    (out * w).sum().backward()
    for i, t in enumerate(leaves[:2]):
        if t.grad is not None:
            c.put(name, "grad%d" % i, t.grad)


SHAPE = (3, 4, 5)
DIFF = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss, "smooth": F.smooth_l1_loss,
        "huber2": lambda x, t, **k: F.huber_loss(x, t, delta=0.4, **k),
        "smooth2": lambda x, t, **k: F.smooth_l1_loss(x, t, beta=0.4, **k),
        "smooth0": lambda x, t, **k: F.smooth_l1_loss(x, t, beta=0.0, **k)}
X_EDGE = reals(NAN, 1, 1, INF, -INF, 0, 3, 1e19, 0.4, -1)
T_EDGE = reals(0, 0, 2, 0, 0, 0, NAN, -1e19, 0, -1)
LOGITS = reals(1e4, -1e4, 1e4, -1e4, INF, INF, -INF, -INF, NAN, 0, 20, -20, 90, -90, 1e-6)
LOGIT_T = reals(0, 0, 1, 1, 0, 1, 0, 1, 0, 2, 1, 1, .25, .25, .5)


def differences(c):
    for name, fn in DIFF.items():
        for r in ("mean", "sum", "none"):
            x, t = c.real(name + r, "x", SHAPE), c.real(name + r, "t", SHAPE)
            t.view(-1)[3] = x.view(-1)[3]
            case(c, "%s_plain_%s" % (name, r), lambda x, t: fn(x, t, reduction=r), x, t)
            if name in ("mse", "l1", "huber"):
                w = c.real(name + r, "weight", SHAPE, 0.1, 2)
                case(c, "%s_w_%s" % (name, r), lambda x, t, w: fn(x, t, reduction=r, weight=w), x,
                     t, [w])
        case(c, "%s_edge_none" % name, lambda x, t: fn(x, t, reduction="none"), X_EDGE, T_EDGE)
        for r in ("mean", "sum"):
            case(c, "%s_empty_%s" % (name, r), lambda x, t: fn(x, t, reduction=r),
                 torch.zeros(0, 3), torch.zeros(0, 3))


def binary(c):
    fn, logits = F.binary_cross_entropy, F.binary_cross_entropy_with_logits
    for r in ("mean", "sum", "none"):
        x, t = c.real("bce" + r, "x", SHAPE, 0, 1), c.real("bce" + r, "t", SHAPE, 0, 1)
        z = c.real("bce" + r, "z", SHAPE, -8, 8)
        w, p = c.real("bce" + r, "w", (4, 1), 0, 2), c.real("bce" + r, "p", (5,), 0.2, 3)
        case(c, "bce_plain_" + r, lambda x, t: fn(x, t, reduction=r), x, t)
        case(c, "bce_w_" + r, lambda x, t, w: fn(x, t, w, reduction=r), x, t, [w])
        case(c, "logits_plain_" + r, lambda x, t: logits(x, t, reduction=r), z, t)
        case(c, "logits_w_" + r, lambda x, t, w: logits(x, t, w, reduction=r), z, t, [w])
        case(c, "logits_wp_" + r, lambda x, t, w, p: logits(x, t, w, reduction=r, pos_weight=p), z,
             t, [w, p])
    # in float: where the loss or the derivative is limited, the limit is that of floats
    case(c, "bce_edge_none", lambda x, t: fn(x, t, reduction="none"),
         reals(0, 1, 0, 1, .25, 1e-9, 1 - 2.0 ** -24, 1e-30, 2.0 ** -130),
         reals(0, 1, 1, 0, .5, 0, 1, 1, 0), double=False)
    case(c, "logits_edge_none", lambda x, t: logits(x, t, reduction="none"), LOGITS, LOGIT_T)
    case(c, "logits_edgep_none",
         lambda x, t, w, p: logits(x, t, w, reduction="none", pos_weight=p), LOGITS, LOGIT_T,
         [torch.ones(1), torch.full((1,), 3.0)])
    for name, f in (("bce", fn), ("logits", logits)):
        for r in ("mean", "sum"):
            case(c, "%s_empty_%s" % (name, r), lambda x, t: f(x, t, reduction=r),
                 torch.zeros(0, 3), torch.zeros(0, 3))


def divergences(c):
    for r in ("mean", "sum", "none", "batchmean"):
        x = c.real("kl" + r, "x", SHAPE).log_softmax(-1)
        t = c.real("kl" + r, "t", SHAPE).softmax(-1)
        case(c, "kl_plain_" + r, lambda x, t: F.kl_div(x, t, reduction=r), x, t)
        case(c, "kllog_plain_" + r, lambda x, t: F.kl_div(x, t, reduction=r, log_target=True), x,
             t.log())
    case(c, "kl_edge_none", lambda x, t: F.kl_div(x, t, reduction="none"),
         reals(-1, -2, -INF, -1, -INF), reals(.5, 0, 0, -.5, .5))
    case(c, "kllog_edge_none", lambda x, t: F.kl_div(x, t, reduction="none", log_target=True),
         reals(-1, -2, -INF, -1, -1), reals(-.5, -INF, -INF, .5, -200))
    case(c, "kl_empty_batchmean", lambda x, t: F.kl_div(x, t, reduction="batchmean"),
         torch.zeros(0, 3), torch.zeros(0, 3))


def classes(c):
    for r in ("mean", "sum", "none"):
        x = c.real("nll" + r, "x", (6, 7)).log_softmax(-1)
        deep = c.real("nll" + r, "deep", (2, 5, 3)).log_softmax(1)
        w, w5 = c.real("nll" + r, "w", (7,), 0, 2), c.real("nll" + r, "w5", (5,), 0, 2)
        y, y2 = ints(0, 6, -100, 3, 3, 5), ints(4, 0, 2, 2, 1, 3).reshape(2, 3)
        case(c, "nll_plain_" + r, lambda x, t: F.nll_loss(x, t, reduction=r), x, y)
        case(c, "nll_w_" + r, lambda x, t, w: F.nll_loss(x, t, w, reduction=r), x, y, [w])
        case(c, "nll_inside_" + r, lambda x, t: F.nll_loss(x, t, reduction=r, ignore_index=3), x,
             y.clamp(min=0))
        case(c, "nll_deep_" + r, lambda x, t, w: F.nll_loss(x, t, w, reduction=r, ignore_index=2),
             deep, y2, [w5])
    case(c, "nll_nothing_mean", F.nll_loss, torch.zeros(2, 3), ints(-100, -100))
    case(c, "nll_empty_mean", F.nll_loss, torch.zeros(0, 3), ints())


def cosines(c):
    pairs = {"last": ((3, 4, 37), (3, 4, 37), -1), "first": ((5, 2, 3), (5, 2, 3), 0),
             "middle": ((2, 33, 3), (2, 33, 3), 1), "pairs": ((3, 1, 4), (1, 2, 4), 2),
             "row": ((4, 6), (6,), -1), "single": ((4, 1), (4, 5), 1), "rows": ((2, 3), (1, 3), 0)}
    for name, (a, b, dim) in pairs.items():
        case(c, "cosine_" + name, lambda a, b: F.cosine_similarity(a, b, dim=dim),
             c.real(name, "a", a), c.real(name, "b", b))
    case(c, "cosine_zero", lambda a, b: F.cosine_similarity(a, b, dim=-1),
         reals(0, 0, 1e-9, 1e-9, 1, 2, NAN, 1).reshape(4, 2),
         reals(1, 1, 1, 2, 0, 0, 1, 1).reshape(4, 2))


def main():
    c = Cases()
    differences(c)
    binary(c)
    divergences(c)
    classes(c)
    cosines(c)
    print(write("losses", c.tensors), "bytes")


if __name__ == "__main__":
    main()
