/* scan.h: the pre-tokenizers that models use most, written by hand: each says where the first piece of a text ends.
 * They equal the regular expressions named beside them, in one pass and with no look-back, so a text is cut in linear
 * time. Text is well-formed UTF-8 and not empty. Pure; any thread. */
#ifndef QUIRE_TEXT_SCAN_H
#define QUIRE_TEXT_SCAN_H

#include <stddef.h>

/* GPT-2: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
size_t scan_gpt2(const unsigned char *text, size_t bytes);

/* Llama 3 with digits_max 3, Qwen 2 with 1, all on one line:
 *   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits_max}
 *   | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
size_t scan_llama3(const unsigned char *text, size_t bytes, int digits_max);

/* The Digits splitter: a run of digits (one digit alone with `individual`), or what lies before the next digit. */
size_t scan_digits(const unsigned char *text, size_t bytes, int individual);

#endif
