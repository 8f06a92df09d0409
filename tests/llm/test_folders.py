#!/usr/bin/env python3
"""Folders that say something else than the small models of test_llm.py, or lie: every key of
config.json that transformers has for these families (config_keys.txt), values of transformers where
keys differ from each other or from the weights (folders.json, by make_folders.py), tensors that no
layer has, and the sentences of refusals."""

import json
import os
import shutil
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import models
from test_llm import (TOLERANCE, Letters, converse, llm, numbers, only_on_rank_0, refused,
                      run_tests, written)
from scripts import check

SCRIPT_LIMIT = 200  # seconds, for tests/run.sh
WEIGHTS = "model.safetensors"


def logits(folder, prompt, *flags):
    """(shape, values) that --dump-logits writes, and stderr."""
    dump = os.path.join(folder, "logits")
    done = llm(folder, "--ids", numbers(prompt), "--print-ids", "--max-new", "0", "--dump-logits",
               dump, "--dtype", "f32", "--tp", "1", *flags)
    check(done.returncode == 0, done.stderr)
    return models.read_safetensors(dump)["logits"], done.stderr


def folders_have_the_values_of_transformers(folder):
    with open(os.path.join(HERE, "folders.json"), encoding="ascii") as file:
        golden = json.load(file)
    for case in golden["cases"]:
        what = "%s: %s" % (case["model"], case["what"])
        changes = dict(case["config"], **{key: ... for key in case["without"]})
        written(folder, case["model"], **changes)
        if case["head"]:
            models.change_head(folder, case["head"])
        for ranks in ("1", "3"):
            (shape, got), errors = logits(folder, golden["prompt"], "--tp", ranks)
            off = max(abs(a - b) for row, want in zip(golden["rows"], case["logits"])
                      for a, b in zip(got[row * shape[1]:], want))
            check(off <= TOLERANCE, what, "on", ranks, "ranks: logits are off by", off)
            told = "differs from" in errors and errors.count("\n") == 1
            check(told if case["head"] == "other" else not errors, what, errors)


# -- keys ----------------------------------------------------------------------


def listed():
    """(family, key, status, default) of each line of config_keys.txt."""
    with open(os.path.join(HERE, "config_keys.txt"), encoding="ascii") as file:
        lines = [line.rstrip("\n") for line in file if line[0] != "#"]
    return [line.split(" ", 3) for line in lines]


def golden_of(family):
    return {"gemma3_text": "gemma3", "all": "llama"}.get(family, family)


def keys_of(family):
    """(key, status, default): of a family, and those that every class takes."""
    own = [line[1:] for line in listed() if line[0] == family]
    names = [line[0] for line in own]
    return own, [line[1:] for line in listed() if line[0] == "all" and line[1] not in names]


def every_key_has_a_line(folder):
    """What config_keys.txt says of a key is what the program does with it: keys that change nothing
    may have any value, those that are refused their default alone, and each key that is obeyed is
    looked at: an object, which none of them takes, is refused with its name."""
    prompt, counts = list(range(1, 12)), {"obeyed": 0, "harmless": 0, "refused": 0}
    for _, _, status, _ in listed():
        counts[status] += 1
    check(counts["obeyed"] > 200 and counts["harmless"] > 100 and counts["refused"] > 10, counts)
    for family in sorted({line[0] for line in listed()} - {"all"}):
        name, (lines, common) = golden_of(family), keys_of(family)
        plain, _ = logits(written(folder, name), prompt)
        harmless = {key: "x" for key, status, _ in lines + common if status == "harmless"}
        got, errors = logits(written(folder, name, **harmless), prompt)
        check(got == plain and not errors, family, "harmless keys change logits", errors)
        fixed = {key: json.loads(value) for key, status, value in lines + common
                 if status == "refused"}
        got, errors = logits(written(folder, name, **fixed), prompt)
        check(got == plain and not errors, family, "defaults change logits", errors)
        for key, status, value in lines + (common if family == "llama" else []):
            if status == "harmless":
                continue
            other = "x" if key in ("rope_scaling", "rope_parameters") else {"a": 1}
            if status == "refused" and value in ("true", "false"):
                other = value == "false"
            refused(written(folder, name, **{key: other}), key)


REAL = [  # keys that files of the hub have, and no class of transformers
    ("llama", {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
               "transformers.js_config": {"dtype": "q4"}, "_name_or_path": "x",
               "pretraining_tp": 1}),  # SmolLM2
    ("llama", {"unsloth_fixed": True, "unsloth_version": "2024.9", "tokenizer_class": "x",
               "pad_token": "<pad>", "return_dict": True, "max_sequence_length": 2048}),
    ("qwen2", {"use_mrope": False, "attn_implementation": "sdpa", "_attn_implementation": "eager",
               "max_length": 20, "temperature": 0.7, "top_p": 0.8, "do_sample": True,
               "num_labels": 2, "id2label": {"0": "a"}, "repetition_penalty": 1.1}),
    ("gpt2", {"n_ctx": 1024, "output_past": True, "predict_special_tokens": True,
              "task_specific_params": {"text-generation": {"do_sample": True}},
              "is_encoder_decoder": False, "pruned_heads": {}, "tf_legacy_loss": False,
              "cross_attention_hidden_size": None, "bad_words_ids": None, "num_beams": 1}),
    ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
              "attention_bias": False, "mlp_bias": False, "auto_map": {"AutoConfig": "x.Y"}}),
    ("bloom", {"n_inner": None, "offset_alibi": 100, "seq_length": 2048, "skip_bias_add": True,
               "skip_bias_add_qkv": False, "attention_softmax_in_fp32": True, "unk_token_id": 0,
               "masked_softmax_fusion": True, "bias_dropout_fusion": True}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    ("gpt_neox", {"rope_theta": 10000, "partial_rotary_factor": 0.25}),
    ("smollm3", {"max_window_layers": 28, "use_sliding_window": False, "pretraining_tp": 2}),
    ("bert", {"directionality": "bidi", "pooler_type": "first_token_transform",
              "position_embedding_type": "absolute", "gradient_checkpointing": False,
              "sbert_ce_default_activation_function": "x", "finetuning_task": None}),
]


def keys_of_real_files_are_taken(folder):
    for name, keys in REAL:
        done = llm(written(folder, name, **keys), "--ids", "1 2", "--print-ids", "--max-new", "0",
                   "--tp", "1")
        check(done.returncode == 0 and not done.stderr, name, done.stderr)


def unknown_keys_may_be_allowed(folder):
    """A key that is not known is refused whatever it is; with the flag there is a warning each."""
    for value in (False, 0, "", [], True):
        refused(written(folder, "llama", mystery=value), "config.json: mystery is", "not known",
                "--allow-unknown-keys")
    plain, _ = logits(written(folder, "llama"), [1, 2, 3])
    got, errors = logits(written(folder, "llama", mystery=False, puzzle=[1]), [1, 2, 3],
                         "--allow-unknown-keys")
    check(got == plain and errors.count("\n") == 2 and "mystery is false" in errors and
          "puzzle is [1]" in errors, errors)
    refused(written(folder, "llama", rope_interleaved=True), "rope_interleaved is true",
            "supported for llama is false",
            flags=("--ids", "1", "--print-ids", "--allow-unknown-keys"))


# -- tensors -------------------------------------------------------------------


def add_tensors(folder, tensors, metadata=...):
    """Adds {name: (dtype, shape, bytes)} to the folder's file."""
    path = os.path.join(folder, WEIGHTS)
    with open(path, "rb") as file:
        data = file.read()
    size = int.from_bytes(data[:8], "little")
    header, values = json.loads(data[8:8 + size].decode("ascii")), data[8 + size:]
    for name, (dtype, shape, count) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(values), len(values) + count]}
        values += bytes(count)
    if metadata is not ...:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode("ascii")
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + values)


def tensors_that_no_layer_has_are_refused(folder):
    """Under any prefix; those of a list of harmless names may be of any dtype and rank."""
    for name, tensor in (
            ("llama", "adapter.weight"), ("llama", "layers.0.adapter.weight"),
            ("llama", "model.layers.0.self_attn.q_proj.bias"), ("llama", "lm_head.bias"),
            ("llama", "model.layers.0.attn.bias"), ("llama", "v_head.summary.weight"),
            ("llama", "model.embed_positions.weight"), ("gpt2", "transformer.h.2.attn.bias.x"),
            ("gpt2", "h.3.ln_1.weight"), ("gpt2", "score.weight"), ("bert", "adapter.weight"),
            ("bert", "bert.encoder.layer.7.output.dense.weight"), ("opt", "model.x.weight"),
            ("gpt_neox", "extra"), ("falcon", "transformer.h.0.mlp.bias"),
            ("bloom", "word_embeddings.scale")):
        add_tensors(written(folder, name), {tensor: ("F32", [2], 8)})
        flags = ("--ids", "1 2", "--print-ids", "--max-new", "0")
        refused(folder, tensor, "--ignore PATTERN", flags=flags)
        done = llm(folder, *flags, "--ignore", tensor, "--tp", "2")
        check(done.returncode == 0 and not done.stderr, tensor, done.stderr)
    odd = ("F4", [3, 5], 7)
    for name, tensors in (
            ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": odd}),
            ("gpt2", {"h.0.attn.bias": ("BOOL", [1] * 9, 1), "h.0.attn.masked_bias": odd}),
            ("gpt_neox", {"gpt_neox.layers.0.attention.bias": ("U128", [1], 16)}),
            ("bert", {"bert.pooler.dense.weight": ("C64", [2], 16), "cls.x.y": odd,
                      "classifier.bias": ("F8_E8M0", [2], 2)})):
        plain, _ = logits(written(folder, name), [1, 2, 3])
        add_tensors(folder, tensors, None)
        got, errors = logits(folder, [1, 2, 3])
        check(got == plain and not errors, name, errors)
    add_tensors(written(folder, "llama"), {"adapter": odd})
    refused(folder, "adapter", flags=("--ids", "1", "--print-ids"))
    check(llm(folder, "--ids", "1", "--print-ids", "--ignore", "adapter").returncode == 0, "F4")


def indices_name_files_in_folders(folder):
    model = models.load("llama")
    prompt = model["prompt"]
    plain, _ = logits(written(folder, "llama"), prompt)
    tensors = models.read_safetensors(os.path.join(folder, WEIGHTS))
    names = sorted(tensors)
    os.remove(os.path.join(folder, WEIGHTS))
    os.makedirs(os.path.join(folder, "sub", "b"))
    places = {name: ("./one.safetensors", "sub/two.safetensors", "sub/b/three.safetensors",
                     "one.safetensors")[i % 4] for i, name in enumerate(names)}
    for place in ("one.safetensors", "sub/two.safetensors", "sub/b/three.safetensors"):
        models.write_safetensors(os.path.join(folder, place), {
            name: tensors[name] for name in names if places[name].endswith(place)})

    def index(**changes):
        with open(os.path.join(folder, WEIGHTS + ".index.json"), "w", encoding="ascii") as file:
            json.dump({"weight_map": dict(places, **changes)}, file)

    index()
    got, errors = logits(folder, prompt)
    check(got == plain and not errors, errors)
    for lie in ("../one.safetensors", "/one.safetensors", "sub/../one.safetensors", "sub//x",
                "sub/", "", "./", "..", "sub\\two.safetensors"):
        index(**{names[0]: lie})
        refused(folder, "no name of a file beside it")


# -- sentences -----------------------------------------------------------------


def save(folder, name, text):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(text)


def json_that_is_wrong_is_told_by_its_place(folder):
    written(folder, "llama")
    for name in ("config.json", "generation_config.json"):
        for text, *words in (
                ("{\"model_type\": ", "line 1, column 16", "ends here"),
                ("{\"a\": 1,\n \"b\": Infinity}", "line 2, column 7", "Infinity"),
                ("{\"a\": -Infinity}", "line 1, column 7", "Infinity"),
                ("{\"a\": NaN}", "line 1, column 7", "NaN"),
                ("{\"a\": 1 \"b\": 2}", "line 1, column 9", "comma"),
                ("{\"a\": 1,}", "line 1, column 9", "comma"),
                ("{\"a\" 1}", "line 1, column 6", "colon"),
                ("{'a': 1}", "line 1, column 2", "double quotes"),
                ("{\"a\": True}", "line 1, column 7", "Python"),
                ("{\n// a\n\"a\": 1}", "line 2, column 1", "string"),
                ("{\"a\": 1 // a\n}", "line 1, column 9", "comma"),
                ("{\"a\": [1, 2}", "line 1, column 12", "bracket"),
                ("{\"a\": \"x\n\"}", "line 1, column 9", "not closed"),
                ("{} {}", "line 1, column 4", "follows"),
                ("", "line 1, column 1", "ends here"),
                ("{\"a\": ", "line 1, column 7", "ends here")):
            shutil.copy(os.path.join(folder, "config.json"), os.path.join(folder, "whole"))
            save(folder, name, text)
            refused(folder, name + ": ", *words)
            os.replace(os.path.join(folder, "whole"), os.path.join(folder, "config.json"))
        if name != "config.json":
            os.remove(os.path.join(folder, name))
    with open(os.path.join(folder, "config.json"), encoding="ascii") as file:
        whole = file.read()
    save(folder, "config.json", whole[:-1] + ", \"hidden_size\": 48}")
    refused(folder, "config.json has the key hidden_size twice")
    save(folder, "config.json", whole[:-1] + ", \"rope_scaling\": {\"a\": 1, \"a\": 2}}")
    refused(folder, "config.json has the key a twice")
    save(folder, "config.json", "[1]")
    refused(folder, "is not a JSON object")


def what_is_found_instead_is_told(folder):
    here = os.path.join(folder, "models--a--b")
    snapshot = os.path.join(here, "snapshots", "0123abcd")
    os.makedirs(snapshot)
    os.makedirs(os.path.join(here, "refs"))
    written(snapshot, "llama")
    refused(here, "folder of the hub's cache", snapshot)
    empty = os.path.join(folder, "empty")
    for name, *words in (("x-q4.gguf", "give that file itself"), ("params.json", "transformers"),
                         ("adapter_config.json", "with --adapter")):
        os.makedirs(empty)
        save(empty, name, "{}")
        refused(empty, "has " + name, "no config.json", *words)
        shutil.rmtree(empty)
    refused(os.path.join(snapshot, WEIGHTS), "is a file", "config.json")
    refused("nobody/nothing-1b", "nobody/nothing-1b", "hf download nobody/nothing-1b")
    refused("nothing-1b", "hf download nothing-1b")
    os.remove(os.path.join(snapshot, WEIGHTS))
    for name, *words in (("pytorch_model.bin", "save_pretrained"),
                         ("pytorch_model.bin.index.json", "save_pretrained"),
                         ("model.q8.gguf", "give that file itself"), ("tf_model.h5", "PyTorch")):
        save(snapshot, name, "x")
        refused(snapshot, "has " + name, "no *.safetensors", *words)
        os.remove(os.path.join(snapshot, name))
    written(snapshot, "llama")
    for name in ("tokenizer.model", "vocab.json", "vocab.txt"):
        save(snapshot, name, "x")
        refused(snapshot, "has " + name, "no tokenizer.json", "AutoTokenizer",
                flags=("--prompt", "a"))
        os.remove(os.path.join(snapshot, name))
    for bare, name in ((False, "bert.encoder.layer.1.attention.output.dense.weight"),
                       (True, "encoder.layer.1.output.LayerNorm.bias")):
        path = os.path.join(written(snapshot, "bert"), WEIGHTS)
        tensors = {key[5:] if bare else key: value
                   for key, value in models.read_safetensors(path).items()}
        del tensors[name]
        models.write_safetensors(path, tensors)
        refused(snapshot, "lacks 1 of the model's tensors (\"%s\")" % name,
                flags=("--ids", "1 2", "--max-new", "0", "--print-ids"))


LIES = [  # configs of which each contradicts itself, the weights, or what is supported
    ("llama", {"eos_token_id": 2.7}, "eos_token_id is 2.7", "whole number"),
    ("llama", {"eos_token_id": [1, 2.5]}, "eos_token_id", "whole numbers"),
    ("smollm3", {"no_rope_layers": [1, 1, None, 1]}, "no_rope_layers"),
    ("llama", {"is_causal": None}, "is_causal is null"),
    ("llama", {"is_causal": "no"}, "is_causal is \"no\""),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is \"linear\"", "object"),
    ("llama", {"rope_parameters": 3}, "rope_parameters is 3", "object"),
    ("llama", {"rope_parameters": {"rope_type": 3}}, "rope_type is 3"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "yarn", "factor"),
    ("llama", {"rope_parameters": {"rope_type": "su"}}, "\"su\""),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "full_attention"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2, "mscale": 1}}, "mscale"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"rotary_pct": 0.5}, "rotary_pct"),
    ("llama", {"sliding_window": 5}, "sliding_window is 5"),
    ("llama", {"use_sliding_window": True}, "use_sliding_window is true"),
    ("llama", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ("llama", {"layer_types": ["full_attention", "full_attention"]}, "layer_types"),
    ("llama", {"per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, "per_layer_config"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("llama", {"qkv_bias": False}, "qkv_bias is false"),
    ("llama", {"num_experts": 0}, "num_experts is 0"),
    ("phi3_longrope", {"max_position_embeddings": ...}, "needs the key max_position"),
    ("llama", {"head_dim": 16}, "self_attn"),
    ("llama", {"vocab_size": 60}, "embed_tokens"),
    ("mistral", {"attention_bias": True}, "attention_bias is true"),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias is true"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0"),
    ("gemma", {"hidden_activation": "relu"}, "hidden_activation is \"relu\""),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0"),
    ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5"),
    ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "full_attention"),
    ("gemma2", {"sliding_window_pattern": 3}, "sliding_window_pattern is 3"),
    ("starcoder2", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
     "all layers of starcoder2 have the window"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias is true"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "phi3 has default and longrope"),
    ("gpt_neox", {"rope_theta": 50.0}, "rope_theta is 50", "rotary_emb_base 10000"),
    ("falcon", {"ff_factor": 2}, "ff_factor is 2"),
    ("falcon", {"apply_residual_connection_post_layernorm": True}, "post_layernorm is true"),
    ("bert", {"add_cross_attention": True}, "add_cross_attention is true"),
    ("bert", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
]


def folders_that_lie_are_refused(folder):
    check(len(LIES) >= 40, len(LIES))
    for name, changes, *words in LIES:
        refused(written(folder, name, **changes), *words)


def heads_may_lie_in_another_file(folder):
    """Than the embedding, as an index says, or the folder alone."""
    for how in ("copy", "other"):
        path = os.path.join(written(folder, "qwen2", tie_word_embeddings=True), WEIGHTS)
        models.change_head(folder, how)
        want, first = logits(folder, [1, 2, 3])
        tensors = models.read_safetensors(path)
        os.remove(path)
        places = {name: "b.safetensors" if name == "lm_head.weight" else "a.safetensors"
                  for name in tensors}
        for place in ("a.safetensors", "b.safetensors"):
            models.write_safetensors(os.path.join(folder, place), {
                name: value for name, value in tensors.items() if places[name] == place})
        save(folder, WEIGHTS + ".index.json", json.dumps({"weight_map": places}))
        got, second = logits(folder, [1, 2, 3])
        check(got == want and first == second and ("differs" in first) == (how == "other"), first,
              second)
        os.remove(os.path.join(folder, WEIGHTS + ".index.json"))
        got, third = logits(folder, [1, 2, 3])
        check(got == want and first == third, "without an index", third)
        os.remove(os.path.join(folder, "a.safetensors"))
        os.remove(os.path.join(folder, "b.safetensors"))


def only_rank_0_reads_the_head(folder):
    """Ranks that have no files learn from rank 0 that the head is not tied, or stands alone."""
    start, here = only_on_rank_0(folder)
    here = os.path.join(here, "model")
    for how in ("other", "alone"):
        models.change_head(written(here, "qwen2", tie_word_embeddings=True), how)
        flags = ("--ids", numbers(models.load("qwen2")["prompt"]), "--print-ids", "--max-new", "9",
                 "--dtype", "f32")
        want = llm(here, *flags, "--tp", "1")
        done = start("model", *flags)
        check(done.returncode == 0 and done.stdout.split()[1:] == want.stdout.split() and
              done.stderr.count("differs from") == (how == "other"), how, done.stdout, done.stderr,
              want.stdout)


def both_ways_needs_a_whole_prompt(folder):
    """A model that sees both ways computes a prompt at once, whatever its length."""
    prompt = [(7 * i) % 61 for i in range(300)]
    model = models.load("llama")["config"]
    first, _ = logits(written(folder, "llama", is_causal=False,
                              max_position_embeddings=512), prompt)
    second, _ = logits(folder, prompt, "--tp", "2")
    size = model["vocab_size"]
    check(first[0] == [300, size], first[0])
    off = max(abs(a - b) for a, b in zip(first[1], second[1]))
    check(off < TOLERANCE, off)
    refused(folder, "one prompt at a time", flags=("--ids", "1 2", "--ids", "3", "--print-ids"))
    changed, _ = logits(folder, prompt[:-1] + [60])
    check(max(abs(a - b) for a, b in zip(first[1][:size], changed[1][:size])) > 1e-3,
          "the first token does not see the last")
    letters = Letters(folder, is_causal=False)
    answers = converse(letters, ["hello", "and now?"], 9).stdout.split("\n")
    said = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    first = letters.next(letters.encode(said), 9)
    said += letters.decode(first) + "<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n"
    second = letters.next(letters.encode(said + "<|im_start|>assistant\n"), 9)
    want = letters.decode(first) + "\n" + letters.decode(second) + "\n"
    check("\n".join(answers) == want, answers, want)


if __name__ == "__main__":
    sys.exit(run_tests("folders", [
        folders_have_the_values_of_transformers, every_key_has_a_line,
        keys_of_real_files_are_taken, unknown_keys_may_be_allowed,
        tensors_that_no_layer_has_are_refused, indices_name_files_in_folders,
        json_that_is_wrong_is_told_by_its_place, what_is_found_instead_is_told,
        folders_that_lie_are_refused, heads_may_lie_in_another_file,
        only_rank_0_reads_the_head, both_ways_needs_a_whole_prompt]) > 0)
