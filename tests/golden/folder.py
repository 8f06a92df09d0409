#!/usr/bin/env python3
"""Writes the folder `folder` beside itself: a small Llama as transformers saves it, in bf16, in
several files with an index.

    python3 tests/golden/folder.py        (PyTorch, transformers and safetensors)

Weights are numbers that tests/layer/test_load_folder.c computes itself, from the path without
"model." and the index: ((37 index + sum of the path's bytes) mod 256 - 128) / 64.
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "folder")


def main():
    config = LlamaConfig(vocab_size=20, hidden_size=12, intermediate_size=10, num_hidden_layers=2,
                         num_attention_heads=3, num_key_value_heads=1, head_dim=4,
                         tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            path = name[len("model."):] if name.startswith("model.") else name
            values = (torch.arange(weight.numel()) * 37 + sum(path.encode())) % 256 - 128
            weight.copy_((values / 64).reshape(weight.shape))
    model.save_pretrained(FOLDER, max_shard_size="1KB")
    for name in ("config.json", "generation_config.json"):
        os.remove(os.path.join(FOLDER, name))


if __name__ == "__main__":
    main()
