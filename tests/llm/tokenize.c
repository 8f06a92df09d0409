/* Tokenizes stdin, for the tests that compare with other programs, and for measuring.
 *
 *     tokenize TOKENIZER [--no-special] [--lines] [--between TEXT] [--decode] [--stream]
 *              [--bench ROUNDS]
 *
 * TOKENIZER: a tokenizer.json or GGUF file. Prints the ids on one line; --lines: those of each
 * line, without its newline, on a line; --between: those of each text between two of TEXT.
 * --decode: stdin has ids, and their text is printed, at once, or with --stream id by id, with
 * special tokens. --bench: the best rate of ROUNDS, each with a new tokenizer, in CPU time. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#endif
#define TSHARD_IMPLEMENTATION
#include "../../examples/llm/text.h"
#include <time.h>

typedef struct options {
    const char *tokenizer, *between;
    int special, decode, stream, bench;
} options;

static char *read_all(size_t *length) {
    size_t room = 1 << 16;
    char *text = (char *)malloc(room);
    *length = 0;
    while (text && (*length += fread(text + *length, 1, room - *length, stdin)) == room)
        text = (char *)realloc(text, room *= 2);
    return text;
}

static int print_ids(llm_tokenizer *t, const char *text, size_t length, int special) {
    int32_t *ids;
    const int64_t n = llm_tokenizer_encode(t, text, length, special, &ids);
    int64_t i;
    if (n < 0) {
        fprintf(stderr, "tokenize: %s\n", llm_tokenizer_error(t));
        return 1;
    }
    for (i = 0; i < n; i++) printf(i ? " %d" : "%d", (int)ids[i]);
    printf("\n");
    free(ids);
    return 0;
}

static int decode(llm_tokenizer *t, char *text, int by_id) {
    llm_ids ids = {NULL, 0, 0};
    llm_stream stream;
    const char *part;
    char *end, *whole;
    size_t n, i;
    for (;; text = end) {
        const long id = strtol(text, &end, 10);
        if (end == text) break;
        if (!llm_put_id(t, &ids, (int32_t)id)) return 1;
    }
    if (by_id) {
        memset(&stream, 0, sizeof stream);
        stream.tokenizer = t;
        stream.special = 1;
        for (i = 0; i < ids.count; i++) {
            part = llm_stream_add(&stream, ids.at[i], &n);
            if (part) fwrite(part, 1, n, stdout);
        }
        part = llm_stream_end(&stream, &n);
        fwrite(part, 1, n, stdout);
    } else {
        whole = llm_tokenizer_decode(t, ids.at, ids.count, 1, &n);
        if (whole) fwrite(whole, 1, n, stdout);
        free(whole);
    }
    free(ids.at);
    return 0;
}

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int bench(const options *o, const char *text, size_t length) {
    double best = 1e9, begin, opened = 1e9;
    char error[256];
    int32_t *ids;
    int64_t n = 0;
    int i;
    for (i = 0; i < o->bench; i++) {
        llm_tokenizer *t;
        begin = now();
        t = llm_tokenizer_open(o->tokenizer, error, sizeof error);
        if (!t) return 1;
        if (now() - begin < opened) opened = now() - begin;
        begin = now();
        n = llm_tokenizer_encode(t, text, length, o->special, &ids);
        if (now() - begin < best) best = now() - begin;
        free(ids);
        llm_tokenizer_free(t);
    }
    printf("%.1f MB/s, %.2f bytes per token, opened in %.0f ms\n", (double)length / best / 1e6,
           (double)length / (double)(n ? n : 1), 1e3 * opened);
    return n < 0;
}

static int run(llm_tokenizer *t, const options *o, char *text, size_t length) {
    size_t begin, end;
    if (o->bench) return bench(o, text, length);
    if (o->decode) return decode(t, text, o->stream);
    if (!o->between) return print_ids(t, text, length, o->special);
    for (begin = 0; begin < length; begin = end + strlen(o->between)) {
        const char *next = strstr(text + begin, o->between);
        end = next ? (size_t)(next - text) : length;
        if (print_ids(t, text + begin, end - begin, o->special)) return 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    options o = {NULL, NULL, 1, 0, 0, 0};
    text_codec codec;
    char *text;
    size_t length;
    int i, code;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--no-special") == 0)
            o.special = 0;
        else if (strcmp(argv[i], "--lines") == 0)
            o.between = "\n";
        else if (strcmp(argv[i], "--between") == 0 && i + 1 < argc)
            o.between = argv[++i];
        else if (strcmp(argv[i], "--decode") == 0)
            o.decode = 1;
        else if (strcmp(argv[i], "--stream") == 0)
            o.stream = 1;
        else if (strcmp(argv[i], "--bench") == 0 && i + 1 < argc)
            o.bench = atoi(argv[++i]);
        else
            o.tokenizer = argv[i];
    }
    if (!o.tokenizer) return 2;
    memset(&codec, 0, sizeof codec);
    (void)text_open(&codec, o.tokenizer, NULL, NULL);
    text = read_all(&length);
    if (!codec.tokenizer || !text) {
        fprintf(stderr, "tokenize: %s\n", text ? codec.error : "there is no memory");
        return 1;
    }
    text = (char *)realloc(text, length + 1);
    if (!text) return 1;
    text[length] = 0;
    code = run(codec.tokenizer, &o, text, length);
    free(text);
    text_close(&codec);
    return code;
}
