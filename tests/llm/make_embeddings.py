#!/usr/bin/env python3
"""Writes golden/embed/vectors.json: folders of sentence-transformers, each around a small model of
golden/*.json, and the vectors that its encode (6.2 or newer, with torch) makes of some texts.

    make_embeddings.py
"""

import json
import os
import sys
import tempfile

import torch
from sentence_transformers import SentenceTransformer

import models

TEXTS = ["hello world, it is COLD, 10 below!", "b", "what does the FOX say? abc def ghi jkl 01234"]
HERE = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."
TORCH = "torch.nn.modules."


def modules(*rest, first="", kind=HERE):
    """modules.json of a Transformer and what follows, (type, folder) each."""
    every = (("Transformer", first),) + rest
    return [{"idx": i, "name": str(i), "path": path,
             "type": (kind if name == "Pooling" else HERE) + name}
            for i, (name, path) in enumerate(every)]


def older(*on, **more):
    """A Pooling's config in its older form, with the modes `on`."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens",
             "weightedmean_tokens", "lasttoken")
    return dict({"word_embedding_dimension": 48},
                **{"pooling_mode_" + name: name in on for name in names}, **more)


def newer(mode, **more):
    return dict(embedding_dimension=48, pooling_mode=mode, **more)


POOL, NORM = ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")


def pooled(pooling, *rest, model="bert", kind=HERE, **files):
    return {"model": model, "files": dict(
        {"modules.json": modules(POOL, *rest, kind=kind), "1_Pooling/config.json": pooling},
        **{name: text for name, text in files.items()})}


def with_dense(config, shapes, *rest, size=48):
    case = pooled(older("mean_tokens"), ("Dense", "a dense"), *rest)
    case["files"]["a dense/config.json"] = dict(in_features=size, **config)
    case["files"]["a dense/model.safetensors"] = shapes
    return case


def cases():
    yield "mean", pooled(older("mean_tokens"), NORM)
    yield "cls", pooled(newer("cls"), NORM, kind=NEW)
    yield "max", pooled(newer("max"), kind=NEW)
    yield "some", pooled(newer(["max", "lasttoken", "weightedmean"]), NORM, kind=NEW)
    yield "older", pooled(older("cls_token", "mean_tokens", "mean_sqrt_len_tokens"))
    yield "older_too", pooled(older("lasttoken", "weightedmean_tokens", "max_tokens"))
    yield "no_mode", pooled({"word_embedding_dimension": 48})
    yield "nothing_said", {"model": "bert", "files": {}}
    yield "tanh", with_dense({"out_features": 7, "bias": True, "activation_function":
                              TORCH + "activation.Tanh"},
                             {"linear.weight": [7, 48], "linear.bias": [7]}, NORM)
    yield "residual", with_dense({"out_features": 48, "bias": False, "use_residual": True,
                                  "activation_function": TORCH + "activation.GELU"},
                                 {"linear.weight": [48, 48]})
    yield "shortcut", with_dense({"out_features": 5, "bias": True, "use_residual": True,
                                  "activation_function": TORCH + "linear.Identity"},
                                 {"linear.weight": [5, 48], "linear.bias": [5],
                                  "residual.weight": [5, 48]}, ("Normalize", "n"))
    for name in ("activation.ReLU", "activation.Sigmoid", "activation.SiLU"):
        yield name, with_dense({"out_features": 6, "activation_function": TORCH + name},
                               {"linear.weight": [6, 48], "linear.bias": [6]})
    long = {"max_seq_length": 12, "do_lower_case": False}
    yield "cut", pooled(older("mean_tokens"), sentence_bert_config___json=long)
    yield "cut_by_tokenizer", dict(pooled(older("weightedmean_tokens")),
                                   tokenizer={"model_max_length": 9})
    yield "cut_left", dict(pooled(older("mean_tokens")),
                           tokenizer={"model_max_length": 9, "truncation_side": "left"})
    yield "lower", pooled(older("mean_tokens"), sentence_bert_config___json={
        "max_seq_length": 40, "do_lower_case": True})
    prompts = {"prompts": {"query": "find: ", "passage": "this: "}, "default_prompt_name": "query"}
    yield "prompt", pooled(older("mean_tokens"), NORM,
                           config_sentence_transformers___json=prompts)
    for mode in ("cls", "max", "mean", "weightedmean", "lasttoken"):
        yield "no_prompt_" + mode, pooled(newer(mode, include_prompt=False),
                                          config_sentence_transformers___json=prompts)
    case = pooled(older("mean_tokens"), ("Normalize", ""))
    case["files"]["modules.json"] = modules(POOL, first="0_Transformer")
    case["files"]["0_Transformer/sentence_roberta_config.json"] = long
    yield "elsewhere", dict(case, model_at="0_Transformer")
    yield "qwen3", pooled(older("lasttoken", include_prompt=True), NORM, model="qwen3")
    for model in ("bloom", "falcon", "gemma2", "gpt2", "gpt_neox", "granite", "llama",
                  "llama_biased", "llama_dynamic_far", "mistral_window", "opt", "phi",
                  "phi3_longrope_far"):
        yield model, {"model": model, "files": {}}


def main():
    torch.set_num_threads(1)
    made = {}
    for name, case in cases():
        case["files"] = {key.replace("___", "."): text for key, text in case["files"].items()}
        width = models.load(case["model"])["config"]
        width = width.get("hidden_size") or width.get("n_embd")
        for key in ("word_embedding_dimension", "embedding_dimension"):
            if key in case["files"].get("1_Pooling/config.json", {}):
                case["files"]["1_Pooling/config.json"][key] = width
        with tempfile.TemporaryDirectory() as folder:
            models.write_embedder(folder, case)
            rows = SentenceTransformer(folder, device="cpu").encode(TEXTS, batch_size=1)
        case["vectors"] = [[float("%.6g" % x) for x in row] for row in rows.tolist()]
        made[name] = case
        print("%-20s %s" % (name, rows.shape), flush=True)
    path = os.path.join(models.GOLDEN, "embed", "vectors.json")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="ascii") as file:
        json.dump({"texts": TEXTS, "cases": made}, file)
        file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
