/* quote.h - makes text from a model's files, or from the model, safe to print: on a terminal, an
 * escape sequence in it could clear the screen, and a newline could forge a line of this
 * program. */
#ifndef LLM_QUOTE_H
#define LLM_QUOTE_H

#include <stddef.h>
#include <string.h>

#if defined(__GNUC__)
#define QUOTE_API __attribute__((unused)) static
#else
#define QUOTE_API static
#endif

/* Returns the length in bytes of the control character with which the n bytes of UTF-8 at s begin;
 * 0: they begin with none. */
static size_t quote_control(const char *s, size_t n) {
    const unsigned char *at = (const unsigned char *)s;
    if (n > 0 && (at[0] < 0x20 || at[0] == 0x7f)) return 1;
    return n > 1 && at[0] == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0 ? 2 : 0; /* U+0080 to U+009F */
}

/* Returns the length in bytes of the character with which the n bytes of UTF-8 at s begin, if it
 * changes the direction of the text after it, or begins a new line or paragraph: U+200E, U+200F,
 * U+2028 to U+202E, U+2066 to U+2069; else 0. */
static size_t quote_turn(const char *s, size_t n) {
    const unsigned char *at = (const unsigned char *)s;
    if (n < 3 || at[0] != 0xe2) return 0;
    if (at[1] == 0x81) return at[2] >= 0xa6 && at[2] <= 0xa9 ? 3 : 0;
    if (at[1] != 0x80) return 0;
    return at[2] == 0x8e || at[2] == 0x8f || (at[2] >= 0xa8 && at[2] <= 0xae) ? 3 : 0;
}

/* Turns an error message into one line that shows as it is written: each byte of a control
 * character, or of a character of quote_turn, becomes '?'. Called for every message that may
 * contain a string from outside. Returns text. */
QUOTE_API char *quote_message(char *text) {
    const size_t length = strlen(text);
    for (size_t i = 0; i < length;) {
        const size_t control = quote_control(text + i, length - i);
        const size_t n = control ? control : quote_turn(text + i, length - i);
        if (n > 0) memset(text + i, '?', n);
        i += n > 0 ? n : 1;
    }
    return text;
}

/* Removes control characters, except newlines and tabs, from n bytes of text, in place. Returns how
 * many bytes are left. */
QUOTE_API size_t quote_drop(char *text, size_t n) {
    size_t from = 0, to = 0;
    while (from < n) {
        const size_t skip =
            text[from] == '\n' || text[from] == '\t' ? 0 : quote_control(text + from, n - from);
        if (skip == 0) text[to++] = text[from++];
        from += skip;
    }
    return to;
}

#endif
