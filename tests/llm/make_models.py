#!/usr/bin/env python3
"""Writes golden/*.json: for a small model of each family its config, the shapes of its tensors, a
prompt, its logits, 32 greedy tokens, and those of a left-padded batch, by transformers (5.24 or
newer, with torch) in float32.

    make_models.py [NAME...]     these, or all of them
    make_models.py --batch NAME...  their batches alone, of the goldens that are there
    make_models.py --list        their names
"""

import json
import os
import random
import sys
import tempfile

import torch
import transformers

import models

GAP = 0.01  # between the two largest logits of every generated token, at least
NEW = 32
PROMPT = [3, 41, 17, 9, 52, 28, 17, 5]
BATCH = (5, 1, 20, 12)  # lengths of the prompts of a batch
BATCH_NEW = 16

LLAMA = dict(vocab_size=61, hidden_size=48, intermediate_size=44, num_hidden_layers=2,
             num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=256,
             eos_token_id=None, bos_token_id=None, pad_token_id=None)
SAME = dict(LLAMA, hidden_size=40, num_attention_heads=5)  # as many key heads
del SAME["num_key_value_heads"]
GPT2 = dict(vocab_size=61, n_embd=40, n_head=5, n_layer=2, n_inner=44, n_positions=256,
            eos_token_id=None, bos_token_id=None)
BLOOM = dict(vocab_size=61, hidden_size=48, n_head=6, n_layer=2, eos_token_id=None,
             bos_token_id=None)
OPT = dict(SAME, ffn_dim=44, word_embed_proj_dim=40)
FALCON = dict(SAME, hidden_size=48, num_attention_heads=6, ffn_hidden_size=44)
del OPT["intermediate_size"], FALCON["intermediate_size"]


BERT = dict(SAME, hidden_size=48, num_attention_heads=6)


def rope(kind, **rest):
    return dict(rope_type=kind, rope_theta=rest.pop("rope_theta", 10000.0), **rest)


MODELS = {
    "llama": ("llama", LLAMA),
    "llama_linear": ("llama", dict(LLAMA, rope_parameters=rope("linear", factor=2.5))),
    "llama_llama3": ("llama", dict(LLAMA, num_key_value_heads=2, rope_parameters=rope(
        "llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64))),
    "llama_yarn": ("llama", dict(LLAMA, rope_parameters=rope(
        "yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=64))),
    "llama_dynamic": ("llama", dict(LLAMA, rope_parameters=rope("dynamic", factor=2.0))),
    "llama_biased": ("llama", dict(LLAMA, attention_bias=True, mlp_bias=True, head_dim=12,
                                   num_key_value_heads=6, tie_word_embeddings=True)),
    "mistral": ("mistral", dict(LLAMA, sliding_window=None)),
    "mistral_window": ("mistral", dict(LLAMA, sliding_window=5)),
    "qwen2_window": ("qwen2", dict(LLAMA, use_sliding_window=True, sliding_window=6,
                                   max_window_layers=1)),
    "qwen3_window": ("qwen3", dict(LLAMA, head_dim=12, use_sliding_window=True, sliding_window=9,
                                   max_window_layers=1)),
    "qwen2": ("qwen2", dict(LLAMA, tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(LLAMA, head_dim=12)),
    "granite": ("granite", dict(LLAMA, embedding_multiplier=3.0, attention_multiplier=0.2,
                                residual_multiplier=0.7, logits_scaling=1.5)),
    "smollm3": ("smollm3", dict(LLAMA, num_hidden_layers=4)),
    "starcoder2": ("starcoder2", LLAMA),
    "olmo2": ("olmo2", dict(LLAMA, num_key_value_heads=2)),
    "gemma": ("gemma", dict(LLAMA, head_dim=12, num_key_value_heads=1)),
    "gemma2": ("gemma2", dict(LLAMA, head_dim=12, tie_word_embeddings=False,
                              query_pre_attn_scalar=20, sliding_window=6,
                              attn_logit_softcapping=2.0, final_logit_softcapping=20.0)),
    "gemma3": ("gemma3_text", dict(LLAMA, head_dim=12, tie_word_embeddings=False,
                                   query_pre_attn_scalar=15, sliding_window=6,
                                   num_hidden_layers=4, sliding_window_pattern=3,
                                   rope_parameters=dict(full_attention=rope(
                                       "linear", rope_theta=300.0, factor=2.0),
                                       sliding_attention=rope("default", rope_theta=50.0)))),
    "phi3_window": ("phi3", dict(LLAMA, original_max_position_embeddings=256, sliding_window=7)),
    "phi3": ("phi3", dict(LLAMA, original_max_position_embeddings=256)),
    "phi3_longrope": ("phi3", dict(
        LLAMA, num_key_value_heads=2, original_max_position_embeddings=64, rope_parameters=rope(
            "longrope", short_factor=[1.0, 1.3, 1.7, 2.2], long_factor=[1.0, 2.0, 4.0, 8.0],
            original_max_position_embeddings=64))),
    "phi3_longrope_far": ("phi3", dict(
        LLAMA, original_max_position_embeddings=20, rope_parameters=rope(
            "longrope", short_factor=[1.0, 1.3, 1.7, 2.2], long_factor=[1.0, 2.0, 4.0, 8.0],
            original_max_position_embeddings=20))),
    "llama_dynamic_far": ("llama", dict(LLAMA, max_position_embeddings=6, rope_parameters=rope(
        "dynamic", rope_theta=100.0, factor=2.0))),
    "phi": ("phi", dict(LLAMA, partial_rotary_factor=0.5)),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", dict(SAME, rotary_pct=0.25)),
    "gpt_neox_serial": ("gpt_neox", dict(SAME, use_parallel_residual=False)),
    "opt": ("opt", OPT),
    "bloom": ("bloom", BLOOM),
    "bloom_post": ("bloom", dict(BLOOM, apply_residual_connection_post_layernorm=True)),
    "bert": ("bert", BERT),
    "roberta": ("roberta", dict(BERT, type_vocab_size=1, pad_token_id=1)),
    "falcon": ("falcon", FALCON),
    "falcon_groups": ("falcon", dict(FALCON, new_decoder_architecture=True, num_kv_heads=3)),
    "falcon_serial": ("falcon", dict(FALCON, multi_query=False, parallel_attn=False, bias=True)),
}


def auto(config):
    encoder = config.model_type in ("bert", "roberta")
    return transformers.AutoModelForMaskedLM if encoder else transformers.AutoModelForCausalLM


def shapes(config, folder):
    """{name: shape} of what save_pretrained writes, of encoders without the head."""
    auto(config).from_config(config).save_pretrained(folder)
    read = models.read_safetensors(os.path.join(folder, "model.safetensors"))
    return {name: list(shape) for name, (shape, _) in read.items()
            if not name.startswith(("cls.", "lm_head.")) or auto(config) != \
            transformers.AutoModelForMaskedLM}


def answer(folder):
    """Logits of the prompt, greedy tokens, and the smallest gap between two logits."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    model.eval()
    ids, gap = list(PROMPT), 1e9
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        cache = None
        for _ in range(NEW):
            # Keys of dynamic positions keep the frequencies of the step that computed them.
            if model.config.to_dict().get("rope_parameters", {}).get("rope_type") == "dynamic":
                out = model(torch.tensor([ids if cache is None else ids[-1:]]), use_cache=True,
                            past_key_values=cache)
                cache, row = out.past_key_values, out.logits[0, -1]
            else:
                row = model(torch.tensor([ids])).logits[0, -1]
            best = row.topk(2).values
            gap = min(gap, float(best[0] - best[1]))
            if gap <= GAP:
                break
            ids.append(int(row.argmax()))
    return logits, ids[len(PROMPT):], gap


def batch(folder):
    """Prompts of unequal length, padded on the left, and what follows each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    size, widest = model.config.vocab_size, max(BATCH)
    for seed in range(200):
        draw = random.Random(seed)
        prompts = [[draw.randrange(size) for _ in range(n)] for n in BATCH]
        ids = torch.tensor([[0] * (widest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=BATCH_NEW,
                                 do_sample=False, eos_token_id=None, pad_token_id=0,
                                 output_logits=True, return_dict_in_generate=True)
        best = torch.stack(out.logits).topk(2).values
        if float((best[..., 0] - best[..., 1]).min()) > GAP:
            return {"prompts": prompts, "new": out.sequences[:, widest:].tolist()}
    return sys.exit("no batch has gaps above %g" % GAP)


def vectors(folder):
    """An encoder's last hidden state."""
    model, info = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, add_pooling_layer=False)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    with torch.no_grad():
        return model.eval()(torch.tensor([PROMPT])).last_hidden_state[0]


def save(name, model):
    with open(os.path.join(models.GOLDEN, name + ".json"), "w", encoding="ascii") as file:
        json.dump(model, file)
        file.write("\n")


def make_batch(name, folder):
    model = models.load(name)
    models.write(folder, model)
    model["batch"] = batch(folder)
    save(name, model)
    print("%-16s %s" % (name, model["batch"]["new"][0]), flush=True)


def make(name, folder):
    kind, options = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **options)
    model = {"config": json.loads(config.to_json_string(use_diff=True)),
             "tensors": shapes(config, folder)}
    for seed in range(200):
        model["seed"] = seed
        models.write(folder, model)
        if auto(config) == transformers.AutoModelForMaskedLM:
            logits, new, gap = vectors(folder), [], 0
            break
        logits, new, gap = answer(folder)
        if gap > GAP and len(set(new)) > 5:
            break
    else:
        sys.exit("%s: no seed has gaps above %g" % (name, GAP))
    model["prompt"], model["new"] = PROMPT, new
    if new:
        model["batch"] = batch(folder)
    model["logits"] = [[float("%.7g" % x) for x in row] for row in logits.tolist()]
    save(name, model)
    print("%-16s seed %d, gap %.3f, %d tokens" % (name, seed, gap, len(set(new))), flush=True)


def main():
    if sys.argv[1:] == ["--list"]:
        print("\n".join(MODELS))
        return
    os.makedirs(models.GOLDEN, exist_ok=True)
    torch.set_num_threads(1)
    batches = sys.argv[1:2] == ["--batch"]
    for name in sys.argv[1 + batches:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            (make_batch if batches else make)(name, folder)


if __name__ == "__main__":
    main()
