#!/usr/bin/env python3
"""Writes tests/golden/tokenizers.json: small tokenizers of each kind, trained here, with hard
strings and what the Python package `tokenizers` makes of them; and the seeds of
tests/fuzz/fuzz_tokenizer.c.

    make_goldens.py      needs `tokenizers`

The trainer of Unigram is not deterministic: each run writes another vocabulary for it.
"""

import json
import os
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers as n
from tokenizers import pre_tokenizers as p, processors, trainers

from charsmap import charsmap

TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
TEXT = [
    "the quick brown fox jumps over the lazy dog, don't you think so? we'll see, they've been",
    "int main(void) { return tokens[i + 1] != 0x7F ? -1 : 12345; } /* comments in code */",
    "Une \u00e9t\u00e9 \u00e0 la mer, \u00fcber stra\u00dfe, na\u00efve caf\u00e9 \u00d8resund",
    "\u4e2d\u6587\u5206\u8bcd\u5f88\u6709\u8da3 \u4eca\u5929\u5929\u6c14\u5f88\u597d",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 123 \u0661\u0662",
    "there is the other, and another there; whether they are the same is another matter",
]
STRINGS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "  two  spaces  ",
    "the  other\n\n there \r\n\tend ",
    "DON'T we'LL they'Ve I'm 'S '\u017f",
    "1234567 12 \u0661\u0662\u0663 \u00b2\u00bd\u2167",
    "caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m A\u030a \u212b \u1e9b\u0323",
    "\uac00\u1100\u1161\u11a8 \ud55c\uae00",
    "\u0344 a\u0323\u0307 a\u0307\u0323 \u0958 \u09c7\u09be \u0f71\u0f72\u0f71",
    "\u4e2d\u6587,\u3042\u3044\u30ab\u3099 \U00020000\U0002b740",
    "\u0130stanbul STRASSE \u1e9e \u03a3\u0391\u03a3",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\u2764\ufe0f\U0001f1e9\U0001f1ea",
    "\u180e\u200b\u00a0\u2028\u2029\u0085\u3000x",
    "a\x01b\x7fc\x0bd\x0ce\x1cf\ufeffg\ufffdh\u00adi",
    "<s>the</s>",
    "a <mask> b",
    "a<mask>b x<word>y <word> <word>",
    "  <mask>  <s>  x",
    "<S>THE<Norm>norm",
    "\u2581\u2581the\u2581 other \u2581",
    "<0x41><0xE4>",
    "##ing ing##",
    "x" * 150,
    "ab" * 70 + " " + "the" * 50,
    " " * 40 + "=" * 33 + "\n" * 9,
    "[x]{y}(z)!?-_~`$+<=>^|\u00a1\u20ac\u2014\u3002",
    "\U0001faf9\u1c89\U00031350\U00011f02",
    "a'b''c'''d",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
    "tokens[i+1]!=0x7F?-1:12345;",
    "\ufb01x \u2121 \u33c2 \uff76\uff9e \ufdfa \u3131\u314f \u1e9b\u0323 \u2460 \u00bd",
    "a\u0301 a\u0323\u0301 A\u0301\u0302 \r\n\n\r x\r\u0301 "
    "\u00a9\u0301 \u00a9\u200d\u2603\u0301",
    "\u2603\u200d\u00a9\u0301 \u2603\u0302\u200d\u2603\u0301 "
    "\u2603\u200d\u200d\u2603\u0301 \u2603\ufe0f",
    "\u0915\u094d\u0915\u0301 \u0915\u0301\u094d\u200d\u0915\u0301 "
    "\u0915\u094d\u200c\u0915\u0301 \u0915\u0903",
    "\u1100\u1161\u0301 \u1161\u1161\u0301 \u1161\u11a8\u0301 "
    "\u11a8\u1161\u0301 \uac00\u1161\u0301 \uac01\u1161\u0301",
    "\u0600a \u0600\u0301a \u200ba\u0301 \u0301a \u0301\u0302 a\U00011000 \U0001f1e9\u0301",
]
# What normalizers replace: ends of lines, a key that begins another, ones that are part of a
# cluster, one whose result is empty.
CHARSMAP = {
    "\r": " ",
    "\n": " ",
    "\t": " ",
    "A": "a",
    "a\u0301": "<a>",
    "\u0301": "'",
    "\u00a9": "(c)",
    "\u00ad": "",
    "\u2603": "snow",
    "\u0600": "#",
    "\u0915": "ka",
    "\u1161": "v",
    "\u11a8": "t",
    "\uac00": "lv",
    "\uac01": "lvt",
    "\ufb01": "fi",
    "ffi": "f",
    "\U0001f600": ":)",
}
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = [
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("</s>", special=True, normalized=False),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True, rstrip=True),
    AddedToken("<word>", normalized=False, single_word=True),
    AddedToken("<Norm>", normalized=True),
]


def bpe(pre, size=330, normalizer=None, letters=True, post=None, decoder=None, **options):
    t = Tokenizer(models.BPE(**options))
    t.pre_tokenizer = pre
    if normalizer:
        t.normalizer = normalizer
    t.train_from_iterator(
        TEXT * 3,
        trainers.BpeTrainer(
            vocab_size=size,
            show_progress=False,
            special_tokens=["<unk>"] if "unk_token" in options else [],
            initial_alphabet=p.ByteLevel.alphabet() if letters else [],
        ),
    )
    t.add_tokens(ADDED)
    t.decoder = decoder or decoders.ByteLevel()
    if post:
        t.post_processor = post
    return t


def llama(pre, normalizer, decoder, **options):
    """Byte fallback: the vocabulary gets the 256 bytes."""
    t = bpe(pre, 150, normalizer, False, unk_token="<unk>", decoder=decoder, **options)
    state = json.loads(t.to_str())
    vocab = state["model"]["vocab"]
    for token in state["added_tokens"]:
        token["id"] += 256
    for b in range(256):
        vocab["<0x%02X>" % b] = len(vocab)
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = [a for a in state["added_tokens"] if a["content"] != "<unk>"]
    for i, token in enumerate(state["added_tokens"]):
        token["id"] = len(vocab) + i
    return Tokenizer.from_str(json.dumps(state))


def wordpiece(normalizer, post):
    t = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
    t.normalizer = normalizer
    t.pre_tokenizer = p.BertPreTokenizer()
    t.train_from_iterator(
        TEXT * 3,
        trainers.WordPieceTrainer(
            vocab_size=180,
            show_progress=False,
            special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
        ),
    )
    t.add_tokens(ADDED)
    t.decoder = decoders.WordPiece()
    t.post_processor = post(t)
    return t


def unigram(pre, normalizer=None, byte_fallback=False, decoder=None):
    t = Tokenizer(models.Unigram())
    t.pre_tokenizer = pre
    t.train_from_iterator(
        TEXT * 3,
        trainers.UnigramTrainer(
            vocab_size=150, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
        ),
    )
    state = json.loads(t.to_str())
    if byte_fallback:
        state["model"]["vocab"] += [["<0x%02X>" % b, -20.0] for b in range(256)]
        state["model"]["byte_fallback"] = True
    t = Tokenizer.from_str(json.dumps(state))
    if normalizer:
        t.normalizer = normalizer
    t.add_tokens(ADDED)
    t.decoder = decoder or decoders.Metaspace()
    return t


def ties():
    """Of each letter a token of one and one of two: "aaa" within a text is a + aa or aa + a, as the
    last bit of a sum of scores says."""
    draw = random.Random(1)
    letters = [chr(c) for c in range(0x100, 0x180)]
    vocabulary = [("<unk>", 0.0)] + [
        (letter * count, draw.uniform(-12, -2)) for letter in letters for count in (1, 2)
    ]
    t = Tokenizer(models.Unigram(vocabulary, 0))
    t.decoder = decoders.Fuse()
    return t, ["".join(letter * 3 for letter in letters), "".join(a * 5 for a in letters[::-1])]


def bert_template(t):
    ids = [(token, t.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    return processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids
    )


def splits():
    """A step of each behaviour, over letters."""
    for name, step in (
        ("removed", p.Split(Regex(r"[\s,]+"), "removed")),
        ("isolated", p.Split("th", "isolated")),
        ("previous", p.Split(Regex(r"\W|\d"), "merged_with_previous")),
        ("next", p.Split(Regex(r"\p{Lu}|[\p{P}\p{S}]"), "merged_with_next")),
        ("contiguous", p.Split(Regex(r"[^\S\n]|[e-i\u00e9-\u4e2d]"), "contiguous")),
        ("inverted", p.Split(Regex(r"\w+"), "removed", invert=True)),
        ("empty", p.Split(Regex(r"(?=[A-Z\u4e00-\u9fff])|x*$"), "isolated")),
        ("digits", p.Sequence([p.Digits(), p.Punctuation("contiguous"), p.WhitespaceSplit()])),
        ("words", p.Whitespace()),
    ):
        yield "split_" + name, bpe(
            p.Sequence([step, p.ByteLevel(True, use_regex=name == "digits")]), 258
        )


def all_tokenizers():
    yield "gpt2", bpe(
        p.ByteLevel(add_prefix_space=False), post=processors.ByteLevel(trim_offsets=False)
    )
    yield "roberta", bpe(
        p.ByteLevel(add_prefix_space=True),
        post=processors.RobertaProcessing(("</s>", 331), ("<s>", 330)),
    )
    yield "llama3", bpe(
        p.Sequence([p.Split(Regex(GPT4), "isolated"), p.ByteLevel(False, use_regex=False)]),
        ignore_merges=True,
        post=processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 330)]),
            ]
        ),
    )
    yield "qwen", bpe(
        p.Sequence([p.Split(Regex(GPT4), "isolated"), p.ByteLevel(False, use_regex=False)]),
        normalizer=n.NFC(),
    )
    yield "cased", bpe(
        p.Sequence([p.Split(Regex(CASED), "isolated"), p.ByteLevel(False, use_regex=False)])
    )
    yield "smollm", bpe(p.Sequence([p.Digits(individual_digits=True), p.ByteLevel(False)]))
    yield "falcon", bpe(
        p.Sequence(
            [
                p.Punctuation("contiguous"),
                p.ByteLevel(False),
                p.Digits(),
                p.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        )
    )
    fall = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    yield "llama2", llama(
        None,
        n.Sequence([n.Prepend("\u2581"), n.Replace(" ", "\u2581")]),
        decoders.Sequence(fall + [decoders.Strip(" ", 1, 0)]),
        fuse_unk=True,
    )
    yield "mistral", llama(
        p.Metaspace("\u2581", "first", split=False),
        None,
        decoders.Sequence(fall + [decoders.Strip(" ", 1, 0)]),
        fuse_unk=True,
    )
    yield "gemma", llama(
        p.Split(" ", "merged_with_previous"), n.Replace(" ", "\u2581"), decoders.Sequence(fall)
    )
    yield "unknown", bpe(
        p.WhitespaceSplit(),
        90,
        n.Sequence([n.NFD(), n.StripAccents(), n.Lowercase()]),
        False,
        decoder=decoders.Fuse(),
        unk_token="<unk>",
    )
    yield "fused", bpe(
        p.WhitespaceSplit(),
        90,
        n.Strip(),
        False,
        decoder=decoders.Strip("e", 1, 0),
        unk_token="<unk>",
        fuse_unk=True,
    )
    yield "bert", wordpiece(n.BertNormalizer(), bert_template)
    yield "bert_cased", wordpiece(
        n.BertNormalizer(lowercase=False),
        lambda t: processors.BertProcessing(
            ("[SEP]", t.token_to_id("[SEP]")), ("[CLS]", t.token_to_id("[CLS]"))
        ),
    )
    yield "t5", unigram(p.Metaspace())
    yield "xlm", unigram(
        p.Sequence([p.WhitespaceSplit(), p.Metaspace()]),
        n.Replace(Regex(" {2,}"), " "),
        True,
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    )
    mapped = n.Precompiled(charsmap(CHARSMAP))
    yield "t5_mapped", unigram(p.Sequence([p.WhitespaceSplit(), p.Metaspace()]), mapped)
    lower = [n.Replace("``", '"'), n.NFKD(), n.StripAccents(), n.Lowercase(), mapped]
    yield "albert", unigram(p.Metaspace(), n.Sequence(lower + [n.Replace(Regex(" {2,}"), " ")]))
    for name, normalizer in (("mapped", mapped), ("nfkc", n.NFKC()), ("nfkd", n.NFKD())):
        yield name, bpe(p.ByteLevel(False), 258, normalizer)
    yield "ties", ties()[0]
    yield from splits()


def main():
    golden = []
    for name, t in all_tokenizers():
        cases, state = [], t.to_str()
        t = Tokenizer.from_str(state)  # with scores as it reads them, not to their last bit
        for text in STRINGS + (ties()[1] if name == "ties" else []):
            ids = t.encode(text).ids
            cases.append(
                {
                    "text": text,
                    "ids": ids,
                    "plain": t.encode(text, add_special_tokens=False).ids,
                    "decoded": t.decode(ids, skip_special_tokens=False),
                    "shown": t.decode(ids),
                }
            )
        golden.append({"name": name, "tokenizer": json.loads(state), "cases": cases})
    with open(os.path.join(TESTS, "golden", "tokenizers.json"), "w", encoding="ascii") as file:
        file.write(
            "[\n" + ",\n".join(json.dumps(g, separators=(",", ":")) for g in golden) + "\n]\n"
        )
    folder = os.path.join(TESTS, "fuzz", "tokenizer")
    os.makedirs(folder, exist_ok=True)
    for g in golden:  # seeds: the same with few tokens, as libFuzzer takes them
        model = g["tokenizer"]["model"]
        if model["type"] == "BPE":
            keep = model["merges"][:30]
            tokens = (
                {a for m in keep for a in (m[0], m[1], m[0] + m[1])}
                | set(" \u0120abc\u2581")
                | {"<unk>", "<0x41>"}
            )
            model["merges"] = keep
        else:
            tokens = None
        if isinstance(model["vocab"], dict):
            model["vocab"] = {
                w: i
                for i, w in enumerate(
                    w
                    for w in model["vocab"]
                    if tokens is None
                    and len(model["vocab"])
                    and w[:2] != "zz"
                    or tokens
                    and w in tokens
                )
            }
            model["vocab"] = dict(list(model["vocab"].items())[:70])
        else:
            model["vocab"] = model["vocab"][:60]
        for i, token in enumerate(g["tokenizer"]["added_tokens"]):
            token["id"] = (
                model["vocab"].get(token["content"], 80 + i)
                if isinstance(model["vocab"], dict)
                else 80 + i
            )
        g["tokenizer"]["added_tokens"] = [
            a for a in g["tokenizer"]["added_tokens"] if a["content"] != "<unk>"
        ]
        data = json.dumps(g["tokenizer"], ensure_ascii=False, separators=(",", ":")).encode()
        with open(os.path.join(folder, g["name"]), "wb") as file:
            file.write(data + b"\xff" + " <s>The other\u00e9 12 <mask> \u4e2d\n".encode())


if __name__ == "__main__":
    main()
