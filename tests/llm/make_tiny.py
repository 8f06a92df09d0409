#!/usr/bin/env python3
"""Trains the two models that are in examples/llm/tiny, so that examples 09 and 10 run without a
download: llama, whose tokens are ASCII characters, knows this project's licence by heart; bert
tells five topics apart by their words.

    make_tiny.py [llama] [bert]     needs torch, transformers and tokenizers; takes two minutes
"""

import json
import os
import random
import sys

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
OUT = os.path.join(TOP, "examples", "llm", "tiny")
TOPICS = {
    "weather": "rain snow wind storm sun clouds cold warm sky winter summer ice thunder fog wet",
    "kitchen": "bread soup salt oven butter cook bake onions sugar cheese hungry dinner knife "
    "taste pan",
    "music": "piano song violin sing guitar band melody concert drums choir loud dance orchestra "
    "notes listen",
    "computers": "program memory disk compile code kernel network bug processor file thread "
    "keyboard server screen run",
    "travel": "train ticket airport journey bus station map luggage hotel border passport flight "
    "road sea ship",
}
FILLERS = (
    "the a my we i you is are was in on with and of to it this that there very new old today "
    "for our all night day morning after before no not has had from some will came goes"
).split()


def save(model, name, **more):
    folder = os.path.join(OUT, name)
    os.makedirs(folder, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(dict(config, **more), file, indent=1, sort_keys=True)
    if os.path.exists(os.path.join(folder, "generation_config.json")):
        os.remove(os.path.join(folder, "generation_config.json"))
    print(name, sum(p.numel() for p in model.parameters()), "parameters")


def letters():
    """A tokenizer whose tokens are ASCII characters."""
    made = Tokenizer(models.BPE({chr(i): i for i in [10, *range(32, 127)]}, []))
    made.decoder = decoders.Fuse()
    return made


def llama():
    with open(os.path.join(TOP, "LICENSE"), encoding="ascii") as file:
        text = torch.tensor([ord(c) for c in file.read()])
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=48, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, dtype="bfloat16")
    model = transformers.LlamaForCausalLM(config).float()
    steps = 1500
    adam = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, 4e-3, steps)
    for step in range(steps):
        starts = torch.randint(0, len(text) - 128, (16,))
        ids = torch.stack([text[s : s + 128] for s in starts])
        loss = model(input_ids=ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
        rate.step()
        if step % 100 == 0 or step + 1 == steps:
            print("llama", step, loss.item(), flush=True)
    save(model, "llama")
    letters().save(os.path.join(OUT, "llama", "tokenizer.json"), pretty=False)


def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] + FILLERS + " ".join(TOPICS.values()).split()
    words += ["##" + s for s in "s ing ed er ly".split()] + list(".,!?")
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    made.add_special_tokens(words[:4])
    return made


def sentence(draw, topic):
    words = draw.sample(TOPICS[topic].split(), draw.randint(1, 3))
    words = words + draw.sample(FILLERS, draw.randint(2, 5))
    draw.shuffle(words)
    words = [w + draw.choice(["", "", "", "s", "ing", "ed"]) for w in words]
    return " ".join(words) + draw.choice(["", ".", "!", "?"])


def vectors(model, made, texts):
    made.enable_padding()
    rows = made.encode_batch(texts)
    mask = torch.tensor([row.attention_mask for row in rows])
    hidden = model(torch.tensor([row.ids for row in rows]), mask).last_hidden_state
    mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=1)


def bert():
    made, draw = tokenizer(), random.Random(1)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=made.get_vocab_size(), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, type_vocab_size=1,
        dtype="bfloat16")
    model = transformers.BertModel(config, add_pooling_layer=False).float()
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(400):
        topics = [draw.choice(list(TOPICS)) for _ in range(48)]
        found = vectors(model, made, [sentence(draw, topic) for topic in topics])
        same = torch.tensor([[float(a == b) for a in topics] for b in topics])
        loss = torch.nn.functional.mse_loss(found @ found.T, same)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % 50 == 0 or step == 399:
            print("bert", step, loss.item(), flush=True)
    save(model, "bert")
    made.no_padding()
    made.save(os.path.join(OUT, "bert", "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small that more are slower
    for name in sys.argv[1:] or ("llama", "bert"):
        {"llama": llama, "bert": bert}[name]()
