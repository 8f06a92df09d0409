"""Edge cases for op_db.py, beside PyTorch's own samples: empty tensors, lengths of 1, NaN,
infinity, ties, and every dimension as a positive and as a negative number.

EDGES has a generator of (args, kwargs) for the operators that it names. What torch refuses is not
compared.
"""

import itertools
import math

import torch

import op_db_library as lib

NAN, INF = math.nan, math.inf
SPECIAL = torch.tensor([
    NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -1.5, -2.5, 3.0, -3.0, 6.0, 7.0,
    1e-8, -1e-8, 1e-20, 1e-40, 1e-45, 9.0, 20.0, 20.5, 25.0, -25.0, 88.0, 89.0, -87.0, -88.0,
    100.0, -100.0, 1e4, -1e4, 1e10, 3e38, -3e38, 8388607.5, 16777216.0])
SHAPES = [(), (0,), (1,), (3, 0), (0, 3), (1, 1, 1), (2, 1, 3), (5, 4)]
TIES = torch.tensor([[1.0, 1, 2, 0, -0.0], [2, 2, 1, -3, 3], [0, 0, 0, 3, -3]])
NANS = torch.tensor([[1.0, NAN, 2, NAN], [NAN, INF, 1, -INF], [-INF, -1, -INF, -2],
                     [INF, INF, 1, 0]])
INPUTS = [torch.zeros(2, 3), torch.ones(3, 1), TIES, NANS, torch.full((2, 2), -INF)]


def tensors():
    yield from (torch.randn(shape) for shape in SHAPES)


def dims(x):
    """All dimensions of x, from both ends."""
    return range(-x.ndim, x.ndim) if x.ndim else (0, -1)


def elements(**options):
    """For functions of one number; options: lists of values."""
    def run():
        for values in itertools.product(*options.values()):
            for x in (*tensors(), SPECIAL):
                yield (x,), dict(zip(options, values))
    return run


def two():
    """For functions of two numbers: special values against each other, ties, broadcasting."""
    some = SPECIAL[:9]
    yield (some[:, None], some[None, :]), {}
    yield (TIES, TIES.flip(0)), {}
    yield (TIES, TIES.clone()), {}
    for a, b in (((0,), (1,)), ((2, 0), (1, 1)), ((), (0, 3)), ((2, 1), (1, 3)), ((), ())):
        yield (torch.randn(a), torch.randn(b)), {}


def along(every=False, keep=True, **options):
    """For reductions: each dimension, and all of them; keep: with and without keepdim."""
    def run():
        for x in (*tensors(), *INPUTS):
            for dim in [*dims(x), None] if every else dims(x):
                for values in itertools.product(*options.values()):
                    for k in ({"keepdim": True}, {"keepdim": False}) if keep else ({},):
                        yield (x,), {"dim": dim, **dict(zip(options, values)), **k}
    return run


def stacked():
    for x in (torch.randn(()), torch.randn(0), torch.randn(2, 0), torch.randn(2, 1, 3)):
        for dim in range(-x.ndim - 1, x.ndim + 1):
            for n in (1, 3):
                yield ([x + i for i in range(n)], dim), {}


def squeezed():
    for x in (torch.randn(()), torch.randn(1, 0, 1), torch.randn(1, 1), torch.randn(2, 1, 3, 1)):
        yield (x,), {}
        for dim in dims(x):
            yield (x, dim), {}


def unsqueezed():
    for x in tensors():
        for dim in range(-x.ndim - 1, x.ndim + 1):
            yield (x, dim), {}


def expanded():
    for a, b in (((), ()), ((), (2, 3)), ((), (0,)), ((1,), (0,)), ((1,), (4,)),
                 ((3, 1), (2, -1, 4)),
                 ((0, 1), (0, 5)), ((1, 2, 1), (3, 2, 4)), ((2, 1), (0, 2, 1)), ((3,), (-1,))):
        yield (torch.randn(a), b), {}


def padded(mode, negative=True):
    def run():
        shapes = {"constant": [(3,), (0,), (2, 0), (2, 3), (1, 1, 1)]}.get(
            mode, [(1, 4), (2, 3, 4), (1, 1, 3, 4), (1, 2, 3, 3, 4), (1, 1, 1, 1), (0, 2, 4)])
        pads = [(0, 0), (1, 0), (0, 2), (2, 3), (3, 1), (4, 4), (-1, 1), (2, -2), (-1, -1), (-3, 0),
                (1, 1, 1, 1), (2, 1, 0, 2), (-1, 2, 1, -1), (0, 0, 0, 0, 1, 2), (1, 1, 1, 1, 1, 1)]
        values = (None, 0.0, 2.5, NAN) if mode == "constant" else (None,)
        for shape, p, value in itertools.product(shapes, pads, values):
            if len(p) <= 2 * len(shape):
                yield (torch.randn(shape), p, mode), {} if value is None else {"value": value}
    return run


def flipped():
    for x in (*tensors(), NANS):
        for dim in dims(x):
            yield (x,), {"dims": [dim]}


def rolled():
    for x in tensors():
        for dim in dims(x):
            for shift in (0, 1, -1, 7, -9):
                yield (x, shift, dim), {}


def sliced():
    for x in (torch.randn(7, 2), torch.randn(2, 0, 3), torch.randn(1)):
        for dim in dims(x):
            for a, b, step in ((0, 5, 2), (-3, None, 1), (1, -1, 3), (5, 2, 1), (-100, 100, 4),
                               (0, 0, 1),
                               (None, None, 100)):
                yield (x, dim, a, b, step), {}


def triangles():
    for shape in ((2, 0), (0, 2), (0, 0), (1, 1), (3, 5), (5, 3), (2, 1, 4, 4), (0, 3, 3)):
        for diagonal in (0, 1, -1, 2, -4, 100, -100):
            yield (torch.randn(shape), diagonal), {}
    yield (NANS, 0), {}


def tiled():
    for shape in ((), (0,), (1,), (2, 1), (2, 0, 3)):
        for repeats in ((), (1,), (3,), (2, 0), (1, 2), (2, 3, 1), (2, 1, 3, 2)):
            yield (torch.randn(shape), repeats), {}


def interleaved():
    for x in tensors():
        for repeats in (0, 1, 3):
            for dim in (*dims(x), None):
                yield (x,), {"repeats": repeats, "dim": dim}


def gathered():
    for a, b, dim in (((), (), 0), ((3,), (0,), 0), ((3,), (), 0), ((), (3,), -1),
                      ((4, 3), (2, 3), 0),
                      ((4, 3), (4, 7), -1), ((4, 3), (1, 1), 1), ((4, 3), (0, 3), 1),
                      ((2, 0), (2, 0), 1),
                      ((2, 0), (2, 0), 0), ((2, 3, 4), (2, 5, 4), -2), ((2, 3, 1), (9, 3, 1), -3)):
        x = torch.randn(a)
        n = x.shape[dim] if x.ndim else 1
        yield x, dim, torch.randint(max(n, 1), b)
    yield NANS, 1, torch.tensor([[1, 1, 0], [3, 2, 1], [0, 0, 0], [2, 1, 3]])


def indexed():
    for x, dim, index in gathered():
        yield (x, dim, index), {}
    for bad in (3, -1):
        yield (torch.randn(3), 0, torch.tensor([0, bad])), {}


def added():
    for x, dim, index in gathered():
        yield (x, dim, index, torch.randn(index.shape)), {}
    yield (torch.randn(3, 2), 0, torch.zeros(2, 1, dtype=torch.int64), torch.randn(4, 2)), {}
    yield (torch.zeros(2), 0, torch.ones(3, dtype=torch.int32), torch.tensor([NAN, 1.0, INF])), {}


def selected():
    for x in tensors():
        for dim in dims(x):
            n = x.shape[dim] if x.ndim else 1
            yield (x, dim, torch.zeros(0, dtype=torch.int64)), {}
            if n:
                yield (x, dim, torch.randint(n, (4,))), {}
                yield (x, dim, torch.tensor([n - 1], dtype=torch.int32)), {}
    yield (torch.randn(3), 0, torch.tensor(2)), {}


def sorted_along(**options):
    def run():
        many = torch.randint(5, (3, 200)).float()
        for x in (*tensors(), *INPUTS, SPECIAL, many, (10 * TIES).long()):
            for dim in dims(x):
                for values in itertools.product(*options.values()):
                    yield (x,), {"dim": dim, **dict(zip(options, values))}
    return run


def top():
    for x in (*tensors(), NANS[:3, :2], torch.randperm(300).float(),
              torch.randperm(40).view(4, 10)):
        for dim in dims(x):
            n = x.shape[dim] if x.ndim else 1
            # torch.topk(x, 0) of a scalar returns a scalar
            for k in sorted({0, 1, n // 2, n} if x.ndim else {1}):
                for largest in (True, False):
                    yield (x, k, dim, largest), {}


def classes():
    for shape in SHAPES:
        for dtype in (torch.int64,):
            yield (torch.randint(4, shape, dtype=dtype),), {"num_classes": 4}
    yield (torch.tensor([0, 0]),), {"num_classes": 1}


def filled_where():
    for a, b in (((2, 3), (2, 3)), ((2, 3), (3,)), ((3,), (2, 3)), ((), (2,)), ((2, 1), (3,)),
                 ((0, 3), (1, 3)),
                 ((2,), ()), ((), ())):
        for value in (0, 2.5, NAN, -INF):
            yield (torch.randn(a), torch.rand(b) > 0.5, value), {}


def clamps():
    limits = [(-1.0, 1.0), (None, 0.5), (0.1, None), (1, -1), (0, 0), (-INF, INF), (0.5, 0.5)]
    for x in (*tensors(), SPECIAL):
        for low, high in limits:
            yield (x,), {"min": low, "max": high}


def einsums():
    for equation, shapes in (
            ("ij->ji", [(2, 3)]), ("ii->i", [(3, 3)]), ("ii->", [(3, 3)]), ("ii", [(3, 3)]),
            ("ij->", [(2, 3)]),
            ("ij->j", [(2, 0)]), ("ij->i", [(2, 0)]), ("i,i->", [(4,), (4,)]),
            ("i,i->i", [(4,), (4,)]),
            ("i,i->", [(0,), (0,)]), ("ij,jk", [(2, 3), (3, 4)]), ("ba,cb", [(2, 3), (3, 2)]),
            ("ij,jk->ik", [(2, 0), (0, 4)]), ("ij,jk->ik", [(0, 2), (2, 4)]),
            ("ij,jk->ki", [(1, 3), (3, 1)]),
            ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]), ("bij,bjk->bik", [(1, 3, 4), (2, 4, 5)]),
            ("b...d,d->b...", [(2, 3, 4), (4,)]), ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 2)]),
            ("bhid,bhjd->bhij", [(2, 2, 3, 4), (2, 2, 5, 4)]),
            ("bhij,bjhd->bihd", [(2, 2, 3, 5), (2, 5, 2, 4)]),
            ("ij,ij->", [(2, 3), (2, 3)]), ("ij,ij->ij", [(2, 3), (2, 3)]),
            ("ij,i->j", [(2, 3), (2,)]),
            ("iij,jk->ik", [(3, 3, 2), (2, 4)]), ("i,j->", [(2,), (3,)]),
            ("ij,kl->ijkl", [(2, 1), (1, 3)]),
            (",->", [(), ()]), ("i,->i", [(3,), ()]), ("->", [()]), ("ab,b", [(2, 1), (3,)]),
            ("...->...", [(2, 3)]),
            ("i j , j k -> i k", [(2, 3), (3, 2)])):
        yield ([torch.randn(s) for s in shapes], equation), {}


def losses(values=torch.randn, **options):
    """x and target of the same shape, made by values; options: lists of values."""
    def run():
        for shape in SHAPES:
            for kind in ("mean", "sum", "none"):
                for chosen in itertools.product(*options.values()):
                    yield (values(shape), values(shape)), {"reduction": kind,
                                                           **dict(zip(options, chosen))}
    return run


def differences(*tails):
    """losses, and differences at which their pieces meet."""
    def run():
        for more in tails or ({},):
            for args, kwargs in losses()():
                yield args, {**kwargs, **more}
            x = torch.tensor([0.0, 1, 2, -1, -2, 0.5, NAN, INF, -INF, 1e20, INF])
            yield (x, torch.zeros(11)), {"reduction": "none", **more}
            yield (torch.zeros(11), x), {"reduction": "none", **more}
            yield (x, x.clone()), {"reduction": "none", **more}
    return run


def probabilities():
    yield from losses(torch.rand)()
    x = torch.tensor([0.0, 1, 1e-45, 1e-30, 0.5, 1 - 6e-8])
    yield (x[:, None].expand(6, 6).clone(), x.expand(6, 6).clone()), {"reduction": "none"}
    for bad in (-0.1, 1.5, NAN):
        yield (torch.tensor([0.5, bad]), torch.tensor([0.5, 0.5])), {}
    for shape in ((2, 3), (3,), (1,), (2, 1)):
        for kind in ("mean", "sum", "none"):
            yield (torch.rand(2, 3), torch.rand(2, 3)), {"weight": torch.rand(shape),
                                                         "reduction": kind}


def logits():
    yield from losses()()
    yield (SPECIAL, torch.rand(SPECIAL.shape)), {"reduction": "none"}
    yield (SPECIAL, torch.ones(SPECIAL.shape)), {"reduction": "none"}
    yield (SPECIAL, torch.zeros(SPECIAL.shape)), {"reduction": "none"}
    for shape in ((2, 3), (3,), (1,), (2, 1), ()):
        for kind in ("mean", "none"):
            for name in ("weight", "pos_weight"):
                yield (torch.randn(2, 3), torch.rand(2, 3)), {name: torch.rand(shape),
                                                              "reduction": kind}


def divergences():
    for shape in SHAPES:
        for kind, log in itertools.product(("mean", "sum", "none", "batchmean"), (False, True)):
            target = torch.randn(shape).log_softmax(-1) if log else torch.rand(shape)
            yield (torch.randn(shape).log_softmax(-1), target), {"reduction": kind,
                                                                 "log_target": log}
    x = torch.tensor([-1.0, -2, -INF, -3, -INF, NAN, -1])
    for target in ([0.0, 1, 0.5, -1, 0, 0.5, NAN], [0.0, 0, 0, 0, 0, 0, 0]):
        yield (x, torch.tensor(target)), {"reduction": "none"}
    yield (x, torch.tensor([0.0, -INF, -1, -2, -INF, 0, NAN])), {"reduction": "none",
                                                                 "log_target": True}


def likelihoods():
    for shape, kind in itertools.product(((3,), (2, 3), (0, 3), (1, 1), (2, 3, 4), (2, 3, 2, 2),
                                          (2, 3, 0)),
                                         ("mean", "sum", "none")):
        classes = shape[1] if len(shape) > 1 else shape[0]
        target = torch.randint(classes, shape[:1] * (len(shape) > 1) + shape[2:])
        x = torch.randn(shape).log_softmax(1 if len(shape) > 1 else 0)
        yield (x, target), {"reduction": kind}
        yield (x, target), {"reduction": kind, "weight": torch.rand(classes)}
        yield (x, target), {"reduction": kind, "ignore_index": 0}
        yield (x, torch.full_like(target, -100)), {"reduction": kind}
        yield (x, target), {"reduction": kind, "weight": torch.zeros(classes)}
    yield (torch.tensor([[-INF, 0.0], [NAN, -1.0]]), torch.tensor([0, 0])), {}
    for bad in (3, -1):
        yield (torch.randn(2, 3), torch.tensor([0, bad])), {}


def cosines():
    for a, b in (((), ()), ((3,), (3,)), ((0,), (0,)), ((2, 0), (2, 0)), ((0, 3), (0, 3)),
                 ((2, 3), (3,)),
                 ((2, 1, 3), (1, 4, 3)), ((2, 1), (2, 3)), ((1, 1), (1, 1))):
        for dim in range(-max(len(a), len(b), 1), max(len(a), len(b), 1)):
            for eps in (1e-8, 0.0, 3.0):
                yield (torch.randn(a), torch.randn(b)), {"dim": dim, "eps": eps}
    yield (torch.zeros(2, 3), torch.randn(2, 3)), {"dim": 1}
    yield (torch.zeros(2, 3), torch.zeros(2, 3)), {"dim": 1}
    yield (torch.tensor([[1e20, 1], [1e-20, 1e-20], [NAN, 1], [INF, 1]]),
           torch.ones(4, 2)), {"dim": 1}


def convolutions(n, transposed=False):
    def run():
        for batch, groups, bias, k in itertools.product((0, 1, 2), (1, 2), (False, True), (1, 3)):
            into, out = 4, 6
            w = (into, out // groups) if transposed else (out, into // groups)
            for stride, padding, dilation in ((1, 0, 1), (2, 1, 1), (1, 1, 2), (3, 0, 2)):
                yield (torch.randn((batch, into) + (7, 5)[:n]), torch.randn(w + (k,) * n),
                       torch.randn(out) if bias else None), {
                           "stride": stride, "padding": padding, "dilation": dilation,
                           "groups": groups}
        # nothing is left of the image, unless it is padded
        yield (torch.randn((2, 1) + (3,) * n), torch.randn((1, 1) + (5,) * n)), {}
        yield (torch.randn((2, 1) + (3,) * n), torch.randn((1, 1) + (3,) * n)), {"padding": 3}
    return run


def pools(n, **options):
    def run():
        for shape, chosen in itertools.product(((2, 3), (0, 2), (1, 1)),
                                               itertools.product(*options.values())):
            x = torch.randn(shape + (7, 6)[:n])
            yield (x,), dict(zip(options, chosen))
        x = torch.tensor([NAN, 1.0, 1.0, 0.0, -INF, -INF, INF, INF]).repeat(1, 2, 4)
        yield (x if n == 1 else x[:, :, None].repeat(1, 1, 3, 1),), {"kernel_size": 2}
        yield (torch.zeros((1, 1) + (5,) * n),), {"kernel_size": 3, "stride": 1}
    return run


def adaptive(n):
    def run():
        for shape in ((2, 3), (0, 2), (1, 1)):
            for size in (1, 3, 7, 9):
                yield (torch.randn(shape + (7, 5)[:n]), (size, size + 1)[:n]), {}
    return run


def resized(mode, n):
    def run():
        for corners in (None,) if mode == "nearest" else (False, True):
            for shape in ((2, 3), (0, 2), (1, 1)):
                for size in ((1, 1), (7, 5), (14, 3), (4, 11)):
                    yield (torch.randn(shape + (7, 5)[:n]), size[:n]), {"mode": mode,
                                                                        "align_corners": corners}
                for scale in (0.5, 2.0, 1.3, 3):
                    yield (torch.randn(shape + (7, 5)[:n]),), {
                        "scale_factor": scale, "mode": mode, "align_corners": corners}
    return run


def resizings(*kinds):
    def run():
        for mode, n in kinds:
            yield from resized(mode, n)()
    return run


def shuffled():
    for shape, factor in (((1, 4, 2, 3), 2), ((2, 9, 1, 1), 3), ((0, 4, 2, 2), 2),
                          ((2, 4, 0, 2), 2), ((2, 0, 2, 2), 2)):
        yield (torch.randn(shape), factor), {}


def channel_norms(name):
    def run():
        for shape in ((4, 6), (2, 6, 5), (1, 6, 3, 2), (0, 6, 2), (2, 6, 0), (2, 6, 1), (1, 6)):
            for affine, eps in itertools.product((False, True), (1e-5, 0.0, 0.5)):
                if shape == (2, 6, 1) and eps != 0.5:
                    continue  # a group of one value: dx is the difference of two large numbers
                w, b = (torch.randn(6), torch.randn(6)) if affine else (None, None)
                x = torch.randn(shape)
                if name == "group":
                    for groups in (1, 2, 6):
                        yield (x, groups), {"weight": w, "bias": b, "eps": eps}
                elif name == "instance":
                    yield (x,), {"weight": w, "bias": b, "eps": eps}
                else:
                    for training, momentum in ((True, 0.1), (True, 0.0), (True, 1.0), (False, 0.1)):
                        yield (x, torch.randn(6), torch.rand(6), w, b), {
                            "training": training, "momentum": momentum, "eps": eps}
                    yield (x, None, None, w, b), {"training": True, "eps": eps}
    return run


ELEMENTWISE = elements()
POOL = {"kernel_size": [2, 3], "stride": [None, 1, 2], "padding": [0, 1],
        "ceil_mode": [False, True]}
EDGES = {
    **{name: ELEMENTWISE for name in (
        "abs", "sign", "sin", "cos", "floor", "ceil", "round", "rsqrt", "reciprocal", "expm1",
        "log1p", "exp",
        "log", "sqrt", "sigmoid", "tanh", "erf", "neg")},
    **{"nn.functional." + name: ELEMENTWISE for name in (
        "logsigmoid", "selu", "mish", "relu6", "hardsigmoid", "hardswish", "relu", "silu", "gelu")},
    "nn.functional.softplus": elements(beta=[1, 0.5, 3, -1]),
    "nn.functional.elu": elements(alpha=[1.0, 0.5, 0.0, 2.0]),
    "nn.functional.leaky_relu": elements(negative_slope=[0.01, 0.0, 0.3, 2.0]),
    "clamp": clamps, **{name: two for name in (
        "minimum", "maximum", "add", "sub", "mul", "div/no_rounding_mode", "pow", "eq", "ne", "lt",
        "le", "gt", "ge")},
    "min/reduction_with_dim": along(), "max/reduction_with_dim": along(), "argmin": along(True),
    "argmax": along(True), "logsumexp": along(), "sum": along(True), "mean": along(True),
    "prod": along(), "var": along(True, correction=[0, 1, 2.5]),
    "std": along(True, correction=[0, 1, 2.5]), "softmax": along(keep=False),
    "log_softmax": along(keep=False),
    "linalg.vector_norm": along(True, ord=[2, 0, 1, 3, 0.5, -1, INF, -INF]),
    "cumsum": along(keep=False), "masked_fill": filled_where, "stack": stacked, "squeeze": squeezed,
    "unsqueeze": unsqueezed, "expand": expanded, "flip": flipped, "roll": rolled, "slice": sliced,
    **{"nn.functional.pad/" + mode: padded(mode) for mode in ("constant", "reflect", "replicate",
                                                              "circular")},
    "gather": indexed, "scatter_add": added, "index_select": selected, "topk": top,
    "sort": sorted_along(descending=[False, True], stable=[True]),
    "argsort": sorted_along(descending=[False, True], stable=[True]),
    "nn.functional.one_hot": classes, "tril": triangles, "triu": triangles, "tile": tiled,
    "repeat": tiled,
    "repeat_interleave": interleaved, "einsum": einsums,
    "nn.functional.mse_loss": differences(), "nn.functional.l1_loss": differences(),
    "nn.functional.huber_loss": differences({"delta": 1.0}, {"delta": 0.5}),
    "nn.functional.smooth_l1_loss": differences({"beta": 1.0}, {"beta": 0.0}, {"beta": 2.0}),
    "nn.functional.binary_cross_entropy": probabilities,
    "nn.functional.binary_cross_entropy_with_logits": logits, "nn.functional.kl_div": divergences,
    "nn.functional.nll_loss": likelihoods, "nn.functional.cosine_similarity": cosines,
    **{f"nn.functional.conv{n}d": convolutions(n) for n in (1, 2)},
    **{f"nn.functional.conv_transpose{n}d": convolutions(n, True) for n in (1, 2)},
    **{f"nn.functional.max_pool{n}d": pools(n, **POOL, dilation=[1, 2]) for n in (1, 2)},
    **{f"nn.functional.avg_pool{n}d": pools(n, **POOL, count_include_pad=[False, True])
       for n in (1, 2)},
    **{f"nn.functional.adaptive_avg_pool{n}d": adaptive(n) for n in (1, 2)},
    "nn.functional.interpolate/nearest": resizings(("nearest", 1), ("nearest", 2)),
    "nn.functional.interpolate/linear": resizings(("linear", 1)),
    "nn.functional.interpolate/bilinear": resizings(("bilinear", 2)),
    "nn.functional.pixel_shuffle": shuffled, "nn.functional.batch_norm": channel_norms("batch"),
    "nn.functional.group_norm": channel_norms("group"),
    "nn.functional.instance_norm": channel_norms("instance"),
}


def infinite(tensor):
    return bool(torch.isinf(tensor).any())


# Differences that stay: name of the operators, condition on (args, kwargs, what differs), reason.
KNOWN = [
    ("nn.functional.(elu|selu|relu6)",
     lambda a, k, why: "gradient" in why and bool(a[0].isnan().any()),
     "torch's gradient at NaN depends on the element's place in memory: its loops differ"),
    ("nn.functional.mish", lambda a, k, why: "gradient" in why and "not nan" in why,
     "at infinity the gradient is 1; torch multiplies infinity by 0"),
    ("var", lambda a, k, why: "gradient" in why and "inf" in why and k.get("dim") is None,
     "without freedom torch makes all gradients +infinity, whatever the sign of x - mean"),
    ("topk|sort|msort|argsort",
     lambda a, k, why: lib.FLOATING != torch.float32 and not k.get("stable"),
     "which of equal elements comes first is not specified; rounding makes elements equal"),
    ("nn.functional.scaled_dot_product_attention",
     lambda a, k, why: "gradient" in why and lib.FLOATING != torch.float32,
     "backward uses the rounded result; in bf16 probabilities and gradients are rounded, too"),
    ("prod", lambda a, k, why: "gradient" in why and "not nan" in why and infinite(a[0]),
     "torch divides the product by an infinite element: NaN for the product of the others"),
    ("linalg.vector_norm",
     lambda a, k, why: "gradient" in why and infinite(a[0]) and ": 0, not nan" in why,
     "the gradient at 0 is 0; torch multiplies it by an infinite norm"),
    ("nn.functional.group_norm", lambda a, k, why: "gradient" in why and a[0].numel() == 0,
     "no element: the gradient of weight is 0; torch divides 0 by 0"),
]
