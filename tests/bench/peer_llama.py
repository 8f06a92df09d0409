#!/usr/bin/env python3
"""Tokens per second of llama.cpp, by its Python package's low-level interface, for a model of
random weights in a GGUF file that this writes by the gguf package.

    peer_llama.py --model gpt2|llama1b --weights f32|f16|bf16|q8_0|q4_0 [--threads 2] [--folder F]
    peer_llama.py --file FILE.gguf [--threads 2]         a model of yours

It answers commands on its input: "decode 0 N", with the microseconds of one of N tokens, each after
the others; "prefill T N", with those of one of N prompts of T tokens. All matrices have the dtype
asked for, so that each side reads as many bytes; vectors and position embeddings are float32, as
llama.cpp's converters write them. Keys and values are float16, llama.cpp's default.
"""

import argparse
import os
import sys
import time

import gguf
import llama_cpp
import numpy

CONTEXT = 1024
LATER = 8  # the tokens of a decoding before the measured ones
Tensor = gguf.MODEL_TENSOR
SHAPES = {"gpt2": dict(arch="gpt2", dim=768, layers=12, heads=12, kv=12, hidden=3072, vocab=50257),
          "llama1b": dict(arch="llama", dim=2048, layers=22, heads=32, kv=4, hidden=5632,
                          vocab=32000)}


def tensors(shape):
    """(name, shape) of every tensor, the last dimension first in memory."""
    dim, hidden, vocab = shape["dim"], shape["hidden"], shape["vocab"]
    kv = dim // shape["heads"] * shape["kv"]
    names = gguf.TENSOR_NAMES

    def block(number, tensor, dims, bias):
        name = names[tensor].format(bid=number)
        yield name + ".weight", dims
        if bias:
            yield name + ".bias", dims[:1]

    yield names[Tensor.TOKEN_EMBD] + ".weight", (vocab, dim)
    gpt2 = shape["arch"] == "gpt2"
    if gpt2:
        yield names[Tensor.POS_EMBD] + ".weight", (CONTEXT, dim)
        parts = [(Tensor.ATTN_NORM, (dim,)), (Tensor.ATTN_QKV, (3 * dim, dim)),
                 (Tensor.ATTN_OUT, (dim, dim)), (Tensor.FFN_NORM, (dim,)),
                 (Tensor.FFN_UP, (hidden, dim)), (Tensor.FFN_DOWN, (dim, hidden))]
    else:
        yield names[Tensor.OUTPUT] + ".weight", (vocab, dim)
        parts = [(Tensor.ATTN_NORM, (dim,)), (Tensor.ATTN_Q, (dim, dim)),
                 (Tensor.ATTN_K, (kv, dim)), (Tensor.ATTN_V, (kv, dim)),
                 (Tensor.ATTN_OUT, (dim, dim)), (Tensor.FFN_NORM, (dim,)),
                 (Tensor.FFN_GATE, (hidden, dim)), (Tensor.FFN_UP, (hidden, dim)),
                 (Tensor.FFN_DOWN, (dim, hidden))]
    for number in range(shape["layers"]):
        for tensor, dims in parts:
            yield from block(number, tensor, dims, gpt2)
    yield from block(0, Tensor.OUTPUT_NORM, (dim,), gpt2)


def describe(writer, shape):
    """The metadata that llama.cpp wants; there is no tokenizer."""
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape["dim"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["hidden"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv"])
    if shape["arch"] == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(shape["dim"] // shape["heads"])
    writer.add_vocab_size(shape["vocab"])
    writer.add_tokenizer_model("no_vocab")


def write(path, shape, weights):
    """Writes the file. Values repeat after 2^20, so that a model of 4 GB is quick to make."""
    values = numpy.random.default_rng(1).standard_normal(1 << 20, numpy.float32) * 0.02
    values = values.reshape(-1, 4096)
    kinds = {kind: numpy.frombuffer(gguf.quants.quantize(values, kind).tobytes(), numpy.uint8)
             for kind in (gguf.GGMLQuantizationType.F32,
                          gguf.GGMLQuantizationType[weights.upper()])}
    writer = gguf.GGUFWriter(path, shape["arch"])
    describe(writer, shape)
    pieces = []
    for name, dims in tensors(shape):
        matrix = len(dims) > 1 and not name.startswith("position")
        kind = gguf.GGMLQuantizationType[weights.upper() if matrix else "F32"]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(numpy.prod(dims)) // block * size
        pieces.append((count, kinds[kind]))
        bytes_shape = dims[:-1] + (dims[-1] // block * size,)
        plain = kind is gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(name, dims if plain else bytes_shape,
                               numpy.dtype(numpy.float32 if plain else numpy.uint8), count,
                               kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for count, data in pieces:
        writer.write_tensor_data(numpy.resize(data, count))
    writer.close()


class Model:
    def __init__(self, path, threads, batch, repacked):
        self.quiet = llama_cpp.llama_log_callback(self.log)  # kept: C calls it
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.use_extra_bufts = repacked
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model)
        if not self.model:
            sys.exit("llama.cpp does not load %s" % path)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT
        params.n_batch, params.n_ubatch = CONTEXT, batch
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit("llama.cpp makes no context")

    @staticmethod
    def log(level, text, _):
        if level == 4:  # an error; see ggml_log_level
            sys.stderr.write(text.decode("utf-8", "replace"))

    def run(self, count):
        """One llama_decode of so many tokens, which gives the last one's logits."""
        tokens = (llama_cpp.llama_token * count)(*(range(1, count + 1)))
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, count)):
            sys.exit("llama.cpp does not decode")
        llama_cpp.llama_synchronize(self.context)

    def forget(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def decode(self, count):
        """Seconds of a token."""
        self.forget()
        self.run(LATER)
        begin = time.perf_counter()
        for _ in range(count):
            self.run(1)
        return (time.perf_counter() - begin) / count

    def prefill(self, length, count):
        """Seconds of a prompt."""
        seconds = 0
        for _ in range(count):
            self.forget()
            begin = time.perf_counter()
            self.run(length)
            seconds += time.perf_counter() - begin
        return seconds / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(SHAPES))
    parser.add_argument("--weights", choices=("f32", "f16", "bf16", "q8_0", "q4_0"))
    parser.add_argument("--file", help="a GGUF file, in place of --model and --weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=512,
                        help="tokens of a prompt that it computes at once")
    parser.add_argument("--as-stored", action="store_true",
                        help="weights are not repacked when they are loaded, as AMX needs it")
    parser.add_argument("--folder", default=".", help="for the GGUF file, which is removed again")
    args = parser.parse_args()
    if not args.file and not (args.model and args.weights):
        parser.error("give --file, or --model and --weights")
    path = args.file or os.path.join(args.folder, "%s_%s_%d.gguf" % (args.model, args.weights,
                                                                     os.getpid()))
    try:
        if not args.file:
            write(path, SHAPES[args.model], args.weights)
        model = Model(path, args.threads, args.batch, not args.as_stored)  # mapped: the name may go
    finally:
        if not args.file and os.path.exists(path):
            os.remove(path)
    for line in sys.stdin:
        name, size, count = line.split()
        seconds = (model.decode(int(count)) if name == "decode"
                   else model.prefill(int(size), int(count)))
        print("%.1f" % (1e6 * seconds), flush=True)


if __name__ == "__main__":
    main()
