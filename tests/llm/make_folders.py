#!/usr/bin/env python3
"""Writes folders.json: small models of golden/*.json with other keys in config.json, or another
head in the file, and some rows of the logits that transformers (5.24, with torch) computes with
them, in float32.

    make_folders.py      needs torch and transformers
"""

import json
import os
import tempfile

import torch
import transformers

import models

PROMPT = [3, 41, 17, 9, 52, 28, 17, 5, 1, 60, 33, 7, 21, 2, 2, 44, 50, 13, 8, 30]
ROWS = (0, 5, 19)  # of the logits: the first, one in the middle, the last
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0, 1.3, 1.7, 2.2], "long_factor": [1.0, 2.0, 4.0, 8.0]}
GEMMA3 = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
FALSE, TRUE = {"is_causal": False}, {"is_causal": True}
# What to show, the model, keys of config.json (None: null), keys that are taken away, the head.
CASES = [
    ("both ways", name, FALSE, [], None)
    for name in ("llama", "gpt2", "bloom", "falcon_groups", "opt", "phi", "gpt_neox", "qwen2",
                 "mistral_window", "gemma2", "bert")
] + [
    ("one way", "llama", TRUE, [], None),
    ("one way", "bert", TRUE, [], None),
    ("rope_scaling goes before rope_parameters", "llama",
     {"rope_scaling": {"type": "linear", "factor": 4.0}}, [], None),
    ("its base is that beside it", "llama",
     {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 4.0}}, [], None),
    ("an empty rope_scaling does not", "llama", {"rope_scaling": {}}, [], None),
    ("the base in the object goes before that beside it", "llama", {"rope_theta": 50.0}, [], None),
    ("the name rope_type goes before type", "llama", {"rope_parameters": {
        "rope_type": "default", "type": "linear", "factor": 2.0, "rope_theta": 100.0}}, [], None),
    ("the original length beside it goes before its own", "llama",
     {"rope_parameters": YARN, "original_max_position_embeddings": 8}, [], None),
    ("else its own", "llama", {"rope_parameters": YARN}, [], None),
    ("else the largest length", "llama", {"rope_parameters": {
        "rope_type": "yarn", "factor": 4.0}}, [], None),
    ("a factor that is null is the ratio of lengths", "llama",
     {"rope_parameters": dict(YARN, factor=None)}, [], None),
    ("YaRN's mscale", "llama", {"rope_parameters": dict(
        YARN, mscale=0.7, mscale_all_dim=0.3, truncate=False, beta_fast=16, beta_slow=2)}, [],
     None),
    ("phi3's default is 4096", "phi3", {
        "max_position_embeddings": 8192, "rope_parameters": dict(
            LONG, rope_type="longrope", original_max_position_embeddings=64)},
     ["original_max_position_embeddings"], None),
    ("an old name of longrope", "phi3", {
        "original_max_position_embeddings": 16, "rope_scaling": dict(
            LONG, type="su", original_max_position_embeddings=16)}, [], None),
    ("rope_scaling within Gemma 3's", "gemma3", {
        "rope_parameters": GEMMA3, "rope_scaling": {"factor": 8.0}}, [], None),
    ("gpt_neox has names of its own", "gpt_neox", {"rotary_emb_base": 50.0, "rotary_pct": 0.5},
     ["rope_parameters"], None),
    ("Gemma's gelu is tanh's", "gemma", {"hidden_act": "gelu"}, [], None),
    ("the window of SmolLM3 is that of layers without positions", "smollm3",
     {"use_sliding_window": True, "sliding_window": 5}, ["layer_types"], None),
    ("another head", "llama", {"tie_word_embeddings": True}, [], "other"),
    ("another head", "gpt2", {}, [], "other"),
    ("another head", "gpt_neox", {"tie_word_embeddings": True}, [], "other"),
    ("a copy of the embedding", "qwen2", {}, [], "copy"),
    ("a copy of the embedding", "opt", {}, [], "copy"),
    ("the head alone", "qwen2", {}, [], "alone"),
    ("the head alone", "bloom", {}, [], "alone"),
    ("the head alone", "opt", {}, [], "alone"),
    ("the head alone", "gpt2", {}, [], "alone"),
    ("the head alone", "falcon", {}, [], "alone"),
]


def compute(case, folder):
    model = models.load(case["model"])
    config = dict(model["config"], **case["config"])
    for key in case["without"]:
        config.pop(key, None)
    models.write(folder, dict(model, config=config))
    if case["head"]:
        models.change_head(folder, case["head"])
    encoder = config["model_type"] in ("bert", "roberta")
    kind = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
    more = {"add_pooling_layer": False} if encoder else {}
    loaded, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True,
                                        **more)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    with torch.no_grad():
        out = loaded.eval()(torch.tensor([PROMPT]))
    logits = (out.last_hidden_state if encoder else out.logits)[0]
    return [[float("%.7g" % x) for x in logits[row].tolist()] for row in ROWS]


def main():
    torch.set_num_threads(1)
    cases = []
    for what, model, config, without, head in CASES:
        case = {"what": what, "model": model, "config": config, "without": without, "head": head}
        with tempfile.TemporaryDirectory() as folder:
            case["logits"] = compute(case, folder)
        cases.append(case)
        print(what, model, flush=True)
    with open(os.path.join(models.HERE, "folders.json"), "w", encoding="ascii") as file:
        lines = ",\n".join(json.dumps(case) for case in cases)
        file.write('{"prompt": %s, "rows": %s, "cases": [\n%s\n]}\n'
                   % (json.dumps(PROMPT), json.dumps(ROWS), lines))


if __name__ == "__main__":
    main()
