#!/usr/bin/env python3
"""Compares our ids with those of Hugging Face's `tokenizers`, for the vocabulary of the default model under each
pre-tokenizer that we have by hand, under a pattern that goes through PCRE2, with NFC, and with awkward added tokens.

    python3 tests/tokenizer/differential.py [--full] [--tool build/tools/tokenize] [--model FILE.gguf] [--seed N]

With NFC only characters that this machine's Unicode knows are compared. Every text is encoded by both with special
tokens parsed and as plain text. Without the package it says "skipped" and ends with 0. --full takes every scalar
value alone as well (a million lines for each tokenizer).
"""

import argparse
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

try:
    import tokenizers
except ImportError:
    print("skipped: the Python package tokenizers is not there")
    sys.exit(0)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
OTHER = r"[A-Za-z]+|[0-9]{1,2}| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"  # no class whose members depend on Unicode's version
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def split(pattern, **more):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **more}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


VARIANTS = {
    "smollm": {"pre": sequence({"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True})},
    "gpt2": {"pre": {**BYTES, "use_regex": True}},
    "digit runs": {"pre": sequence({"type": "Digits", "individual_digits": False}, {**BYTES, "use_regex": True})},
    "llama3": {"pre": sequence(split(LLAMA3), {**BYTES, "use_regex": False}), "ignore_merges": True},
    "qwen2": {"pre": sequence(split(QWEN2), {**BYTES, "use_regex": False}), "normalizer": {"type": "NFC"}},
    "regex": {"pre": sequence(split(OTHER), {**BYTES, "use_regex": False})},
    "regex, matches": {"pre": sequence(split(OTHER, behavior="Removed", invert=True), {**BYTES, "use_regex": False})},
    "added": {
        "pre": {**BYTES, "use_regex": True},
        "added": [
            dict(content="<mask>", lstrip=True, special=True),
            dict(content="<both>", lstrip=True, rstrip=True),
            dict(content="wordq", single_word=True),
            dict(content="<|im_start|>x", special=True),
            dict(content="\n \n"),
            dict(content="qwq", normalized=True),
            dict(content="qé", normalized=True),
            dict(content="<|"),
            dict(content="wordq up", normalized=True, single_word=True),
        ],
    },
}


def read_gguf(path):
    """The metadata of a GGUF file."""
    data, at = memoryview(pathlib.Path(path).read_bytes()), 4

    def number(code):
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize(code)
        return value

    def string():
        nonlocal at
        count = number("Q")
        at += count
        return bytes(data[at - count : at]).decode()

    def value(kind):
        if kind == 8:
            return string()
        if kind == 9:
            inner, count = number("I"), number("Q")
            return [value(inner) for _ in range(count)]
        return number({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind])

    number("I"), number("Q")
    meta = {}
    for _ in range(number("Q")):
        key = string()
        meta[key] = value(number("I"))
    return {key[len("tokenizer.ggml.") :]: meta[key] for key in meta if key.startswith("tokenizer.ggml.")}


def tokenizer_json(meta, variant):
    names = meta["tokens"]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    added = [
        dict(id=i, content=names[i]) | flags | dict(special=True)
        for i, kind in enumerate(meta["token_type"])
        if kind == 3
    ]
    for i, token in enumerate(variant.get("added", [])):
        added.append(dict(id=len(names) + i) | flags | token)
    assert not {token["content"] for token in variant.get("added", [])} & set(names)  # they would have ids already
    model = dict(
        type="BPE",
        dropout=None,
        unk_token=None,
        continuing_subword_prefix=None,
        end_of_word_suffix=None,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=variant.get("ignore_merges", False),
        vocab={name: i for i, name in enumerate(names)},
        merges=meta["merges"],
    )
    return dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=added,
        normalizer=variant.get("normalizer"),
        pre_tokenizer=variant["pre"],
        post_processor=None,
        decoder={**BYTES, "use_regex": True},
        model=model,
    )


def scalars():
    return [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]


def texts(rng, full):
    every = scalars()
    for start in range(0, len(every), 48):  # every scalar value between letters, after a space, before a digit
        chunk = every[start : start + 48]
        yield "".join("a" + c + "b" for c in chunk)
        if full:
            yield "".join(" " + c + "1" for c in chunk)
            yield "".join(chunk)
    yield from every if full else rng.sample(every, 5000) + every[:0x800]
    spaces = [
        " ",
        "  ",
        "\t",
        "\n",
        "\r",
        "\r\n",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u0085",
        "\u180e",
        "\u200b",
        "\ufeff",
        "\v",
    ]
    words = [
        "a",
        "don't",
        "I'LL",
        "we'Re",
        "'s",
        "'\u017f",
        "'S",
        "x",
        "12",
        "345678",
        "²",
        "½",
        "٣",
        "é",
        "e\u0301",
        "中文",
        "🦊",
        "👩‍👩‍👧",
        "!",
        "...",
        "--",
        "_",
        "Ⅷ",
        "hello",
        "World",
        "\u0300",
        "\x00",
        "\x04",
        "\U0001e6c0",
        "\u1c89",
        "<mask>",
        "<both>",
        "wordq",
        "wordqs",
        "wordq up",
        "qé",
        "qwq",
        "qwq\u0301",
        "<|im_start|>",
        "<|im_start|>x",
        "<|",
        "|>",
        "<|im_end|>",
        "wo",
        "\U00040000",
        "\n \n",
    ]
    for _ in range(60000 if full else 8000):
        picks = [rng.choice(spaces if rng.random() < 0.4 else words) for _ in range(rng.randint(1, 12))]
        yield "".join(picks)
    for _ in range(4000 if full else 1000):
        yield "".join(rng.choice(every) for _ in range(rng.randint(1, 30)))
    for _ in range(300 if full else 60):
        yield "".join(rng.choice("abcdefgh ETAOIN") for _ in range(rng.randint(50, 3000)))
        yield rng.choice(["a", "ab", " ", "the", "é", "=", "12"]) * rng.randint(1, 2000)


def ours(tool, folder, lines, flags):
    data = "".join(text.encode().hex() + "\n" for text in lines)
    done = subprocess.run([tool, folder, str(flags)], input=data, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


def compare(name, variant, meta, tool, lines):
    if variant.get("normalizer"):  # characters younger than this machine's libraries have no normal form here
        lines = [text for text in lines if all(unicodedata.category(c) != "Cn" for c in text)]
    config = tokenizer_json(meta, variant)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(config))
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "tokenizer.json").write_text(json.dumps(config, ensure_ascii=False))
        for special in (True, False):
            theirs.encode_special_tokens = not special
            got = ours(tool, folder, lines, 1 if special else 0)
            for start in range(0, len(lines), 20000):
                for i, want in enumerate(
                    theirs.encode_batch_fast(lines[start : start + 20000], add_special_tokens=False)
                ):
                    if got[start + i] != " ".join(map(str, want.ids)):
                        wrong += 1
                        if wrong <= 5:
                            text = lines[start + i]
                            print(
                                f"  {name}, special {special}: {text[:200]!r}\n    ours   {got[start + i][:300]}\n"
                                f"    theirs {' '.join(map(str, want.ids))[:300]}"
                            )
    print(f"{name}: {2 * len(lines)} encodings, {wrong} differ", flush=True)
    return wrong


def main():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    model = os.environ.get("QUIRE_TEST_MODEL") or os.path.join(cache, "quire", "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--tool", default="build/tools/tokenize")
    parser.add_argument("--model", default=model)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one variant by name")
    args = parser.parse_args()
    if not os.path.exists(args.model):
        print("skipped: the default model is not there")
        return 0
    meta, lines = read_gguf(args.model), list(texts(random.Random(args.seed), args.full))
    variants = {k: v for k, v in VARIANTS.items() if args.only in (None, k)}
    return 1 if sum(compare(name, variant, meta, args.tool, lines) for name, variant in variants.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
