#!/usr/bin/env python3
"""tshard from Python, examples/python/tshard.py over the shared library: ops and gradients against
NumPy, arrays and DLPack, training on several ranks, errors, lifetimes, the GIL. Reports in cmocka's
words."""

import gc
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback

SCRIPT_LIMIT = 300
HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
EXAMPLES = os.path.join(TOP, "examples", "python")
sys.path[:0] = [os.path.join(TOP, "tests", "support"), EXAMPLES]
from scripts import DEBUG, ENVIRONMENT, Failed, Skipped, check, make_debug, run_tests

LIBRARY = os.path.join(DEBUG, "libtshard.so")
MISSING = []  # why no test can run
np = tshard = None


def prepare():
    """Imports NumPy and tshard; makes the library that tshard loads."""
    global np, tshard
    try:
        np = importlib.import_module("numpy")
        importlib.import_module("cffi")
    except ImportError as error:
        MISSING.append("%s: apt-get install python3-cffi python3-numpy" % error)
        return
    make_debug("shared")
    os.environ["TSHARD_LIBRARY"] = ENVIRONMENT["TSHARD_LIBRARY"] = LIBRARY
    tshard = importlib.import_module("tshard")


def on_ranks(*counts):
    """Makes of test(ctx) one that runs on so many ranks, for each of counts."""
    def made(test):
        def whole(_):
            for ranks in counts:
                tshard.run(ranks, test)
        whole.__name__ = test.__name__
        return whole
    return made


def close(a, b, limit=1e-5):
    a, b = np.asarray(a), np.asarray(b)
    check(a.shape == b.shape, "shapes", a.shape, b.shape)
    check(np.allclose(a, b, limit, limit), "differ by", a.size and abs(a - b).max(), ":", a, b)


def refused(code, words, call, *args, **named):
    """The sentence of the error that a call raises."""
    try:
        result = call(*args, **named)
    except tshard.Error as error:
        check(error.code == code and words in error.sentence, "not", code, words, "but", error)
        return error
    raise Failed("no error, but %r" % (result,))


def raises(kind, words, call, *args, **named):
    try:
        result = call(*args, **named)
    except kind as error:
        check(words in str(error), "not", words, "but", error)
        return error
    raise Failed("no error, but %r" % (result,))


def normal(*shape):
    return np.random.default_rng(sum(shape) + len(shape)).standard_normal(shape).astype(np.float32)


# ---- declarations --------------------------------------------------------------


def declarations_are_those_of_the_headers(_):
    if not shutil.which(os.environ.get("CC", "cc").split()[0]):
        raise Skipped("no C compiler is here: apt-get install gcc")
    done = subprocess.run([sys.executable, "-B", os.path.join(EXAMPLES, "make_cdef.py"), "--check"],
                          stdout=subprocess.PIPE, timeout=60, text=True)
    check(done.returncode == 0, done.stdout)


def every_function_can_be_called(_):
    count = 0
    for name, names in tshard.PARAMETERS.items():
        kind = tshard.ffi.typeof(getattr(tshard.lib, name))
        check(len(names) == len(kind.args), name, "has parameters", names)
        if kind.ellipsis or name + "_built" in tshard.PARAMETERS or name.endswith("_built"):
            continue
        if name != "tsh_close":
            check(callable(getattr(tshard, name[4:])), name, "is not there")
            count += 1
    check(count > 150, "only", count, "functions")
    raises(AttributeError, "there is no tsh_rleu", lambda: tshard.rleu)
    check(tshard.version().startswith("%d.%d." % divmod(tshard.VERSION, 1000)), tshard.version())
    check(tshard.COLWISE == 1 and tshard.ZERO < 0 and tshard.MAX_DIMS == 6, "constants")


def owned_tensors_are_those_of_the_manual(_):
    """What the header says to make an owned tensor, and what returns a parameter."""
    with open(os.path.join(TOP, "tshard.h"), encoding="utf-8") as file:
        text = file.read().split("/* end of header: stop here")[0]
    documented = re.findall(r"/\*((?:[^*]|\*(?!/))*)\*/\nTSH_API tsh_tensor \*tsh_(\w+)\(", text)
    check(len(documented) > 40, "only", len(documented), "functions found")
    owned = {name for words, name in documented if re.search(r"(Makes|Returns) an owned", words)
             and "Returns\n * t" not in words and "Returns t" not in words}
    check(owned == tshard.OWNED, "owned:", owned ^ tshard.OWNED)
    params = {name for words, name in documented
              if re.search(r"Returns the parameter|Adds a parameter", words)}
    check(params == tshard.PARAMS, "parameters:", params ^ tshard.PARAMS)


# ---- values ----------------------------------------------------------------------


@on_ranks(1, 2)
def ops_are_those_of_numpy(ctx):
    a, b = normal(3, 4), normal(4) + 3
    x, y = tshard.tensor(a), tshard.tensor(b)
    for ours, theirs in ((x + y, a + b), (x - y, a - b), (x * y, a * b), (x / y, a / b),
                         (y ** x, b ** a), (x + 2, a + 2), (2 + x, a + 2), (x - 2, a - 2),
                         (2 - x, 2 - a), (x * 3, a * 3), (3 * x, a * 3), (x / 3, a / 3),
                         (3 / y, 3 / b), (y ** 3, b ** 3), (-x, -a), (x @ x.T, a @ a.T),
                         (x < 0, a < 0), (x >= y, a >= b), (x > np.float32(1), a > 1),
                         (x.sum(), a.sum()), (x.sum(dim=-1, keepdim=True), a.sum(-1)[:, None]),
                         (x.mean(0), a.mean(0)), (tshard.max(x, 1), a.max(1)),
                         (x.argmax(dim=1), a.argmax(1)), (x.exp(), np.exp(a)),
                         (x.reshape(2, -1), a.reshape(2, 6)), (x.transpose(0, 1), a.T),
                         (x.permute(1, 0), a.T), (tshard.concat([x, x], dim=1), np.hstack([a, a])),
                         (x.split(2, dim=1)[1], a[:, 2:]), (x.softmax(-1).sum(-1), np.ones(3)),
                         (tshard.where(x < 0, -x, x), abs(a)),
                         (tshard.full((2, 3), 7), np.full((2, 3), 7)),
                         (tshard.arange("i64", 0, 5, 2), np.arange(0, 5, 2)),
                         (tshard.layer_norm(x), (a - a.mean(1, keepdims=True))
                          / np.sqrt(a.var(1, keepdims=True) + 1e-5))):
        close(ours.numpy(), theirs)
    check(float(x[1, 2]) == a[1, 2] and len(x) == 3 and x.ndim == 2, "a tensor")
    check(x == x and x != x[0] and x[0, 0].eq(x[0, 0]) and len(list(x)) == 3, "a tensor")
    check("%s %d" % (x.dtype, x.dtype) == "F32 1", x.dtype)
    check(x.shape == (3, 4) and x.dtype == tshard.F32 and str(x.layout) == "R", x)
    check(repr(tshard.tensor([1.0, 2.0])) == "f32 (2) R: 1 2", repr(tshard.tensor([1.0, 2.0])))
    raises(TypeError, "unsupported operand", lambda: x + "1")
    raises(TypeError, "", lambda: a * x)


@on_ranks(1)
def indices_are_those_of_numpy(_):
    a = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    x = tshard.tensor(a)
    for index in (0, -1, np.s_[1:], np.s_[:, 1], np.s_[..., 2], np.s_[1, :, 3:],
                  np.s_[:, None, 1:3], np.s_[2, 3, 4], np.s_[...], np.s_[5:], np.s_[None],
                  np.s_[-2:, ..., -1], ()):
        close(x[index].numpy(), a[index])
    raises(IndexError, "outside", lambda: x[3])
    raises(IndexError, "3 dimensions", lambda: x[0, 0, 0, 0])
    raises(IndexError, "step", lambda: x[::2])
    raises(TypeError, "an index", lambda: x["a"])


@on_ranks(1, 2)
def gradients_are_those_of_a_formula(ctx):
    a, w = normal(5, 3), normal(3, 2)
    x = tshard.tensor(a).requires_grad(1)
    weight = tshard.tensor(w).requires_grad(1)
    check(weight.grad is None, "a gradient before backward")
    y = ((x @ weight) ** 2).sum()
    y.backward()
    close(weight.grad.numpy(), 2 * a.T @ (a @ w), 1e-4)
    close(x.grad.numpy(), 2 * (a @ w) @ w.T, 1e-4)
    tshard.step_end()
    with tshard.no_grad():
        z = (x * 2).sum()
        if ctx.size == 1:  # other ranks would learn it
            refused(tshard.ERR_STATE, "does not depend", z.backward)
    check(tshard.gradcheck(lambda ctx, p, q: (p @ q).sigmoid().sum(), [x, weight]) < 1e-2,
          "gradcheck")


@on_ranks(1, 2, 3)
def arrays_share_memory_where_they_can(ctx):
    a = normal(6, 4)
    x = tshard.tensor(a)
    x.numpy()[1, 1] = 50
    check(x[1, 1].item() == 50, "a copy")
    a[1, 1] = 50
    check(x.numpy().ctypes.data == x.T.numpy().ctypes.data, "a transposed copy")
    close(x.T.numpy(), a.T)
    close(np.asarray(x), a)
    cut = tshard.tensor(a, layout=tshard.sharded(0))
    check(str(cut.layout) == "S(0)" and cut.shape == (6, 4), cut)
    own = 6 // ctx.size
    close(cut.numpy(local=True), a[ctx.rank * own:(ctx.rank + 1) * own])
    check(cut.local_shape == (own, 4), cut.local_shape)
    close(cut.numpy(), a)
    close((cut * 2).full_tensor().numpy(), a * 2)
    empty = tshard.tensor(np.zeros((0, 3)))
    check(empty.numpy().shape == (0, 3) and empty.shape == (0, 3), empty)
    for dtype in "f32", "f16", "bf16", "i32", "i64":
        close(tshard.tensor([[1, 2], [3, 4]], dtype).numpy(), np.array([[1, 2], [3, 4]]))
    check(tshard.tensor([1, 2]).dtype == tshard.I64, "integers")
    check(tshard.tensor(np.float64(1.5)).dtype == tshard.REAL, "a float64")
    check(tshard.from_numpy(np.float64([1.5])).dtype == tshard.F64, "from_numpy converts")
    raises(TypeError, "no dtype of tshard", tshard.from_numpy, np.zeros(3, np.complex64))
    x.write(a * 3)
    close(x.numpy(), a * 3)


@on_ranks(1, 2)
def dlpack_with_numpy(ctx):
    for dtype in np.float32, np.float64, np.float16, np.int32, np.int64:
        a = (normal(4, 3) * 10).astype(dtype)
        x = tshard.from_dlpack(a.T)
        close(x.numpy(), a.T)
        back = np.from_dlpack(x)
        check(back.dtype == dtype and back.ctypes.data == x.numpy().ctypes.data, "a copy")
        close(np.from_dlpack(x[1:]), a.T[1:])
    close(tshard.from_dlpack(normal(6)[::-2]).numpy(), normal(6)[::-2])
    check(tshard.from_dlpack(np.array(3, np.float32)).shape == (), "a scalar")
    check(x.__dlpack_device__() == (1, 0), "a device")
    x.__dlpack__()  # a capsule that nobody takes
    cut = tshard.tensor(normal(4), layout=tshard.sharded(0))
    if ctx.size > 1:
        raises(BufferError, "full_tensor", np.from_dlpack, cut)
    close(np.from_dlpack(cut.full_tensor()), normal(4))
    raises(TypeError, "no dtype of code", tshard.from_dlpack, np.zeros(3, np.uint8))


def dlpack_with_torch(_):
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise Skipped("torch is not here") from None

    def both(_):
        for dtype in "float32", "float64", "float16", "bfloat16", "int32", "int64":
            a = (torch.arange(12).reshape(3, 4) * 3 - 7).to(getattr(torch, dtype))
            x = tshard.from_dlpack(a.T)
            back = torch.from_dlpack(x)
            check(back.dtype == a.dtype and torch.equal(back, a.T), dtype, back, a)
            if x.dtype != tshard.BF16:
                back[0, 0] = 5
                check(x.numpy()[0, 0] == 5, "a copy")
        return back
    kept = tshard.run(1, both)[0]
    check(kept[1, 1] == 8, "values after the ctx", kept)
    del kept
    nothing_is_left()


def nothing_is_left():
    gc.collect()
    with tshard.MEMORY.lock:
        tshard.MEMORY.settle()
    check(not tshard._capsules, "capsules:", len(tshard._capsules))
    check(not tshard.MEMORY.sizes and not tshard.MEMORY.shared, "blocks:", tshard.MEMORY.sizes)


# ---- training ----------------------------------------------------------------------



def make_net(cut):
    """A container with a forward in Python, sharded if cut."""
    class MLP(tshard.Module):
        def __init__(self, parent, name):
            super().__init__(parent, name)
            self.norm = tshard.LayerNorm(self, "norm", 8)
            self.up = tshard.Linear(self, "up", 8, 20, style=tshard.COLWISE if cut else 0)
            self.down = tshard.Linear(self, "down", in_=20, out=5, bias=not cut,
                                      style=tshard.ROWWISE if cut else tshard.PLAIN)

        def forward(self, x):
            return self.down(self.up(self.norm(x)).gelu())

    return MLP(tshard.root(), "mlp")


def train(ctx, cut, path=None):
    """The losses of some steps on ids that an embedding looks up."""
    table = tshard.Embedding(tshard.root(), "table", 11, 8)
    model = make_net(cut)
    adam = tshard.AdamW(tshard.root(), lr=0.05, weight_decay=0.1, clip_norm=1.0)
    rng, losses = np.random.default_rng(3), []
    for _ in range(6):
        ids = tshard.tensor(rng.integers(0, 11, (16,)))
        target = tshard.tensor(ids.numpy() % 5)
        loss = tshard.cross_entropy(model(table(ids)), target, label_smoothing=0.1)
        loss.backward()
        losses.append(loss.item())
        adam.step()
        tshard.zero_grads(tshard.root())
        tshard.step_end()
    check(adam.state().steps == 6, "steps")
    if path:
        tshard.save(tshard.root(), path, adam)
    return losses


def losses_are_the_same_on_several_ranks(folder):
    path = os.path.join(folder, "model.safetensors")
    one, = tshard.run(1, train, True)
    check(one[-1] < one[0], "no progress:", one)
    for ranks in 1, 2, 3:
        for losses in tshard.run(ranks, train, True, path):
            close(losses, one, 1e-5)
    dense = tshard.run(1, train, False)
    check(dense[0][0] != one[0], "the bias is of no effect")

    def loaded(ctx, path):
        tshard.Embedding(tshard.root(), "table", 11, 8)
        make_net(True)
        tshard.load(tshard.root(), path)
        params = tshard.root().parameters()
        tshard.save_with(tshard.root(), path + ".%d" % ctx.size, dtype=tshard.BF16)
        return {name: param.numpy().copy() for name, param in params.items()}

    here, (there, same) = tshard.run(1, loaded, path)[0], tshard.run(2, loaded, path)
    check(list(here) == ["table.weight", "mlp.norm.weight", "mlp.norm.bias", "mlp.up.weight",
                         "mlp.up.bias", "mlp.down.weight"], list(here))
    for name, values in here.items():
        check((values == there[name]).all() and (values == same[name]).all(), name, "differs")
    with open(path + ".1", "rb") as first, open(path + ".2", "rb") as second:
        check(first.read() == second.read(), "files of 1 and 2 ranks differ")


def examples_print_what_those_in_c_do(folder):
    if not shutil.which("cc"):
        raise Skipped("no C compiler is here: apt-get install gcc")
    for name in "01_autograd", "02_two_ranks", "03_shard_a_model":
        with open(os.path.join(TOP, "examples", name + ".c"), encoding="utf-8") as file:
            text = file.read().replace("#define TSHARD_IMPLEMENTATION\n", "")
        source, program = os.path.join(folder, name + ".c"), os.path.join(folder, name)
        with open(source, "w", encoding="utf-8") as out:
            out.write(text.replace('"../', '"'))
        subprocess.run(["cc", "-std=c99", "-O0", "-I", TOP, source, "-o", program, "-L",
                        os.path.dirname(LIBRARY), "-ltshard", "-lm", "-pthread",
                        "-Wl,-rpath," + os.path.dirname(LIBRARY)], check=True, timeout=100)
        said = [subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60, text=True,
                               env=ENVIRONMENT).stdout
                for command in ([program], [sys.executable, "-B", os.path.join(EXAMPLES,
                                                                               name + ".py")])]
        check(said[0] == said[1] and len(said[0]) > 100, name, "prints", *said)
        with open(os.path.join(EXAMPLES, name + ".py"), encoding="utf-8") as file:
            check(len(file.readlines()) < text.count("\n"), name, "is longer in Python")


# ---- errors ------------------------------------------------------------------------


@on_ranks(1)
def errors_are_exceptions(ctx):
    x, y = tshard.tensor(normal(2, 3)), tshard.tensor(normal(2, 4))
    error = refused(tshard.ERR_SHAPE, "tsh_matmul: (2, 3) R times (2, 4) R does not fit",
                    lambda: x @ y)
    check(error.rank == 0 and str(error).endswith("(TSH_ERR_SHAPE)"), error)
    close((x + x).numpy(), 2 * normal(2, 3))  # the ctx goes on
    refused(tshard.ERR_ARGUMENT, "b is NULL", tshard.add, x, None)
    refused(tshard.ERR_ARGUMENT, "lr", tshard.SGD, tshard.Linear(tshard.root(), "a", 3, 3), lr=-1)
    raises(TypeError, "tsh_linear_desc has no field inn; it has in, out, input", tshard.Linear,
           tshard.root(), "b", inn=3)
    raises(TypeError, "1 arguments too many", tshard.relu, x, 1)
    raises(TypeError, "dim0 is missing", tshard.transpose, x)
    raises(TypeError, "has no parameter slope", tshard.relu, x, slope=1)
    raises(TypeError, "tsh_tensor *", tshard.relu, tshard.root())
    raises(AttributeError, "there is no tsh_weight that takes a tsh_module", getattr,
           tshard.root(), "weight")
    refused(tshard.ERR_ARGUMENT, "has no module", lambda: tshard.root()["nothing"])
    refused(tshard.ERR_IO, "", tshard.load, tshard.root(), "/nowhere")
    refused(tshard.ERR_ARGUMENT, "no", tshard.fail, tshard.ERR_ARGUMENT, "100 % no")
    other = []

    def elsewhere():
        try:
            tshard.relu(x)
        except tshard.Error as error:
            other.append(error.sentence)
        try:
            tshard.zeros((2,))
        except tshard.Error as error:
            other.append(error.sentence)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    check(len(other) == 2 and "another thread" in other[0] and "has no ctx" in other[1], other)


def a_callback_raises_what_it_raised(_):
    def body(ctx):
        class Bad(tshard.Module):
            def forward(self, x):
                return x.relu() if self.good else x.relu() + self.absent

        bad = Bad(tshard.root(), "bad")
        bad.good = False
        x = tshard.tensor(normal(3))
        error = raises(AttributeError, "Bad has no absent", bad, x)
        check("return x.relu()" in "".join(traceback.format_tb(error.__traceback__)), "traceback")
        bad.good = True
        close(bad(x).numpy(), np.maximum(normal(3), 0))
        wrong = tshard.add_module(tshard.root(), "wrong", forward=lambda self, x: x @ x)
        refused(tshard.ERR_SHAPE, "wrong: tsh_matmul: ", wrong, x)
        none = tshard.add_module(tshard.root(), "none", forward=lambda self, x: None)
        refused(tshard.ERR_ARGUMENT, "none: tsh_forward", none, x)
        raises(ZeroDivisionError, "division", tshard.gradcheck, lambda ctx, x: 1 / 0,
               [x.requires_grad(1)])
    tshard.run(1, body)
    error = raises(tshard.Error, "wrong: tsh_matmul: ", tshard.run, 2, fails_in_a_module)
    check(error.rank == 1 and error.sentence.count("wrong: ") == 1, error)
    check(error.ranks[0].sentence == "rank 1: " + error.sentence, error.ranks[0])


@on_ranks(1, 2, 3)
def an_op_in_numpy(ctx):
    a, b = normal(6, 5), normal(6, 5) + 2
    for layout in tshard.replicated(), tshard.sharded(0), tshard.sharded(1):
        x = tshard.tensor(a, layout=layout).requires_grad(1)
        y = tshard.tensor(b, layout=layout).requires_grad(1)
        both = {"shape": (6, 5), "layout": layout}
        product, larger = tshard.custom_op(
            [x, y], lambda x, y: (x * y, x > y), lambda grads, given, _: (
                grads[0] * given[1], grads[0] * given[0]), out=[both, {**both, "dtype": "i32"}])
        close(product.numpy(), a * b)
        close(larger.numpy(), a > b)
        (product * product).sum().full_tensor().backward()
        close(x.grad.numpy(), 2 * a * b * b, 1e-4)
        close(y.grad.numpy(), 2 * a * a * b, 1e-4)
        tshard.step_end()
    if ctx.size == 1:
        square = lambda back: tshard.custom_op([x], lambda x: x * x, back)
        close(square(None).numpy(), a * a)
        raises(ZeroDivisionError, "", tshard.custom_op, [x], lambda x: 1 / 0)
        loss = square(lambda grads, given, _: 1 / 0).sum().full_tensor()
        raises(ZeroDivisionError, "", loss.backward)


def a_pipeline_of_python_functions(_):
    tshard.run(2, through_a_pipeline, pp=2)


def through_a_pipeline(ctx):
    blocks = tshard.add_module(tshard.root(), "h")
    for i in range(2):
        tshard.Linear(blocks, str(i), 6, 6)
    a, losses = normal(4, 6), []
    pipe = tshard.pipeline_new(blocks, micro_batches=2,
                               input=lambda ctx, k: tshard.tensor(a[2 * k:2 * k + 2]),
                               loss=lambda ctx, y, k: (y ** 2).mean())
    adam = tshard.Adam(tshard.root(), lr=0.1)
    for _ in range(4):
        losses.append(pipe.train())
        adam.step()
        tshard.zero_grads(tshard.root())
        tshard.step_end()
    check(losses[3] < losses[0] and abs(pipe.evaluate(2) / losses[3] - 1) < 1, losses)


def fails_in_a_module(ctx):
    wrong = tshard.add_module(tshard.root(), "wrong", forward=lambda self, x: x @ x)
    x = tshard.tensor(normal(3))
    tshard.tp_reduce(x, tshard.SUM)  # now all are here
    if ctx.rank == 1:
        wrong(x)
    tshard.tp_reduce(x, tshard.SUM)


def an_exception_on_one_rank_ends_all(_):
    def body(ctx, guilty):
        x = tshard.tensor(normal(3))
        tshard.tp_reduce(x, tshard.SUM)  # now all are here
        if ctx.rank == guilty:
            raise ValueError("of rank %d, 100 %%s" % guilty)
        tshard.tp_reduce(x, tshard.SUM)
        while True:  # until the error arrives
            tshard.ok()

    for ranks, guilty in ((1, 0), (2, 0), (2, 1), (3, 2)):
        error = raises(ValueError, "of rank %d, 100 %%s" % guilty, tshard.run, ranks, body, guilty)
        check("raise ValueError" in "".join(traceback.format_tb(error.__traceback__)), "traceback")
        check(sorted(error.ranks) == list(range(ranks)), error.ranks)
        for rank, other in error.ranks.items():
            if rank != guilty:
                check(isinstance(other, tshard.Error) and other.rank == guilty
                      and other.code == tshard.ERR_ABORTED
                      and other.sentence == "rank %d: ValueError: %s" % (guilty, error), other)
    raises(SystemExit, "3", tshard.run, 2, lambda ctx: sys.exit(3))
    refused(tshard.ERR_STATE, "3 ranks do not divide", tshard.run, 3, body, 0, tp=2)
    for ranks in 1, 2:
        raises(TypeError, "tsh_desc has no field rank", tshard.run, ranks, body, rank=2)


# ---- lifetimes -----------------------------------------------------------------------


def stale_tensors_are_errors(_):
    words = "were given back by tsh_backward, tsh_step_end or tsh_scope_end"

    def body(ctx):
        w = tshard.tensor(normal(4)).requires_grad(1)
        middle = w * 2
        kept = (w * 3).retain_grad()
        (middle * kept).sum().backward()
        refused(tshard.ERR_STALE, "tsh_relu: the values of x " + words, middle.relu)
        refused(tshard.ERR_STALE, words, middle.numpy)
        close(kept.numpy(), 3 * normal(4))
        tshard.step_end()
        for step in range(3):  # the library uses handles again
            for _ in range(400):
                w.relu()
            refused(tshard.ERR_STALE, "tsh_relu: the values of x " + words, kept.relu)
            refused(tshard.ERR_STALE, "tsh_add: the values of b " + words, tshard.add, w, kept)
            refused(tshard.ERR_STALE, "parts[1] " + words, tshard.concat, [w, kept], 0)
            refused(tshard.ERR_STALE, words, lambda: kept.shape)
            check(repr(kept) == "<tshard tensor, released>", kept)
            tshard.step_end()
        with tshard.no_grad(), tshard.scope():
            inner = w + 1
            close(inner.numpy(), normal(4) + 1)
        refused(tshard.ERR_STALE, words, inner.numpy)
        outer = w.keep()
        tshard.step_end()
        close(outer.numpy(), normal(4))
        adam = tshard.Adam(tshard.Linear(tshard.root(), "a", 3, 3))
        adam.free()
        raises(tshard.Error, "", adam.step)
        tshard.tensor_free(outer)
        refused(tshard.ERR_STALE, "", outer.relu)
        return w, tshard.root(), ctx

    w, root, ctx = tshard.run(1, body)[0]
    refused(tshard.ERR_STALE, "the ctx of x is closed", w.relu)
    refused(tshard.ERR_STALE, "is closed", w.numpy)
    refused(tshard.ERR_STALE, "is closed", tshard.zero_grads, root)
    refused(tshard.ERR_STATE, "the ctx is closed", ctx.ok)
    refused(tshard.ERR_STATE, "has no ctx", tshard.zeros, (1,))
    check("released" in repr(w) and "released" in repr(root), "repr")


def memory_of_arrays_stays(_):
    def body(ctx):
        layer = tshard.Linear(tshard.root(), "layer", 300, 500)
        owned = tshard.tensor(normal(2000, 1000))  # a block with huge pages
        step = owned * 2
        tshard.materialize(tshard.root())
        arrays = [layer.param("weight").numpy(), owned.numpy(), step.numpy(), np.from_dlpack(owned)]
        copies = [array.copy() for array in arrays[:2]]
        del owned
        tshard.zeros((1,))  # frees it
        tshard.to(tshard.root(), tshard.BF16)  # other memory for the weight
        return arrays, copies

    (weight, owned, step, again), copies = tshard.run(1, body)[0]
    check((weight == copies[0]).all() and (owned == copies[1]).all(), "other values")
    check((again == copies[1]).all() and step.sum() is not None, "other values")
    step[:] = 1  # this rank's memory still
    del weight, owned, step, again
    nothing_is_left()


def a_tensor_keeps_its_ctx(_):
    x = tshard.tensor([1.0, 2.0], ctx=tshard.Context(seed=4))
    gc.collect()
    check((x + x).tolist() == [2, 4], "no values")
    check(tshard.current() is x.ctx and tshard.zeros((2,)).ctx is x.ctx, "another ctx")
    del x
    nothing_is_left()
    ctx = tshard.Context()  # in cycles
    model = make_net(False)
    x = tshard.tensor(normal(2, 8))
    x.me = x, model
    close(model(x).numpy().shape, (2, 5))
    del ctx, model, x
    nothing_is_left()
    with tshard.Context(dtype="bf16") as ctx:
        layer = tshard.Linear(ctx.root(), "layer", 2, 2)
        check(layer.param("weight").dtype == tshard.BF16, "another dtype")
    refused(tshard.ERR_STATE, "closed", ctx.root)
    ctx = tshard.Context()
    tshard.run(1, lambda inner: check(tshard.current() is inner, "another ctx"))
    check(tshard.current() is ctx, "another ctx")
    refused(tshard.ERR_ARGUMENT, "do not divide", tshard.Context, tp=2)


def tensors_are_freed_with_their_objects(_):
    def body(ctx):
        def held():
            tshard.zeros((1,))  # frees what is not used any more
            return tshard.mem_stats().now[tshard.MEM_TENSORS]
        weight = tshard.tensor(normal(100, 100)).requires_grad(1)
        before = held()
        for _ in range(10):
            x = tshard.tensor(normal(100, 100))
            loss = (x @ weight).sum()
            del x  # backward has its values nevertheless
            held()
            loss.backward()
            close(weight.grad.numpy(), np.repeat(normal(100, 100).sum(0)[:, None], 100, 1), 1e-3)
            tshard.zero_grad(weight)
            tshard.step_end()
        check(held() == before, "bytes held:", before, held())
    tshard.run(1, body)
    nothing_is_left()


# ---- threads ------------------------------------------------------------------------


def waiting_ranks_do_not_hold_the_gil(_):
    """All but one rank wait in a collective, which that one joins only after it, and a thread
    beside it, have run Python code for a while."""
    def body(ctx):
        counted, done = [], threading.Event()

        def count():
            while not done.is_set():
                counted.append(1)
                time.sleep(0.001)
        if ctx.rank == 0:
            thread = threading.Thread(target=count)
            thread.start()
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                sum(range(1000))
            done.set()
            thread.join()
            check(len(counted) > 3, "the thread ran", len(counted), "times")
        begin = time.monotonic()
        total = tshard.tp_reduce(tshard.full((4,), ctx.rank + 1), tshard.SUM)
        check(total.tolist() == [sum(range(1, ctx.size + 1))] * 4, total)
        return time.monotonic() - begin

    for ranks in 2, 3:
        waited = tshard.run(ranks, body)
        check(all(time > 0.1 for time in waited[1:]), "nobody waited:", waited)


def ctrl_c_ends_all_ranks(folder):
    path = os.path.join(folder, "loop.py")
    with open(path, "w", encoding="utf-8") as out:
        out.write("import faulthandler, sys\nfaulthandler.dump_traceback_later(60, exit=True)\n"
                  "sys.path.insert(0, %r)\nimport tshard\n"
                  "def loop(ctx):\n"
                  "    print('ready', flush=True)\n"
                  "    while True:\n"
                  "        tshard.tp_reduce(tshard.ones((2,)), tshard.SUM)\n"
                  "        tshard.step_end()\n"
                  "tshard.run(int(sys.argv[1]), loop)\n" % EXAMPLES)
    for ranks in "1", "2", "3":
        with subprocess.Popen([sys.executable, "-B", path, ranks], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as program:
            program.stdout.readline()
            program.send_signal(signal.SIGINT)
            _, said = program.communicate(timeout=100)
        check(said.rstrip().endswith("KeyboardInterrupt"), ranks, "said:", said)


def warnings_are_those_of_python(_):
    import warnings
    said = []

    def body(_):
        layer = tshard.Linear(tshard.root(), "a", 2, 2)
        sgd = tshard.SGD(layer)
        sgd.step()
        sgd.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tshard.run(1, body)
    check(any("changes nothing" in str(one.message) for one in caught), caught)
    tshard.run(1, body, log=said.append)
    check(any(one.startswith("warning: ") for one in said), said)


TESTS = [declarations_are_those_of_the_headers, every_function_can_be_called,
         owned_tensors_are_those_of_the_manual, ops_are_those_of_numpy, indices_are_those_of_numpy,
         gradients_are_those_of_a_formula, arrays_share_memory_where_they_can, dlpack_with_numpy,
         dlpack_with_torch, losses_are_the_same_on_several_ranks, examples_print_what_those_in_c_do,
         errors_are_exceptions, a_callback_raises_what_it_raised, an_op_in_numpy,
         a_pipeline_of_python_functions, an_exception_on_one_rank_ends_all,
         stale_tensors_are_errors, memory_of_arrays_stays, a_tensor_keeps_its_ctx,
         tensors_are_freed_with_their_objects, waiting_ranks_do_not_hold_the_gil,
         ctrl_c_ends_all_ranks, warnings_are_those_of_python]


def guarded(test):
    """The test, with any exception as a failure; where something is missing, it is skipped."""
    def run(folder):
        if MISSING:
            raise Skipped(MISSING[0])
        try:
            test(folder)
        except (Failed, Skipped):
            raise
        except Exception:
            raise Failed(traceback.format_exc()) from None
    run.__name__ = test.__name__
    return run


if __name__ == "__main__":
    prepare()
    sys.exit(1 if run_tests("python", [guarded(test) for test in TESTS]) else 0)
