#!/usr/bin/env python3
"""build/llm --finetune on SmolLM2-135M-Instruct, on 2 ranks: a text, conversations, 8-bit weights,
a GGUF file as base; what it must show is checked. Takes minutes each.

    real_finetune.py text DIR TEXT       LoRA on a text: the held-out loss falls
    real_finetune.py chats DIR           LoRA on 200 chats (make_chats_data.py): the held-out loss
                                         falls, and 20 held-out prompts end before --max-new
    real_finetune.py q8_0 DIR            the same on weights of 8 bits; the adapter loads in PEFT,
                                         with equal logits on the weights of DIR
    real_finetune.py gguf FILE.gguf      the same with a GGUF file as base; DIR2 has the adapter
                                         alone, which loads in PEFT over the dequantised weights

DIR is the folder that real_models.py's written() makes of FILE.gguf. q8_0 and gguf need torch,
transformers and peft. --steps N, --context N and --lr X are those of the training, --folder F is
where everything is written. TSHARD_LLM is the program, if not build/llm.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
LLM = os.environ.get("TSHARD_LLM") or os.path.join(TOP, "build", "llm")
HELD, MOST = 20, 48  # chats that are not learnt; tokens of an answer at most
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def check(true, *what):
    if not true:
        sys.exit("real_finetune.py: %s" % " ".join(map(str, what)))


def llm(model, *flags):
    done = subprocess.run([LLM, "--model", model, "--tp", "2", *flags], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    check(done.returncode == 0, *flags, done.stderr)
    return done.stdout


def train(args, data, held, *flags):
    """Trains, and checks that the held-out loss falls. Returns the adapter's folder."""
    out = os.path.join(args.folder, "adapter")
    told = llm(args.model, "--finetune", data, "--held-out", held, "--out", out, "--lora", "8",
               "--batch", "4", "--context", str(args.context), "--accumulate", "1", "--steps",
               str(args.steps), "--lr", str(args.lr), "--max-new", str(MOST), *flags)
    print(told, flush=True)
    before = float(re.search(r"before    held-out loss ([0-9.]+)", told).group(1))
    after = float(re.findall(r"  val ([0-9.]+)", told)[-1])
    print("held-out loss: %.4f before, %.4f after" % (before, after), flush=True)
    check(after < before, "the held-out loss does not fall")
    return out


def split_chats(args):
    """Paths of the chats to learn and of those held out; the held-out conversations."""
    path = os.path.join(args.folder, "chats.jsonl")
    subprocess.run([sys.executable, os.path.join(HERE, "make_chats_data.py"), path], check=True)
    with open(path, encoding="ascii") as file:
        lines = file.readlines()
    paths = [os.path.join(args.folder, name) for name in ("learnt.jsonl", "held.jsonl")]
    for name, part in zip(paths, (lines[:-HELD], lines[-HELD:])):
        with open(name, "w", encoding="ascii") as file:
            file.writelines(part)
    return (*paths, [json.loads(line)["messages"] for line in lines[-HELD:]])


def answers(args, chats, *flags):
    """What the model says to the first question of each chat. Prints how many answers end before
    --max-new, and returns that."""
    prompts = ["<|im_start|>system\n%s<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n"
               "<|im_start|>assistant\n" % (SYSTEM, chat[0]["content"]) for chat in chats]
    command = [word for prompt in prompts for word in ("--prompt", prompt)]
    ids = llm(args.model, *command, "--max-new", str(MOST), "--print-ids", *flags).splitlines()
    check(len(ids) == len(chats), ids)
    ended = sum(len(line.split()) < MOST for line in ids)
    text = llm(args.model, *command, "--max-new", str(MOST), *flags)
    for said, chat in list(zip(re.split(r"==> \d+ <==\n", text)[1:], chats))[:4]:
        print("  %s  [%s]\n    %s" % (chat[0]["content"], chat[1]["content"],
                                      said.strip().replace("\n", "\n    ")))
    print("%d of %d answers end before %d tokens" % (ended, len(chats), MOST), flush=True)
    return ended


def learn_text(args):
    with open(args.text, encoding="utf-8") as file:
        text = file.read()
    paths = [os.path.join(args.folder, name) for name in ("learnt.txt", "held.txt")]
    for path, part in zip(paths, (text[:-20000], text[-20000:])):
        with open(path, "w", encoding="utf-8") as file:
            file.write(part)
    train(args, *paths)


def learn_chats(args, *flags):
    learnt, held, chats = split_chats(args)
    print("before:")
    answers(args, chats)
    out = train(args, learnt, held, *flags)
    print("after:")
    ended = answers(args, chats, "--adapter", out)
    check(ended == len(chats), "an answer does not end")
    return out


def compare_with_peft(args, out, name, **how):
    """The logits of a prompt, with f32 weights on both sides."""
    import torch
    import transformers
    from peft import PeftModel
    sys.path.insert(0, HERE)
    import models
    ids = [1] + [97 * i % 49000 for i in range(1, 40)]
    dump = os.path.join(args.folder, "logits")
    llm(args.model, "--ids", " ".join(map(str, ids)), "--print-ids", "--max-new", "0",
        "--dump-logits", dump, "--dtype", "f32", "--adapter", out)
    _, got = models.read_safetensors(dump)["logits"]
    base = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **how)
    with torch.no_grad():
        plain = base(torch.tensor([ids])).logits[0].flatten()
        model = PeftModel.from_pretrained(base, out).eval()
        want = model(torch.tensor([ids])).logits[0].flatten()
    off = (torch.tensor(got) - want).abs().max().item()
    print("logits of PEFT: off by %.1e, the largest is %.1f; without the adapter off by %.1e" %
          (off, want.abs().max().item(), (torch.tensor(got) - plain).abs().max().item()))
    check(off < 2e-3, "other logits than PEFT's")


def learn_q8_0(args):
    out = learn_chats(args, "--weights", "q8_0")
    compare_with_peft(args, out, args.model)


def learn_gguf(args):
    out = learn_chats(args)
    check(sorted(os.listdir(out)) == ["adapter_config.json", "adapter_model.safetensors"],
          os.listdir(out))
    folder, file = os.path.split(args.model)
    compare_with_peft(args, out, folder, gguf_file=file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["text", "chats", "q8_0", "gguf"])
    parser.add_argument("model")
    parser.add_argument("text", nargs="?")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or folder
        os.makedirs(args.folder, exist_ok=True)
        {"text": learn_text, "chats": learn_chats, "q8_0": learn_q8_0,
         "gguf": learn_gguf}[args.what](args)


if __name__ == "__main__":
    main()
