#!/usr/bin/env python3
"""Writes tests/llm/golden/data/trl.json: the tokens that TRL 1.16 makes of documents of each form,
and which of them have a loss: what SFTTrainer and DPOTrainer do before they train. Needs trl and
transformers.

A token without a loss is written as ~token, as examples/llm/data.h keeps it. The tokenizers are
those of tests/golden/tokenizers.json, with the special tokens of a chat template, the templates
those that TRL brings with it."""

import importlib.machinery
import importlib.resources
import json
import os
import sys
import types

import tokenizers
import transformers


class Rows:
    """What the two trainers use of datasets.Dataset: without it, pyarrow or pandas."""
    format = {"type": None}

    def __init__(self, rows):
        self.rows = rows
        self.column_names = list(rows[0])

    def __iter__(self):
        return iter(self.rows)

    def map(self, function, fn_kwargs=None, remove_columns=None, **_):
        dropped = [remove_columns] if isinstance(remove_columns, str) else remove_columns or []
        rows = []
        for row in self.rows:
            new = dict(row, **function(dict(row), **(fn_kwargs or {})))
            rows.append({key: value for key, value in new.items() if key not in dropped})
        return Rows(rows)


def stand_in(name, **values):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(values)
    sys.modules[name] = module
    return module


stand_in("datasets", Dataset=Rows, DatasetDict=dict, IterableDataset=tuple,
         IterableDatasetDict=set, concatenate_datasets=None,
         fingerprint=stand_in("datasets.fingerprint", Hasher=None))
stand_in("pandas", DataFrame=None)
stand_in("pyarrow", Table=None, Array=None, compute=stand_in("pyarrow.compute"),
         types=stand_in("pyarrow.types"))
from trl import DPOConfig, SFTConfig  # noqa: E402
from trl.chat_template_utils import get_training_chat_template  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "golden", "data", "trl.json")

TURNS = ["<|im_start|>", "<|im_end|>"]
# The template that SmolLM2-Instruct has; TRL brings no training variant of it.
SMOLLM2 = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
           "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
           "Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
           "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
           "{{ '<|im_start|>assistant\n' }}{% endif %}")
LEARNT = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
          "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
          "Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n'}}"
          "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + "
          "'<|im_end|>' + '\n' }}{% endgeneration %}{% else %}{{ message['content'] + "
          "'<|im_end|>' + '\n' }}{% endif %}{% endfor %}")
# style of chat.h, file of TRL, tokenizer, special tokens, whether it takes a system message
STYLES = [
    ("smollm2", None, "smollm", TURNS, True),
    ("qwen2.5", "qwen2_5", "qwen", TURNS, True),
    ("qwen3", "qwen3", "qwen", TURNS, True),
    ("qwen3-instruct", "qwen3_instruct_2507", "smollm", TURNS, True),
    ("llama3", "llama3", "llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
     True),
    ("gemma", "gemma", "gemma", ["<start_of_turn>", "<end_of_turn>"], False),
    ("gemma3", "gemma3", "gemma", ["<start_of_turn>", "<end_of_turn>"], True),
    ("phi3", "phi3", "llama2", ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], True),
]
TEXTS = [{"text": text} for text in (
    "Once upon a time", "It ends itself</s>", "na\u00efve \u4e2d\u6587 \U0001f600\n",
    " two  spaces ",
    "The boats come in at noon.\nThe square is empty.")]
PLAIN = [{"prompt": prompt, "completion": completion} for prompt, completion in (
    ("The sky is", " blue."), ("2 + 2 =", " 4</s>"), ("unhap", "pily joined"), ("", "All of it."),
    ("A line\n", "\nand another"), ("caf\u00e9 ", " au lait \U0001f600"))]
PREFERENCES = [{"prompt": prompt, "chosen": chosen, "rejected": rejected}
               for prompt, chosen, rejected in (
                   ("The sky is", " blue.", " green."), ("2 + 2 =", " 4</s>", " 5"),
                   ("unhap", "pily", "y"), ("Say", ": yes", "s no"))]
IMPLICIT = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in (
    ("The sky is blue.", "The sky is green."), ("Yes, it is.", "Yes, it is. Or not."),
    ("unhappily", "unhappy"), ("caf\u00e9", "caf\u00e8 au lait"), ("same text", "same text"))]


def said(*texts, system=None):
    """A conversation; the user begins."""
    messages = [{"role": "assistant" if i % 2 else "user", "content": text}
                for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system else []) + messages


def conversations(system):
    """Prompts, each with an answer and a worse one."""
    rows = [(said("What is 2 + 2?"), "It is 4.", "Five"),
            (said("Hello", "Hi! What can I do?", " Tell me where\nthe boats are. "),
             " In the harbour.\n", "Nowhere \u4e2d\u6587"),
            (said("Who are you?"), "<b>Nobody</b> \U0001f600", "I will not say.")]
    if system:
        rows.append((said("Which day is it?", system="Be brief."), "Monday.", "It is not Sunday."))
    return rows


def answer(text):
    return [{"role": "assistant", "content": text}]


def sft(tokenizer, rows, template, assistant_only, completion_only):
    """The labelled tokens of SFTTrainer."""
    trainer = types.SimpleNamespace(_tokenizer=tokenizer, chat_template=template,
                                    completion_only_loss=completion_only)
    args = SFTConfig(output_dir="/tmp/none", max_length=None, packing=False, use_cpu=True,
                     bf16=False, assistant_only_loss=assistant_only)
    args.shuffle_dataset = False
    done = SFTTrainer._prepare_dataset(trainer, Rows(rows), tokenizer, args,
                                       False, None, "train")
    return [[[i if label == i else ~i for i, label in zip(row["input_ids"], row["labels"])]]
            for row in done]


def dpo(tokenizer, rows):
    """The labelled tokens of DPOTrainer, chosen and rejected."""
    trainer = types.SimpleNamespace(_tokenizer=tokenizer)
    args = DPOConfig(output_dir="/tmp/none", max_length=None, use_cpu=True, bf16=False)
    done = DPOTrainer._prepare_dataset(trainer, Rows(rows), tokenizer, args,
                                       "train")
    return [[[~i for i in row["prompt_ids"]] + row[key] for key in ("chosen_ids", "rejected_ids")]
            for row in done]


def cases_of(style, tokenizer, training, system):
    """Yields the name of a form, whether all tokens have a loss, its documents and their tokens."""
    rows = conversations(system)
    chats = [{"messages": prompt + answer(good)} for prompt, good, _ in rows]
    chats.append({"messages": said("One?", "1", "Two?", "2", "And three?")})
    asked = [{"prompt": prompt, "completion": answer(good)} for prompt, good, _ in rows]
    better = [{"prompt": prompt, "chosen": answer(good), "rejected": answer(bad)}
              for prompt, good, bad in rows]
    whole = [{"chosen": prompt + answer(good), "rejected": prompt + answer(bad)}
             for prompt, good, bad in rows]
    # The training variant of Qwen2.5's template has a loss on the newline before an answer, which
    # the prompt ends with when the model is used.
    if style != "qwen2.5":
        yield "messages", 0, chats, sft(tokenizer, chats, training, True, False)
    yield "messages", 1, chats[:-1], sft(tokenizer, chats[:-1], None, False, False)
    yield "answers", 0, asked, sft(tokenizer, asked, None, False, True)
    yield "answers", 1, asked, sft(tokenizer, asked, None, False, False)
    yield "preferences", 0, better, dpo(tokenizer, better)
    yield "implicit", 0, whole, dpo(tokenizer, whole)
    yield "texts", 0, TEXTS, sft(tokenizer, TEXTS, None, False, False)
    yield "completions", 0, PLAIN, sft(tokenizer, PLAIN, None, False, True)
    yield "completions", 1, PLAIN, sft(tokenizer, PLAIN, None, False, False)
    yield "plain preferences", 0, PREFERENCES, dpo(tokenizer, PREFERENCES)
    yield "plain implicit", 0, IMPLICIT, dpo(tokenizer, IMPLICIT)


def main():
    with open(os.path.join(HERE, "..", "golden", "tokenizers.json"), encoding="utf-8") as file:
        known = {item["name"]: item["tokenizer"] for item in json.load(file)}
    models = []
    for style, name, base, special, system in STYLES:
        core = tokenizers.Tokenizer.from_str(json.dumps(known[base]))
        core.add_special_tokens(special)
        template = SMOLLM2 if not name else importlib.resources.files("trl").joinpath(
            "chat_templates", name + ".jinja").read_text(encoding="utf-8")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template)
        training = get_training_chat_template(tokenizer) if name else LEARNT
        cases = [{"form": form, "all": whole, "lines": rows, "tokens": tokens}
                 for form, whole, rows, tokens in cases_of(style, tokenizer, training, system)]
        models.append({"style": style, "cases": cases,
                       "tokenizer": json.loads(tokenizer.backend_tokenizer.to_str())})
        print(style, sum(len(case["lines"]) for case in cases))
    os.makedirs(os.path.dirname(OUT), exist_ok=True)
    with open(OUT, "w", encoding="ascii") as file:
        file.write('{"bos":"<s>","eos":"</s>","models":[\n')
        file.write(",\n".join(json.dumps(m, separators=(",", ":")) for m in models) + "\n]}\n")


if __name__ == "__main__":
    main()
