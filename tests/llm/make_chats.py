#!/usr/bin/env python3
"""Writes tests/golden/chats.json: conversations as apply_chat_template of transformers (5.24 or
newer) renders them.

    make_chats.py DIR    DIR/NAME.jinja or NAME@ANYTHING.jinja: the chat template of a model of the
                         hub, for the style NAME of examples/llm/chat.h

Of a template its hash is written, as chat_hash of chat.h computes it, not its text."""

import glob
import json
import os
import sys

import tokenizers
import transformers

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATE = "26 Jul 2024"
SPACE = " \n\u3000 spaced out\u00a0\t\n\n"
TURNS = [
    ["Hello"],
    ["What is 2 + 2?", "It is 4.", "And \u4e2d\u6587 \U0001f600?"],
    [SPACE, SPACE, "<think>", "<think>\nLet me see.\n</think>\n\nYes.</think>\n No.", "{eos}",
     "{bos} {x}", "\\n"],
    ["a", "", "b", "\n\n</think>\n\n", ""],
]


def fnv(text):
    text = text.replace("\\n", "\n")
    value = 0xCBF29CE484222325
    for byte in (text[:-1] if text.endswith("\n") else text).encode():
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return "%016x" % value


def render(tokenizer, text, messages):
    """None: the template refuses them."""
    try:
        return tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False,
                                             add_generation_prompt=True, date_string=DATE)
    except Exception as error:
        assert "System role not supported" in str(error) or "Only user and" in str(error) or \
            "must alternate" in str(error), error
        return None


def main():
    goldens, conversations = [], []
    for system in (None, "Be brief.", SPACE):
        for turns in TURNS:
            messages = [] if system is None else [["system", system]]
            conversations.append(messages + [["assistant" if i % 2 else "user", turn]
                                             for i, turn in enumerate(turns)])
    for path in sorted(glob.glob(os.path.join(sys.argv[1], "*.jinja"))):
        name = os.path.basename(path)[:-6].split("@")[0]
        with open(path, encoding="utf-8") as file:
            text = file.read()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), bos_token="<s>",
            eos_token="</s>")
        texts = [render(tokenizer, text, [{"role": role, "content": content}
                                          for role, content in messages])
                 for messages in conversations]
        assert any(texts), name
        goldens.append({"name": name, "hash": fnv(text), "texts": texts})
        print(name, goldens[-1]["hash"], repr(texts[5])[:150])
    with open(os.path.join(TESTS, "golden", "chats.json"), "w", encoding="ascii") as file:
        file.write('{"bos":"<s>","eos":"</s>","today":"%s","conversations":%s,\n"templates":[\n' %
                   (DATE, json.dumps(conversations, separators=(",", ":"))))
        file.write(",\n".join(json.dumps(g, separators=(",", ":")) for g in goldens) + "\n]}\n")


if __name__ == "__main__":
    main()
