"""Trains the first example's network from Python, through the shared library that the argument
names: y = x0 x1, two linear layers, AdamW. Prints a loss every 100 steps, as the example does."""

import ctypes
import sys
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_size_t, c_void_p

BUILT = 2  # the version, 0.2, that the structures here are of
TSH_ADAMW, TSH_ALL = 2, -1000
RANK_MAIN = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)  # int fn(tsh_ctx *ctx, void *user)


class Shape(Structure):
    _fields_ = [("ndim", c_int), ("dim", c_int64 * 6)]


class Init(Structure):
    _fields_ = [("kind", c_int), ("a", c_double), ("b", c_double), ("gain", c_double),
                ("fan_out", c_int), ("low", c_double), ("high", c_double)]


class Linear(Structure):
    _fields_ = [("inputs", c_int64), ("outputs", c_int64), ("input", c_void_p),
                ("output", c_void_p), ("bias", c_int), ("style", c_int),
                ("segments", c_int), ("unit", c_int64), ("gather_output", c_int),
                ("skip_bias_add", c_int), ("reversed", c_int), ("regather", c_int),
                ("weight_init", Init), ("bias_init", Init), ("dtype", c_int)]


class Custom(Structure):
    _fields_ = [("name", c_char_p), ("moments", c_int), ("whole", c_int), ("update", c_void_p),
                ("user", c_void_p)]


class Optim(Structure):
    _fields_ = [("kind", c_int), ("lr", c_double), ("momentum", c_double), ("nesterov", c_int),
                ("beta1", c_double), ("beta2", c_double), ("eps", c_double),
                ("weight_decay", c_double), ("clip_norm", c_double), ("zero", c_int),
                ("grad_dtype", c_int), ("moments_dtype", c_int), ("round_weights", c_int),
                ("schedule", c_void_p), ("alpha", c_double), ("centered", c_int),
                ("lr_decay", c_double), ("momentum_decay", c_double), ("decoupled", c_int),
                ("beta2_decay", c_double), ("eps2", c_double), ("d", c_double),
                ("ns_coefficients", c_double * 3), ("ns_steps", c_int), ("adjust_lr_fn", c_int),
                ("custom", Custom)]


# The C name and the last field of each structure above.
STRUCTURES = {"tsh_shape": (Shape, "dim"), "tsh_init": (Init, "high"),
              "tsh_linear_desc": (Linear, "dtype"), "tsh_optim_desc": (Optim, "custom")}

FUNCTIONS = {  # result, arguments
    "tsh_version": (c_char_p, []),
    "tsh_run_built": (c_int, [c_int, c_size_t, c_size_t, c_void_p, RANK_MAIN, c_void_p]),
    "tsh_ok": (c_int, [c_void_p]),
    "tsh_root": (c_void_p, [c_void_p]),
    "tsh_add_linear": (c_void_p, [c_void_p, c_char_p, POINTER(Linear)]),
    "tsh_optim_new": (c_void_p, [c_void_p, POINTER(Optim)]),
    "tsh_optim_step": (c_int, [c_void_p]),
    "tsh_randn": (c_void_p, [c_void_p, Shape]),
    "tsh_slice": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "tsh_mul": (c_void_p, [c_void_p, c_void_p]),
    "tsh_sub": (c_void_p, [c_void_p, c_void_p]),
    "tsh_gelu": (c_void_p, [c_void_p]),
    "tsh_pow_scalar": (c_void_p, [c_void_p, c_double]),
    "tsh_mean": (c_void_p, [c_void_p, c_int, c_int]),
    "tsh_forward": (c_void_p, [c_void_p, c_void_p]),
    "tsh_backward": (c_int, [c_void_p, c_void_p]),
    "tsh_item": (c_double, [c_void_p, c_void_p]),
    "tsh_zero_grads": (None, [c_void_p]),
    "tsh_step_end": (c_int, [c_void_p]),
}


def load(path):
    library = ctypes.CDLL(path)
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def train(tsh):
    def learn(ctx, _):
        net = tsh.tsh_root(ctx)
        up = tsh.tsh_add_linear(net, b"up", Linear(inputs=2, outputs=32))
        down = tsh.tsh_add_linear(net, b"down", Linear(inputs=32, outputs=1))
        adam = tsh.tsh_optim_new(net, Optim(kind=TSH_ADAMW, lr=0.005, weight_decay=0.01))
        for step in range(501):
            x = tsh.tsh_randn(ctx, Shape(2, (256, 2)))
            y = tsh.tsh_mul(tsh.tsh_slice(x, 1, 0, 1), tsh.tsh_slice(x, 1, 1, 1))
            guess = tsh.tsh_forward(down, tsh.tsh_gelu(tsh.tsh_forward(up, x)))
            loss = tsh.tsh_mean(tsh.tsh_pow_scalar(tsh.tsh_sub(guess, y), 2), TSH_ALL, 0)
            tsh.tsh_backward(ctx, loss)
            if step % 100 == 0:
                print("step %3d  loss %.4f" % (step, tsh.tsh_item(ctx, loss)))
            tsh.tsh_optim_step(adam)
            tsh.tsh_zero_grads(net)
            tsh.tsh_step_end(ctx)
        return 0 if tsh.tsh_ok(ctx) else 1

    return tsh.tsh_run_built(BUILT, 4, 0, None, RANK_MAIN(learn), None)


if __name__ == "__main__":
    LIBRARY = load(sys.argv[1])
    print("version", LIBRARY.tsh_version().decode())
    sys.exit(train(LIBRARY))
