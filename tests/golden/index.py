#!/usr/bin/env python3
"""Writes index.safetensors beside itself: ops on shapes and indices by PyTorch, with gradients.

    python3 tests/golden/index.py        (PyTorch and safetensors)

A case has "in0", "in1", ... (F32, or I64), its result "out", and, where the result has a gradient,
a cotangent "w" and "grad0", ...: the gradients of sum(out * w). "indices" is the second result of
topk and sort. tests/op/test_index.c runs the cases by their names.
"""

import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
tensors = {}
torch.manual_seed(7)


def case(name, fn, *inputs, grad=True):
    ins = [t.clone().requires_grad_(t.is_floating_point() and grad) for t in inputs]
    out = fn(*ins)
    if isinstance(out, tuple):
        tensors[name + ".indices"] = out[1].contiguous()
        out = out[0]
    for i, t in enumerate(inputs):
        tensors["%s.in%d" % (name, i)] = t.clone().contiguous()
    tensors[name + ".out"] = out.detach().clone().contiguous()
    if not (grad and out.is_floating_point()):
        return
    w = torch.randn(out.shape)
    tensors[name + ".w"] = w
    (out * w).sum().backward()
    for i, t in enumerate(ins):
        if t.grad is not None:
            tensors["%s.grad%d" % (name, i)] = t.grad.contiguous()


def r(*shape):
    return torch.randn(shape)


def ids(below, *shape):
    return torch.randint(0, below, shape)


def main():
    nan, inf = float("nan"), float("inf")
    case("stack", lambda a, b, c: torch.stack([a, b, c], 1), r(2, 3), r(2, 3), r(2, 3))
    case("stack_last", lambda a, b: torch.stack([a, b], -1), r(2, 3), r(2, 3))
    case("squeeze", lambda x: x.squeeze(1), r(2, 1, 3, 1))
    case("squeeze_all", lambda x: x.squeeze(), r(2, 1, 3, 1))
    case("squeeze_not", lambda x: x.squeeze(0), r(2, 1, 3))
    case("unsqueeze", lambda x: x.unsqueeze(-2), r(2, 3))
    case("expand", lambda x: x.expand(2, 4, -1, 5), r(4, 3, 1))
    case("expand_scalar", lambda x: x.expand(2, 3), r())
    case("tile", lambda x: x.tile((2, 1, 3)), r(2, 3))
    case("tile_inner", lambda x: x.tile((2,)), r(2, 3))
    case("repeat", lambda x: x.repeat_interleave(3, 1), r(2, 3, 2))
    case("pad_constant", lambda x: F.pad(x, (1, 2, 3, 0), value=1.5), r(2, 3, 4))
    case("pad_cut", lambda x: F.pad(x, (-1, 2, 1, -2)), r(2, 3, 4))
    case("pad_reflect", lambda x: F.pad(x, (3, 2, 1, 2), mode="reflect"), r(1, 2, 3, 4))
    case("pad_reflect_cut", lambda x: F.pad(x, (2, -1), mode="reflect"), r(1, 2, 5))
    case("pad_replicate", lambda x: F.pad(x, (3, 5, 1, 0), mode="replicate"), r(1, 2, 3, 4))
    case("pad_circular", lambda x: F.pad(x, (4, 1, 2, 3), mode="circular"), r(1, 2, 3, 4))
    case("pad_circular_cut", lambda x: F.pad(x, (2, -1), mode="circular"), r(1, 2, 5))
    case("flip", lambda x: x.flip(1), r(2, 5, 3))
    case("roll", lambda x: x.roll(2, 1), r(2, 5, 3))
    case("roll_back", lambda x: x.roll(-7, -1), r(2, 5, 3))
    case("slice_step", lambda x: x[:, 1:6:2], r(2, 7, 3))
    case("slice_step_end", lambda x: x[-5::3], r(7, 2))
    case("slice_step_none", lambda x: x[4:2:3], r(7, 2))
    case("tril", lambda x: x.tril(-1), r(2, 4, 5))
    case("triu", lambda x: x.triu(2), r(2, 4, 5))
    case("one_hot", lambda i: F.one_hot(i, 6), ids(6, 2, 3))
    case("gather_0", lambda x, i: x.gather(0, i), r(5, 3, 4), ids(5, 7, 2, 4))
    case("gather_1", lambda x, i: x.gather(1, i), r(5, 3, 4), ids(3, 4, 6, 3))
    case("gather_2", lambda x, i: x.gather(-1, i), r(5, 3, 4), ids(4, 5, 3, 9))
    case("gather_scalar", lambda x, i: x.gather(0, i), r(), torch.tensor(0))
    case("gather_turned", lambda x, i: x.t().gather(1, i.t()), r(5, 3), ids(5, 6, 2))
    case("scatter_0", lambda x, i, s: x.scatter_add(0, i, s), r(5, 3, 4), ids(5, 7, 2, 4),
         r(7, 2, 4))
    case("scatter_2", lambda x, i, s: x.scatter_add(-1, i, s), r(5, 3, 4), ids(4, 5, 3, 9),
         r(5, 3, 9))
    case("scatter_1", lambda x, i, s: x.scatter_add(1, i, s), r(3, 4), ids(4, 3, 5), r(3, 5))
    case("scatter_part", lambda x, i, s: x.scatter_add(1, i, s[:2, :3]), r(3, 4), ids(4, 2, 3),
         r(3, 5))
    case("select_0", lambda x, i: x.index_select(0, i), r(5, 3, 4), ids(5, 8))
    case("select_1", lambda x, i: x.index_select(1, i), r(5, 3, 4), ids(3, 4))
    case("select_2", lambda x, i: x.index_select(2, i), r(5, 3, 4), ids(4, 6))
    # (torch.topk leaves it open which of equal elements it takes: a stable sort does not)
    first = lambda dim, down, k: lambda x: tuple(
        t.narrow(dim, 0, k) for t in torch.sort(x, dim=dim, descending=down, stable=True))
    whole = torch.randint(-3, 4, (4, 40)).float()
    special = torch.tensor([[1, nan, -inf, 0.0, -0.0, inf, nan, 1, -2, inf],
                            [0.0, -0.0, 0.0, nan, nan, nan, -1, 5, -inf, 2]])
    case("topk", lambda x: x.topk(5, -1), r(3, 4, 20))
    case("topk_1", lambda x: x.topk(3, 1, largest=False), r(3, 7, 4))
    case("topk_ties", first(1, True, 9), whole)
    case("topk_ties_small", first(1, False, 9), whole)
    case("topk_special", first(1, True, 6), special)
    case("topk_special_small", first(1, False, 6), special)
    case("topk_long", lambda x: x.topk(40, 1), r(2, 3000))
    case("topk_long_small", lambda x: x.topk(40, 1, largest=False), r(2, 3000))
    case("sort", lambda x: x.sort(-1), r(3, 4, 20))
    case("sort_down", lambda x: x.sort(1, descending=True), r(3, 17, 4))
    case("sort_ties", first(1, False, 40), whole)
    case("sort_ties_down", first(1, True, 40), whole)
    case("sort_special", first(1, False, 10), special)
    case("sort_special_down", first(1, True, 10), special)
    case("sort_long", lambda x: x.sort(1), r(2, 1500))
    case("sort_integers", first(1, True, 9), ids(5, 3, 9) - 2, grad=False)
    for name, equation, *shapes in [
            ("matmul", "ij,jk->ik", (3, 4), (4, 5)),
            ("batched", "bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
            ("turned", "bij,bkj->kbi", (2, 3, 4), (2, 5, 4)), ("outer", "i,j->ji", (3,), (4,)),
            ("dot", "i,i->", (5,), (5,)), ("dots", "bi,bi->b", (4, 5), (4, 5)),
            ("dots_two", "bij,jbi->b", (4, 2, 5), (5, 4, 2)), ("mul", "ij,ji->ij", (3, 4), (4, 3)),
            ("mul_wide", "ij,j->ij", (3, 4), (4,)), ("implicit", "ij,jk", (3, 4), (4, 5)),
            ("implicit_order", "ba,ac", (3, 4), (4, 5)), ("capitals", "bA,Ac", (3, 4), (4, 5)),
            ("transpose", "ba", (3, 4)), ("trace", "ii->", (4, 4)), ("diagonal", "ii->i", (4, 4)),
            ("sum", "ijk->k", (3, 4, 2)), ("sum_all", "ijk->", (3, 4, 2)),
            ("permute", "ijk->kij", (3, 4, 2)), ("dots_one", "...ij->...ji", (2, 3, 4)),
            ("dots_both", "...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)),
            ("dots_wide", "...ij,jk->...ik", (2, 2, 3, 4), (4, 5)),
            ("dots_broadcast", "...i,...i->...i", (3, 1, 4), (2, 4)),
            ("dots_implicit", "i...j,j", (2, 3, 4), (4,)), ("dots_summed", "...i->i", (2, 3, 4)),
            ("two_sums", "aijb,jcib->abc", (2, 3, 4, 2), (4, 5, 3, 2)),
            ("alone", "ijx,jky->ik", (3, 4, 2), (4, 5, 3)), ("one", "ij,jk->ik", (3, 1), (4, 5)),
            ("attention", "bqhd,bkhd->bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
            ("diagonals", "iij,jk->ik", (3, 3, 4), (4, 5)),
            ("five", "abcdei,abcdei->abcde", (2, 1, 2, 1, 2, 3), (2, 1, 2, 1, 2, 3)),
            ("rows", "abcdi,abcdij->abcdj", (2, 1, 2, 2, 3), (2, 1, 2, 2, 3, 2)),
            ("five_rows", "abcdei,abcdei->abcd", (2, 1, 2, 2, 2, 3), (2, 1, 2, 2, 2, 3)),
            ("many", "abcdex,abcdef->abcdf", (2, 1, 2, 2, 3, 1), (2, 1, 2, 2, 3, 2)),
            ("scalar", ",ij->ji", (), (2, 3)), ("spaces", " i j , j -> i ", (2, 3), (3,))]:
        case("einsum_" + name, lambda *x: torch.einsum(equation, *x), *[r(*s) for s in shapes])
        text = torch.tensor([ord(c) for c in equation])
        tensors["einsum_%s.equation" % name] = text
    save_file(tensors, os.path.join(HERE, "index.safetensors"))


if __name__ == "__main__":
    main()
