"""Which rooms of tshard.h may name a dtype, and why. What a dtype is stands in its row of
tshi_dtypes (room dtype); no other code may depend on which dtype a tensor has."""

import re

# The type that ops compute in, and what a descriptor has by default; any room may name them.
FREE = {"TSH_REAL", "TSH_DTYPE_DEFAULT"}
# The rooms that may ask how wide a tsh_real is: kernels are of one width; TSH_REAL, TSHI_DOUBLE,
# TSH_BUILT.
WIDTH = re.compile(r"sizeof\s*\(\s*tsh_real\s*\)")
WIDTHS = {"types", "config", "context-api", "base", "dtype", "gemm", "gemm-vector", "gemm-avx512",
          "gemm-avx2", "gemm-api", "context"}
BOOKKEEPING = "counts, marks, hashes and sums that ranks exchange, in arrays of their own"
INDICES = "the op's output, or its argument, is indices or counts"
TRAINED = "bf16 parameters have exact weights, and gradients and moments may be kept in bf16"
PRODUCTS = "processors multiply or convert bf16 and f16 in hardware"
# {room: {dtype: why it is named there}}
ALLOWED = {
    "init": {"TSH_F64": "initial values are computed in double"},
    "tensor-exact": {"TSH_BF16": TRAINED},
    "gemm-avx2": {"TSH_F16": PRODUCTS},
    "gemm-avx512": {"TSH_F16": PRODUCTS},
    "gemm-few": {"TSH_F16": PRODUCTS},
    "gemm-api": {"TSH_BF16": PRODUCTS, "TSH_F16": PRODUCTS},
    "comm": {"TSH_F32": "a barrier has no data; any dtype will do"},
    "bucket": {"TSH_F64": BOOKKEEPING},
    "wire": {"TSH_BF16": "blocks of quantised values are sent as 16-bit elements"},
    "inputs": {"TSH_I64": BOOKKEEPING},
    "tape-grad": {"TSH_BF16": TRAINED, "TSH_I32": BOOKKEEPING},
    "context": {"TSH_BF16": "of the floating dtypes below a float, the one that has its range"},
    "tape-leaf": {"TSH_BF16": TRAINED},
    "op-map": {"TSH_I32": "comparisons return I32"},
    "op-matmul": {"TSH_BF16": PRODUCTS},
    "attention": {"TSH_BF16": PRODUCTS},
    "attention-back": {"TSH_BF16": PRODUCTS},
    "attention-run": {"TSH_BF16": PRODUCTS},
    "op-attention": {"TSH_I32": "a mask that is no number becomes I32"},
    "op-batch-norm": {"TSH_F64": BOOKKEEPING},
    "norm-layers": {"TSH_I64": "num_batches_tracked is a count"},
    "op-embedding": {"TSH_I64": BOOKKEEPING, "TSH_F64": BOOKKEEPING},
    "op-loss": {"TSH_F64": BOOKKEEPING},
    "loss-element": {"TSH_F64": BOOKKEEPING},
    "op-stat": {"TSH_F64": BOOKKEEPING},
    "op-cumsum": {"TSH_I64": "sums of integers are I64", "TSH_F64": BOOKKEEPING},
    "op-index": {"TSH_I64": INDICES},
    "op-reduce": {"TSH_I64": INDICES},
    "op-sort": {"TSH_I64": INDICES},
    "sample": {"TSH_I64": INDICES},
    "layers": {"TSH_I32": INDICES, "TSH_I64": INDICES},
    "module-same": {"TSH_I32": BOOKKEEPING, "TSH_I64": BOOKKEEPING},
    "module-tree": {"TSH_BF16": TRAINED},
    "optim-norm": {"TSH_BF16": "loads bf16 faster than its row does", "TSH_F64": BOOKKEEPING},
    "optim-update": {"TSH_BF16": TRAINED},
    "optim-table": {"TSH_BF16": TRAINED},
    "ema": {"TSH_BF16": TRAINED},
    "outer": {"TSH_BF16": "blocks of quantised values are sent as 16-bit elements"},
    "optim": {"TSH_BF16": TRAINED},
    "pipeline-send": {"TSH_I64": BOOKKEEPING},
    "pipeline": {"TSH_F64": BOOKKEEPING},
    "io": {"TSH_F32": TRAINED, "TSH_I32": BOOKKEEPING, "TSH_I64": BOOKKEEPING},
    "io-save": {"TSH_BF16": "blocks of quantised weights are sent as 16-bit elements",
                "TSH_I64": BOOKKEEPING},
    "load-match": {"TSH_I32": BOOKKEEPING, "TSH_I64": BOOKKEEPING},
    "load-cache": {"TSH_I32": BOOKKEEPING},
    "check": {"TSH_BF16": TRAINED, "TSH_I64": BOOKKEEPING, "TSH_F64": BOOKKEEPING},
    "trace-file": {"TSH_I64": BOOKKEEPING},
}


def findings(source):
    """(line, what) of each name of a dtype that is not allowed, and of each allowance that nothing
    needs. source: tshard.h, as lint.py reads it."""
    private = next(number for number, line in enumerate(source.lines, 1)
                   if line.startswith("#ifdef TSHARD_IMPLEMENTATION"))
    names = set(re.findall(r"^    (TSH_\w+)", source.text[source.text.index("enum tsh_dtype {"):]
                           .split("}")[0], re.M)) - FREE
    code = re.sub(r"/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", lambda m: re.sub(r"[^\n]", " ", m[0]),
                  source.text, flags=re.S)
    used = set()
    for number, line in enumerate(code.split("\n"), 1):
        room = source.room_at(number)
        if WIDTH.search(line) and not (room and room.name in WIDTHS):
            yield number, "asks for the width of tsh_real: take it from tshi_dtypes"
        if number < private or not room or room.name == "dtype":
            continue
        for name in names.intersection(re.findall(r"\bTSH_\w+", line)):
            used.add((room.name, name))
            if name not in ALLOWED.get(room.name, {}):
                yield number, ("names %s: take what it depends on from tshi_dtypes, or give a "
                               "reason in tests/lint/dtypes.py" % name)
    for room, reasons in ALLOWED.items():
        for name in reasons:
            if (room, name) not in used:
                yield private, ("tests/lint/dtypes.py allows %s in >>%s, which does not name it"
                            % (name, room))
