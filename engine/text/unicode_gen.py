#!/usr/bin/env python3
"""Writes engine/text/unicode_table.c: the character classes as Hugging Face's pre-tokenizers see them.

The package `tokenizers` (0.23) is asked for every scalar value, because its two engines follow different versions of
Unicode (its regular expressions 16, its Digits splitter 17) and ids must equal its ids, not a standard's.

    python3 -m venv venv && venv/bin/pip install tokenizers==0.23.3 && venv/bin/python engine/text/unicode_gen.py
"""

import pathlib

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Digits, Split

BLOCK = 128
SCALARS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
CLASSES = [  # name, and a pattern or which other engine to ask; the bit is the position
    ("LETTER", r"\p{L}"), ("NUMBER", r"\p{N}"), ("SPACE", r"\s"), ("MARK", r"\p{M}"),
    ("UPPER", r"[\p{Lu}\p{Lt}]"), ("LOWER", r"\p{Ll}"), ("WORD", "word"), ("DIGIT", "digit"),
]


def members(pattern):
    """Scalars that the pattern matches."""
    found = set()
    if pattern == "word":  # what keeps an added token with single_word from matching beside it
        model = Tokenizer(BPE())
        model.add_tokens([AddedToken("Q", single_word=True)])
        return {c for c in SCALARS if c != ord("Q") and not model.encode(chr(c) + "Q").ids} | {ord("Q")}
    if pattern == "digit":
        digits = Digits(individual_digits=True)
        return {c for c in SCALARS if len(digits.pre_tokenize_str("a" + chr(c) + "b")) == 3}
    split = Split(Regex(pattern), behavior="removed", invert=True)
    for start in range(0, len(SCALARS), 4096):
        text = "".join(map(chr, SCALARS[start : start + 4096]))
        for piece, _ in split.pre_tokenize_str(text):
            found.update(map(ord, piece))
    return found


def rows(values):
    line, out = "   ", []
    for value in values:
        item = f" {value},"
        if len(line) + len(item) > 119:
            out.append(line)
            line = "   "
        line += item
    return "\n".join(out + [line])


def main():
    table = bytearray(0x110000)
    for bit, (_, pattern) in enumerate(CLASSES):
        for scalar in members(pattern):
            table[scalar] |= 1 << bit
    blocks, index = {}, []
    for start in range(0, len(table), BLOCK):
        index.append(blocks.setdefault(bytes(table[start : start + BLOCK]), len(blocks)))
    out = pathlib.Path(__file__).with_name("unicode_table.c")
    out.write_text(
        "/* Written by unicode_gen.py. */\n"
        '#include "engine/text/unicode.h"\n\n'
        f"const uint8_t unicode_index[{len(index)}] = {{\n{rows(index)}\n}};\n\n"
        f"const uint8_t unicode_blocks[{len(blocks)}][{BLOCK}] = {{\n"
        + "".join(f"{{\n{rows(block)}\n}},\n" for block in blocks)
        + "};\n"
    )
    print(len(blocks), "blocks")


if __name__ == "__main__":
    main()
