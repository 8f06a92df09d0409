#!/usr/bin/env python3
"""Runs PyTorch's own samples of its operators through tshard.

    python3 tests/golden/op_db.py [--only NAME] [--dtype bfloat16]    (PyTorch 2.13; not in CI)

The samples are sample_inputs and reference_inputs of
torch.testing._internal.common_methods_invocations.op_db, in float32 (for the operators of
op_db_ops.INTEGERS also in int64), of at most 20,000 elements, and the edge cases of
op_db_edges.py: empty tensors, lengths of 1, NaN, infinity, ties, every dimension as a positive and
as a negative number. They are run for every operator that tshard has, forward and backward, with
contiguous and with transposed inputs, on one rank and on two; on two ranks with all inputs
replicated; with all that have it sharded along each dimension, the first alone, the others alone;
and in the layouts of op_db_ops.LAYOUTS. Values and gradients are compared with PyTorch's in
float64.

A sample is claimed if tshard has what its arguments ask for. Of these it counts: equal; differ;
known, a difference of op_db_edges.KNOWN, which stays; refused, with an error; crashed. On two
ranks, layouts that an op does not take (TSH_ERR_LAYOUT) are counted apart. What torch itself
refuses is not claimed; it is counted whether tshard refuses it, too. It prints a line for each
operator (its name; how many samples are claimed; what came out on one rank, in both forms of
memory, and on two, in all layouts; how many samples are not claimed, and why), then the sentences
of the errors, and totals. Exits with 1 if a sample differs or an operator crashes.
"""

import argparse
import ctypes
import json
import os
import re
import signal
import sys
import tempfile
import textwrap
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import op_db_library as lib
from op_db_edges import EDGES, KNOWN
from op_db_library import NotClaimed, Refused, V, call, call_result, leaf, pointer, refusal
from op_db_ops import INTEGERS, LAYOUTS, OPS, PRODUCTS, TORCH

LARGEST = 20000  # elements of all inputs of a sample
MOST = 300  # samples of one operator, and edge cases; of more, as many are drawn at random
ERR_LAYOUT = "TSH_ERR_LAYOUT"

# --------------------------------------------------------------- one comparison


def clamped(x, dtype):
    """What tsh_cast documents where torch's result is C's undefined behaviour."""
    ends, values = torch.iinfo(dtype), torch.nan_to_num(x.double(), 0)
    low, high = values <= float(ends.min), values >= float(ends.max)
    whole = torch.where(low | high, 0, values).to(torch.int64)
    return whole.masked_fill(low, ends.min).masked_fill(high, ends.max).to(dtype)


def wanted(op, args, kwargs, dtype, only_first=False):
    """Torch's outputs in dtype, the weights of the loss, which is of the first output, and the
    gradients of all tensors; only_first: of the first one, as torch has none for the others."""
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
        outputs = TORCH.get(op.name, op.op)(*a, **k)
    except RuntimeError as error:
        if only_first or not re.search("not differentiable|not implemented", str(error)):
            raise
        return wanted(op, args, kwargs, dtype, True)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    y = outputs[0]
    if op.name in ("int", "long"):
        outputs[0] = y = clamped(flat[0], y.dtype)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    grads = [None] * len(leaves)
    if y.is_floating_point() and y.requires_grad:
        (y * weights.to(y.dtype)).sum().backward()
        grads = [t.grad if t.is_floating_point() else None for t in leaves]
    return [t.detach() for t in outputs], weights, grads


def roughly(op, args, kwargs):
    """What torch gives in the dtype of --dtype; in float32 if it has no such kernel."""
    try:
        return wanted(op, args, kwargs, lib.FLOATING)
    except RuntimeError:
        return wanted(op, args, kwargs, torch.float32)


def same(got, want, coarse, roundings):
    """Whether got equals want, in float64, but for rounding: 2e-5 relative to the larger of 1 and
    the value, and 8 times the error of torch's own arithmetic. With --dtype, also so many
    roundings to it."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not got.is_floating_point():
        got, want = got.to(torch.int64), want.to(torch.int64)
        at = (got != want).flatten().nonzero()
        return f"{got.flatten()[at[0]]}, not {want.flatten()[at[0]]}" if len(at) else ""
    g, w, c = got.double(), want.double(), coarse.double()
    bound = 2e-5 * w.abs().clamp(min=1) + 8 * torch.nan_to_num((c - w).abs(), 0, 0, 0)
    if lib.FLOATING != torch.float32:
        bound += roundings * torch.finfo(lib.FLOATING).eps * w.abs().clamp(min=1)
        c = c.to(lib.FLOATING).double()
    ok = (g == w) | ((g - w).abs() <= bound) | (g.isnan() & w.isnan())
    ok |= g == c  # an overflow of float32, as torch has it
    ok |= g.isnan() & c.isnan()
    if bool(ok.all()):
        return ""
    at = int((~ok).flatten().nonzero()[0])
    return f"{g.flatten()[at]:.9g}, not {w.flatten()[at]:.9g}, at {at} of {g.numel()}"


def attempt(ctx, fn, args, kwargs, cuts, transposed, want, coarse, roundings):
    """Runs a sample on this rank; "" if all is equal, else what differs. cuts: of each tensor the
    dimension along which it is sharded, -1 for none."""
    flat, spec = tree_flatten((args, kwargs))
    leaves = []
    for i, t in enumerate(flat):
        if isinstance(t, torch.Tensor):
            d = cuts[len(leaves)]
            flat[i] = leaf(ctx, t, d if d >= 0 and t.shape[d] != 1 else -1, transposed)
            leaves.append(flat[i])
    a, k = tree_unflatten(flat, spec)
    y = fn(*a, **k)
    outputs = y if isinstance(y, list) else [y]
    y = outputs[0]
    (torch_outputs, weights, grads), (rough, _, rough_grads) = want, coarse
    for i, (got, output, c) in enumerate(zip(outputs, torch_outputs, rough)):
        result = same(call("od_full", got).read(),
                      output.to(torch.int32) if output.dtype == torch.bool else output, c,
                      roundings)
        if result:
            return (f"output {i}: " if i else "output: ") + result
    if not any(g is not None for g in grads) or not y.floating:
        return ""
    if call_result("od_backward", ctypes.c_void_p(ctx), y, ctypes.c_void_p(weights.data_ptr()),
                   ctypes.c_size_t(4 * weights.numel())):
        raise refusal(ctx)
    for i, x in enumerate(leaves):
        if grads[i] is None or x.leaf is None:
            continue
        handle = pointer("tsh_grad")(ctypes.c_void_p(x.leaf))
        if not handle:
            if lib.LIB.od_has_error(ctypes.c_void_p(ctx)) or bool(grads[i].any()):
                return f"gradient {i}: none ({refusal(ctx).args[1]})"
            continue
        back = V(ctx, handle, None).read().permute(x.order)
        result = same(back, grads[i], rough_grads[i], roundings)
        if result:
            return f"gradient {i}: {result}"
    return ""


class Accepted(Exception):
    """tshard gave a result."""


def accept(_):
    raise Accepted


FN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def run(ranks, *sample):
    """Runs a sample on so many ranks: "equal", "differ", "refused", "layout" or "skip", and why."""
    outcome = [None] * ranks

    def rank(ctx, _):
        place = lib.LIB.od_rank(ctypes.c_void_p(ctx))
        lib.LIB.od_barrier(ctypes.c_void_p(ctx))  # all ranks are open before one fails
        try:
            why = attempt(ctx, *sample)
            outcome[place] = ("differ", why) if why else ("equal", "")
        except NotClaimed as error:
            outcome[place] = ("skip", error.args[0])
        except Refused as error:
            code, text = error.args
            outcome[place] = ("layout" if code == ERR_LAYOUT and ranks > 1 else "refused", text)
        except Accepted:
            outcome[place] = ("equal", Accepted.__name__)
        except Exception as error:  # of this script
            outcome[place] = ("script", repr(error))
        return 0

    lib.LIB.od_run(ranks, FN(rank))
    order = ["script", "differ", "refused", "layout", "skip", "equal"]
    return min((o or ("refused", "no ctx") for o in outcome), key=lambda o: order.index(o[0]))


def describe(args, kwargs):
    flat, spec = tree_flatten((args, kwargs))
    return str(tree_unflatten([f"{str(t.dtype)[6:]}{tuple(t.shape)}" if isinstance(
        t, torch.Tensor) else t for t in flat], spec))


def own_samples(op):
    """PyTorch's samples: (args, kwargs)."""
    for dtype in (torch.float32, torch.int64):
        if dtype != torch.float32 and (op.name not in INTEGERS or dtype not in op.dtypes):
            continue
        for source in (op.sample_inputs, op.reference_inputs):
            torch.manual_seed(0)
            for sample in source("cpu", dtype, requires_grad=False):
                yield (sample.input, *sample.args), sample.kwargs


def edge_cases(op):
    torch.manual_seed(0)
    return EDGES.get(full_name(op), tuple)()


def full_name(op):
    return f"{op.name}/{op.variant_test_name}".rstrip("/")


def rounded(x):
    """A tensor of float32 whose values the dtype of --dtype has."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.to(lib.FLOATING).to(torch.float32)
    return x


def samples(op):
    """The samples of op, each once, of at most LARGEST elements: (args, kwargs, tensors)."""
    seen = set()
    for source in (own_samples, edge_cases):
        chosen = []
        for args, kwargs in source(op):
            args, kwargs = tree_map(rounded, (args, kwargs))
            tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
            if not tensors or sum(t.numel() for t in tensors) > LARGEST:
                continue
            key = (describe(args, kwargs), *(t.contiguous().numpy().tobytes() for t in tensors))
            if key not in seen:
                seen.add(key)
                chosen.append((args, kwargs, tensors))
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(1))[:MOST]
        yield from (chosen[i] for i in sorted(order.tolist()))


def layouts(op, tensors):
    """(name, the sharded dimension of each tensor) of the layouts on two ranks that are tried.
    S(d): along dimension d of the tensor that has most, shapes being aligned at the right."""
    n = len(tensors)
    yield "R", [-1] * n
    most = max(t.ndim for t in tensors)
    for cut in range(most):
        cuts = [max(cut - (most - t.ndim), -1) for t in tensors]
        yield f"S({cut})", cuts
        if n > 1:
            yield f"S({cut}), the first alone", cuts[:1] + [-1] * (n - 1)
            yield f"S({cut}), not the first", [-1] + cuts[1:]
    for own in LAYOUTS.get(op.name, ()):
        cuts = (list(own) + [own[-1]] * n)[:n]
        if all(c < t.ndim for c, t in zip(cuts, tensors)):
            yield "further layouts", cuts


def kind_of(sentence):
    """An error's sentence without its values."""
    sentence = re.sub(r"-?\b\d+(\.\d+)?(e[+-]?\d+)?\b", "N", sentence)
    return re.sub(r"\((N(, N)*)?,?\)", "(..)", sentence)


def run_op(op, fn, verbose):
    """Runs all samples of an operator. Returns how often what came out, by ranks and layouts; how
    many samples are not claimed, by reason; and how many errors there are of each kind."""
    counts, unclaimed, sentences, shown = {}, {}, {}, set()
    # of sums that nearly cancel; of bf16 fewer, as its roundings are large
    most = 8 if lib.FLOATING == torch.bfloat16 else 32
    roundings = most if op.name in PRODUCTS else 1

    def count(where, outcome):
        kind, why = outcome
        if kind == "differ" and any(re.fullmatch(name, op.name) and known(args, kwargs, why)
                                    for name, known, _ in KNOWN):
            kind = "known"
        counts.setdefault(where, {}).setdefault(kind, 0)
        counts[where][kind] += 1
        if kind in ("refused", "layout"):
            key = kind + ": " + kind_of(why)
            sentences[key] = sentences.get(key, 0) + 1
        if (kind in ("differ", "script") or (kind == "refused" and verbose)) and why not in shown:
            shown.add(why)  # once for all layouts
            print(f"{op.name} {where}: {kind}: {describe(args, kwargs)}: {why}", flush=True)

    for args, kwargs, tensors in samples(op):
        try:
            want = wanted(op, args, kwargs, torch.float64)
            coarse = roughly(op, args, kwargs)
        except Exception as error:  # such as float64 against an argument of float32
            taken = run(1, lambda *a, **k: accept(fn(*a, **k)), args, kwargs, [-1] * len(tensors),
                        False, None, None, 0)[1]
            why = "torch refuses" + (", tshard computes" if taken == Accepted.__name__ else "")
            unclaimed[why] = unclaimed.get(why, 0) + 1
            if verbose:
                print(f"{op.name}: {why}: {describe(args, kwargs)}: {error}", flush=True)
            continue
        if verbose > 1:
            print(f"{op.name}: {describe(args, kwargs)}", flush=True)
        shown.clear()
        none = [-1] * len(tensors)
        outcome = run(1, fn, args, kwargs, none, False, want, coarse, roundings)
        if outcome[0] == "skip":
            unclaimed[outcome[1]] = unclaimed.get(outcome[1], 0) + 1
            continue
        count("1 rank, contiguous", outcome)
        count("1 rank, transposed", run(1, fn, args, kwargs, none, True, want, coarse, roundings))
        for name, cuts in layouts(op, tensors):
            count(f"2 ranks, {name}",
                  run(2, fn, args, kwargs, cuts, False, want, coarse, roundings))
            if "," not in name:
                count(f"2 ranks, {name}, transposed",
                      run(2, fn, args, kwargs, cuts, True, want, coarse, roundings))
    return counts, unclaimed, sentences


def in_child(op, fn, verbose):
    """run_op in a process of its own; a signal is a crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.alarm(1800)
        with os.fdopen(writing, "w") as pipe:
            json.dump(run_op(op, fn, verbose), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) or not text:
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exit"
        print(f"{op.name}: crashed: {name}", flush=True)
        return {"1 rank, contiguous": {"crashed": 1}}, {}, {}
    return json.loads(text)


KINDS = ("equal", "layout", "refused", "known", "differ", "crashed", "script")


def row(counts, ranks):
    """How often what came out on 1 or 2 ranks: "12 equal, 3 layout"."""
    sums = {kind: sum(kinds.get(kind, 0) for where, kinds in counts.items()
                      if where.startswith(ranks)) for kind in KINDS}
    return ", ".join(f"{n} {kind}" for kind, n in sums.items() if n) or "-"


def add_up(total, counts):
    for where, kinds in counts.items():
        for kind, n in kinds.items():
            total.setdefault(where, {}).setdefault(kind, 0)
            total[where][kind] += n


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="operators whose name holds one of these, with commas")
    parser.add_argument("--library", help="the shared library of op_db.c, if it is built already")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                        help="dtype of tshard's floating tensors")
    parser.add_argument("--verbose", "-v", action="count", default=0)
    args = parser.parse_args()
    lib.FLOATING = getattr(torch, args.dtype)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    total, errors, skipped = {}, [], 0
    print("| operator | claimed | 1 rank | 2 ranks | not claimed |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        lib.load(args.library or lib.build(folder))
        for op in op_db:
            name = full_name(op)
            fn = OPS.get(op.name)
            if not fn or (args.only and not any(o in name for o in args.only.split(","))):
                continue
            counts, unclaimed, sentences = in_child(op, fn, args.verbose)
            add_up(total, counts)
            skipped += sum(unclaimed.values())
            errors += [f"- {n} {name}, {text}" for text, n in sentences.items()]
            claimed = sum(counts.get("1 rank, contiguous", {}).values())
            print(f"| {name} | {claimed} | {row(counts, '1 rank')} | {row(counts, '2 ranks')} | "
                  + ", ".join(f"{n} {why}" for why, n in unclaimed.items()) + " |", flush=True)
    lines = [textwrap.fill(error, 110, subsequent_indent="  ", break_long_words=False,
                           break_on_hyphens=False) for error in errors]
    print("\n".join(["", *lines, ""]))
    for where in sorted(total):
        print(f"- {where}: {sum(total[where].values())} claimed: " +
              ", ".join(f"{n} {kind}" for kind, n in sorted(total[where].items())))
    print(f"\n1 rank: {row(total, '1 rank')}; 2 ranks: {row(total, '2 ranks')}; "
          f"samples not claimed: {skipped}")
    bad = sum(kinds.get(k, 0) for kinds in total.values() for k in ("differ", "crashed", "script"))
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
