"""models.py - folders of small models, as the Hugging Face hub has them, from golden/*.json:
weights are drawn by Python's own generator, so that make_models.py, which computes the goldens with
transformers, and the tests, which have no torch, write the same bytes."""

import glob
import json
import os
import random
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "golden")


def names():
    return sorted(os.path.basename(path)[:-5] for path in glob.glob(os.path.join(GOLDEN, "*.json")))


def load(name):
    with open(os.path.join(GOLDEN, name + ".json"), encoding="ascii") as file:
        return json.load(file)


def values(name, shape, seed, stored_in_out):
    """Values of a tensor, nothing of it flat: norms about 1, biases not 0, matrices that keep the
    size of what they multiply."""
    draw = random.Random("%s %d" % (name, seed)).uniform
    count = 1
    for length in shape:
        count *= length
    if len(shape) == 1:
        middle = 1.0 if name.endswith("weight") else 0.0
        return [middle + draw(-0.4, 0.4) for _ in range(count)]
    wide = 1.0 if "emb" in name.lower() or "wte" in name or "wpe" in name else \
        1.6 / shape[0 if stored_in_out else -1] ** 0.5
    return [draw(-1.7, 1.7) * wide for _ in range(count)]


def write_safetensors(path, tensors):
    """tensors: {name: (shape, floats)}"""
    header, blobs, at = {}, [], 0
    for name in sorted(tensors):
        shape, floats = tensors[name]
        blobs.append(struct.pack("<%df" % len(floats), *floats))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_safetensors(path):
    """{name: (shape, floats)} of a file of F32"""
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8:8 + size].decode("ascii")).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        first, last = first + 8 + size, last + 8 + size
        floats = struct.unpack("<%df" % ((last - first) // 4), data[first:last])
        tensors[name] = (entry["shape"], floats)
    return tensors


def write(folder, model):
    """model: what golden/*.json holds."""
    os.makedirs(folder, exist_ok=True)
    in_out = model["config"].get("model_type") == "gpt2"
    write_safetensors(os.path.join(folder, "model.safetensors"),
                      {name: (shape, values(name, shape, model["seed"], in_out))
                       for name, shape in model["tensors"].items()})
    with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
        json.dump(model["config"], file)


HEADS = {"gpt_neox": "embed_out.weight"}
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def change_head(folder, how):
    """Makes the head in the folder's file another one than the embedding ("other"), the embedding's
    copy ("copy"), or the only one of both ("alone")."""
    path = os.path.join(folder, "model.safetensors")
    tensors = read_safetensors(path)
    with open(os.path.join(folder, "config.json"), encoding="ascii") as file:
        head = HEADS.get(json.load(file)["model_type"], "lm_head.weight")
    embedding = next(name for name in tensors if name.endswith(EMBEDDINGS))
    shape, floats = tensors[embedding]
    tensors[head] = (shape, values(head, shape, 1, False) if how == "other" else floats)
    if how == "alone":
        del tensors[embedding]
    write_safetensors(path, tensors)


# A tokenizer with a token for each letter: 59 of them, and two that begin and end a text.
SPECIAL = ("<|im_start|>", "<|im_end|>")
LETTERS = "abcdefghijklmnopqrstuvwxyz?!.,'\n 0123456789ABCDEFGHIJKLMNOP"


def letters(tokens, post_processor=None):
    """The tokenizer.json of these tokens, each a letter or one of SPECIAL."""
    ids = {token: i for i, token in enumerate(tokens)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": ids[t], "content": t, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}
                         for t in SPECIAL],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": True},
        "post_processor": post_processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "byte_fallback": False, "merges": [],
                  "vocab": {{"\n": "\u010a", " ": "\u0120"}.get(t, t): i
                            for t, i in ids.items()}}}


def write_embedder(folder, case):
    """A folder of sentence-transformers: the model of a golden, in the subfolder case["model_at"],
    a tokenizer that begins and ends a text, and case["files"]; of a safetensors file they have the
    shapes."""
    at = os.path.join(folder, case.get("model_at", ""))
    write(at, load(case["model"]))
    around = {"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": SPECIAL[1], "type_id": 0}}], "pair": [
        {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
              "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]}
                                 for t, i in zip(SPECIAL, (0, 60))}}
    tokens = [SPECIAL[0], *LETTERS, SPECIAL[1]]
    files = {"tokenizer.json": letters(tokens, around),
             "tokenizer_config.json": dict(
                 {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0],
                  "eos_token": SPECIAL[1], "pad_token": SPECIAL[1]}, **case.get("tokenizer", {}))}
    files = {os.path.join(case.get("model_at", ""), name): text for name, text in files.items()}
    for name, text in dict(files, **case["files"]).items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if name.endswith(".safetensors"):
            write_safetensors(path, {key: (shape, values(key, shape, 7, False))
                                     for key, shape in text.items()})
            continue
        with open(path, "w", encoding="ascii") as file:
            json.dump(text, file)


def older(config):
    """The same config in the form from before transformers 5."""
    config = dict(config)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    rope = dict(config.pop("rope_parameters", None) or {})
    if "full_attention" in rope:  # Gemma 3
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    if rope:
        config["rope_theta"] = rope.pop("rope_theta", 10000.0)
        part = rope.pop("partial_rotary_factor", None)
        if part is not None:
            key = "rotary_pct" if config["model_type"] == "gpt_neox" else "partial_rotary_factor"
            config[key] = part
        rope["type"] = rope.pop("rope_type", "default")
        config["rope_scaling"] = None if rope == {"type": "default"} else rope
    return config
