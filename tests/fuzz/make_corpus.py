#!/usr/bin/env python3
"""Writes the seeds of fuzz_safetensors.c into the folder safetensors, those of fuzz_index.c into
the folder index, those of fuzz_config.c, from the goldens of tests/llm, into config, those of
fuzz_data.c, from tests/llm/golden/data, into data, and those of fuzz_text.c, from
tests/golden/tokenizers.json, into text."""

import glob
import json
import os
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = {"F32": 4, "F64": 8, "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2,
         "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}


def write(name, data, folder="safetensors"):
    with open(os.path.join(HERE, folder, name), "wb") as out:
        out.write(data)
    return data


def file(header, values):
    if isinstance(header, dict):
        header = json.dumps(header, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + bytes(values)


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def older(config):
    """A config.json as transformers wrote it before version 5."""
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta", 10000.0)
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    rope["type"] = rope.pop("rope_type", "default")
    if rope["type"] != "default":
        config["rope_scaling"] = rope
    return config


def write_configs():
    os.makedirs(os.path.join(HERE, "config"), exist_ok=True)
    for path in glob.glob(os.path.join(HERE, "..", "llm", "golden", "*.json")):
        with open(path, encoding="utf-8") as golden:
            config = json.load(golden)["config"]
        name = os.path.basename(path)[:-len(".json")]
        forms = {name: dict(config)}
        if "rope_type" in config.get("rope_parameters", {}):
            forms[name + "_older"] = older(dict(config))
        for form, value in forms.items():
            text = json.dumps(value, separators=(",", ":")).encode()
            write(form, text + b"\xff" + b'{"eos_token_id":[1,2]}', "config")


def write_texts():
    """Each text of the goldens with another tokenizer, some that are no UTF-8, and one of which
    BERT's normalizer leaves nothing."""
    os.makedirs(os.path.join(HERE, "text"), exist_ok=True)
    with open(os.path.join(HERE, "..", "golden", "tokenizers.json"), encoding="utf-8") as goldens:
        tokenizers = json.load(goldens)
    texts = [case["text"].encode() for case in tokenizers[0]["cases"]]
    texts += [b"\x80", b"caf\xc3", b"\xed\xa0\x80 x", b"\xf0\x9f\x98 a\xff", b"a\x00b", b"\x0f"]
    for i in range(max(len(texts), len(tokenizers))):
        write("%02d" % i, bytes([i % len(tokenizers)]) + texts[i % len(texts)], "text")


def write_data():
    """Documents of each form, and lines that are wrong."""
    os.makedirs(os.path.join(HERE, "data"), exist_ok=True)
    with open(os.path.join(HERE, "..", "llm", "golden", "data", "trl.json"),
              encoding="utf-8") as golden:
        cases = json.load(golden)["models"][0]["cases"]
    texts = {}
    for case in cases:
        lines = [json.dumps(line, separators=(",", ":")) for line in case["lines"][:4]]
        texts[case["form"].replace(" ", "_")] = "\n".join(lines).encode()
    texts["escapes"] = (b'\xef\xbb\xbf{"text" : "\\u00e4\\ud83d\\ude00 \\"a\\"\\t"}\r\n\n '
                        b'{"text":"b c"}')
    texts["mixed"] = b"\n".join([texts["texts"], texts["messages"]])
    texts["thoughts"] = json.dumps({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}]}).encode()
    texts["zero"] = b'{"text":"a\\u0000b"}'
    texts["bytes"] = b'{"text":"caf\xc3\xa9 \xed\xa0\x80"}'
    for name, text in texts.items():
        write(name, b"\0" + text, "data")


def write_indices():
    files = {"a.weight": "a.safetensors", "a.bias": "b.safetensors"}
    indices = {
        "whole": {"metadata": {"total_size": 36}, "weight_map": files},
        "metadata": {"weight_map": files, "metadata": {"x": [1.5e-3, None, {"y": [True, "}"]}]}},
        "swapped": {"weight_map": {"a.weight": "b.safetensors", "a.bias": "a.safetensors"}},
        "more": {"weight_map": dict(files, c="a.safetensors")},
        "nowhere": {"weight_map": dict(files, c="c.safetensors")},
        "above": {"weight_map": dict(files, c="../a.safetensors")},
        "nothing": {"metadata": {}},
    }
    texts = {name: json.dumps(index, indent=2).encode() for name, index in indices.items()}
    texts["escapes"] = (b' {"weight_map":{"\\u0061.weight":"a.safe\\u0074ensors" ,\n'
                        b'"a.bias":"b.safetensors"}} ')
    texts["twice"] = (b'{"weight_map":{"a.bias":"b.safetensors","a.weight":"a.safetensors",'
                      b'"a.bias":"b.safetensors"}}')
    texts["deep"] = b'{"metadata":' + b"[" * 9999 + b"]" * 9999 + b"}"
    texts["cut"] = texts["whole"][:-30]
    os.makedirs(os.path.join(HERE, "index"), exist_ok=True)
    for name, text in texts.items():
        write(name, text, "index")


def main():
    write_indices()
    write_configs()
    write_texts()
    write_data()
    os.makedirs(os.path.join(HERE, "safetensors"), exist_ok=True)
    model = {"a.weight": entry("F32", [3, 2], 0, 24), "a.bias": entry("F32", [3], 24, 36)}
    state = {"format": "pt", "tshard.format": "1", "tshard.seed": "0", "tshard.randn_calls": "1",
             "tshard.dropout_calls": "2", "tshard.dropout_calls.d": "3", "tshard.optim": "adam",
             "tshard.optim.steps": "1", "tshard.optim.skipped": "0",
             "tshard.optim.steps.a.weight": "1", "tshard.optim.steps.a.bias": "0"}
    moments = {"optim.first.a.weight": entry("F32", [3, 2], 36, 60),
               "optim.second.a.weight": entry("F32", [3, 2], 60, 84)}
    types, at = {}, 0
    for name, size in SIZES.items():
        types[name] = entry(name, [1, 1], at, at + size)
        at += size
    write("parameters", file(model, 36))
    whole = write("state", file(dict(__metadata__=state, **model, **moments), 84))
    write("escapes", file(
        b'{"__metadata__":{"\\u00e4\\ud83d\\ude00":"\\"\\\\\\/\\b\\f\\n\\r\\t",'
        b'"\xc3\xa4":"\xf0\x9f\x98\x80"} , "\\u0061.weight" :\t{"shape":[ 3,2 ],'
        b'"data_offsets":[0,24],\n"dtype":"F32"},'
        b'"a.bias":{"dtype":"F32","shape":[3],"data_offsets":[24,36]}}', 36))
    write("types", file(types, at))
    write("empty", file({"a.weight": entry("F32", [0, 2], 0, 0), "s": entry("F32", [], 0, 4)}, 4))
    write("nothing", file(b"{}", 0))
    write("gap", file({"a.weight": entry("F32", [3, 2], 4, 28)}, 28))
    write("long", b"\xff" * 8 + b"{}")
    write("cut", whole[:200])


if __name__ == "__main__":
    main()
