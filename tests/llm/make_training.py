#!/usr/bin/env python3
"""Writes golden/training/*.json: a small model of each decoder family learns, in float32, by
transformers (5.24 or newer, with torch) and PEFT (0.21 or newer).

    make_training.py [NAME...]   these, or all of them

A golden has the model's config, the shapes of its tensors, the tokens of a batch, and of five steps
of AdamW on it: "losses" and "norms" (of the gradients), all weights being trained; "lora", the
losses with adapters of low rank in their place, whose shapes and config are in "adapter"; and
"q8_0", the same on weights that were rounded to ggml's Q8_0. test_training.c compares. Weights are
not stored: both sides compute them from a tensor's name (see values).
"""

import json
import os
import sys
import tempfile

import numpy
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "training")
STEPS, RATE, DECAY = 5, 1e-3, 0.01
RANK, ALPHA = 4, 6
ROWS, LENGTH = 2, 12  # of the batch

# Heads have 32 features and other sizes are multiples of 32, so that whole blocks of Q8_0 lie on
# each of up to three ranks. Four query heads in two groups: the key heads are cut over two ranks,
# and whole on each of three.
GROUPED = dict(vocab_size=61, hidden_size=128, intermediate_size=96, num_hidden_layers=2,
               num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
               eos_token_id=None, bos_token_id=None, pad_token_id=None)
PLAIN = dict(GROUPED, hidden_size=96, num_attention_heads=3, num_key_value_heads=3)
ONE = dict(PLAIN)
del ONE["num_key_value_heads"]
BARE = dict(ONE)  # for families that name the size of the MLP otherwise
del BARE["intermediate_size"]
MODELS = {
    "llama": ("llama", GROUPED),
    "mistral": ("mistral", dict(GROUPED, sliding_window=5)),
    "qwen2": ("qwen2", dict(GROUPED, tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(PLAIN, head_dim=32)),
    "smollm3": ("smollm3", dict(GROUPED, no_rope_layer_interval=2)),
    "granite": ("granite", dict(GROUPED, embedding_multiplier=3.0, attention_multiplier=0.2,
                                residual_multiplier=0.7, logits_scaling=1.5)),
    "olmo2": ("olmo2", GROUPED),
    "starcoder2": ("starcoder2", dict(GROUPED, sliding_window=7)),
    "gemma": ("gemma", dict(GROUPED, head_dim=32, num_key_value_heads=1)),
    "gemma2": ("gemma2", dict(GROUPED, head_dim=32, query_pre_attn_scalar=40, sliding_window=6,
                              attn_logit_softcapping=2.0, final_logit_softcapping=20.0)),
    "gemma3": ("gemma3_text", dict(GROUPED, head_dim=32, query_pre_attn_scalar=40,
                                   sliding_window=6, sliding_window_pattern=2)),
    "phi": ("phi", dict(PLAIN, partial_rotary_factor=0.5)),
    "phi3": ("phi3", dict(GROUPED, original_max_position_embeddings=64)),
    "gpt2": ("gpt2", dict(vocab_size=61, n_embd=96, n_head=3, n_layer=2, n_inner=96, n_positions=64,
                          eos_token_id=None, bos_token_id=None)),
    "gpt_neox": ("gpt_neox", dict(ONE, rotary_pct=0.25)),
    "gpt_neox_serial": ("gpt_neox", dict(ONE, use_parallel_residual=False)),
    "opt": ("opt", dict(BARE, ffn_dim=96, word_embed_proj_dim=96)),
    "bloom": ("bloom", dict(vocab_size=61, hidden_size=64, n_head=2, n_layer=2, eos_token_id=None,
                            bos_token_id=None)),
    "falcon": ("falcon", dict(BARE, ffn_hidden_size=96)),
    "falcon_groups": ("falcon", dict(BARE, hidden_size=128, num_attention_heads=4,
                                     ffn_hidden_size=96, new_decoder_architecture=True,
                                     num_kv_heads=2)),
    "falcon_serial": ("falcon", dict(BARE, ffn_hidden_size=96, multi_query=False,
                                     parallel_attn=False, bias=True)),
}

# The linear layers of each family, but no head.
SEPARATE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BY_GROUP = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
TARGETS = {
    "starcoder2": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
    "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "gpt_neox": BY_GROUP, "bloom": BY_GROUP, "falcon": BY_GROUP}


def values(name, shape, kind):
    """A tensor's values, in [-1, 1) times a factor, from a hash of its name (FNV-1a) by SplitMix64:
    norms multiply by about 1, biases are not 0, and matrices keep the size of what they multiply.
    kind: the model_type; gpt2 stores matrices (in, out), and norms of gemma multiply by weight + 1.
    "": an adapter."""
    seed = 0xcbf29ce484222325
    for byte in name.encode("ascii"):
        seed = (seed ^ byte) * 0x100000001b3 % 2 ** 64
    count = int(numpy.prod(shape))
    z = numpy.uint64(seed) + numpy.arange(1, count + 1, dtype=numpy.uint64) * \
        numpy.uint64(0x9e3779b97f4a7c15)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xbf58476d1ce4e5b9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94d049bb133111eb)
    z = (z ^ (z >> numpy.uint64(31))) >> numpy.uint64(40)
    u = z.astype(numpy.float64) / 2 ** 23 - 1
    if len(shape) == 1:
        u = 0.4 * u + (1 if name.endswith("weight") and not kind.startswith("gemma") else 0)
    elif "emb" in name or "wte" in name or "wpe" in name:
        u *= 0.2
    else:
        u *= 1.5 / numpy.sqrt(float(shape[0 if kind == "gpt2" else -1]))
    return u.astype(numpy.float32).reshape(shape)


def rounded(w):
    """What a matrix is after it was rounded to Q8_0, in blocks of 32 along its last dimension."""
    x = w.reshape(-1, 32)
    scale = (numpy.abs(x).max(1, keepdims=True) / numpy.float32(127)).astype(numpy.float32)
    inverse = numpy.where(scale > 0, numpy.float32(1) / scale, numpy.float32(0))
    y = x * inverse.astype(numpy.float32)
    whole = numpy.trunc(y)
    whole += (y - whole >= 0.5).astype(numpy.float32) - (y - whole <= -0.5).astype(numpy.float32)
    kept = scale.astype(numpy.float16).astype(numpy.float32)
    return (whole * kept).astype(numpy.float32).reshape(w.shape)


def shapes(path):
    return {name: list(t.shape) for name, t in sorted(load_file(path).items())}


def write(folder, model, q8_0):
    """The folder of the base model."""
    kind, tensors = model["config"]["model_type"], {}
    for name, shape in model["tensors"].items():
        t = values(name, shape, kind)
        if q8_0 and len(shape) == 2:
            linear = kind == "gpt2" and "wte" not in name and "wpe" not in name
            t = rounded(t.T.copy()).T.copy() if linear else rounded(t)
        tensors[name] = t
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
        json.dump(model["config"], file)


def load(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()  # without dropout


def learn(model, ids):
    """Losses and norms of gradients of the steps."""
    ids = torch.tensor(ids)
    trained = [p for p in model.parameters() if p.requires_grad]
    optim = torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY)
    losses, norms = [], []
    for _ in range(STEPS):
        optim.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norms.append(float("%.9g" % float(torch.nn.utils.get_total_norm(
            [p.grad for p in trained if p.grad is not None]))))
        losses.append(float("%.9g" % loss.item()))
        optim.step()
    return losses, norms


def adapted(folder, adapter):
    """The base model with the golden's adapter."""
    tensors = {name: values(name, shape, "") for name, shape in adapter["tensors"].items()}
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="ascii") as file:
        json.dump(adapter["config"], file)
    model = PeftModel.from_pretrained(load(folder), folder, is_trainable=True)
    for name, p in model.named_parameters():
        if "lora_" in name:
            want = tensors[name.replace(".default.", ".")]
            assert p.requires_grad and (p.detach().numpy() == want).all(), name
    return model.eval()


def new_adapter(folder, kind):
    """The config as PEFT writes it, and the shapes of what it writes."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS.get(kind, SEPARATE),
                        task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2")
    model = get_peft_model(load(folder), config)
    with tempfile.TemporaryDirectory() as out:
        model.save_pretrained(out, save_embedding_layers=False)
        with open(os.path.join(out, "adapter_config.json"), encoding="ascii") as file:
            config = json.load(file)
        tensors = shapes(os.path.join(out, "adapter_model.safetensors"))
    config["base_model_name_or_path"] = "small"
    config["target_modules"].sort()
    return {"config": config, "tensors": tensors}


def make(name, folder):
    kind, options = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **options)
    draw = numpy.random.RandomState(46)
    model = {"config": json.loads(config.to_json_string(use_diff=True)),
             "ids": draw.randint(0, 61, (ROWS, LENGTH)).tolist()}
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model["tensors"] = shapes(os.path.join(folder, "model.safetensors"))
    write(folder, model, False)
    model["losses"], model["norms"] = learn(load(folder), model["ids"])
    model["adapter"] = new_adapter(folder, kind)
    model["lora"], _ = learn(adapted(folder, model["adapter"]), model["ids"])
    write(folder, model, True)
    model["q8_0"], _ = learn(adapted(folder, model["adapter"]), model["ids"])
    with open(os.path.join(FOLDER, name + ".json"), "w", encoding="ascii") as file:
        json.dump(model, file)
        file.write("\n")
    print("%-16s %s %s %s %s" % (name, model["losses"], model["norms"], model["lora"],
                                 model["q8_0"]), flush=True)


def main():
    os.makedirs(FOLDER, exist_ok=True)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            make(name, folder)


if __name__ == "__main__":
    main()
