#!/usr/bin/env python3
"""Compares config_keys.txt with transformers (5.24): every key that the config classes of the
families have, with its default, needs a line, and the other way round.

    make_config_keys.py            compares; exit code 1 if they differ
    make_config_keys.py --write    writes the file anew: lines keep what they say, new keys get "?"
"""

import dataclasses
import json
import os
import sys

import transformers

HERE = os.path.dirname(os.path.abspath(__file__))
PATH = os.path.join(HERE, "config_keys.txt")
FAMILIES = ("bert bloom falcon gemma gemma2 gemma3_text gpt2 gpt_neox granite llama mistral olmo2 "
            "opt phi phi3 qwen2 qwen3 roberta smollm3 starcoder2").split()
# Keys that the base class takes from config.json and does not declare.
TAKEN = {"attn_implementation": None, "experts_implementation": None, "is_causal": True,
         "name_or_path": "", "num_labels": 2, "output_attentions": False, "per_layer_config": None,
         "torch_dtype": None}
ROTARY = {"rope_scaling": None, "rope_theta": 10000.0}
OTHER = {"gpt_neox": {"rotary_emb_base": 10000.0, "rotary_pct": 0.25},
         "phi": {"partial_rotary_factor": 0.5}, "phi3": {"partial_rotary_factor": 1.0},
         "gemma3_text": {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
         "falcon": {"n_embed": None}, "bloom": {"n_embed": None}}
HEAD = """# What becomes of each key of config.json that transformers' config classes have,
# by family (all: what every class takes):
#   obeyed    a family of examples/llm reads it
#   harmless  it changes no logits, whatever its value
#   refused   it has to have its default, or to be null
# and the default. make_config_keys.py compares it with transformers, test_folders.py
# with build/llm.
"""


def common():
    """{key: default} of what every class takes."""
    found = {field.name: None if field.default is dataclasses.MISSING else field.default
             for field in dataclasses.fields(transformers.PreTrainedConfig)}
    found.update(TAKEN)
    found.update(transformers.GenerationConfig._get_default_generation_params())
    return dict(found, eos_token_id=None, model_type="")


def keys(family):
    """{key: default} of a family's class and its other names, but for common()."""
    cls = transformers.CONFIG_MAPPING[family]
    found, every = {}, common()
    for field in dataclasses.fields(cls):
        found[field.name] = None if field.default is dataclasses.MISSING else field.default
    for alias, name in cls.attribute_map.items():
        found.setdefault(alias, found.get(name))
    if "rope_parameters" in found:
        found.update(dict(ROTARY, rope_theta=getattr(cls, "default_theta", 10000.0)))
        if isinstance(found["rope_theta"], dict):
            found["rope_theta"] = found["rope_theta"]["global"]
    found.update(OTHER.get(family, {}))
    return {key: value for key, value in found.items()
            if key not in every or key in ("pad_token_id", "max_position_embeddings")}


def read():
    """{(family, key): (status, default)}"""
    if not os.path.exists(PATH):
        return {}
    with open(PATH, encoding="ascii") as file:
        lines = [line.rstrip("\n").split(" ", 3) for line in file if line[0] != "#"]
    return {(family, key): (status, default) for family, key, status, default in lines}


def main():
    have = read()
    want = {(family, key): json.dumps(default) for family in FAMILIES
            for key, default in keys(family).items()}
    want.update({("all", key): json.dumps(default) for key, default in common().items()})
    if sys.argv[1:] == ["--write"]:
        with open(PATH, "w", encoding="ascii") as file:
            file.write(HEAD)
            for (family, key), default in sorted(want.items()):
                status = have.get((family, key), ("?", None))[0]
                file.write("%s %s %s %s\n" % (family, key, status, default))
        have = read()
    wrong = 0
    for line in sorted(set(have) | set(want)):
        if line not in have or line not in want or have[line][1] != want[line]:
            print("%s %s: transformers has %s, the file %s"
                  % (*line, want.get(line, "no such key"), have.get(line, "no line")))
            wrong += 1
    counts = [sum(status == v for status, _ in have.values())
              for v in ("obeyed", "harmless", "refused")]
    print("%d lines: %d obeyed, %d harmless, %d refused; %d differ from transformers %s"
          % (len(have), *counts, wrong, transformers.__version__))
    return wrong > 0 or sum(counts) != len(have)


if __name__ == "__main__":
    sys.exit(main())
